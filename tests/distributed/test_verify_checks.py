"""`wh.verify` beyond plain steps: a truth of its own, and what else a training script does."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.distributed.faults import Case, vectors
from tests.distributed.subtle_faults import (
    BUFFERS,
    CASES,
    FAULTS,
    QUICK,
    QUICK_CASES,
    UNUSED,
    Float32Inside,
    spoil_buffers,
)
from tests.distributed.test_verify import verify
from whale.errors import WhaleError
from whale.verification import check
from whale.verification.compare import error_of, scales
from whale.verification.feeds import CHECKS

pytestmark = pytest.mark.usefixtures("untried")


def params(names: Iterable[str], quick: frozenset[str]) -> list[Any]:
    assert quick <= set(names)
    return [pytest.param(n, marks=() if n in quick else pytest.mark.full) for n in names]


@pytest.mark.every(3)
@pytest.mark.parametrize("name", params(CASES, QUICK_CASES))
def test_a_healthy_model_is_equal(name: str) -> None:
    verdict = verify(CASES[name], checks=frozenset(CHECKS))
    assert verdict.ok, str(verdict)
    status = {c.name: c.status for c in verdict.checks}
    assert list(status) == list(CHECKS)
    for made in ("steps", "optimizer state", "evaluate", "later steps", "checkpoint", "fewer rows"):
        assert status[made] == "equal", str(verdict)
    assert status["one row"] == ("not checked" if name == "odd" else "equal"), str(verdict)
    assert "not checked" not in verdict.reference
    several = CASES[name].config
    assert ("whole batch in plain torch" in verdict.reference) or several
    assert ("weighed so that" in verdict.reference) == (name == "own-loss")
    drops = any(word in name for word in ("dropout", "wide", "attention", "noisy"))
    assert ("masks handed" in verdict.reference) == drops
    assert verdict.dtype == ("float32" if name == "float32" else "float64")


@pytest.mark.every(3)
@pytest.mark.parametrize("name", params(FAULTS, QUICK))
def test_a_subtle_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    fault.plant(monkeypatch)
    config = {"check_parts": False}  # what is planted is not to be found by another guard
    case = CASES[fault.case]
    checks = [fault.check, *([fault.also] if fault.also else [])]
    verdict = verify(case, checks=checks, config={**case.config, **config})
    assert not verdict.ok, str(verdict)
    assert not verdict.failure, str(verdict)
    first = verdict.first
    assert first is not None
    assert (first.check, first.kind) == (fault.check, fault.kind), str(verdict)
    then = [m for m in verdict.mismatches if (m.kind, m.step) == (first.kind, first.step)]
    if fault.tensor:
        assert {m.tensor for m in then} == {fault.tensor}, str(verdict)
    assert {m.rank for m in then} == set(fault.ranks or ()), str(verdict)
    assert {c.name: c.status for c in verdict.checks}[fault.check] == "not equal"


def test_every_sort_of_buffer_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_buffers(monkeypatch)
    verdict = verify(CASES["odd"], steps=1)
    found = {(m.tensor, m.rank) for m in verdict.mismatches if (m.kind, m.step) == ("buffer", 0)}
    assert found == {(name, 1) for name in BUFFERS}, str(verdict)
    first = verdict.first
    assert first is not None
    assert first.step == 0


def test_parameters_without_a_gradient() -> None:
    verdict = verify(UNUSED, checks=None)
    assert verdict.ok, str(verdict)


# ---- precision -----------------------------------------------------------------------------------


def test_a_model_that_makes_float32_tensors() -> None:
    case = CASES["float32"]
    verdict = verify(case, checks=["steps"])
    assert verdict.ok, str(verdict)
    assert verdict.tolerance == 1e-4
    assert "in float32, for in float64: " in verdict.reference
    assert "dtype" in verdict.reference
    with pytest.raises(WhaleError, match="--dtype float32|dtype=") as caught:
        verify(case, checks=["steps"], dtype="float64")
    assert "does not train on one device" in str(caught.value)
    with pytest.raises(WhaleError, match="dtype is float16; allowed: float64, float32"):
        verify(case, dtype="float16")


def test_a_fault_is_seen_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS["halved gradients, dropout"].plant(monkeypatch)
    verdict = verify(CASES["float32"], checks=["steps"])
    assert not verdict.ok
    assert verdict.dtype == "float32"
    first = verdict.first
    assert first is not None
    assert first.kind == "gradient"


def test_asked_for_float32() -> None:
    verdict = verify(CASES["data"], dtype=torch.float32, checks=["steps", "evaluate"])
    assert verdict.ok, str(verdict)
    assert 1e-9 < verdict.worst_error < 1e-4
    assert verdict.dtype == "float32"


# ---- checks as values ----------------------------------------------------------------------------


def test_what_was_not_checked_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "MAX_FOR_ALL_CHECKS", 10)
    verdict = verify(CASES["data"], checks=None)
    assert verdict.ok
    notes = {c.name: (c.status, c.note) for c in verdict.checks}
    assert notes["checkpoint"][0] == "not checked"
    assert "173 parameters, more than 10" in notes["checkpoint"][1]
    assert notes["evaluate"][0] == "equal"
    assert "not checked: later steps, checkpoint, outputs" in str(verdict)
    data = json.loads(json.dumps(verdict.to_dict()))
    assert [c["name"] for c in data["checks"]] == list(CHECKS)
    with pytest.raises(WhaleError, match=r"checks has \['evaluation'\]; allowed: steps"):
        verify(CASES["data"], checks=["evaluation"])


def test_a_refusal_is_no_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    run = wh.Step._train

    def refusing(self: Any, taken: Any) -> Any:
        if taken.batch.total_rows == 4:
            raise WhaleError("not with 4 rows", hint="5")
        return run(self, taken)

    monkeypatch.setattr(wh.Step, "_train", refusing)
    verdict = verify(CASES["data"], checks=None)
    status = {c.name: (c.status, c.note) for c in verdict.checks}
    assert verdict.ok, str(verdict)
    assert status["fewer rows"][0] == "refused"
    assert "not with 4 rows" in status["fewer rows"][1]
    assert status["one row"] == ("not checked", "the ranks stopped at fewer rows")


def test_a_rank_that_fails_in_a_check_says_in_which(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Any, path: Any) -> Any:
        raise RuntimeError("no disk")

    monkeypatch.setattr(wh.Step, "load", failing)
    verdict = verify(CASES["data"], checks=["checkpoint"])
    assert not verdict.ok
    assert "raised RuntimeError: no disk" in verdict.failure
    assert "while checking: checkpoint" in verdict.failure


# ---- tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        ([torch.inf, 1.0], [torch.inf, 1.0], 0.0),
        ([torch.nan, 1.0], [torch.nan, 1.5], 0.5),
        ([torch.inf], [-torch.inf], float("inf")),
        ([torch.nan], [1.0], float("inf")),
        ([1.0], [torch.nan], float("inf")),
        ([True, False], [True, True], 1.0),
        ([2, 7], [2, 4], 3.0),
        ([1.0], [1], float("inf")),
        ([1 + 2j], [1 + 5j], 3.0),
        ([1 + 2j], [1.0], float("inf")),
        ([], [], 0.0),
    ],
)
def test_errors(got: list[Any], want: list[Any], error: float) -> None:
    found, location = error_of(torch.tensor(got), torch.tensor(want), 1.0)
    assert found == error
    assert len(location) <= 1
    sparse = torch.tensor([[0.0, 2.0]]).to_sparse()
    assert error_of(sparse, torch.tensor([[0.0, 2.5]]), 0.5) == (1.0, (0, 1))


def test_every_buffer_has_a_scale_of_its_own() -> None:
    truth = {
        "mask": torch.tensor([torch.finfo(torch.float64).min]),
        "mean": torch.tensor([1e-3]),
        "n.running_mean": torch.tensor([1e-20]),
        "n.running_var": torch.tensor([4.0]),
        "zero": torch.zeros(2),
    }
    found = scales("buffer", truth, 1e-6)
    assert found["mean"] == pytest.approx(1e-3)
    assert found["n.running_mean"] == 2.0
    assert found["zero"] == 1e-6
    weights = scales("weight", {"a": torch.tensor([-1e38]), "b": torch.zeros(1)}, 1e-6)
    assert weights["b"] == pytest.approx(1e-3)


def test_the_model_float32_inside_is_what_it_says() -> None:
    with pytest.raises(RuntimeError, match="dtype|type"):
        Float32Inside().double()(vectors(5)[0].double())


class _NeedsRows(nn.Module):
    """Has no answer for an empty batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.mix, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        return self.out(self.mix(h - h.detach().max(0).values.mean() * 0).relu())


def test_a_rank_that_refuses_does_not_let_the_others_wait() -> None:
    def tags() -> dict[str, Any]:
        return {"inp|out": wh.replicate(), "mix": wh.split()}

    verdict = verify(Case(_NeedsRows, tags, vectors(5)), checks=["steps", "one row"])
    assert verdict.ok, str(verdict)
    status = {c.name: (c.status, c.note) for c in verdict.checks}
    assert status["one row"][0] == "refused" and "empty batch" in status["one row"][1]
