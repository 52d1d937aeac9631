"""Start N ranks of a script: a thin front of torchrun that checks first.

Place in the flow: outside it; the ranks it starts meet in `wh.init`. What torchrun would only show
as a hang or a long traceback is refused before anything starts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from whale.errors import ClusterError, ConfigError, RankError

SHARED_DEVICE = "WHALE_ALLOW_SHARED_DEVICE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "-n", dest="num_ranks", type=int, required=True, metavar="N", help="ranks on this node"
    )
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="nodes (default 1)")
    parser.add_argument(
        "--node-rank", type=int, default=0, metavar="I", help="this node, from 0 (default 0)"
    )
    parser.add_argument(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="where the ranks meet, on node 0 (default with one node: a free local port)",
    )
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="restarts after a failed rank"
    )
    parser.add_argument(
        "--log-dir", metavar="DIR", help="also write each rank's output to files under DIR"
    )
    parser.add_argument("script", help="the Python script every rank runs")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the script's arguments")


def run(args: argparse.Namespace) -> int:
    """Check, start the ranks, wait; the exit status is that of the rank that failed first."""
    check(args, os.environ, num_cuda_devices=torch.cuda.device_count())
    os.environ.update(_defaults(os.environ, nnodes=args.nnodes))
    command = [*_dies_with_launcher(), sys.executable, "-u", args.script, *args.args]
    try:
        elastic_launch(_launch_config(args), command[0])(*command[1:])
    except ChildFailedError as error:
        first, failure = error.get_first_failure()
        others = [_ending(r, f) for r, f in sorted(error.failures.items()) if r != first]
        after = f"; then {', '.join(others)}" if others else ""
        print(f"whale launch: {_ending(first, failure)}{after}", file=sys.stderr)
        return _status(failure.exitcode)
    except SignalException as error:
        print(f"whale launch: stopped by {error.sigval.name}", file=sys.stderr)
        return _status(-error.sigval)
    return 0


def check(args: argparse.Namespace, environ: Mapping[str, str], *, num_cuda_devices: int) -> None:
    """Raise for anything that would make the launch fail or hang."""
    nested = [f"{name}={environ[name]}" for name in ("RANK", "WORLD_SIZE") if name in environ]
    if nested:
        raise RankError(
            f"{' and '.join(nested)} already set: this process is itself a rank of a launch",
            hint="run the script directly here, or unset them if they are left over",
        )
    _at_least("-n", args.num_ranks, 1)
    _at_least("--nnodes", args.nnodes, 1)
    _at_least("--max-restarts", args.max_restarts, 0)
    if not 0 <= args.node_rank < args.nnodes:
        raise ConfigError(
            f"--node-rank {args.node_rank} with --nnodes {args.nnodes}; allowed: 0 to "
            f"{args.nnodes - 1}",
            hint="every node gets its own --node-rank, from 0",
        )
    if not Path(args.script).is_file():
        raise ConfigError(
            f"script {args.script!r} is not a file", hint=f"looked for it in {Path.cwd()}"
        )
    if 0 < num_cuda_devices < args.num_ranks and environ.get(SHARED_DEVICE) != "1":
        raise ClusterError(
            f"-n {args.num_ranks} on a node with {num_cuda_devices} CUDA device(s); allowed: one "
            "device for each rank",
            hint=f"lower -n, set {SHARED_DEVICE}=1 to share devices, or CUDA_VISIBLE_DEVICES= "
            "(empty) to run on the CPU",
        )
    _check_endpoint(args)


def _at_least(flag: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ConfigError(f"{flag} {value}; allowed: {minimum} or more", hint=f"raise {flag}")


def _check_endpoint(args: argparse.Namespace) -> None:
    if args.rdzv_endpoint is None:
        if args.nnodes > 1:
            raise ConfigError(
                f"--nnodes {args.nnodes} without --rdzv-endpoint; allowed: only with one node",
                hint="give every node the same --rdzv-endpoint HOST:PORT, HOST being node 0",
            )
        return
    host, _, port = args.rdzv_endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"--rdzv-endpoint {args.rdzv_endpoint!r}; allowed: HOST:PORT, PORT from 1 to 65535",
            hint="such as --rdzv-endpoint 10.0.0.1:29500",
        )
    if args.node_rank == 0 and not _is_free(int(port)):
        raise ClusterError(
            f"port {port} of --rdzv-endpoint {args.rdzv_endpoint} is in use on this node",
            hint="choose another port, or with one node leave --rdzv-endpoint out",
        )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the store will: only a live listener counts, not a connection that is closing down.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _defaults(environ: Mapping[str, str], *, nnodes: int) -> dict[str, str]:
    """What the ranks' environment gets unless the user has set it.

    With glibc's own thresholds every large tensor on the CPU is mapped anew and its pages are
    touched for the first time, step after step; here freed memory is kept for the next one.
    """
    kept = str(4 << 30)
    values = {
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": kept,
        "MALLOC_TRIM_THRESHOLD_": kept,
    }
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if nnodes == 1 and loopback:
        values["GLOO_SOCKET_IFNAME"] = loopback[0]
    return {name: value for name, value in values.items() if name not in environ}


def _dies_with_launcher() -> list[str]:
    """Prefix of a rank's command: even a killed launcher, which cannot clean up, leaves no rank."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL"] if setpriv else []


def _launch_config(args: argparse.Namespace) -> LaunchConfig:
    one_node = args.nnodes == 1
    return LaunchConfig(
        min_nodes=args.nnodes,
        max_nodes=args.nnodes,
        nproc_per_node=args.num_ranks,
        role="rank",
        run_id=uuid.uuid4().hex if one_node else "whale",
        # Port 0 is bound by the store itself: nobody can take it between a check and the start.
        rdzv_endpoint=args.rdzv_endpoint or "localhost:0",
        # With several nodes a static rendezvous keeps ranks in the order of --node-rank.
        rdzv_backend="c10d" if one_node else "static",
        rdzv_configs={"is_host": "true"} if one_node else {"rank": args.node_rank},
        max_restarts=args.max_restarts,
        local_addr="127.0.0.1" if one_node else None,
        logs_specs=DefaultLogsSpecs(
            log_dir=args.log_dir, tee=Std.ALL if args.log_dir else Std.NONE
        ),
    )


def _ending(rank: int, failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        return f"rank {rank} was killed by {failure.signal_name()}"
    return f"rank {rank} exited with {failure.exitcode}"


def _status(exitcode: int) -> int:
    """A shell's status for a child's exit code: 128 + the signal for a killed one."""
    return 128 - exitcode if exitcode < 0 else exitcode
