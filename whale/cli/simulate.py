"""`whale simulate PLAN.json`: one step of a plan on a clock.

Place in the flow: a front of `sim.simulate` for a plan in a file. Its prices are in it, so neither
the model nor its devices are needed, nor torch. Exit status: 0 done, 1 does not fit, 2 bad input.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from whale.cli.files import STANDARD, dumps, not_a_plan, read_plan
from whale.cli.reports import (
    add_files,
    check_files,
    print_table,
    say_fit,
    wants_events,
    write_files,
)
from whale.errors import WhaleError
from whale.ir.check import check_plan
from whale.ir.deadlock import check_schedule
from whale.planner.make_plan import orders_of
from whale.sim.report import Report
from whale.sim.simulate import simulate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "plan",
        metavar="PLAN.json",
        help="what `whale plan MODEL --cluster SPEC --json F` wrote; - is standard input",
    )
    add_files(parser, content="the report, with every event")


def run(args: argparse.Namespace) -> int:
    """Simulate; report; 0 when it fits, 1 when it does not."""
    check_files(args)
    report = _simulated(args.plan, events=wants_events(args) or args.json is not None)
    as_json = dumps(report.to_dict()) if args.json is not None else ""
    written = write_files(args, as_json, report)
    if args.json == STANDARD:
        print(as_json)
    else:
        print_table(report)
        if written:
            print(f"written: {', '.join(written)}")
    return say_fit("whale simulate", report)


def _simulated(path: str, *, events: bool) -> Report:
    plan = read_plan(path)
    title = f"{Path(path).name}, model {plan.model_hash}" if path != STANDARD else ""
    try:
        check_plan(plan)
        orders = orders_of(plan.schedule)
        check_schedule(plan.schedule, orders)
        return simulate(plan, orders, title=title, events=events)
    except WhaleError:
        raise
    # A plan that was changed by hand may be JSON of the right shape and still point nowhere.
    except _BROKEN as error:
        raise not_a_plan(path, error) from error


_BROKEN = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError)
