"""What capture sees of a model's draws and checkpoints, and what is refused for them."""

from __future__ import annotations

import copy
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import whale as wh
from whale.engine.capture.captured import Captured, capture
from whale.errors import CaptureError, WhaleError
from whale.nn.randomness import UNKNOWN, PlainDraws

BATCH = (torch.randn(4, 6), torch.randn(4, 6))


class Two(nn.Module):
    """Two Linears, and what a test puts between them."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self, self.a(x)))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def seen(between: Any) -> Captured:
    return capture(Two(between), BATCH, loss)


def step_of(between: Any) -> Any:
    return wh.parallelize(
        Two(between), optimizer=partial(torch.optim.SGD, lr=0.1), batch=BATCH, loss=loss
    )


def test_what_only_sounds_random_is_not() -> None:
    found = seen(lambda m, h: F.normalize(h, dim=-1) + F.batch_norm(h, None, None, training=True))
    assert not found.random.drawing
    assert not found.random.dims.by_name


def test_dims_of_draws() -> None:
    found = seen(
        lambda m, h: (
            h * torch.rand(6) + torch.randn_like(h) * torch.randn(6, len(h)).t()
            + torch.rand(3 * len(h), 2).sum() + torch.randn(len(h), len(h)).sum()
        )
    )  # fmt: skip
    dims = [dim for _, dim in found.random.dims.by_name.values()]
    assert dims == [None, 0, 1, 0, UNKNOWN]
    assert found.random.drawing == {""}
    assert found.random.known


def test_a_model_in_eval_mode_is_seen_as_it_trains() -> None:
    model = Two(lambda m, h: F.dropout(h, 0.5, m.training)).eval()
    assert capture(model, BATCH, loss).random.drawing == {""}
    assert not capture(model, BATCH, loss, training=False).random.drawing


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_a_branch_that_no_draw_can_change_is_decided(p: float) -> None:
    found = seen(lambda m, h: h * 2 if torch.rand([]) < p else h * 3)
    assert found.program is not None
    assert found.random.dims.exact


def test_a_branch_on_a_draw_runs_in_one_stage_only() -> None:
    found = seen(lambda m, h: h * 2 if torch.rand([]) < 0.3 else h * 3)
    assert found.program is None
    assert "random draw" in str(found.refusal)
    assert __file__ in str(found.refusal)
    assert found.random.known
    assert not found.random.dims.exact


def test_code_that_reads_values_is_probed_on_real_rows() -> None:
    def between(model: nn.Module, h: Tensor) -> Tensor:
        if float(h.sum()) > -1e9:
            h = F.dropout(h, 0.5, model.training)
        return h

    model = Two(lambda m, h: h)
    model.between = between
    model.a.register_forward_hook(lambda m, args, out: out + 0 * out.nonzero().shape[0])
    found = capture(model, BATCH, loss)
    assert found.program is None
    assert found.random.known
    assert found.random.dims.of(("", 0), 2) == 0


def test_pythons_generator_is_seen_and_seeded() -> None:
    def between(model: nn.Module, h: Tensor) -> Tensor:
        return h * random.random()

    found = seen(between)
    assert found.random.foreign == "Python's random"
    assert not found.random.foreign_rows
    assert "Python's random" in str(found.refusal)
    state = random.getstate()
    first, second = (float(step_of(between)(BATCH)["loss"]) for _ in range(2))
    assert state == random.getstate()
    del first, second
    rows = seen(lambda m, h: h * torch.tensor([random.random() for _ in range(len(h))])[:, None])
    assert rows.random.foreign_rows


def test_a_seed_set_in_the_forward_is_refused() -> None:
    def between(model: nn.Module, h: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return h + torch.randn_like(h)

    step = step_of(between)
    before = torch.get_rng_state()
    with pytest.raises(WhaleError, match="sets torch's seed"):
        step(BATCH)
    assert torch.equal(before, torch.get_rng_state())


def test_draws_that_capture_never_saw_are_refused() -> None:
    asked = []

    def between(model: nn.Module, h: Tensor) -> Tensor:
        return F.dropout(h, 0.5) if asked else h

    step = step_of(between)
    step(BATCH)
    asked.append(1)
    with pytest.raises(WhaleError, match="not keyed"):
        step(BATCH)


class _Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] + torch.rand_like(grads[0])


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        return module(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ctx.module(x).backward(grads[0])
        return x.grad, None


def test_draws_in_a_backward_are_refused() -> None:
    with pytest.raises(WhaleError, match="draws random numbers"):
        step_of(lambda m, h: _Noisy.apply(h))(BATCH)
    model = Two(lambda m, h: _Again.apply(h, m.drop))
    model.drop = nn.Dropout(0.5)
    with pytest.raises(WhaleError, match="draws random numbers .dropout"):
        wh.parallelize(model, optimizer=partial(torch.optim.SGD, lr=0.1), batch=BATCH, loss=loss)(
            BATCH
        )


def test_a_generator_of_the_users_is_left_to_it_in_one_process() -> None:
    def between(model: nn.Module, h: Tensor) -> Tensor:
        return h + torch.randn(6, generator=torch.Generator().manual_seed(3))

    want = Two(between)
    torch.manual_seed(0)
    step = step_of(between)
    assert step(BATCH)["loss"] > 0
    del want


def test_checkpoints_in_glue_are_marked_and_reentrant_ones_without_gradient_refused() -> None:
    found = seen(lambda m, h: checkpoint(torch.tanh, h, use_reentrant=True))
    assert found.program is not None
    assert [op.region is not None for op in found.program.ops if op.layer is None][:1] == [True]
    found = seen(lambda m, h: checkpoint(torch.tanh, h.detach(), use_reentrant=True))
    assert isinstance(found.refusal, CaptureError)
    assert "use_reentrant" in str(found.refusal)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_mixture_in_a_checkpoint_is_the_mixture_alone(reentrant: bool) -> None:
    """In plain torch too: the second forward routes as the first and moves nothing."""
    torch.manual_seed(0)
    moe = wh.nn.MoE(6, 8, 4, top_k=2, balance_rate=0.5).double()
    twin = copy.deepcopy(moe)
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        moe(x).square().sum().backward()
        checkpoint(twin, y, use_reentrant=reentrant).square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
    for (name, a), b in zip(moe.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(moe.tokens_seen, twin.tokens_seen)
    for a, b in zip(moe.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_plain_draws_are_those_of_a_step() -> None:
    model = Two(lambda m, h: F.dropout(torch.randn_like(h) + h, 0.3))
    plain = copy.deepcopy(model)
    step = wh.parallelize(
        model,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        batch=BATCH,
        loss=loss,
        config={"seed": 9},
    )
    got = float(step(BATCH)["loss"])
    draws = PlainDraws(plain, capture(plain, BATCH, loss).random.dims, seed=9)
    with draws.at(step=0, rows=4):
        want = loss(plain(BATCH[0]), BATCH[1])
    draws.close()
    assert got == pytest.approx(float(want.detach()), rel=1e-6)
    assert not plain._forward_hooks
