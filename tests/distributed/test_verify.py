"""`wh.verify`: true plans pass, and every planted fault is found and named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import whale as wh
from tests.distributed.faults import CASES, FAULTS, Case, cross_entropy, rank, vectors
from whale.cli.main import main
from whale.errors import AnnotationError, PlanError, RankError, WhaleError
from whale.ir.cluster import Cluster, Device, Node
from whale.ir.plan import Plan
from whale.runtime import executor
from whale.verification import check

pytestmark = pytest.mark.usefixtures("untried")


def cluster(num_ranks: int, speeds: tuple[float, ...] | None = None) -> Cluster:
    return Cluster(
        devices=tuple(
            Device(rank=r, node=0, type="CPU", memory_bytes=8 * 10**9, speed=s)
            for r, s in enumerate(speeds or (1.0,) * num_ranks)
        ),
        nodes=(Node(index=0),),
    )


def verify(case: Case, **more: Any) -> wh.Verdict:
    given: dict[str, Any] = {
        "batch": case.batch,
        "loss": case.loss,
        "config": {**case.config, "cluster.balance": "speed"},
        "cluster": cluster(case.num_ranks, case.speeds),
        "steps": 2,
        "checks": ["steps"],
        **more,
    }
    return wh.verify(case.model(), **given)


# ---- plans that are right ------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CASES)
def test_a_true_plan_is_equal(name: str) -> None:
    verdict = verify(CASES[name])
    assert verdict.ok, str(verdict)
    assert verdict.worst_error <= verdict.tolerance == 1e-9
    assert not verdict.mismatches
    assert not verdict.folded
    assert ("masks handed" in verdict.reference) == (name == "dropout")
    assert "equal:" in str(verdict)
    assert f"on {CASES[name].num_ranks} ranks" in verdict.line


# ---- planted faults ------------------------------------------------------------------------------


AT_BUILD = ("inputs of two replicas swapped", "dropout keyed by the local row")


@pytest.mark.parametrize("name", AT_BUILD)
def test_what_makes_parts_differ_is_refused_before(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHALE_CHECK_PARTS", "1")
    fault = FAULTS[name]
    fault.plant(monkeypatch)
    try:
        said = verify(CASES[fault.case]).failure
    except WhaleError as error:
        said = str(error)
    assert "in two parts" in said


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if number % 2 else ())
        for number, name in enumerate(n for n in FAULTS if n not in AT_BUILD)
    ],
)
def test_a_planted_fault_is_found_and_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    fault.plant(monkeypatch)
    verdict = verify(CASES[fault.case])
    assert not verdict.ok, str(verdict)
    assert not verdict.failure, str(verdict)
    first = verdict.first
    assert first is not None
    assert (first.kind, first.step) == (fault.kind, fault.first_step), str(verdict)
    then = [m for m in verdict.mismatches if (m.kind, m.step) == (first.kind, first.step)]
    if fault.tensors:
        assert {m.tensor for m in then} == set(fault.tensors), str(verdict)
    if fault.ranks is not None:
        assert {m.rank for m in then} == set(fault.ranks), str(verdict)
    assert all(m.error > verdict.tolerance for m in verdict.mismatches)
    assert first.tensor in str(verdict)
    assert f"rank {first.rank}" in str(verdict)


def test_the_worst_element_is_located(monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS["other initial weights on one rank"].plant(monkeypatch)
    first = verify(CASES["data"], steps=1).first
    assert first is not None
    assert first.location == (3, 1)
    FAULTS["cut shifted by one unit"].plant(monkeypatch)
    found = [m for m in verify(CASES["tensor"], steps=1).mismatches if m.tensor == "emb.weight"]
    # Ranks 0 and 1 hold 8 and 4 of the 12 rows: the place is given in the whole tensor.
    assert all(8 <= m.location[0] < 12 for m in found if m.step == 0)


# ---- ranks that fail -----------------------------------------------------------------------------


def _in_backward(monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    backward = executor.Executor._backward_of

    def faulty(self: Any, action: Any) -> None:
        if rank() == 1:
            act()
        backward(self, action)

    monkeypatch.setattr(executor.Executor, "_backward_of", faulty)


def _raise(error: BaseException) -> Any:
    def act() -> None:
        raise error

    return act


def test_a_rank_that_raises_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _in_backward(monkeypatch, _raise(RuntimeError("the cause")))
    verdict = verify(CASES["data"])
    assert not verdict.ok
    assert verdict.line.startswith("not equal: rank 1 raised RuntimeError: the cause")
    assert verdict.worst_error == float("inf")


def test_a_rank_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _in_backward(monkeypatch, lambda: os._exit(3))
    start = time.monotonic()
    verdict = verify(CASES["data"])
    assert not verdict.ok
    assert verdict.failure.startswith("rank 1 exited with 3")
    assert time.monotonic() - start < 30


def test_a_rank_that_hangs_is_named_and_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def hang() -> None:
        Path(tmp_path, "pid").write_text(str(os.getpid()))
        time.sleep(600)

    _in_backward(monkeypatch, hang)
    verdict = verify(CASES["data"], timeout=5.0)
    assert not verdict.ok
    assert verdict.failure.startswith("rank 1 did not finish in 5 s")
    assert "in hang" in verdict.failure
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path(tmp_path, "pid").read_text()), 0)


HANGS = """
import os, sys, time
import torch.distributed as dist
sys.path.insert(0, {root!r})
from tests.distributed import faults, test_verify
from whale.runtime import executor

def hang(self, action):
    open(os.path.join({folder!r}, str(dist.get_rank())), "w").write(str(os.getpid()))
    time.sleep(600)

executor.Executor._backward_of = hang
test_verify.verify(faults.CASES["skip"])
"""


@pytest.mark.full
def test_no_rank_outlives_a_killed_parent(tmp_path: Path) -> None:
    code = HANGS.format(root=str(Path(__file__).parents[2]), folder=str(tmp_path))
    parent = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not any(path.read_text() for path in tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    assert len(children) == 3
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline, children
        time.sleep(0.05)


def test_what_the_user_can_fix_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    _in_backward(monkeypatch, _raise(AnnotationError("wrong", hint="mend it", where="model.py:3")))
    with pytest.raises(AnnotationError, match="mend it") as caught:
        verify(CASES["data"])
    assert caught.value.where == "model.py:3"


def test_a_model_that_fails_on_one_device() -> None:
    case = CASES["data"]
    with pytest.raises(WhaleError, match="does not train on one device|cannot be captured|shape"):
        verify(case, batch=(torch.zeros(5, 6), torch.full((5,), 7)), config={"check_parts": False})


# ---- what it takes -------------------------------------------------------------------------------


def test_the_model_is_not_changed() -> None:
    model = CASES["norm"].model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    verdict = wh.verify(
        model, batch=vectors(5), loss=cross_entropy, cluster=cluster(2), steps=1, checks=["steps"]
    )
    assert verdict.ok
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_a_plan_of_the_users_is_tried_and_survives_json() -> None:
    case = CASES["tensor"]
    model = case.model()
    plan = wh.plan(model, cluster=cluster(2, (3.0, 1.0)), batch=case.batch, loss=cross_entropy)
    again = Plan.from_dict(plan.to_dict())
    assert wh.verify(model, again, case.batch, loss=cross_entropy, steps=1).ok
    with pytest.raises(PlanError, match="for 2 ranks, the cluster has 3 devices"):
        wh.verify(model, plan, case.batch, loss=cross_entropy, cluster="1x3xCPU")
    with pytest.raises(PlanError, match="the plan is for model"):
        wh.verify(CASES["data"].model(), plan, vectors(5), loss=cross_entropy)


def test_a_model_on_the_meta_device() -> None:
    case = CASES["data"]
    with torch.device("meta"):
        model = wh.annotate(case.build(), case.entries())
    verdict = wh.verify(
        model, batch=case.batch, loss=cross_entropy, cluster=cluster(2), steps=1, checks=["steps"]
    )
    assert verdict.ok, str(verdict)


class InFloat32(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).float()


def test_a_loss_in_float32_has_another_tolerance() -> None:
    model = wh.replicate()(InFloat32())
    verdict = wh.verify(model, batch=vectors(6), loss=cross_entropy, cluster=cluster(2))
    assert verdict.ok, str(verdict)
    assert verdict.tolerance == 1e-6
    strict = wh.verify(
        model, batch=vectors(6), loss=cross_entropy, cluster=cluster(2), tolerance=0.0
    )
    assert not strict.ok


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["data"]
    with pytest.raises(WhaleError, match="got no batch"):
        wh.verify(case.model(), cluster=cluster(2))
    with pytest.raises(PlanError, match="neither a plan nor a cluster"):
        wh.verify(case.model(), batch=case.batch, loss=cross_entropy)
    with pytest.raises(WhaleError, match="steps is 0"):
        verify(case, steps=0)
    with pytest.raises(WhaleError, match="meta device"):
        verify(case, batch=tuple(t.to("meta") for t in case.batch))
    monkeypatch.setattr(check, "MAX_PARAMETERS", 10)
    with pytest.raises(WhaleError, match="173 parameters; allowed: at most 10"):
        verify(case)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RankError, match="rank 0 of a job"):
        verify(case)


# ---- folding -------------------------------------------------------------------------------------


def fold_of(entries: dict[str, Any], speeds: tuple[float, ...], **config: Any) -> tuple[Plan, str]:
    case = CASES["tensor"]
    model = wh.annotate(case.build(), entries)
    settings = wh.Config.from_dict({**config, "cluster.balance": "speed"})
    devices = cluster(len(speeds), speeds)
    plan = wh.plan(model, cluster=devices, batch=case.batch, loss=cross_entropy, config=settings)
    return check._fold(model, plan, devices, settings, case.batch, cross_entropy)


def shapes(plan: Plan) -> list[tuple[int, ...]]:
    return [
        tuple(len(replica.ranks) for replica in t.virtual_device.replicas) for t in plan.taskgraphs
    ]


def test_copies_fold_to_two_and_keep_their_weights() -> None:
    plan, text = fold_of({"": wh.replicate()}, (1.0,) * 12)
    assert shapes(plan) == [(1, 1)]
    assert text == "12 ranks to 2: replicate0 from 12 replicas to 2 replicas"
    plan, _ = fold_of({"": wh.replicate()}, (2.0,) * 6 + (1.0,) * 6)
    assert sorted(set(plan.stages[0].virtual_device.weights)) == [1, 2]
    assert plan.num_ranks == 3


def test_nesting_and_uneven_splits_survive() -> None:
    plan, text = fold_of({"": (wh.replicate(16), wh.split(4))}, (1.0,) * 16)
    assert shapes(plan) == [(2, 2)]
    assert "from 4 x 4 shards to 2 x 2 shards" in text
    plan, _ = fold_of({"": wh.split()}, (3.0, 1.0, 2.0) + (1.0,) * 7)
    assert shapes(plan) == [(3,)]
    cuts = next(s for s in plan.taskgraphs[0].splits if s.path == "head").cuts_of(0)
    assert cuts == (0, 6, 8, 12)


def test_stages_survive_with_their_own_widths() -> None:
    entries = {"emb|mlp": (wh.stage(), wh.split(2)), "head": (wh.stage(), wh.split(2))}
    plan, _ = fold_of(entries, (1.0,) * 16, **{"pipeline.num_micro_batch": 2})
    assert shapes(plan) == [(2, 2), (2, 2)]
    entries = {"emb|mlp": (wh.stage(), wh.replicate(4)), "head": (wh.stage(), wh.replicate(8))}
    plan, _ = fold_of(entries, (1.0,) * 12, **{"pipeline.num_micro_batch": 2})
    assert shapes(plan) == [(1,) * 2, (1,) * 4]


def test_a_folded_plan_runs() -> None:
    case = CASES["tensor"]
    model = wh.annotate(case.build(), {"": (wh.replicate(12), wh.split(3))})
    speeds = (1.0, 2.0, 1.0) * 2 + (1.0, 1.0, 1.0) * 2
    verdict = wh.verify(
        model,
        batch=case.batch,
        loss=cross_entropy,
        cluster=cluster(12, speeds),
        steps=1,
        config={"cluster.balance": "speed"},
    )
    assert verdict.ok, str(verdict)
    assert verdict.num_ranks <= 8
    assert "12 ranks to" in str(verdict)


def test_what_cannot_be_folded_is_refused() -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(10)))
    wh.annotate(model, {str(i): wh.stage() for i in range(10)})
    with pytest.raises(PlanError, match="the plan for 10 ranks cannot be folded to 8 or fewer"):
        wh.verify(model, batch=vectors(4), loss=cross_entropy, cluster=cluster(10))


# ---- the command ---------------------------------------------------------------------------------

MODEL = """
import torch
import torch.distributed as dist
from torch import nn
import whale as wh

print("this must not reach standard output")

class Doubling(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 5)

    def forward(self, x):
        on_one_rank = dist.is_initialized() and dist.get_rank() == 1
        return self.inner(x) * (2 if on_one_rank else 1)

def batch():
    return torch.randn(5, 6), torch.randint(0, 5, (5,))

def good():
    return wh.split()(nn.Sequential(nn.Linear(6, 5))), batch(), nn.functional.cross_entropy

def bad():
    return wh.replicate()(Doubling()), batch(), nn.functional.cross_entropy

def without_batch():
    return nn.Linear(6, 5)

def failing():
    raise KeyError("the cause")
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return str(path)


def test_command_equal(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["verify", f"{file}:good", "--cluster", "1x2xCPU", "--steps", "1", "--batch", "7"]
    assert main([*command, "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is True
    assert data["num_ranks"] == 2
    assert data["dtype"] == "float64"
    few = [*command, "--checks", "steps,evaluate", "--dtype", "float32"]
    assert main([*few, "--json", str(tmp_path / "verdict.json")]) == 0
    assert capsys.readouterr().out.startswith("equal: 2 tensors on 2 ranks")
    data = json.loads((tmp_path / "verdict.json").read_text())
    assert data["mismatches"] == []
    assert data["dtype"] == "float32"
    made = [check["name"] for check in data["checks"] if check["status"] == "equal"]
    assert made == ["steps", "evaluate"]


def test_command_not_equal(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["verify", f"{file}:bad", "--cluster", "1x2xCPU", "--steps", "1", "--json", "-"]
    command += ["--checks", "steps"]
    assert main(command) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["mismatches"][0]["tensor"] in ("inner.weight", "inner.bias")
    lines = [line for line in err.splitlines() if "must not reach" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("whale verify: not equal: gradient inner.")


def test_command_preset_and_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "gpt-tiny", "--cluster", "2x8xV100-32GB", "--steps", "1"]) == 0
    out = capsys.readouterr().out
    assert "folded: 16 ranks to 2" in out
    assert "gpt-tiny reduced: vocab_size 256 to 61" in out
    plan = tmp_path / "plan.json"
    plan.write_text('{"schema": 0}')
    assert main(["verify", "gpt-tiny", "--cluster", "1x2xCPU", "--plan", str(plan)]) == 2
    assert "schema 0" in capsys.readouterr().err
    plan.write_text("no json")
    assert main(["verify", "gpt-tiny", "--cluster", "1x2xCPU", "--plan", str(plan)]) == 2
    assert "is not a plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("gpt-tny", "allowed: a preset name, or file.py:factory"),
        ("nowhere.py:build", "file 'nowhere.py' is not there"),
        (":without_batch", "returned no batch"),
        (":failing", "failed: KeyError: 'the cause'"),
        (":missing", "has no function 'missing'"),
        (":batch", "returned Tensor; allowed: an nn.Module"),
    ],
)
def test_command_bad_input(
    file: str, model: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = file + model if model.startswith(":") else model
    assert main(["verify", name, "--cluster", "1x2xCPU"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_batch_norm_after_a_split_linear_keeps_its_gradient() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 4)
    )
    wh.annotate(model, {"": (wh.replicate(4), wh.split(2))})
    batch = torch.randn(7, 6), torch.randint(4, (7,))
    verdict = wh.verify(
        model, cluster="1x4xCPU", batch=batch, loss=torch.nn.functional.cross_entropy, steps=1
    )
    assert verdict.ok, str(verdict)
