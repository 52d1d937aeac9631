"""`whale calibrate [MODEL]`: measures this machine's devices and links into a profile.

Place in the flow: a front of `engine.calibrate`. It finds the model, starts one rank for each
device unless it is itself a rank, and writes what they measured; plans are then priced from it.
Exit status: 0 written, 2 bad input, else that of the rank that failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import whale
from whale.cli import launch
from whale.cli import main as entry
from whale.cli.verify import find_subject
from whale.engine.calibrate.profile import ROWS, calibrate
from whale.errors import ConfigError
from whale.ir.profile import Profile, Rate
from whale.models.registry import PRESETS
from whale.parallel import init
from whale.runtime import batch as batches

DEFAULT_FILE = "whale-profile.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Whose Layers are timed, and at which numbers of rows."""

    model: nn.Module | None = None
    batch: Any = None
    loss: Callable[[Any, Any], Any] | None = None
    rows: tuple[int, ...] = ROWS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="whose Layers are timed: a preset, or file.py:factory as for `whale verify` (default: "
        "none, only devices and links)",
    )
    parser.add_argument(
        "--json",
        metavar="F",
        help=f"where the profile goes; - is standard output (default {DEFAULT_FILE})",
    )
    parser.add_argument(
        "-n",
        dest="num_ranks",
        type=int,
        metavar="N",
        help="ranks to start here (default: one for each CUDA device, else 1)",
    )
    parser.add_argument(
        "--batch", type=int, metavar="N", help="rows of the global batch: Layers get no more"
    )
    parser.add_argument("--seq", type=int, metavar="N", help="sequence length of a preset")
    parser.add_argument(
        "--rows", metavar="A,B,C", help="numbers of rows to time each Layer at (default 1,4,16,64)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, or start the ranks that do."""
    _check_target(args.json)
    # Whatever the user's file or a library prints must not get between the JSON.
    with _stdout_to_stderr():
        # In the launcher too: what is wrong with it is said once, before anything starts.
        subject = find_model(args)
    num_ranks = args.num_ranks
    if num_ranks is None:
        num_ranks = max(1, torch.cuda.device_count())
    if "RANK" not in os.environ and num_ranks != 1:
        return _start(args, num_ranks)
    with _stdout_to_stderr():
        init()
        rank = dist.get_rank() if dist.is_initialized() else 0
        try:
            profile = calibrate(subject.model, subject.batch, subject.loss, subject.rows)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    if rank == 0:
        _report(profile, args.json)
    return 0


def _start(args: argparse.Namespace, num_ranks: int) -> int:
    """The same command in ranks of their own, as `whale launch` would start them."""
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    flags = [
        text
        for flag in ("json", "batch", "seq", "rows")
        if (value := getattr(args, flag)) is not None
        for text in (f"--{flag}", str(value))
    ]
    model = [args.model] if args.model is not None else []
    # The ranks run a file, from whose place `whale` need not be found.
    root = str(Path(whale.__file__).resolve().parents[1])
    paths = [root, os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    script = str(Path(entry.__file__).resolve())
    return launch.run(
        parser.parse_args(["-n", str(num_ranks), script, "calibrate", *model, *flags])
    )


def find_model(args: argparse.Namespace) -> Subject:
    """The model that MODEL names, as large as it is; a preset's has no weights."""
    rows = _rows(args.rows)
    if args.model is None:
        return Subject(rows=rows or ROWS)
    if args.model not in PRESETS:
        if args.seq is not None:
            raise ConfigError(
                f"--seq {args.seq} with {args.model!r}; allowed: only with a preset",
                hint="the batch that the factory returns has the sequence length",
            )
        found = find_subject(args.model, args.batch)
        upper = batches.num_rows(found.batch)
        return Subject(
            model=found.model, batch=found.batch, loss=found.loss, rows=rows or _up_to(upper)
        )
    preset = PRESETS[args.model]
    if args.batch is not None and args.batch < 1:
        raise ConfigError(f"--batch {args.batch}; allowed: 1 or more", hint="raise --batch")
    upper = args.batch or preset.rows
    with torch.device("meta"):
        model = preset.build()
        batch = preset.batch(upper, args.seq)
    if preset.annotate is not None:
        model = preset.annotate(model)
    return Subject(model=model, batch=batch, loss=preset.loss, rows=rows or _up_to(upper))


def _up_to(upper: int) -> tuple[int, ...]:
    """The default row counts, none above the global batch."""
    return (*(r for r in ROWS if r < upper), *((upper,) if upper <= ROWS[-1] else ()))


def _rows(text: str | None) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")] if text is not None else []
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"--rows {text!r}; allowed: numbers above 0 with commas between them",
            hint="such as --rows 1,4,16",
        )
    return tuple(sorted({int(part) for part in parts}))


def _check_target(path: str | None) -> None:
    """A file that cannot be written is better known before the measurement."""
    folder = Path(path or DEFAULT_FILE).resolve().parent
    if path != "-" and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(
            f"--json {path}: {folder} is not a folder that can be written to",
            hint="name a file in a folder that exists, or -",
        )


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Also for what C++ prints, as Gloo does when it connects."""
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(ours, 1)
        os.close(ours)


def _report(profile: Profile, path: str | None) -> None:
    if path == "-":
        print(json.dumps(profile.to_dict(), indent=1))
        return
    try:
        profile.write(path or DEFAULT_FILE)
    except OSError as error:
        raise ConfigError(
            f"--json {path}: {error.strerror}", hint="name a file in a folder that exists, or -"
        ) from error
    print("\n".join(table(profile)))
    print(f"written to {path or DEFAULT_FILE}")


def table(profile: Profile) -> Sequence[str]:
    """The profile for a reader: devices, speeds by kind, links."""
    lines = [profile.about]
    for rank, device in enumerate(profile.devices):
        update = (device.apply_bytes_per_s or 0.0) / 1e9
        lines.append(
            f"rank {rank}: {device.type}, {device.memory_bytes / 1e9:.1f} GB, launch "
            f"{device.launch_s * 1e6:.1f} us, AdamW {update:.1f} GB/s"
        )
        for kind, rates in device.rates.items():
            speeds = [f"{dtype} {_speed(kind, rate)}" for dtype, rate in rates.items()]
            lines.append(f"  {kind:9} {', '.join(speeds) or 'not measured'}")
        if device.layers:
            points = max(len(time.forward.points) for time in device.layers.values())
            lines.append(f"  {len(device.layers)} kinds of Layer at up to {points} row counts")
    for (name, ranks, nodes), (latency, speed) in profile.links.items():
        lines.append(
            f"{name} of {ranks} ranks in {nodes} node(s): {latency * 1e6:.0f} us + bytes / "
            f"({speed / 1e9:.2f} GB/s)"
        )
    if profile.contention is not None and profile.links:
        lost = max(device.lost for device in profile.devices)
        lines.append(
            f"side by side: sums are {profile.contention:.0%} slower, computes up to {lost:.0%}"
        )
    return lines


def _speed(kind: str, rate: Rate) -> str:
    if kind == "memory":
        return f"{rate.bytes_per_s / 1e9:.1f} GB/s"
    return f"{rate.flops_per_s / 1e12:.3g} TFLOP/s"
