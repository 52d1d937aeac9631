"""Runs a case under a layout on real ranks and compares it with the plain-torch reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch

import whale as wh
from tests.parity import zoo
from tests.parity.layouts import LayerPaths, layer_paths
from tests.parity.names import case_named, layout_named
from tests.parity.reference import Reference, greatest_entry, relative_error, train_reference
from tests.ranks import RankFailure, run_ranks
from whale.ir.virtual_device import micro_batch_cuts

ROWS = 7
STEPS = 3
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


def train(
    case_name: str,
    layout_name: str,
    more: dict[str, Any] | None = None,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float64,
    optimizer: Any = None,
    paths: Sequence[str] | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Any]:
    """One rank's part: trains, and returns what the whole model looks like.

    `paths` are the model's Layers, if the caller knows them: finding them takes a capture. Every
    step is called in `around()`.
    """
    torch.set_num_threads(1)
    case, layout = case_named(case_name, dropout=dropout), layout_named(layout_name)
    wh.init()
    batches = [in_dtype(case.batch(seed, ROWS), dtype) for seed in range(STEPS)]
    model = case.build().to(dtype)
    layout.annotate(model, paths or LayerPaths(model, batches[0], case.loss))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step = wh.parallelize(
        model,
        optimizer=optimizer or ADAMW,
        batch=batches[0],
        loss=case.loss,
        config={**layout.config, **(more or {})},
        cluster=layout.cluster(),
    )
    losses, gradients, norms = [], {}, []
    for index, batch in enumerate(batches):
        with around():
            metrics = step(batch)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics.get("grad_norm", 0.0)))
        if index == 0:
            gradients = step.gradients()
    result = {
        "losses": losses,
        "gradients": gradients,
        "norms": norms,
        "state": step.state_dict(),
        "rows": [d["share"] for d in step.plan.to_dict()["devices"]],
        "stages": [s.virtual_device.ranks for s in step.plan.stages],
        "micro": step.plan.num_micro_batch,
        "split_share": [t.split_share for t in step.plan.taskgraphs if t.kind == "split"],
        "rules": {s.path: s.rule for t in step.plan.taskgraphs for s in t.splits},
        "untouched": all(torch.equal(p, before[n]) for n, p in model.named_parameters()),
    }
    step.close()
    return result


def in_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """The floating tensors of a batch in another dtype."""

    def convert(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    if isinstance(batch, dict):
        return {key: convert(value) for key, value in batch.items()}
    return tuple(convert(value) for value in batch)


def compare(case_name: str, layout_name: str, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """The largest errors of loss, gradients and weights over all ranks."""
    layout = layout_named(layout_name)
    max_norm = (more or {}).get("optimizer.max_grad_norm")
    truth = _truth(case_name, layout.config.get("pipeline.num_micro_batch", 1), max_norm)
    results = run_ranks(
        layout.num_ranks, _train_one, _paths(case_name), case_name, layout_name, more, timeout=110.0
    )
    return worst_errors(results, truth, with_gradients=max_norm is None)


AT_ONCE = 3
"""Cases that one set of ranks trains: starting the ranks takes longer than training."""


def grouped(points: Iterable[tuple[str, str]]) -> dict[tuple[str, str], tuple[str, ...]]:
    """For each (case, layout) the cases that are trained with it, on the same ranks."""
    by_layout: dict[str, list[str]] = {}
    for case_name, layout_name in points:
        by_layout.setdefault(layout_name, []).append(case_name)
    found = {}
    for layout_name, cases in by_layout.items():
        for low in range(0, len(cases), AT_ONCE):
            group = tuple(cases[low : low + AT_ONCE])
            found.update({(case_name, layout_name): group for case_name in group})
    return found


def compare_in_group(case_name: str, layout_name: str, cases: tuple[str, ...]) -> dict[str, Any]:
    """As `compare`, of one of several cases that share their ranks."""
    try:
        return _compare_several(cases, layout_name)[case_name]
    except RankFailure:
        # Which of them it was shows alone.
        return compare(case_name, layout_name)


@cache
def _compare_several(cases: tuple[str, ...], layout_name: str) -> dict[str, dict[str, Any]]:
    layout = layout_named(layout_name)
    paths = {case_name: _paths(case_name) for case_name in cases}
    results = run_ranks(
        layout.num_ranks, _train_several, paths, layout_name, timeout=60.0 + 25.0 * len(cases)
    )
    return {
        case_name: worst_errors(
            [result[case_name] for result in results],
            _truth(case_name, layout.config.get("pipeline.num_micro_batch", 1), None),
            with_gradients=True,
        )
        for case_name in cases
    }


def _train_one(
    paths: Sequence[str] | None, case_name: str, layout_name: str, more: dict[str, Any] | None
) -> dict[str, Any]:
    return train(case_name, layout_name, more, paths=paths)


def _train_several(
    paths: dict[str, Sequence[str] | None], layout_name: str
) -> dict[str, dict[str, Any]]:
    return {name: train(name, layout_name, paths=known) for name, known in paths.items()}


@cache
def _paths(case_name: str) -> tuple[str, ...] | None:
    """The Layers of a case, found once; not where no layout asks for them."""
    if case_name not in zoo.CASE_NAMES:
        return None
    case = case_named(case_name)
    return tuple(layer_paths(case.build(), case.batch(0, ROWS), case.loss))


@cache
def _truth(case_name: str, micro: int, max_norm: float | None) -> Reference:
    """Layouts with as many micro-batches have one truth."""
    case = case_named(case_name)
    points = micro_batch_cuts(ROWS, micro)
    sizes = [b - a for a, b in zip(points, points[1:], strict=False)]
    batches = [case.batch(seed, ROWS) for seed in range(STEPS)]
    return train_reference(case, batches, [sizes] * STEPS, ADAMW, max_norm=max_norm)


def compare_with_one_rank(case_name: str, layout_name: str, dropout: float) -> dict[str, Any]:
    """The same, against Whale itself on one rank: what keyed dropout is held to."""
    layout = layout_named(layout_name)
    micro = {"pipeline.num_micro_batch": layout.config.get("pipeline.num_micro_batch", 1)}
    (one,) = run_ranks(1, train, case_name, "one", micro, dropout)
    truth = Reference(
        losses=one["losses"],
        gradients=one["gradients"],
        gradient_norms=one["norms"],
        state_dict=one["state"],
    )
    results = run_ranks(layout.num_ranks, train, case_name, layout_name, None, dropout)
    return worst_errors(results, truth, with_gradients=True)


def worst_errors(results: list[Any], truth: Reference, *, with_gradients: bool) -> dict[str, Any]:
    worst: dict[str, Any] = {"loss": 0.0, "gradient": 0.0, "weight": 0.0, "where": ""}
    for rank, result in enumerate(results):
        assert result["untouched"], f"rank {rank}: the user's module was changed"
        for got, want in zip(result["losses"], truth.losses, strict=True):
            error = abs(got - want) / max(abs(want), 1e-12)
            worst["loss"] = max(worst["loss"], _counted(error))
        pairs = [("weight", result["state"], truth.state_dict)]
        if with_gradients:
            pairs.append(("gradient", result["gradients"], truth.gradients))
        for kind, got_all, want_all in pairs:
            assert got_all.keys() == want_all.keys(), (kind, rank)
            largest = greatest_entry(want_all.values())
            for name, want in want_all.items():
                if not want.is_floating_point():
                    assert torch.equal(got_all[name], want), (kind, name, rank)
                    continue
                error = _counted(relative_error(got_all[name], want, largest))
                if error > worst[kind]:
                    worst[kind] = error
                    worst["where"] = f"{kind} {name} on rank {rank}"
    for key in ("split_share", "rows", "stages", "rules"):
        worst[key] = results[0].get(key)
    return worst


def _counted(error: float) -> float:
    """An error that is not a number is the greatest of all, and not less than any tolerance."""
    return math.inf if math.isnan(error) else error
