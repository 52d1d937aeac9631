"""The user's module while a step is open, and code that would train nothing; one process."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import whale as wh

SGD = partial(torch.optim.SGD, lr=0.1)
BATCH = (torch.randn(6, 4).double(), torch.randn(6, 1).double())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def opened(model: nn.Module | None = None, **more: Any) -> tuple[nn.Module, wh.Step]:
    model = Net().double() if model is None else model
    more = {"loss": F.mse_loss, "optimizer": SGD, "batch": BATCH, **more}
    return model, wh.parallelize(model, **more)


def test_faces_answer_for_the_step_and_go_with_it() -> None:
    model, step = opened()
    plain = copy.deepcopy(dict(model.__dict__), {id(v): v for v in model.__dict__.values()})
    before = model.head.weight.clone()
    step(BATCH)
    trained = step.state_dict()
    assert torch.equal(model.state_dict()["head.weight"], trained["head.weight"])
    assert torch.equal(model.head.state_dict()["weight"], trained["head.weight"])
    outer = nn.Sequential(model)
    assert torch.equal(outer.state_dict()["0.head.weight"], trained["head.weight"])
    assert torch.equal(model.head.weight, before), "the user's own tensors stay"
    want = Net().double()
    want.load_state_dict(trained)
    assert torch.equal(model(BATCH[0]), want(BATCH[0]))
    assert torch.equal(model.body(BATCH[0]), want.body(BATCH[0]))
    assert not model(BATCH[0]).requires_grad, "a backward through it would train nothing"
    step.close()
    assert torch.equal(model(BATCH[0]), model.head(model.body(BATCH[0])))
    assert model.__dict__.keys() == plain.keys() - {"forward", "state_dict"} - {
        "load_state_dict",
        "named_parameters",
        "named_buffers",
    }


def test_copies_of_a_faced_model_are_plain(caplog: pytest.LogCaptureFixture) -> None:
    model, step = opened()
    step(BATCH)
    twin = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert "before training" in caplog.text
    for other in (twin, loaded):
        assert torch.equal(other.head.weight, model.head.weight)
        assert other(BATCH[0]).requires_grad
    list(model.parameters())
    assert "not those that train" in caplog.text
    caplog.clear()
    step.state_dict()
    step.close()
    assert not caplog.records


def test_closing_says_what_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    _, step = opened()
    step(BATCH)
    step.close()
    assert "forgotten" in caplog.text


def test_two_open_steps_share_a_model() -> None:
    model, first = opened()
    _, second = opened(model)
    second(BATCH)
    first.close()
    assert torch.equal(model.state_dict()["head.weight"], second.state_dict()["head.weight"])
    second.close()


def freeze(model: nn.Module) -> None:
    model.head.requires_grad_(False)


def halve(model: nn.Module) -> None:
    model.float()


def overwrite(model: nn.Module) -> None:
    nn.init.zeros_(model.body[0].weight)


@pytest.mark.parametrize(
    ("change", "text"),
    [(freeze, "requires_grad=False now"), (halve, "float32 now"), (overwrite, "was written to")],
)
def test_what_a_step_cannot_follow_is_refused(
    change: Callable[[nn.Module], None], text: str
) -> None:
    model, step = opened()
    step(BATCH)
    change(model)
    with pytest.raises(wh.WhaleError, match=text):
        step(BATCH)
    step.close()


def test_training_flags_are_the_users(caplog: pytest.LogCaptureFixture) -> None:
    norm = nn.BatchNorm1d(4)
    model, step = opened(nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 1)).double())
    norm.eval()
    step(BATCH)
    step.evaluate(BATCH)
    step(BATCH)
    assert int(model.state_dict()["1.num_batches_tracked"]) == 0
    norm.train()
    step(BATCH)
    assert int(model.state_dict()["1.num_batches_tracked"]) == 1
    model.eval()
    with caplog.at_level(logging.WARNING):
        step(BATCH)
    assert "eval mode" in caplog.text
    assert int(model.state_dict()["1.num_batches_tracked"]) == 1
    step.close()


def test_dropout_belongs_to_a_step() -> None:
    model, step = opened(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double())
    with pytest.raises(wh.WhaleError, match="training mode"):
        model(BATCH[0])
    model.eval()
    model(BATCH[0])
    step.close()


@pytest.mark.parametrize("part", [False, True])
def test_compiled_models_run_their_own_code(part: bool) -> None:
    model = Net().double()
    if part:
        model.body = torch.compile(model.body, backend="eager")
        model.head.compile(backend="eager")
    given = model if part else torch.compile(model, backend="eager")
    with pytest.warns(UserWarning, match="compiled"):
        step = wh.parallelize(given, loss=F.mse_loss, optimizer=SGD, batch=BATCH)
    step(BATCH)
    assert set(step.state_dict()) == set(model.state_dict())
    given.eval()
    assert not given(BATCH[0]).requires_grad
    step.close()


# ---- code that would train nothing ---------------------------------------------------------------


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1).double())

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(out * self.scale, target)


def closing(model: Net) -> Any:
    return lambda out, target: F.mse_loss(out, target) + model.head.weight.square().sum()


def closing_detached(model: Net) -> Any:
    return lambda out, target: F.mse_loss(out, target) * model.head.weight.detach().norm()


def outside(model: Net) -> Any:
    scale = nn.Parameter(torch.ones(1).double())
    return lambda out, target: F.mse_loss(out * scale, target)


def outside_tensor(model: Net) -> Any:
    scale = torch.ones(1).double().requires_grad_()
    return lambda out, target: F.mse_loss(out * scale, target)


def hooked(model: Net) -> Any:
    model.body.register_forward_hook(lambda module, args, out: out * model.head.weight.sum())
    return F.mse_loss


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (closing, "head.weight is read from the model"),
        (closing_detached, "head.weight is read from the model"),
        (outside, "a parameter of shape"),
        (outside_tensor, "a tensor of shape"),
        (hooked, "head.weight is read from the model"),
        (lambda model: OwnLoss(), "trainable parameter 'scale'"),
    ],
)
def test_code_that_would_train_nothing_is_refused(make: Callable[[Net], Any], text: str) -> None:
    model = Net().double()
    loss = make(model)
    with pytest.raises(wh.WhaleError, match=text):
        _, step = opened(model, loss=loss)
        for _ in range(2):
            step(BATCH)


class Forces(nn.Module):
    """Makes leaves of its own in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.net(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy + force.sum(-1, keepdim=True)


def test_looks_and_leaves_of_a_forward_are_fine() -> None:
    model = Forces().double()
    size = model.net.head.weight

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(out, target) * size.shape[1]

    _, step = opened(model, loss=loss, config={"check_parts": False})
    for _ in range(3):
        step(BATCH)
    step.close()


class Aux(Net):
    """Leaves a term of the loss behind."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = torch.zeros(()).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        self.aux = hidden.square().mean()
        return self.head(hidden)


def test_a_loss_that_reads_what_a_forward_leaves_is_refused() -> None:
    model = Aux().double()
    with pytest.raises(wh.WhaleError, match="reads aux, which a forward sets"):
        opened(model, loss=lambda out, target: F.mse_loss(out, target) + model.aux)


def gradient_hook(model: Net) -> None:
    model.head.weight.register_hook(lambda grad: grad * 0)


def shared_memory(model: Net) -> None:
    model.more = nn.Linear(4, 4).double()
    model.more.weight.data = model.body[0].weight.data


def computed(model: Net) -> None:
    model.part = model.head.weight[:, :2]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (gradient_hook, "head.weight has a gradient hook"),
        (shared_memory, "share memory"),
        (computed, "part was computed from weights"),
    ],
)
def test_what_a_copy_cannot_carry_is_refused(change: Callable[[Net], None], text: str) -> None:
    model = Net().double()
    change(model)
    with pytest.raises(wh.WhaleError, match=text):
        opened(model)


def late_hook(model: Net) -> None:
    model.body.register_forward_hook(lambda module, args, out: out * 2)


@pytest.mark.parametrize("change", [late_hook, gradient_hook])
def test_hooks_that_come_too_late_are_refused(change: Callable[[Net], None]) -> None:
    model, step = opened()
    step(BATCH)
    change(model)
    with pytest.raises(wh.WhaleError, match="hook was put on"):
        step(BATCH)
    step.close()


def test_marks_on_parameters_reach_the_factory() -> None:
    model = Net().double()
    model.head.bias.no_decay = True

    def factory(named: Any) -> torch.optim.Optimizer:
        marked = [n for n, p in named if getattr(p, "no_decay", False)]
        assert marked == ["head.bias"] or len(named) == 1
        return SGD(named)

    opened(model, optimizer=factory)[1].close()


# ---- optimizers ----------------------------------------------------------------------------------


def groups_of_plain(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p for p in params if p.ndim > 1]}], lr=0.1)


def over_others(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(Net().parameters(), lr=0.1)


class Picky(torch.optim.SGD):
    """Looks at what it gets before torch does."""

    def __init__(self, params: Any, lr: float) -> None:
        params = list(params)
        assert all(isinstance(p, nn.Parameter) for p in params)
        super().__init__(params, lr=lr)


@pytest.mark.parametrize("factory", [groups_of_plain, partial(Picky, lr=0.1)])
def test_factories_may_want_plain_parameters(factory: Any) -> None:
    _, step = opened(optimizer=factory)
    before = step.state_dict()
    step(BATCH)
    assert not torch.equal(before["head.weight"], step.state_dict()["head.weight"])
    step.close()


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (torch.optim.LBFGS, "several times"),
        (torch.optim.SparseAdam, "sparse gradients"),
        (over_others, "was not called with"),
        (lambda params: params.nothing, "failed on"),
    ],
)
def test_other_factories_are_refused(factory: Any, text: str) -> None:
    with pytest.raises(wh.WhaleError, match=text):
        opened(optimizer=factory)


def test_sparse_gradients_become_dense_ones() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 4, sparse=True)
            self.head = nn.Linear(4, 1)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.words(ids).mean(1))

    torch.manual_seed(0)
    model = Words().double()
    want = copy.deepcopy(model)
    batch = (torch.randint(0, 5, (6, 3)), torch.randn(6, 1).double())
    optimizer = SGD(want.parameters())
    _, step = opened(model, batch=batch)
    for _ in range(3):
        step(batch)
        optimizer.zero_grad()
        F.mse_loss(want(batch[0]), batch[1]).backward()
        optimizer.step()
    for name, tensor in want.state_dict().items():
        torch.testing.assert_close(step.state_dict()[name], tensor, rtol=1e-9, atol=1e-12)
    step.close()


READS: dict[str, Callable[[nn.Module], Any]] = {
    "model.0.weight": lambda model: model[0].weight.norm(),
    "model.1.running_mean": lambda model: model[1].running_mean.sum(),
    "model.2.bias": lambda model: model.get_parameter("2.bias"),
    "model.named_buffers()": lambda model: dict(model.named_buffers()),
}


@pytest.mark.parametrize("what", READS)
def test_a_tensor_from_before_training_is_said_to_be_one(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    before = type(model[0]._parameters)
    batch = (torch.randn(4, 4), torch.randn(4, 4))
    step = wh.parallelize(model, optimizer=SGD, batch=batch, loss=F.mse_loss)
    READS[what](model)  # nothing is trained yet
    assert "before training" not in caplog.text
    step(batch)
    READS[what](model)
    READS[what](model)
    assert caplog.text.count(f"{what} is the user's own") == 1
    caplog.clear()
    step.write_back()
    READS[what](model)
    assert not caplog.text
    step.state_dict()
    copied = copy.deepcopy(model)
    assert type(copied[0]._parameters) is before
    step.close(forget=True)
    assert type(model[0]._parameters) is before
    assert torch.equal(model[0].weight, copied[0].weight)
