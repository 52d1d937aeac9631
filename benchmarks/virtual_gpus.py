"""Ranks out of one card: `start_ranks` runs a module on virtual GPUs (CUDA MPS), or on CPU.

Place in the flow: under every benchmark, and under tests/gpu. A virtual GPU is a process that owns
a share of the card's SMs and, if asked, a limit on its memory; each plays a host of its own, so
that NCCL talks over loopback sockets. No setting of the card is changed, and nothing outlives the
call: ranks are killed by process group, the MPS daemon is told to quit and killed if it does not.
Needs no torch.

Example: `start_ranks([66, 33], "benchmarks.overhead_rank", ["--size", "gpu"])`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

GRACE_S = 10.0
"""How long the other ranks may go on after the first one failed: time for their own error text."""

MPS_WAIT_S = 20.0
"""How long the MPS daemon may take to answer or to quit."""

CONTROL = "nvidia-cuda-mps-control"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutput:
    """What one rank printed and how it ended (a negative status is the signal that ended it)."""

    rank: int
    status: int
    stdout: str
    stderr: str


class RanksFailedError(RuntimeError):
    """Some rank failed or ran past the timeout; `outputs` holds what all of them printed."""

    def __init__(self, reason: str, outputs: list[RankOutput]) -> None:
        self.outputs = outputs
        lines = [reason]
        for out in outputs:
            tail = "\n".join((out.stdout + out.stderr).rstrip().splitlines()[-30:])
            lines.append(f"---- rank {out.rank}, status {out.status}\n{tail}")
        super().__init__("\n".join(lines))


def start_ranks(
    shares: Sequence[int],
    module_or_script: str,
    args: Sequence[str] = (),
    memory: Sequence[str] | str | None = None,
    *,
    device: str = "cuda",
    environment: Mapping[str, str] | None = None,
    timeout: float = 600.0,
) -> list[RankOutput]:
    """Runs `module_or_script` in one process per share, as torchrun would, and waits for all.

    Args:
        shares: Percent of the card's SMs of each rank; on the CPU only their number counts.
        module_or_script: A dotted module name (`python -m`), or the path of a script.
        args: Its arguments, the same for every rank.
        memory: Memory of each rank as MPS takes it ("16G"): one for all, or one per rank.
        device: "cuda" for virtual GPUs, "cpu" for one-thread processes with Gloo.
        environment: More variables, the same for every rank.
        timeout: Seconds after which everything is killed.

    Returns:
        The ranks' outputs, in order.

    Raises:
        RanksFailedError: A rank ended with a status other than 0, or time was up.
    """
    if isinstance(memory, str):
        memory = [memory] * len(shares)
    with (
        tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as name,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(name)
        shared = {**(environment or {})}
        if device == "cuda":
            shared |= stack.enter_context(mps(folder))
        port = _free_port()
        is_path = module_or_script.endswith(".py")
        target = [module_or_script] if is_path else ["-m", module_or_script]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, share in enumerate(shares):
                limit = memory[rank] if memory else None
                own = _environment(rank, len(shares), port, device, share, limit)
                processes.append(
                    _spawn([sys.executable, *target, *args], {**own, **shared}, folder, rank)
                )
            reason = _wait(processes, timeout)
        finally:
            _kill(processes)
        outputs = [_output(folder, rank, p.returncode) for rank, p in enumerate(processes)]
    if reason is not None:
        raise RanksFailedError(reason, outputs)
    return outputs


def one_node(num_ranks: int) -> dict[str, str]:
    """Variables with which the ranks are one node whose GPUs map each other's memory."""
    return {
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }


@contextlib.contextmanager
def mps(folder: Path) -> Iterator[dict[str, str]]:
    """A CUDA MPS daemon in a private folder; gives the variables its clients need."""
    if shutil.which(CONTROL) is None:
        raise FileNotFoundError(f"{CONTROL} is not on the PATH: virtual GPUs need CUDA MPS")
    pipe, log = folder / "mps", folder / "mps-log"
    pipe.mkdir()
    log.mkdir()
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(log)}
    environment = {**os.environ, **variables}
    try:
        subprocess.run([CONTROL, "-d"], env=environment, check=True, timeout=MPS_WAIT_S)
        yield variables
    finally:
        with contextlib.suppress(subprocess.SubprocessError):
            subprocess.run(
                [CONTROL],
                input=b"quit\n",
                env=environment,
                timeout=MPS_WAIT_S,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        _end_daemon(pipe)


def _end_daemon(pipe: Path) -> None:
    """Waits for the daemon of this folder to end; kills it by its own pid file if it does not."""
    pid_file = pipe / f"{CONTROL}.pid"
    deadline = time.monotonic() + 5.0
    while pid_file.exists() and time.monotonic() < deadline:
        try:
            pid = int(pid_file.read_text().strip())
            os.kill(pid, 0)
        except (ValueError, OSError):
            return
        time.sleep(0.1)
    if pid_file.exists():
        with contextlib.suppress(ValueError, OSError):
            os.kill(int(pid_file.read_text().strip()), signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _environment(
    rank: int, num_ranks: int, port: int, device: str, share: int, memory: str | None
) -> dict[str, str]:
    """One rank's environment: it must stand before CUDA, NCCL or OpenMP start in the process."""
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    own = {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if device != "cuda":
        return own | {
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
    own |= {
        # Each virtual GPU is device 0 of a host of its own: NCCL refuses two ranks on one GPU.
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share),
        "NCCL_HOSTID": f"host{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        # More threads than cores make loopback slower and uneven: 16 sockets of 4 threads for each
        # of 4 ranks on 16 cores gave 1.5 to 3.2 GB/s, one gives 3.5 to 4.8.
        "NCCL_SOCKET_NTHREADS": "1",
        "NCCL_NSOCKS_PERTHREAD": "1",
        "OMP_NUM_THREADS": "2",
    }
    if memory is not None:
        own["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={memory}"
    return own


def _spawn(
    command: list[str], environment: dict[str, str], folder: Path, rank: int
) -> subprocess.Popen[bytes]:
    """One rank in a process group of its own (not a session: whoever ends ours must reach it)."""
    out, err = (folder / f"{rank}.{kind}" for kind in ("out", "err"))
    with out.open("wb") as stdout, err.open("wb") as stderr:
        return subprocess.Popen(
            command,
            env=environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            process_group=0,
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> str | None:
    """Waits until all ranks ended; the reason if that did not go well."""
    deadline = time.monotonic() + timeout
    reason = None
    while any(p.poll() is None for p in processes):
        failed = [rank for rank, p in enumerate(processes) if p.poll() not in (None, 0)]
        if failed and reason is None:
            reason = f"rank {failed[0]} of {len(processes)} failed first"
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            running = [rank for rank, p in enumerate(processes) if p.poll() is None]
            return reason or f"ranks {running} still ran after {timeout:g} s and were killed"
        time.sleep(0.05)
    failed = [rank for rank, p in enumerate(processes) if p.poll() != 0]
    return reason or (f"ranks {failed} failed" if failed else None)


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends what still runs, with its children."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def _output(folder: Path, rank: int, status: int) -> RankOutput:
    out, err = ((folder / f"{rank}.{kind}").read_text(errors="replace") for kind in ("out", "err"))
    return RankOutput(rank=rank, status=status, stdout=out, stderr=err)
