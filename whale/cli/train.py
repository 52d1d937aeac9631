"""`whale train RUN`: trains a run on this machine, with ranks of its own.

Place in the flow: a front of `whale.training`. The process a person starts reads the run and makes
its folder, so that whatever is wrong is said once; the ranks it starts are the same command, which
finds itself to be a rank and trains. Exit status: 0 trained, 2 bad input, else that of the rank
that failed.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch.distributed as dist

from whale.cli import launch
from whale.cli import main as entry
from whale.errors import ConfigError
from whale.models.m6.config import M6Config
from whale.training.folder import RunFolder, resume, start
from whale.training.loop import train
from whale.training.material import read_split
from whale.training.run import Run, find_run, preset_names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "run",
        metavar="RUN",
        help=f"a preset ({', '.join(preset_names())}), or a TOML file",
    )
    parser.add_argument(
        "-n", dest="num_ranks", type=int, metavar="N", help="ranks to start (default: the run's)"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="the run's folder (default: a new one below runs/)"
    )
    parser.add_argument("--steps", type=int, metavar="K", help="steps in all (default: the run's)")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint in the run's folder"
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a key of the run, such as --set optimizer.lr=1e-4; may be given again",
    )


def run(args: argparse.Namespace) -> int:
    """Train, or start the ranks that do."""
    chosen = find_run(args.run, args.settings, steps=args.steps)
    num_ranks = chosen.parallel.num_ranks if args.num_ranks is None else args.num_ranks
    if "RANK" in os.environ:
        if args.out is None:
            raise ConfigError(
                "`whale train` in a rank without --out: ranks must share a folder",
                hint="name one with --out, or run `whale train` itself, which starts its ranks",
            )
        return _on_rank(chosen, RunFolder(Path(args.out)), is_resumed=args.resume)
    check(chosen, num_ranks)
    folder = resume(chosen, args.out) if args.resume else start(chosen, args.out)
    if num_ranks == 1:
        return _on_rank(chosen, folder, is_resumed=args.resume)
    return _start(args, num_ranks, folder)


def check(chosen: Run, num_ranks: int) -> None:
    """Raises for what would only fail once ranks run."""
    if num_ranks < 1:
        raise ConfigError(f"-n {num_ranks}; allowed: 1 or more", hint="raise -n")
    share = num_ranks * chosen.parallel.num_micro_batch
    if chosen.batch_rows < share:
        raise ConfigError(
            f"batch_rows {chosen.batch_rows} on {num_ranks} rank(s) in "
            f"{chosen.parallel.num_micro_batch} micro-batch(es); allowed: {share} or more",
            hint="raise batch_rows, or lower -n",
        )
    config: M6Config = chosen.config()
    for split in ("train", "held_out"):
        samples = read_split(chosen, config, split)  # type: ignore[arg-type]
        for name, source in samples.sources().items():
            if not len(source):
                raise ConfigError(
                    f"data: {name!r} has no {split.replace('_', '-')} samples",
                    hint="a tenth is held out by file name: give more files",
                )


def _on_rank(chosen: Run, folder: RunFolder, *, is_resumed: bool) -> int:
    try:
        train(chosen, folder, resume=is_resumed)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _start(args: argparse.Namespace, num_ranks: int, folder: RunFolder) -> int:
    """The same command in ranks of their own, as `whale launch` would start them."""
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    flags = [args.run, "--out", str(folder.path)]
    flags += [] if args.steps is None else ["--steps", str(args.steps)]
    flags += ["--resume"] if args.resume else []
    flags += [text for setting in args.settings for text in ("--set", setting)]
    script = Path(entry.__file__).resolve()
    # With `python -m whale` beside the package, ranks must find it, too.
    root = str(script.parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return launch.run(parser.parse_args(["-n", str(num_ranks), str(script), "train", *flags]))
