"""Checkpoints: saved under one layout, loaded under another, training as if never stopped."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import whale as wh
from tests.parity import zoo
from tests.parity.layouts import LAYOUTS, LayerPaths, Layout, whole
from tests.parity.reference import greatest_entry, relative_error, train_reference
from tests.ranks import run_ranks
from whale.engine.checkpoint import blocks as checkpoint_blocks
from whale.engine.checkpoint import checkpoint, read_state_dict
from whale.engine.checkpoint import load as checkpoint_load
from whale.engine.checkpoint import save as checkpoint_save
from whale.errors import CheckpointError
from whale.ir.sharding import WHOLE, Piece
from whale.ir.virtual_device import micro_batch_cuts

pytestmark = pytest.mark.usefixtures("untried")

ROWS = 7
TOLERANCE = 1e-9
SINGLE = Layout("single", 1, whole(wh.replicate))
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
CHANGED_LR = 3e-3


def two_groups(params: Any) -> torch.optim.Optimizer:
    """AdamW that decays matrices only; a rank may have nothing of one group."""
    given = list(params)
    plain = [item[1] if isinstance(item, tuple) else item for item in given]
    matrices = [p for p in plain if p.dim() > 1]
    others = [p for p in plain if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.3, "betas": (0.8, 0.95)},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


OPTIMIZERS = {
    "adamw": ADAMW,
    "groups": two_groups,
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    # State that is not cut: mu_product; state of other names: ax, eta, mu.
    "nadam": partial(torch.optim.NAdam, lr=1e-2),
    "asgd": partial(torch.optim.ASGD, lr=1e-2),
}


def change_lr(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = CHANGED_LR


def layout_of(name: str) -> Layout:
    return SINGLE if name == "single" else LAYOUTS[name]


def make_step(
    case_name: str,
    layout_name: str,
    optimizer: str,
    *,
    fresh: bool = True,
    dropout: float = 0.0,
    model: nn.Module | None = None,
) -> wh.Step:
    """A Step under a layout; one that is not `fresh` has weights that only a load makes right."""
    torch.set_num_threads(1)
    case, layout = zoo.case(case_name, dropout=dropout), layout_of(layout_name)
    wh.init()
    batch = case.batch(0, ROWS)
    model = case.build() if model is None else model
    if not fresh:
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.zero_()
    layout.annotate(model, LayerPaths(model, batch, case.loss))
    return wh.parallelize(
        model,
        optimizer=OPTIMIZERS[optimizer],
        batch=batch,
        loss=case.loss,
        config=layout.config,
        cluster=layout.cluster(),
    )


def train_and_save(case_name: str, layout_name: str, optimizer: str, path: str) -> dict[str, Any]:
    step = make_step(case_name, layout_name, optimizer)
    case = zoo.case(case_name)
    for seed in range(2):
        step(case.batch(seed, ROWS))
    change_lr(step.optimizer)
    step.save(path, extra={"epoch": 3, "names": ["a", "b"]})
    there = sorted(os.listdir(path))  # durable: complete on every rank as soon as it returns
    state = step.state_dict()
    step.close()
    return {"files": there, "state": state}


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a pickle was read")


def load_and_train(case_name: str, layout_name: str, optimizer: str, path: str) -> dict[str, Any]:
    step = make_step(case_name, layout_name, optimizer, fresh=False)
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
            patch.setattr(module, name, refuse)
        extra = step.load(path)
    loaded = step.state_dict()
    loss = float(step(zoo.case(case_name).batch(2, ROWS))["loss"])
    result = {
        "extra": extra,
        "num_steps": step.num_steps,
        "loaded": loaded,
        "loss": loss,
        "state": step.state_dict(),
        "lr": [group["lr"] for group in step.optimizer.param_groups],
    }
    step.close()
    return result


def run(layout_name: str, fn: Any, *args: Any) -> list[Any]:
    """On the layout's ranks; a single one runs right here, without any process group."""
    if layout_name == "single":
        return [fn(*args)]
    return run_ranks(layout_of(layout_name).num_ranks, fn, *args, timeout=100.0)


def sizes_of(layout_name: str) -> list[int]:
    micro = layout_of(layout_name).config.get("pipeline.num_micro_batch", 1)
    points = micro_batch_cuts(ROWS, micro)
    return [b - a for a, b in zip(points, points[1:], strict=False)]


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert list(got) == list(want)
    largest = greatest_entry(want.values())
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        if tensor.is_floating_point():
            assert relative_error(got[name], tensor, largest) < TOLERANCE, name
        else:
            assert torch.equal(got[name], tensor), name


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert list(got) == list(want)
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("case_name", "first", "second", "optimizer"),
    [
        ("gpt", "data", "tensor-uneven", "adamw"),
        pytest.param("gpt", "3d-uneven", "data", "groups", marks=pytest.mark.full),
        pytest.param("gpt", "data-tensor-uneven", "data", "groups", marks=pytest.mark.full),
        pytest.param("encdec", "1f1b", "pipeline-tensor-uneven", "adamw", marks=pytest.mark.full),
        ("gpt", "tensor-uneven", "single", "nadam"),
        pytest.param("gpt", "single", "widths-tensor", "groups", marks=pytest.mark.full),
        ("resnet", "data-uneven", "1f1b", "adamw"),
        pytest.param(
            "encdec",
            "pipeline-tensor-uneven",
            "tensor-accumulate-uneven",
            "momentum",
            marks=pytest.mark.full,
        ),
        ("lstm", "tensor-uneven", "data-uneven", "asgd"),
        ("narrow", "tensor-uneven", "colocated-uneven", "adamw"),
    ],
)
def test_training_goes_on_under_another_layout(case_name, first, second, optimizer, tmp_path):
    case = zoo.case(case_name)
    path = str(tmp_path / "checkpoint")

    def reference_optimizer(params: Any) -> torch.optim.Optimizer:
        made = OPTIMIZERS[optimizer](params)
        steps = iter(range(10))

        def after(changed: torch.optim.Optimizer, *_: Any) -> None:
            if next(steps) == 1:
                change_lr(changed)

        made.register_step_post_hook(after)
        return made

    truth = train_reference(
        case,
        [case.batch(seed, ROWS) for seed in range(3)],
        [sizes_of(first), sizes_of(first), sizes_of(second)],
        reference_optimizer,
    )
    saved = run(first, train_and_save, case_name, first, optimizer, path)
    resumed = run(second, load_and_train, case_name, second, optimizer, path)

    assert all(rank["files"] == saved[0]["files"] for rank in saved)
    assert {name.rpartition(".")[2] for name in saved[0]["files"]} == {"json", "safetensors"}
    assert os.listdir(tmp_path) == ["checkpoint"]
    assert_same(read_state_dict(path), saved[0]["state"])
    for rank in resumed:
        assert rank["extra"] == {"epoch": 3, "names": ["a", "b"]}
        assert rank["num_steps"] == 3
        assert set(rank["lr"]) == {CHANGED_LR}
        assert_same(rank["loaded"], saved[0]["state"])
        assert abs(rank["loss"] - truth.losses[2]) / truth.losses[2] < TOLERANCE
        assert_close(rank["state"], truth.state_dict)


def test_every_element_is_written_once_and_the_work_is_shared(tmp_path):
    path = tmp_path / "checkpoint"
    run("data", train_and_save, "gpt", "data", "adamw", str(path))
    index = json.loads((path / "index.json").read_text())
    sizes = []
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            sizes.append(sum(handle.get_tensor(key).numel() for key in handle.offset_keys()))
    tensors = index["tensors"].values()
    assert sum(sizes) == sum(torch.Size(t["shape"]).numel() for t in tensors)
    assert len(sizes) == 2
    assert max(sizes) < 1.2 * min(sizes)


def test_dropout_goes_on_where_it_was(tmp_path):
    case = zoo.case("gpt", dropout=0.3)
    batches = [case.batch(seed, ROWS) for seed in range(3)]
    straight = make_step("gpt", "single", "adamw", dropout=0.3)
    for index, batch in enumerate(batches):
        if index == 2:
            straight.save(tmp_path / "c")
        last = straight(batch)["loss"]
    resumed = make_step("gpt", "single", "adamw", dropout=0.3, fresh=False)
    assert resumed.load(tmp_path / "c") == {}
    assert torch.equal(resumed(batches[2])["loss"], last)


def test_plain_torch_reads_it_with_ties(tmp_path):
    step = make_step("encdec", "single", "adamw")
    step.save(tmp_path / "c")
    model = zoo.case("encdec").build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(read_state_dict(tmp_path / "c"))
    assert_same(dict(model.state_dict()), step.state_dict())


# ---- what is wrong is named, and nothing changes -------------------------------------------------


def edit_index(path: Path, change: Any) -> None:
    index = json.loads((path / "index.json").read_text())
    change(index)
    (path / "index.json").write_text(json.dumps(index))


def truncate(path: Path) -> None:
    file = path / "rank-00001.safetensors"
    os.truncate(file, file.stat().st_size - 8)


def drop_file(path: Path) -> None:
    (path / "rank-00001.safetensors").unlink()


def drop_block(path: Path) -> None:
    """From the file of rank 1, whole otherwise."""
    file = path / "rank-00001.safetensors"
    with safe_open(file, "pt") as handle:
        tensors = {key: handle.get_tensor(key).clone() for key in handle.offset_keys()}
    del tensors[next(key for key in tensors if "/exp_avg[" in key)]
    save_file(tensors, file)


def drop_tensor(path: Path) -> None:
    edit_index(path, lambda index: index["tensors"].pop("head.weight", None))
    edit_index(path, lambda index: index["tensors"].pop(next(iter(index["tensors"]))))


def drop_part(path: Path) -> None:
    def change(index: dict[str, Any]) -> None:
        next(t for t in index["tensors"].values() if len(t["blocks"]) > 1)["blocks"].pop()

    edit_index(path, change)


def other_class(path: Path) -> None:
    edit_index(path, lambda i: i["optimizer"].update({"class": "torch.optim.sgd.SGD"}))


def other_shape(path: Path) -> None:
    edit_index(path, lambda i: next(iter(i["tensors"].values()))["shape"].append(2))


def other_dtype(path: Path) -> None:
    edit_index(path, lambda i: next(iter(i["tensors"].values())).update({"dtype": "float16"}))


def other_ties(path: Path) -> None:
    def change(index: dict[str, Any]) -> None:
        names = index["state_dict"]
        names[next(iter(names))] = list(names.values())[-2]

    edit_index(path, change)


def more_tensors(path: Path) -> None:
    edit_index(path, lambda index: index["state_dict"].update({"more.weight": "more.weight"}))


def other_groups(path: Path) -> None:
    def change(index: dict[str, Any]) -> None:
        group = index["optimizer"]["groups"][0]
        moved = group["params"].pop()
        options = {**group["options"], "lr": 7.0}
        index["optimizer"]["groups"].append({"index": 1, "params": [moved], "options": options})

    edit_index(path, change)


def no_index(path: Path) -> None:
    (path / "index.json").unlink()


def cut_index(path: Path) -> None:
    os.truncate(path / "index.json", 100)


def newer(path: Path) -> None:
    edit_index(path, lambda index: index.update({"schema": 99}))


FAULTS = {
    truncate: "rank-00001.safetensors is missing, cut short or damaged",
    drop_file: "rank-00001.safetensors is missing, cut short or damaged",
    drop_block: "has no block optimizer/",
    drop_tensor: "has no tensor ",
    drop_part: "elements needed of ",
    other_class: "has the state of torch.optim.sgd.SGD, this step's optimizer is torch.optim.adamw",
    other_shape: " in the checkpoint, (",
    other_dtype: "has dtype float16 in the checkpoint, float64 in this model",
    other_ties: " is tied to ",
    more_tensors: "more.weight is not in this model",
    other_groups: "are in one parameter group here, but had different options",
    no_index: "is not a checkpoint: it has no index.json",
    cut_index: "index.json is damaged",
    newer: "schema 99",
}


def broken_on_one_rank(*_: Any) -> Any:
    """Stands in for `safe_open` on rank 1 alone."""
    raise OSError("no such disk")


def load_broken(path: str) -> dict[str, str]:
    """Tries each fault on one running step; what every message was."""
    step = make_step("gpt", "tensor-uneven", "adamw")
    case = zoo.case("gpt")
    step(case.batch(0, ROWS))
    before = step.state_dict()
    options = json.dumps([dict(g, params=0) for g in step.optimizer.param_groups], default=str)
    moments = [dict(held) for held in step.optimizer.state.values()]
    messages = {}
    opener = checkpoint_load.safe_open
    for fault in [f.__name__ for f in FAULTS] + ["broken_on_one_rank"]:
        if fault == "broken_on_one_rank" and step.rank == 1:
            checkpoint_load.safe_open = broken_on_one_rank
        try:
            step.load(Path(path, fault))
        except CheckpointError as error:
            messages[fault] = str(error)
        assert fault in messages, f"{fault} was not noticed"
        assert step.num_steps == 1
        assert_same(step.state_dict(), before)
        assert options == json.dumps(
            [dict(g, params=0) for g in step.optimizer.param_groups], default=str
        )
        for then, now in zip(moments, step.optimizer.state.values(), strict=True):
            assert all(now[key] is then[key] for key in then), fault
    checkpoint_load.safe_open = opener
    step(case.batch(1, ROWS))
    step.load(Path(path, "good"))
    assert step.num_steps == 2
    step.close()
    return messages


def test_faults_are_named_on_every_rank_and_change_nothing(tmp_path):
    run("tensor-uneven", train_and_save, "gpt", "tensor-uneven", "adamw", str(tmp_path / "good"))
    for fault in [*FAULTS, broken_on_one_rank]:
        shutil.copytree(tmp_path / "good", tmp_path / fault.__name__)
        if fault in FAULTS:
            fault(tmp_path / fault.__name__)
    first, second = run_ranks(2, load_broken, str(tmp_path), timeout=100.0)
    assert first == second
    for fault, text in FAULTS.items():
        assert text in first[fault.__name__], first[fault.__name__]
        assert "hint: " in first[fault.__name__]
    assert first["broken_on_one_rank"].startswith("rank 1: ")


def test_another_model_is_refused(tmp_path):
    make_step("gpt", "single", "adamw").save(tmp_path / "c")
    step = make_step("resnet", "single", "adamw")
    with pytest.raises(
        CheckpointError, match=r"is of model \w+, this one is \w+: .* missing there"
    ):
        step.load(tmp_path / "c")
    smaller = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    other = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)).double()
    made = [
        wh.parallelize(m, optimizer=ADAMW, batch=(x, y), loss=nn.functional.cross_entropy)
        for m in (smaller, other)
        for x, y in [(torch.zeros(2, 4).double(), torch.zeros(2, dtype=torch.long))]
    ]
    made[0].save(tmp_path / "d")
    with pytest.raises(
        CheckpointError, match=r"0.weight has shape \(3, 4\) in .*, \(5, 4\) in this"
    ):
        made[1].load(tmp_path / "d")


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path):
    step = make_step("gpt", "single", "adamw")
    with pytest.raises(CheckpointError, match="`extra` is not JSON"):
        step.save(tmp_path / "c", extra={"generator": torch.zeros(2)})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="thesis.tex there was not written by a save"):
        step.save(tmp_path / "mine")
    step.optimizer.param_groups[0]["callback"] = print
    with pytest.raises(
        CheckpointError, match="callback of a parameter group is a builtin_function"
    ):
        step.save(tmp_path / "c")
    assert sorted(os.listdir(tmp_path)) == ["mine"]


# ---- a save that dies ----------------------------------------------------------------------------


def die_while_saving(path: str) -> None:
    """The first save is good; in the second, rank 1 is killed as it writes its file."""
    step = make_step("gpt", "tensor-uneven", "adamw")
    step.save(path, extra={"save": 1})
    step(zoo.case("gpt").batch(0, ROWS))
    if os.environ["RANK"] == "1":
        checkpoint_save.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    step.save(path, extra={"save": 2})


def test_a_killed_rank_leaves_the_old_checkpoint(tmp_path):
    path = tmp_path / "c"
    failure = run_ranks(2, die_while_saving, str(path), expect_failure=True, timeout=100.0)
    assert failure.exit_codes == {1: -signal.SIGKILL}
    assert (tmp_path / ".c.saving").exists()
    assert_same(read_state_dict(path), dict(zoo.case("gpt").build().state_dict()))
    step = make_step("gpt", "single", "adamw", fresh=False)
    assert step.load(path) == {"save": 1}
    step.save(path, extra={"save": 3})
    assert os.listdir(tmp_path) == ["c"]
    assert sorted(os.listdir(path)) == ["index.json", "rank-00000.safetensors"]


class Killed(BaseException):
    """What no `except Exception` catches."""


@pytest.mark.parametrize("at", ["first rename", "second rename"])
def test_a_save_killed_between_renames_leaves_the_old_checkpoint(at, tmp_path, monkeypatch):
    path = tmp_path / "c"
    step = make_step("gpt", "single", "adamw")
    step.save(path, extra={"save": 1})
    want = step.state_dict()
    step(zoo.case("gpt").batch(0, ROWS))
    calls = iter(["first rename", "second rename"])
    rename = os.rename

    def die(source: Path, target: Path) -> None:
        if next(calls) == at:
            raise Killed
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "rename", die)
        with pytest.raises(Killed):
            step.save(path, extra={"save": 2})
    assert_same(read_state_dict(path), want)
    assert step.load(path) == {"save": 1}
    with pytest.raises(CheckpointError, match="not JSON"):
        step.save(path, extra={"save": {1, 2}})
    assert_same(read_state_dict(path), want)
    step.save(path, extra={"save": 3})
    assert step.load(path) == {"save": 3}
    assert os.listdir(tmp_path) == ["c"]


# ---- cells ---------------------------------------------------------------------------------------


def test_cells_cover_every_element_once_whatever_the_cuts():
    pieces = {
        0: Piece(dims=((0, ((0, 2), (6, 8))),)),
        1: Piece(dims=((0, ((2, 6), (8, 12))),)),
        2: Piece(dims=((0, ((0, 5),)),)),
        3: Piece(dims=((0, ((5, 12),)),)),
        4: Piece(dims=((1, ((0, 3),)),)),
        5: WHOLE,
    }
    seen = torch.zeros(12, 5)
    for spans, holders in checkpoint_blocks.cells_of((12, 5), pieces):
        seen[checkpoint_blocks.slices(spans)] += 1
        assert 5 in holders
        assert (4 in holders) == (spans[1][1] <= 3)
    assert torch.equal(seen, torch.ones(12, 5))
    assert checkpoint_blocks.cells_of((), {0: WHOLE, 1: WHOLE}) == [((), (0, 1))]
    assert checkpoint_blocks.cells_of((0, 3), {0: WHOLE}) == [(((0, 0), (0, 3)), (0,))]
    assert len(checkpoint_blocks.cells_of((12, 5), {0: WHOLE, 1: WHOLE})) == 1
