"""`whale plan MODEL --cluster SPEC`: how to run a model on devices that need not be there.

Place in the flow: a front of the planner and the simulator. It finds the model's graph (shipped
with the package, or captured), turns flags into a Config, and prints the fastest plan that fits.
Exit status: 0 done, 1 does not fit (the best plan is still printed), 2 bad input. No torch here:
what needs it is in `whale.cli.captured`, loaded by name.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from whale.cli.compared import COMPARED, Compared, compared
from whale.cli.files import STANDARD, dumps, write
from whale.cli.precisions import PRECISIONS, same_tensors
from whale.cli.reports import (
    add_files,
    check_files,
    print_table,
    say_fit,
    terminal_width,
    wants_events,
    wrapped,
    write_files,
)
from whale.cli.shipped import PlanSubject, load, shipped
from whale.config import Config
from whale.cost.compute import Training
from whale.errors import ConfigError, PlanError
from whale.ir.cluster import Cluster
from whale.ir.device_types import DEVICE_TYPES
from whale.ir.plan import Plan
from whale.ir.profile import Profile
from whale.planner.make_plan import make_plan, orders_of
from whale.sim.simulate import simulate

OPTIMIZERS: Mapping[str, Training] = {
    "adamw": Training(optimizer="AdamW", state_tensors=2.0),
    "adam": Training(optimizer="Adam", state_tensors=2.0),
    "sgd": Training(optimizer="SGD", state_tensors=1.0),
    # Sums over rows and columns instead of the whole: a thousandth of a weight 2,000 wide.
    "adafactor": Training(
        optimizer="Adafactor", state_tensors=0.0, scratch_tensors=0.0, widens_itself=True
    ),
}
"""The state each keeps, in bytes per byte of parameter; SGD has momentum."""

OBJECTIVES = ("time", "energy", "cost")
_DATA_SHEETS = (
    "figures are from data sheets, nothing was measured: `whale calibrate --json F` on the devices "
    "themselves, then --profile F, replaces them"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is planned, whatever the cluster."""

    name: str
    subject: PlanSubject
    rows: int
    precision: str
    training: Training
    config: Config

    @property
    def title(self) -> str:
        """One line for the head of a report."""
        seq = [f"sequences of {self.subject.seq}"] if self.subject.seq is not None else []
        return ", ".join([self.name, *seq, self.precision, self.training.optimizer])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    # As written: the list of presets is a table.
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    presets = shipped()
    width = max(map(len, presets), default=0)
    parser.epilog = "presets:\n" + "\n".join(
        f"  {name:{width}}  {about}" for name, about in presets.items()
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a preset (listed below), or file.py:factory, which returns (module, batch) or "
        "(module, batch, loss)",
    )
    parser.add_argument(
        "--cluster",
        metavar="SPEC",
        help="the devices: 1x8xV100-32GB+1x8xP100-16GB, a TOML file, or local; no default",
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        metavar="SPEC",
        help="one row for each of these clusters, instead of --cluster",
    )
    parser.add_argument("--batch", type=int, metavar="N", help="rows of the global batch")
    parser.add_argument("--seq", type=int, metavar="N", help="sequence length of a preset")
    parser.add_argument(
        "--precision",
        choices=tuple(PRECISIONS),
        help="of weights and computes: bf16 and fp16 alone, under autocast (amp-), or with what is "
        "updated kept as float32, in two halves, or rounded by chance",
    )
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), help="whose state is kept")
    parser.add_argument(
        "--objective",
        choices=OBJECTIVES,
        help="what the best plan has least of: time (default) or energy; cost is not available yet",
    )
    parser.add_argument("--profile", metavar="F", help="what `whale calibrate` measured")
    parser.add_argument(
        "--micro-batches",
        type=int,
        metavar="N",
        help="micro-batches, 2 or more (default: planned, or what the annotations say)",
    )
    parser.add_argument(
        "--stages", type=int, metavar="N", help="pipeline stages (default: planned)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any setting of Config, such as cluster.balance=equal; may be repeated",
    )
    parser.add_argument("--dry-run", action="store_true", help="plan and print, write no files")
    add_files(parser, content="the plan")


def run(args: argparse.Namespace) -> int:
    """Plan; report; 0 when it fits, 1 when it does not."""
    specs = _specs(args)
    check_files(args)
    # Whatever the user's file prints must not get between the JSON on standard output.
    with contextlib.redirect_stdout(sys.stderr):
        clusters = {spec: _cluster(spec) for spec in specs}
        request = _request(args, clusters)
    if args.compare is not None:
        return _compare(args, request, clusters)
    return _show(args, request, clusters[specs[0]])


# ---- from flags to what is planned ---------------------------------------------------------------


def _specs(args: argparse.Namespace) -> list[str]:
    if args.objective == "cost":
        raise ConfigError(
            "--objective cost is not available yet: no prices are known; allowed: time, energy",
            hint="--compare shows the time and the energy of several clusters",
        )
    if args.compare is None and args.cluster is None:
        raise ConfigError(
            "--cluster is missing: there is no default",
            hint="describe the devices: --cluster 1x8xV100-32GB+1x8xP100-16GB, a TOML file, or "
            "local",
        )
    if args.compare is None:
        return [args.cluster]
    for flag in ("cluster", "profile", "html", "trace"):
        if getattr(args, flag) is not None:
            raise ConfigError(
                f"--{flag} with --compare; allowed: one of them",
                hint="--compare names its own clusters"
                if flag == "cluster"
                else f"--{flag} belongs to one cluster: give it with --cluster",
            )
    return list(args.compare)


def _cluster(spec: str) -> Cluster:
    if spec == "local":
        cluster: Cluster = _torch_side().local_cluster()
        return cluster
    return Cluster.from_toml(spec) if spec.endswith(".toml") else Cluster.parse(spec)


def _request(args: argparse.Namespace, clusters: Mapping[str, Cluster]) -> Request:
    if args.batch is not None and args.batch < 1:
        raise ConfigError(f"--batch {args.batch}; allowed: 1 or more", hint="raise --batch")
    if args.precision is not None:
        _check_precision(args.precision, clusters.values())  # before a capture that takes seconds
    subject = _subject(args)
    precision = args.precision or subject.precision
    _check_precision(precision, clusters.values())
    training = OPTIMIZERS[args.optimizer or subject.optimizer]
    config = _config(args, subject, PRECISIONS[precision].settings)
    return Request(
        name=args.model,
        subject=subject,
        rows=args.batch or subject.rows,
        precision=precision,
        training=replace(training, tf32=precision == "tf32"),
        config=config,
    )


def _subject(args: argparse.Namespace) -> PlanSubject:
    """The shipped graph where the flags leave it what it is, else a capture."""
    found, given = load(args.model), any(text.startswith("amp.") for text in args.set)
    if (
        found is not None
        and not given
        and args.seq in (None, found.seq)
        and same_tensors(args.precision or found.precision, found.precision)
    ):
        return found
    subject: PlanSubject = _torch_side().captured(
        args.model,
        rows=args.batch,
        seq=args.seq,
        precision=args.precision,
        more={key: value for key, value in _set(args).items() if key.startswith("amp.")},
    )
    return subject


def _torch_side() -> Any:
    """What needs torch, which takes seconds to load; a shipped graph does not need it."""
    return importlib.import_module("whale.cli.captured")


def _check_precision(precision: str, clusters: Iterable[Cluster]) -> None:
    """Refuses what some device computes only by emulation."""
    for cluster in clusters:
        names = dict.fromkeys(device.type for device in cluster.devices)
        native = {name: DEVICE_TYPES[name].flops_per_s for name in names if name in DEVICE_TYPES}
        lacking = [
            name for name, rates in native.items() if PRECISIONS[precision].computes not in rates
        ]
        if lacking and precision != "fp32":
            allowed = [
                flag
                for flag, named in PRECISIONS.items()
                if flag == "fp32" or all(named.computes in rates for rates in native.values())
            ]
            raise ConfigError(
                f"precision {precision}: {' and '.join(lacking)} cannot compute in it; allowed on "
                f"{cluster}: {', '.join(allowed)}",
                hint=f"--precision {allowed[-1]}",
            )


def _config(args: argparse.Namespace, subject: PlanSubject, precision: Mapping[str, Any]) -> Config:
    if args.stages is not None and subject.annotated:
        raise ConfigError(
            f"--stages {args.stages} with {args.model!r}, whose annotations say what its stages "
            "are; allowed: only where the planner cuts them",
            hint="leave --stages out",
        )
    values = _set(args)
    for key, value in precision.items():
        values.setdefault(key, value)
    for key, flag in (
        ("pipeline.num_micro_batch", args.micro_batches),
        ("pipeline.num_stages", args.stages),
        ("cluster.profile", args.profile),
        ("auto.objective", args.objective),
    ):
        if flag is not None:
            _put(values, key, flag)
    if subject.num_micro_batch > 1:
        values.setdefault("pipeline.num_micro_batch", subject.num_micro_batch)
    values.setdefault("auto.auto_parallel", True)
    return Config.from_dict(values)


def _set(args: argparse.Namespace) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for text in args.set:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(
                f"--set {text}; allowed: KEY=VALUE", hint="--set cluster.balance=equal"
            )
        _put(values, key.strip(), _value(value.strip()))
    return values


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    if key in values:
        raise ConfigError(
            f"{key} is given twice, as {values[key]!r} and as {value!r}", hint="keep one of them"
        )
    values[key] = value


def _value(text: str) -> Any:
    """A number, true, false or none where the text spells one, else the text itself."""
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False}.get(text.lower())
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text


# ---- one cluster ---------------------------------------------------------------------------------


def _plan(request: Request, cluster: Cluster) -> Plan:
    path = request.config.cluster.profile
    return make_plan(
        request.subject.graph,
        cluster,
        request.config,
        batch_rows=request.rows,
        refusal=request.subject.refusal,
        training=request.training,
        profile=Profile.read(path) if path else None,
    )


def _show(args: argparse.Namespace, request: Request, cluster: Cluster) -> int:
    plan = _plan(request, cluster)
    refusal = request.subject.refusal
    orders = orders_of(plan.schedule)
    report = simulate(plan, orders, title=request.title, events=wants_events(args))
    as_json = dumps(plan.to_dict())
    written = [] if args.dry_run else write_files(args, as_json, report)
    if args.json == STANDARD:
        print(as_json)
    else:
        print_table(report)
        print("cluster")
        for line in cluster.describe():
            print(wrapped(line, indent="  "))
        if not request.config.cluster.profile and args.cluster != "local":
            print(f"\n{wrapped(_DATA_SHEETS)}")
        if refusal is not None:
            print(wrapped(f"no stages could be cut: {refusal.message}"))
        if written:
            print(f"written: {', '.join(written)}")
    if refusal is not None and not any(layer.work for layer in request.subject.graph.layers):
        text = f"warning: the model could not be run, so times lack all compute: {refusal.message}"
        print(wrapped(text), file=sys.stderr)
    return say_fit("whale plan", report)


# ---- several clusters ----------------------------------------------------------------------------


def _compare(args: argparse.Namespace, request: Request, clusters: Mapping[str, Cluster]) -> int:
    found = []
    for spec, cluster in clusters.items():
        try:
            plan = _plan(request, cluster).to_dict()
            found.append(Compared(cluster=spec, **{key: plan[key] for key in COMPARED}))
        except PlanError as error:
            found.append(Compared(cluster=spec, fits=False, strategy=f"none: {error.message}"))
    rows = [asdict(row) for row in found]
    text = dumps({"model": args.model, "batch_rows": request.rows, "clusters": rows})
    if args.json not in (None, STANDARD) and not args.dry_run:
        write("--json", args.json, text + "\n")
    if args.json == STANDARD:
        print(text)
    else:
        print(f"{request.title}, {request.rows} rows\n")
        print("\n".join(compared(found, terminal_width())))
        print(f"\n{wrapped(_DATA_SHEETS)}")
    if any(row.fits for row in found):
        return 0
    print(
        f"whale plan: {args.model} fits on none of {len(found)} clusters\n  hint: `whale plan "
        f"{args.model} --cluster {found[0].cluster}` says by how much",
        file=sys.stderr,
    )
    return 1
