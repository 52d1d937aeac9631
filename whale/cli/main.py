"""`whale COMMAND ...`: finds the command's file, runs it, and turns an error into one message.

Place in the flow: the entry point of every command. A command is a module `whale.cli.<command>`
with `add_arguments(parser)` and `run(args) -> int`; it is imported by name once it is asked for, so
that `whale --help` and the torch-free commands start without torch.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

import whale
from whale.errors import ConfigError, WhaleError

COMMANDS: Mapping[str, str] = {
    "calibrate": "measure this machine's devices and links into a profile for plans",
    "generate": "write a caption, an answer or a text, or draw, with a trained M6",
    "launch": "start N ranks of a script, on one node or several",
    "plan": "how to run a model on a cluster that need not be there: time, memory, energy",
    "search": "rank pictures for a text, or texts for a picture, with a trained M6",
    "simulate": "the timeline of a plan: a table, a page, a trace",
    "train": "train a run (a preset or a TOML file) on ranks of this machine",
    "verify": "run a plan on CPU processes and compare it with one device",
}
BAD_INPUT = 2
INTERRUPTED = 130
PIPE_CLOSED = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the exit status: 0 done, 1 no, 2 bad input."""
    args = _parser().parse_args(argv)
    command: str = args.command
    try:
        if command not in COMMANDS:
            near = difflib.get_close_matches(command, COMMANDS, n=1)
            raise WhaleError(
                f"unknown command {command!r}; allowed: {', '.join(COMMANDS)}",
                hint=f"did you mean `whale {near[0]}`?" if near else "`whale --help` lists them",
            )
        module = importlib.import_module(f"whale.cli.{command}")
        parser = Parser(prog=f"whale {command}", description=COMMANDS[command])
        module.add_arguments(parser)
        status: int = module.run(parser.parse_args(args.rest))
        sys.stdout.flush()
    except WhaleError as error:
        print(f"whale: error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has seen enough (`| head`); nothing is left to say, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return status


class Parser(argparse.ArgumentParser):
    """The arguments of a command; what is wrong with them is one message, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Raises what `main` prints."""
        wrong = message.removeprefix("unrecognized arguments: ").split()[0]
        near = difflib.get_close_matches(wrong.partition("=")[0], self._option_string_actions, n=1)
        raise ConfigError(
            message,
            hint=f"did you mean {near[0]}?"
            if near
            else f"`{self.prog} --help` lists the arguments",
        )


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="whale",
        description="Train giant models on the GPUs people really have.",
        epilog="commands:\n"
        + "\n".join(f"  {name:{width}}  {what}" for name, what in COMMANDS.items())
        + "\n\n`whale COMMAND --help` describes one command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"whale {whale.__version__}")
    parser.add_argument("command", metavar="COMMAND", help="one of the commands below")
    parser.add_argument("rest", metavar="...", nargs=argparse.REMAINDER, help="its arguments")
    return parser


if __name__ == "__main__":
    sys.exit(main())
