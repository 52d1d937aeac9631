"""`whale verify MODEL --cluster SPEC`: does the plan compute what one device computes?

Place in the flow: a front of `wh.verify`. It finds the model and its batch, and turns the verdict
into an exit status: 0 equal, 1 not equal, 2 bad input.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whale.cli.files import STANDARD, dumps, read_plan, write
from whale.errors import ConfigError, WhaleError
from whale.ir.plan import Plan
from whale.models.registry import PRESETS, Preset, listing, near, preset
from whale.runtime import batch as batches
from whale.verification.check import verify
from whale.verification.feeds import CHECKS
from whale.verification.precision import DTYPES

DEFAULT_ROWS = 8
_FORMS = "a preset name, or file.py:factory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is verified: a model with one global batch."""

    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], Any] | None
    note: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    # As written: the list of presets is a table.
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = listing()
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a preset (listed below), or file.py:factory, which returns (module, batch), (module, "
        "batch, loss), or a module that brings its own example inputs",
    )
    parser.add_argument(
        "--cluster", required=True, metavar="SPEC", help="devices to plan for, such as 1x4xCPU"
    )
    parser.add_argument(
        "--plan", metavar="F", help="the plan to try, as JSON (default: planned here)"
    )
    parser.add_argument("--batch", type=int, metavar="N", help="rows of the global batch")
    parser.add_argument("--steps", type=int, default=3, metavar="K", help="first steps (default 3)")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="seconds for a run (default 120)"
    )
    parser.add_argument(
        "--dtype",
        choices=sorted(DTYPES),
        help="precision (default float64; float32 where the model runs in nothing else)",
    )
    parser.add_argument(
        "--checks",
        metavar="LIST",
        help=f"checks to make, with commas between them (default all): {', '.join(CHECKS)}",
    )
    parser.add_argument(
        "--json", metavar="F", help="write the verdict as JSON; - is standard output"
    )


def run(args: argparse.Namespace) -> int:
    """Verify; report; 0 when equal, 1 when not."""
    # Whatever the user's file prints must not get between the JSON on standard output.
    with contextlib.redirect_stdout(sys.stderr):
        plan = None if args.plan is None else read_plan(args.plan)
        subject = find_subject(args.model, args.batch, plan)
        verdict = verify(
            subject.model,
            plan,
            subject.batch,
            loss=subject.loss,
            cluster=args.cluster,
            steps=args.steps,
            timeout=args.timeout,
            dtype=args.dtype,
            checks=None if args.checks is None else args.checks.split(","),
        )
    if args.json is not None:
        text = dumps({"model": args.model, "note": subject.note, **verdict.to_dict()})
        if args.json == STANDARD:
            print(text)
        else:
            write("--json", args.json, text + "\n")
    if args.json != STANDARD:
        print(verdict)
        if subject.note:
            print(f"  model: {subject.note}")
    if not verdict.ok:
        print(f"whale verify: {verdict.line}", file=sys.stderr)
    return 0 if verdict.ok else 1


def find_subject(name: str, rows: int | None, plan: Plan | None = None) -> Subject:
    """The model that MODEL names, and a batch for it; `plan` is what it must suit."""
    if rows is not None and rows < 1:
        raise ConfigError(f"--batch {rows}; allowed: 1 or more", hint="raise --batch")
    if name in PRESETS:
        return _preset(preset(name), rows, plan)
    path, colon, factory = name.rpartition(":")
    if not colon or not path.endswith(".py") or not factory:
        raise ConfigError(
            f"MODEL {name!r}; allowed: {_FORMS}",
            hint=f"a file is given as model.py:build; {near(name, PRESETS)}",
        )
    made = _call(path, factory)
    model, batch, loss = (*made, None, None)[:3] if isinstance(made, tuple) else (made, None, None)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{name} returned {type(model).__name__}; allowed: an nn.Module, (module, batch), or "
            "(module, batch, loss)",
            hint="return the annotated model",
        )
    if batch is None:
        batch = _own_example(model)
    if batch is None:
        raise ConfigError(
            f"{name} returned no batch, and a model cannot be run without one",
            hint="return (module, batch) or (module, batch, loss): one global batch, rows in dim 0",
        )
    return Subject(model=model, batch=_with_rows(batch, rows), loss=loss)


def _call(path: str, factory: str) -> Any:
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"file {path!r} is not there", hint=f"looked for it in {Path.cwd()}")
    spec = importlib.util.spec_from_file_location(f"whale_user_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Pickles and dataclasses of the user's file look their module up by name.
    sys.modules[spec.name] = module
    sys.path.insert(0, str(file.resolve().parent))
    try:
        spec.loader.exec_module(module)
        if not callable(getattr(module, factory, None)):
            names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            raise ConfigError(
                f"{path} has no function {factory!r}; it has: {', '.join(names) or 'none'}",
                hint="name a function of the file after the colon",
            )
        return getattr(module, factory)()
    except WhaleError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{path}:{factory} failed: {type(error).__name__}: {error}",
            hint=f"try it alone: python -c 'import {file.stem}; {file.stem}.{factory}()'",
        ) from error


def _own_example(model: nn.Module) -> Any:
    """The example inputs a Hugging Face model carries, its tokens also as labels."""
    example = getattr(model, "dummy_inputs", None)
    if not isinstance(example, dict) or "input_ids" not in example:
        return None
    return {"labels": example["input_ids"], **example}


def _with_rows(batch: Any, rows: int | None) -> Any:
    """The batch cut to `rows`, or its rows repeated."""
    if rows is None:
        return batch
    have = batches.num_rows(batch)
    index = torch.arange(rows) % have
    leaves = [
        leaf[index.to(leaf.device)] if batches.has_rows(leaf, have) else leaf
        for leaf in batches.leaves(batch)
    ]
    return batches.rebuild(batch, leaves)


def _preset(full: Preset, rows: int | None, plan: Plan | None) -> Subject:
    """A preset, or its small sibling with its annotations: quick to compare in float64.

    A plan is for the preset itself.
    """
    small = preset(full.small) if full.small is not None and plan is None else full
    rows = rows or max(DEFAULT_ROWS, plan.num_micro_batch if plan is not None else 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = small.build()
    if full.annotate is not None:
        model = full.annotate(model)
    return Subject(
        model=model,
        batch=small.batch(rows, small.seq),
        loss=small.loss,
        note="" if small is full else _reduced(full, small, model),
    )


def _reduced(full: Preset, small: Preset, model: nn.Module) -> str:
    """What became of the preset: every number of its configuration that changed."""
    with torch.device("meta"):
        whole = full.build()
    before: Any = getattr(whole, "config", None)
    after: Any = getattr(model, "config", None)
    if not is_dataclass(before) or type(before) is not type(after):
        return f"{full.name} reduced: to {small.name}"
    changed = [
        f"{field.name} {old} to {new}"
        for field in fields(before)
        if (old := getattr(before, field.name)) != (new := getattr(after, field.name))
    ]
    return f"{full.name} reduced: {', '.join(changed)}"
