"""Training truths: what a user's training loop does on one device, it does under every layout.

Each test trains the small GPT in float64 on real ranks and in plain torch in this process, on the
whole batch at once, and compares losses and weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import whale as wh
from tests.parity import zoo
from tests.parity.layouts import LAYOUTS, LayerPaths
from tests.parity.reference import greatest_entry, relative_error
from tests.ranks import RankFailure, run_ranks
from whale.errors import WhaleError

pytestmark = pytest.mark.usefixtures("untried")

ROWS = 7
STEPS = 3
TOLERANCE = 1e-9
SMALL = ("data-uneven", "tensor-uneven", "1f1b")
IGNORED = zoo.IGNORED

every_layout = pytest.mark.parametrize(
    "layout_name",
    [
        *SMALL,
        *(pytest.param(n, marks=pytest.mark.full) for n in ("pipeline-tensor-uneven", "3d-uneven")),
    ],
)
small_layouts = pytest.mark.parametrize("layout_name", SMALL)

Params = list[tuple[str, nn.Parameter]]


# ---- what is trained -----------------------------------------------------------------------------


def by_name(params: Params) -> torch.optim.Optimizer:
    """Decays matrices only, by their names; a rank may have nothing of one group."""
    plain = [p for n, p in params if n.endswith("bias") or "norm" in n]
    decayed = [p for n, p in params if not (n.endswith("bias") or "norm" in n)]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "groups": by_name,
    # Its epsilon, far below a float's, would blow up the rounding in gradients that are truly zero.
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2, eps=(1e-8, 1e-3)),
}


def decay(step: int) -> float:
    return 1.0 / (1 + step)


def labelled(seed: int, mask: str) -> Any:
    """A batch of tokens and labels; `mask` says which labels are ignored beside the usual ones."""
    tokens, labels = zoo.case("gpt").batch(seed, ROWS)
    labels = labels.clone()
    if mask == "holes":
        # Under these layouts some replica, some micro-batch and some of both have no label at all.
        labels[2:6] = IGNORED
        labels[1, :-1] = IGNORED
    if mask == "first only":
        labels[1:] = IGNORED
    return tokens, labels


def scored(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """A loss with more to tell: what `outputs` merges."""
    hits = logits.argmax(-1) == labels
    return {
        "loss": zoo.flat_cross_entropy(logits, labels),
        "accuracy": hits.double().mean(),
        "hits": hits.sum(),
        "per_row": hits.sum(1),
    }


LOSSES: dict[str, Any] = {"plain": zoo.flat_cross_entropy, "scored": scored}
MERGES = {"accuracy": wh.mean, "hits": wh.sum, "per_row": wh.concat, "output": wh.concat}


# ---- both sides ----------------------------------------------------------------------------------


def train(
    layout_name: str,
    optimizer: str = "adamw",
    config: dict[str, Any] | None = None,
    *,
    mask: str = "",
    scheduled: bool = False,
    loss: str = "plain",
    dropout: float = 0.0,
) -> dict[str, Any]:
    """One rank's part: trains, and returns what came out."""
    wh.init()
    layout, case = LAYOUTS[layout_name], zoo.case("gpt", dropout=dropout)
    batches = [labelled(seed, mask) for seed in range(STEPS)]
    model = case.build()
    layout.annotate(model, LayerPaths(model, batches[0], LOSSES[loss]))
    step = wh.parallelize(
        model,
        optimizer=OPTIMIZERS[optimizer],
        batch=batches[0],
        loss=LOSSES[loss],
        config={**layout.config, **(config or {})},
        cluster=layout.cluster(),
        outputs=MERGES if loss == "scored" else None,
    )
    schedule = LambdaLR(step.optimizer, decay) if scheduled else None
    evaluated = step.evaluate(batches[0])
    metrics = []
    for batch in batches if not dropout else []:
        metrics.append(step(batch))
        if schedule is not None:
            schedule.step()
    result = {
        "losses": [float(m["loss"]) for m in metrics],
        "norms": [float(m["grad_norm"]) for m in metrics if "grad_norm" in m],
        "merged": [{name: m[name] for name in MERGES if name in m} for m in metrics],
        "evaluated": {name: torch.as_tensor(value) for name, value in evaluated.items()},
        "state": step.state_dict(),
    }
    step.close()
    return result


def plain(
    optimizer: str = "adamw",
    *,
    max_norm: float | None = None,
    mask: str = "",
    scheduled: bool = False,
    sums: bool = False,
) -> dict[str, Any]:
    """The truth: plain torch, one process, the whole batch at once."""
    model = zoo.case("gpt").build()
    optimize = OPTIMIZERS[optimizer](list(model.named_parameters()))
    schedule = LambdaLR(optimize, decay) if scheduled else None
    losses, norms, merged = [], [], []
    for tokens, labels in (labelled(seed, mask) for seed in range(STEPS)):
        optimize.zero_grad()
        logits = model(tokens)
        told = scored(logits, labels)
        loss = told.pop("loss")
        merged.append({**told, "output": logits.detach()})
        (loss * (labels != IGNORED).sum() if sums else loss).backward()
        if max_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimize.step()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "merged": merged, "state": model.state_dict()}


def assert_same(results: list[dict[str, Any]], truth: dict[str, Any]) -> None:
    """Losses, norms and weights of every rank are the truth's."""
    largest = greatest_entry(truth["state"].values())
    for rank, result in enumerate(results):
        assert result["losses"] == pytest.approx(truth["losses"], rel=TOLERANCE), rank
        assert result["norms"] == pytest.approx(truth["norms"], rel=TOLERANCE), rank
        assert result["state"].keys() == truth["state"].keys()
        for name, want in truth["state"].items():
            assert relative_error(result["state"][name], want, largest) < TOLERANCE, (rank, name)


def run(layout_name: str, *args: Any) -> list[dict[str, Any]]:
    return run_ranks(LAYOUTS[layout_name].num_ranks, train, layout_name, *args, timeout=110.0)


# ---- the update ----------------------------------------------------------------------------------


@every_layout
def test_the_global_norm_is_clipped_over_all_shards(layout_name: str) -> None:
    truth = plain(max_norm=0.05)
    assert min(truth["norms"]) > 0.05
    assert_same(run(layout_name, "adamw", {"optimizer.max_grad_norm": 0.05}), truth)


def test_a_norm_below_the_limit_is_reported_and_changes_nothing() -> None:
    truth = plain(max_norm=100.0)
    assert_same(run("tensor-uneven", "adamw", {"optimizer.max_grad_norm": 100.0}), truth)
    assert truth["state"]["norm.weight"].equal(plain()["state"]["norm.weight"])


def train_groups_with_schedule(layout_name: str) -> dict[str, Any]:
    return train(layout_name, "groups", scheduled=True)


@every_layout
def test_weight_decay_groups_and_a_learning_rate_schedule(layout_name: str) -> None:
    num_ranks = LAYOUTS[layout_name].num_ranks
    results = run_ranks(num_ranks, train_groups_with_schedule, layout_name, timeout=110.0)
    assert_same(results, plain("groups", scheduled=True))


@small_layouts
def test_gradients_may_be_summed(layout_name: str) -> None:
    config = {"communication.gradients_reduce_method": "sum"}
    assert_same(run(layout_name, "sgd", config), plain("sgd", sums=True))


@pytest.mark.parametrize("layout_name", ["accumulate", "accumulate-uneven", "tensor-accumulate"])
def test_accumulation_is_one_big_batch(layout_name: str) -> None:
    assert_same(run(layout_name), plain())


@pytest.mark.parametrize("layout_name", ["data-uneven", "1f1b"])
def test_an_optimizer_of_whole_tensors_where_tensors_are_whole(layout_name: str) -> None:
    assert_same(run(layout_name, "adafactor"), plain("adafactor"))


def refuse_adafactor() -> str:
    with pytest.raises(WhaleError, match="Adafactor is not known to update every element") as error:
        train("tensor-uneven", "adafactor")
    return str(error.value.hint)


def test_an_optimizer_of_whole_tensors_is_refused_where_they_are_split() -> None:
    for hint in run_ranks(2, refuse_adafactor):
        assert "use an elementwise optimizer" in hint
        assert "optimizer.elementwise" not in hint  # a promise that would be false


# ---- the loss ------------------------------------------------------------------------------------


def train_with_labels(layout_name: str, mask: str) -> dict[str, Any]:
    return train(layout_name, mask=mask)


@pytest.mark.every(3)
@pytest.mark.parametrize("mask", ["holes", "first only"])
@every_layout
def test_parts_without_any_label(layout_name: str, mask: str) -> None:
    num_ranks = LAYOUTS[layout_name].num_ranks
    results = run_ranks(num_ranks, train_with_labels, layout_name, mask, timeout=110.0)
    assert_same(results, plain(mask=mask))


def train_scored(layout_name: str) -> dict[str, Any]:
    return train(layout_name, loss="scored")


@every_layout
def test_outputs_are_merged_in_the_order_of_the_batch(layout_name: str) -> None:
    truth = plain()
    num_ranks = LAYOUTS[layout_name].num_ranks
    results = run_ranks(num_ranks, train_scored, layout_name, timeout=110.0)
    assert_same(results, truth)
    for result in results:
        for got, want in zip(result["merged"], truth["merged"], strict=True):
            assert got.keys() == want.keys()
            for name, value in want.items():
                assert got[name].shape == value.shape, name
                assert torch.allclose(got[name].double(), value.double(), rtol=0, atol=1e-9), name
        assert result["evaluated"]["hits"] == truth["merged"][0]["hits"]


def evaluate_with_dropout(layout_name: str) -> dict[str, Any]:
    return train(layout_name, dropout=0.3)


@every_layout
def test_evaluation_is_that_of_one_device(layout_name: str) -> None:
    model = zoo.case("gpt", dropout=0.3).build().eval()
    tokens, labels = labelled(0, "")
    want = zoo.flat_cross_entropy(model(tokens), labels).item()
    num_ranks = LAYOUTS[layout_name].num_ranks
    for result in run_ranks(num_ranks, evaluate_with_dropout, layout_name, timeout=110.0):
        assert float(result["evaluated"]["loss"]) == pytest.approx(want, rel=TOLERANCE)


class Masked(nn.Module):
    """Means written by hand."""

    def __init__(self, reduce: str) -> None:
        super().__init__()
        self.reduce = reduce
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out = self.linear(x)
        each = out.square().sum(1)
        if self.reduce == "masked":
            return (each * mask).sum() / mask.sum()
        # Means over rows and over elements.
        return each.mean() + 0.1 * out.mean()


def masked_batch(mask: list[float]) -> tuple[Tensor, Tensor]:
    x = torch.randn(len(mask), 4, generator=torch.Generator().manual_seed(0))
    return x.double(), torch.tensor(mask, dtype=torch.float64)


@pytest.mark.parametrize("reduce", ["masked", "twice"])
@pytest.mark.parametrize("mask", [[1, 0, 1, 0], [1, 1, 1, 1, 0, 1, 0], [0, 0, 0, 1, 1, 1]])
def test_a_mean_by_hand_is_that_of_the_global_batch(reduce: str, mask: list[float]) -> None:
    torch.manual_seed(0)
    model, batch = Masked(reduce).double(), masked_batch(mask)
    want = model(*batch)
    want.backward()
    gradient = model.linear.weight.grad
    model.zero_grad()
    sgd = partial(torch.optim.SGD, lr=0.1)
    step = wh.parallelize(model, optimizer=sgd, batch=batch, config=LAYOUTS["accumulate"].config)
    got = float(step(batch)["loss"])
    torch.testing.assert_close(step.gradients()["linear.weight"], gradient)
    step.close()
    assert got == pytest.approx(want.item(), rel=TOLERANCE)


# ---- the weights ---------------------------------------------------------------------------------


def build_on_meta(layout_name: str) -> dict[str, Any]:
    wh.init()
    layout, batch = LAYOUTS[layout_name], labelled(0, "")
    with torch.device("meta"):
        model = zoo.case("gpt").build()
    layout.annotate(model, LayerPaths(model, batch, zoo.flat_cross_entropy))
    step = wh.parallelize(
        model,
        optimizer=OPTIMIZERS["adamw"],
        batch=batch,
        loss=zoo.flat_cross_entropy,
        config=layout.config,
        cluster=layout.cluster(),
    )
    owned = 0
    for home in step.plan.homes:
        piece = step.plan.piece(home, step.rank)
        owned += torch.Size(piece.shape(home.shape)).numel() if piece is not None else 0
    held = [p for p in step._lowered.model.parameters() if not p.is_meta]
    state = step.state_dict()
    result = {
        "state": state,
        "owned": owned,
        "held": sum(p.untyped_storage().nbytes() for p in held) // 8,
        "meta": all(p.is_meta for p in model.parameters()),
        "loss": float(step(batch)["loss"]),
    }
    step.close()
    return result


def test_a_model_on_meta_starts_alike_under_every_layout() -> None:
    results = {
        name: run_ranks(LAYOUTS[name].num_ranks, build_on_meta, name, timeout=110.0)
        for name in ("one", *SMALL, "pipeline-tensor-uneven")
    }
    (one,) = results["one"]
    whole = one["owned"]
    for name, ranks in results.items():
        for rank, result in enumerate(ranks):
            assert result["meta"]
            assert result["held"] == result["owned"], (name, rank)
            assert result["loss"] == pytest.approx(one["loss"], rel=TOLERANCE)
            for key, want in one["state"].items():
                assert torch.equal(result["state"][key], want), (name, rank, key)
        if name not in ("one", "data-uneven"):
            assert max(result["owned"] for result in ranks) < whole, name


def fingerprint(model: nn.Module) -> list[Any]:
    """Everything of a module that lowering might have left behind."""
    modules = [
        (name, module.training, sorted(vars(module)), len(module._forward_hooks))
        for name, module in model.named_modules()
    ]
    grads = [p.grad is None for p in model.parameters()]
    return [modules, grads, [id(p) for p in model.parameters()]]


def close_and_go_on(layout_names: list[str]) -> list[Any]:
    wh.init()
    batches = [labelled(seed, "") for seed in range(STEPS)]
    original = zoo.case("gpt").build()
    found = []
    for layout_name in layout_names:
        layout, model = LAYOUTS[layout_name], copy.deepcopy(original)
        layout.annotate(model, LayerPaths(model, batches[0], zoo.flat_cross_entropy))
        before = fingerprint(model)
        # The same model twice: its own second run, and the next layout's, start from the beginning.
        for schedule in (1, 2):
            step = wh.parallelize(
                model,
                optimizer=OPTIMIZERS["adamw"],
                batch=batches[0],
                loss=zoo.flat_cross_entropy,
                config={**layout.config, "pipeline.num_micro_batch": schedule + 1},
                cluster=layout.cluster(),
            )
            losses = [float(step(batch)["loss"]) for batch in batches]
            state = step.state_dict()
            step.close()
            found.append({"losses": losses, "norms": [], "state": state})
        assert fingerprint(model) == before
        for (name, p), q in zip(model.named_parameters(), original.parameters(), strict=True):
            assert torch.equal(p, q), name
    return found


@pytest.mark.full
def test_a_closed_step_leaves_room_for_another_layout() -> None:
    layouts = ["data-pipeline-uneven", "pipeline-tensor-uneven", "data-tensor-uneven"]
    truth = plain()
    for found in run_ranks(4, close_and_go_on, layouts, timeout=110.0):
        assert_same(found, truth)


# ---- a model nobody wrote a rule for -------------------------------------------------------------


class Bend(torch.autograd.Function):
    """A bounded curve whose backward is not its derivative: autograd's own would be seen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x / (1 + x.abs())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * (0.5 + 0.1 * x.abs())


class OddBlock(nn.Module):
    """A third-order form: no Linear anywhere, a parameter used twice, one of no dims."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.core = nn.Parameter(torch.randn(dim, dim, dim) / dim)
        self.gate = nn.Parameter(torch.tensor(0.3))

    def forward(self, x_bd: Tensor, side_bd: Tensor) -> tuple[Tensor, Tensor]:
        pair = torch.einsum("bi,ijk,bj->bk", x_bd, self.core, side_bd)
        mixed = torch.einsum("bk,kii->bi", pair, self.core) * self.gate
        return Bend.apply(x_bd + mixed), side_bd + torch.sin(pair)


class Odd(nn.Module):
    """Blocks that pass two tensors on; glue with einsum between them, and a Function if told."""

    def __init__(self, *, bent_glue: bool) -> None:
        super().__init__()
        self.bent_glue = bent_glue
        self.blocks = nn.ModuleList(OddBlock(5) for _ in range(4))

    def forward(self, x_bd: Tensor) -> Tensor:
        side_bd = torch.einsum("bd->bd", x_bd.cos())
        for block in self.blocks:
            x_bd, side_bd = block(x_bd, side_bd)
            if self.bent_glue:
                x_bd = Bend.apply(x_bd)
        return torch.einsum("bi,bj->bij", x_bd, side_bd)


def odd(bent_glue: bool) -> tuple[nn.Module, list[Any]]:
    torch.manual_seed(0)
    model = Odd(bent_glue=bent_glue).double()
    return model, [
        (torch.rand(ROWS, 5, dtype=torch.float64), torch.rand(ROWS, 5, 5, dtype=torch.float64))
        for _ in range(STEPS)
    ]


def train_odd(layout_name: str, bent_glue: bool) -> dict[str, Any]:
    wh.init()
    layout = LAYOUTS[layout_name]
    model, batches = odd(bent_glue)
    layout.annotate(model, LayerPaths(model, batches[0], F.mse_loss))
    step = wh.parallelize(
        model,
        optimizer=OPTIMIZERS["adamw"],
        batch=batches[0],
        loss=F.mse_loss,
        config=layout.config,
        cluster=layout.cluster(),
    )
    losses = [float(step(batch)["loss"]) for batch in batches]
    result = {"losses": losses, "norms": [], "state": step.state_dict()}
    step.close()
    return result


def compare_odd(layout_name: str, bent_glue: bool) -> None:
    model, batches = odd(bent_glue)
    optimize = OPTIMIZERS["adamw"](model.parameters())
    losses = []
    for x, y in batches:
        optimize.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimize.step()
        losses.append(loss.item())
    truth = {"losses": losses, "norms": [], "state": model.state_dict()}
    assert_same(run_ranks(LAYOUTS[layout_name].num_ranks, train_odd, layout_name, bent_glue), truth)


@pytest.mark.parametrize("layout_name", ["data-uneven", "1f1b", "data-pipeline-uneven"])
def test_a_model_without_any_rule(layout_name: str) -> None:
    compare_odd(layout_name, False)


def test_a_function_of_the_users_between_layers() -> None:
    compare_odd("data-uneven", True)


def test_a_function_of_the_users_between_layers_of_a_pipeline_is_exact_or_refused() -> None:
    try:
        compare_odd("1f1b", True)
    except RankFailure as failure:
        assert "CaptureError" in str(failure)
