"""A Report out of a command: the table, the page and the timeline, and whether it fits.

Place in the flow: below `whale plan` and `whale simulate`, without torch; `whale.viz` draws.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from itertools import combinations
from pathlib import Path

from whale.cli.files import STANDARD, check_target, write
from whale.errors import ConfigError
from whale.sim.report import Report
from whale.viz.facts import needed, over
from whale.viz.html import html
from whale.viz.text import table
from whale.viz.trace import chrome_trace
from whale.viz.units import nbytes


def add_files(parser: argparse.ArgumentParser, *, content: str) -> None:
    """Declare the flags that name files; `content` is what --json writes."""
    parser.add_argument("--json", metavar="F", help=f"write {content}; - is standard output")
    parser.add_argument("--html", metavar="F", help="write the report as a page")
    parser.add_argument("--trace", metavar="F", help="write the timeline for ui.perfetto.dev")


def check_files(args: argparse.Namespace) -> None:
    """Raises for a file that could not be written in the end."""
    check_target("--json", args.json, standard=True)
    check_target("--html", args.html)
    check_target("--trace", args.trace)
    targets = [(flag, getattr(args, flag)) for flag in ("json", "html", "trace")]
    places = {flag: Path(name).resolve() for flag, name in targets if name not in (None, STANDARD)}
    for flag, other in combinations(places, 2):
        if places[flag] == places[other]:
            raise ConfigError(
                f"--{flag} and --{other} are the same file, {getattr(args, flag)!r}",
                hint="give each a name of its own",
            )


def wants_events(args: argparse.Namespace) -> bool:
    """Whether something is drawn that needs every event of the step."""
    return args.html is not None or args.trace is not None


def write_files(args: argparse.Namespace, as_json: str, report: Report) -> list[str]:
    """Writes the files asked for; their names."""
    texts = {}
    if args.json not in (None, STANDARD):
        texts["json"] = as_json + "\n"
    if args.html is not None:
        texts["html"] = html(report)
    if args.trace is not None:
        texts["trace"] = json.dumps(chrome_trace(report)) + "\n"
    for flag, text in texts.items():
        write(f"--{flag}", getattr(args, flag), text)
    return [getattr(args, flag) for flag in texts]


def print_table(report: Report) -> None:
    """The table, as wide as the terminal, with block characters where they can be shown."""
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(table(report, width=terminal_width(), unicode=unicode))


def terminal_width() -> int:
    """Columns to print in; 100 where the output is no terminal."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, 80), 120)


def wrapped(text: str, *, indent: str = "") -> str:
    """A line as wide as the terminal, the rest of it below, a little further in."""
    return "\n".join(
        textwrap.wrap(
            text, terminal_width(), initial_indent=indent, subsequent_indent=f"{indent}  "
        )
    )


def say_fit(command: str, report: Report) -> int:
    """The exit status; where it is 1, a line on standard error says what is missing."""
    worst = over(report)
    if not worst:
        return 0
    device, memory = worst[0], worst[0].memory
    state = memory.parameters + memory.gradients + memory.optimizer
    passing = memory.activations + memory.workspace
    others = f" (and {len(worst) - 1} more of {len(report.devices)} devices)" if worst[1:] else ""
    if passing > state:
        hint = (
            f"{nbytes(passing)} of it are activations: a smaller batch, shorter sequences, more "
            "micro-batches, or more devices"
        )
    else:
        hint = (
            f"{nbytes(state)} of it are weights, gradients and optimizer state: larger or more "
            "devices, an optimizer with less state (sgd, adafactor), or half precision"
        )
    print(
        f"{command}: does not fit: rank {device.rank} ({device.type}){others} needs "
        f"{nbytes(needed(device))} and has {nbytes(device.capacity_bytes)}, "
        f"{nbytes(needed(device) - device.capacity_bytes)} too little\n  hint: {hint}",
        file=sys.stderr,
    )
    return 1
