"""The trial of parts against the whole: what it holds, what it tries, what it leaves alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import whale as wh
from whale.engine.trials import parts, trial_rows
from whale.engine.trials.parts import check_parts
from whale.errors import WhaleError
from whale.runtime.weighing import Trial

ROWS, LENGTH, DIM = 6, 4, 8


def tokens(out: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    labels, _ = target
    return F.cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def masked(out: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    return (tokens(out, target) * target[1]).sum() / target[1].sum()


def by_rows(out: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """The same, but hidden from who looks for sums and counts."""
    total, count = (tokens(out, target) * target[1]).sum(), target[1].sum()
    return torch.exp(total.log() - count.log())


def batch() -> tuple[Tensor, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, LENGTH, DIM, generator=generator)
    labels = torch.randint(5, (ROWS, LENGTH), generator=generator)
    return x, (labels, torch.ones(ROWS, LENGTH))


def tried(model: nn.Module, loss: Any, data: Any = None, *, ranks: int = 2) -> Trial:
    data = batch() if data is None else data
    wh.annotate(model, {"": wh.replicate()})
    plan = wh.plan(model, cluster=f"1x{ranks}xCPU", batch=data, loss=loss)
    return check_parts(model, data, loss, plan)


class Net(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(DIM, DIM), middle, nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> Any:
        h = self.middle(self.first(x))
        return self.last(h[0]) + h[1] if isinstance(h, tuple) else self.last(h)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, 1)).view_as(x)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        jitter = torch.empty_like(x).uniform_(0.9, 1.1)
        return F.dropout(x + torch.randn_like(x), 0.3, training=True) * jitter


class Counts(nn.Module):
    """Writes a buffer that its output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x * (1 + self.seen)


def moe(**more: Any) -> nn.Module:
    return wh.nn.MoE(DIM, 6, 4, top_k=2, **more)


HELD: dict[str, Callable[[], nn.Module]] = {
    "capacity": lambda: moe(capacity_factor=0.5),
    "auxiliary loss": lambda: moe(balance="loss", z_loss=0.1),
    "expert choice": lambda: moe(router="expert-choice", balance="none"),
    "batch norm": Norm,
    "noise": Noise,
    "a buffer": Counts,
    "dropout": lambda: nn.Dropout(0.5),
    "attention": lambda: nn.TransformerEncoderLayer(DIM, 2, 8, batch_first=True),
}


@pytest.mark.parametrize("kind", HELD)
@pytest.mark.filterwarnings("ignore:.*random numbers will depend on the layout")
def test_what_rows_do_by_design_is_held(kind: str) -> None:
    torch.manual_seed(0)
    model = Net(HELD[kind]())
    assert tried(model, masked).weighing is not None
    with pytest.raises(WhaleError, match="computed at once and"):
        tried(model, by_rows)


def test_a_first_batch_without_padding_a_head_of_zeros_and_bf16_hide_nothing() -> None:
    model = Net(nn.Identity())
    nn.init.zeros_(model.last.weight)
    nn.init.zeros_(model.last.bias)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        data = batch()
        x = data[0].to(dtype)
        with pytest.raises(WhaleError, match="holes in masks"):
            tried(model.to(dtype), by_rows, (x, data[1]))
        assert tried(model, masked, (x, data[1])).weighing is not None


def test_a_large_model_is_tried_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MOST_COPIED", 10)
    monkeypatch.setattr(trial_rows, "noisy_copy", lambda *_: pytest.fail("copied"))
    model = Net(moe(capacity_factor=0.5, balance="loss"))
    before = copy.deepcopy(model.state_dict())
    assert tried(model, masked).weighing is not None
    with pytest.raises(WhaleError, match="in two parts"):
        tried(model, by_rows)
    assert model.middle.capacity_factor == 0.5 and "_loss" not in vars(model.middle)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_nothing_of_the_users_is_moved() -> None:
    model = Net(nn.Sequential(Norm(), nn.Dropout(0.3), Counts(), moe()))
    model.middle[1].eval()
    state = copy.deepcopy(model.state_dict())
    flags = [m.training for m in model.modules()]
    attributes = [sorted(k for k in vars(m) if "whale" not in k) for m in model.modules()]
    drawn = torch.get_rng_state()
    tried(model, masked)
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert flags == [m.training for m in model.modules()]
    after = [sorted(k for k in vars(m) if "whale" not in k) for m in model.modules()]
    assert attributes == after
    assert torch.equal(drawn, torch.get_rng_state()) and torch.get_default_dtype() == torch.float32


def test_one_replica_with_all_rows_is_not_tried() -> None:
    def contrastive(out: Tensor, target: Any) -> Tensor:
        h = out.mean(1)
        return F.cross_entropy(h @ h.t(), torch.arange(len(h)))

    model = Net(nn.Identity())
    assert tried(model, contrastive, ranks=1).weighing is None
    with pytest.raises(WhaleError, match="computed at once and"):
        tried(model, contrastive)


def test_the_loss_of_experts_is_the_same_for_all_parts() -> None:
    """It is made of sums over rows, which must not be taken for the loss's own."""

    class Own(Net):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            h, extra = self.middle(self.first(x))
            return F.cross_entropy(self.last(h).flatten(0, 1), labels.flatten()) + extra

    x, (labels, _) = batch()
    wh.init(device="cpu")
    torch.manual_seed(0)
    model = Own(moe(balance="loss", z_loss=0.1, capacity_factor=0.75)).double()
    want = []
    for part in (slice(0, 3), slice(3, 6)):
        want.append(float(model(x[part].double(), labels[part]).detach()))
        model.middle.bias.zero_()
    step = wh.parallelize(
        model,
        optimizer=torch.optim.SGD,
        batch={"x": x.double(), "labels": labels},
        config={"pipeline.num_micro_batch": 2},
        cluster="1x1xCPU",
    )
    got = float(step({"x": x.double(), "labels": labels})["loss"])
    step.close()
    assert got == pytest.approx(sum(want) / 2, rel=1e-12)


def test_weights_that_bear_no_noise() -> None:
    class Log(Net):
        def __init__(self) -> None:
            super().__init__(nn.Identity())
            self.scale = nn.Parameter(torch.tensor([1e-6, 1.0]))

        def forward(self, x: Tensor) -> Any:
            return super().forward(x) * (1 - 0.1 * self.scale.log().sum())

    assert tried(Log(), masked).weighing is not None
    with pytest.raises(WhaleError, match="in two parts"):
        tried(Log(), by_rows)


def test_gradients_are_compared_too() -> None:
    def detached(out: Tensor, target: Any) -> Tensor:
        losses = tokens(out, target)
        mean = losses.mean()  # the value of a mean, the gradient of its square
        return mean.detach() + (mean**2 - mean.detach() ** 2)

    with pytest.raises(WhaleError, match="its gradients differ"):
        tried(Net(nn.Identity()), detached)


def load_balancing_loss_func(logits: Tensor) -> Tensor:
    """Named as that of transformers; its tokens come last."""
    return logits.softmax(0).mean(1).square().sum()


class Odd(Net):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        out = super().forward(x)
        ce = F.cross_entropy(out.flatten(0, 1), labels.flatten())
        return ce + load_balancing_loss_func(out.flatten(0, 1).t())


class Even(Net):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        out = super().forward(x)
        ce = F.cross_entropy(out.flatten(0, 1), labels.flatten())
        return ce + load_balancing_loss_func(out.flatten(0, 1))


def test_a_router_loss_is_gathered_only_if_tokens_come_first() -> None:
    x, (labels, _) = batch()
    with pytest.raises(WhaleError, match="first dim is not the tokens"):
        tried(Odd(nn.Identity()), None, {"x": x, "labels": labels})
    found = tried(Even(nn.Identity()), None, {"x": x, "labels": labels})
    assert found.router_losses and found.meets
    assert load_balancing_loss_func.__name__ == "load_balancing_loss_func"


@pytest.mark.parametrize(
    ("out", "text"),
    [
        (lambda x: None, "returned NoneType, and no loss"),
        (lambda x: 3.0, "a `loss` that is float, not a tensor"),
        (lambda x: {"logits": x}, "returned dict with logits, and no loss"),
        (lambda x: {"loss": None, "logits": x}, "and no loss"),
        (lambda x: x.sum((1, 2)), "a `loss` of shape"),
        (lambda x: (x.mean(0), x), "a `loss` of shape"),
    ],
)
def test_a_missing_loss_is_named(out: Callable[[Tensor], Any], text: str) -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Any:
            return out(self.first(x))

    for given in (None, lambda o, t: out(o)):
        data = batch()[0] if given is None else batch()
        model = Wrong() if given is None else nn.Linear(DIM, DIM)
        with pytest.raises(WhaleError, match=text) as error:
            wh.plan(model, cluster="1x2xCPU", batch=data, loss=given)
        assert error.value.hint


def test_expert_choice_behind_causal_attention_is_said() -> None:
    class Causal(nn.Module):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.how = how
            self.moe = moe(router="expert-choice", balance="none")
            if how == "buffer":
                self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril().bool())

        def forward(self, x: Tensor) -> Tensor:
            mask = None
            if self.how == "buffer":
                mask = self.mask
            elif self.how == "triu":
                mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
            h = F.scaled_dot_product_attention(x, x, x, mask, is_causal=self.how == "causal")
            return self.moe(h)

    x = batch()[0]
    loss = lambda out, target: (out - target).square().mean()  # noqa: E731
    for how in ("causal", "triu", "buffer"):
        with pytest.warns(UserWarning, match="depends on later ones"):
            wh.plan(Causal(how), cluster="1x1xCPU", batch=(x, x), loss=loss)
    wh.plan(Causal("none"), cluster="1x1xCPU", batch=(x, x), loss=loss)


def test_expert_choice_has_a_plan_for_few_rows() -> None:
    model = wh.annotate(
        Net(moe(router="expert-choice", balance="none", capacity_factor=0.3)), {"": wh.replicate()}
    )
    data = (torch.randn(4, 1, DIM), (torch.randint(5, (4, 1)), torch.ones(4, 1)))
    plan = wh.plan(model, cluster="1x4xCPU", batch=data, loss=masked)
    assert plan.prices is not None


def test_padding_takes_no_room_of_experts_that_choose() -> None:
    torch.manual_seed(0)
    layer = wh.nn.MoE(DIM, 6, 4, top_k=1, router="expert-choice", balance="none").double()
    x = torch.randn(12, DIM, dtype=torch.float64)
    valid = torch.arange(12) % 2 == 0
    out = layer(x, valid)
    assert torch.allclose(out[valid], layer(x[valid]), atol=1e-12)
    assert not out[~valid].any()


def test_rows_in_training_show_what_no_trial_saw() -> None:
    class Pads(nn.Module):
        """Its padding is a token that the first batch does not have."""

        def __init__(self, *, hidden: bool) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(9, DIM), nn.Linear(DIM, 9)
            self.hidden = hidden
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, ids: Tensor) -> Tensor:
            self.calls += 1
            mask = (ids != 8).double()
            losses = F.cross_entropy(
                self.head(self.embedding(ids)).flatten(0, 1), ids.flatten(), reduction="none"
            )
            total, count = (losses * mask.flatten()).sum(), mask.sum()
            return torch.exp(total.log() - count.log()) if self.hidden else total / count

    def ids(padded: bool) -> Tensor:
        made = torch.arange(6 * LENGTH).view(6, LENGTH) % 8
        ends = torch.arange(6).view(-1, 1) % 3 + 1
        return torch.where(torch.arange(LENGTH) < ends, made, 8) if padded else made

    wh.init(device="cpu")
    for hidden in (False, True):
        torch.manual_seed(0)
        step = wh.parallelize(
            Pads(hidden=hidden).double(),
            optimizer=torch.optim.SGD,
            batch=ids(False),
            config={"pipeline.num_micro_batch": 2},
            cluster="1x1xCPU",
        )
        before = int(step.state_dict()["calls"])
        step(ids(False))
        if hidden:
            with pytest.raises(WhaleError, match="in step 1 on rank 0, the loss of 3 rows"):
                step(ids(True))
        else:
            step(ids(True))
            assert int(step.state_dict()["calls"]) == before + 4
        step.close()
