"""The reference and its models: against loops written out by hand, and steady from call to call."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tests.parity.reference import greatest_entry, relative_error, split_batch, train_reference
from tests.parity.zoo import CASE_NAMES, IGNORED, case

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
ROWS = 6


@pytest.mark.parametrize("name", CASE_NAMES)
def test_cases_are_float64_and_always_the_same(name: str) -> None:
    one, two = case(name).build(), case(name).build()
    assert one.training
    for (key, a), b in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        assert a.dtype == torch.float64 or not a.dtype.is_floating_point, key
        assert torch.equal(a, b), key
    first, again, other = (case(name).batch(seed, ROWS) for seed in (0, 0, 1))
    values = [list(b.values()) if isinstance(b, dict) else list(b) for b in (first, again, other)]
    assert all(torch.equal(a, b) for a, b in zip(values[0], values[1], strict=True))
    assert not torch.equal(values[0][0], values[2][0])
    assert case(name).outputs_loss == name.startswith("hf_")


@pytest.mark.parametrize("name", CASE_NAMES)
def test_every_row_has_a_label_and_rows_differ(name: str) -> None:
    batch = case(name).batch(0, ROWS)
    counts = [case(name).count(row) for row in split_batch(batch, [1] * ROWS)]
    assert min(counts) > 0
    assert sum(counts) == case(name).count(batch)
    assert len(set(counts)) > 1 or name == "resnet"


@pytest.mark.parametrize("name", CASE_NAMES)
def test_dropout_reaches_the_model(name: str) -> None:
    rates = {
        m.p for m in case(name, dropout=0.1).build().modules() if isinstance(m, torch.nn.Dropout)
    }
    assert rates == (set() if name == "resnet" else {0.1})


@pytest.mark.parametrize("name", CASE_NAMES)
def test_micro_batches_change_nothing_but_batch_norm(name: str) -> None:
    batches = [case(name).batch(seed, ROWS) for seed in range(2)]
    whole = train_reference(case(name), batches, [[ROWS]] * 2, ADAMW, max_norm=0.5)
    parts = train_reference(case(name), batches, [[3, 2, 1], [1, 5]], ADAMW, max_norm=0.5)
    largest = greatest_entry(whole.gradients.values())
    errors = [relative_error(parts.gradients[k], g, largest) for k, g in whole.gradients.items()]
    assert whole.gradients.keys() == dict(case(name).build().named_parameters()).keys()
    if name == "resnet":
        assert max(errors) > 1e-3
    else:
        assert max(errors) < 1e-12
        assert parts.losses == pytest.approx(whole.losses, rel=1e-12)
        assert parts.gradient_norms == pytest.approx(whole.gradient_norms, rel=1e-12)


def test_gpt_equals_a_loop_by_hand() -> None:
    gpt = case("gpt")
    batches = [gpt.batch(seed, ROWS) for seed in range(3)]
    found = train_reference(gpt, batches, [[ROWS]] * 3, ADAMW, max_norm=0.5)

    model = gpt.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for batch in batches:
        assert isinstance(batch, tuple)
        loss = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    check(found.losses, found.state_dict, losses, model.state_dict())


def test_hf_gpt2_equals_a_loop_by_hand() -> None:
    gpt2 = case("hf_gpt2")
    batches = [gpt2.batch(seed, ROWS) for seed in range(3)]
    found = train_reference(gpt2, batches, [[ROWS]] * 3, ADAMW)

    model = gpt2.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for batch in batches:
        assert isinstance(batch, dict)
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        loss = F.cross_entropy(logits[labels != IGNORED], labels[labels != IGNORED])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    check(found.losses, found.state_dict, losses, model.state_dict())


def check(
    losses: list[float],
    state: dict[str, Tensor],
    true_losses: list[float],
    true_state: dict[str, Tensor],
) -> None:
    assert losses == pytest.approx(true_losses, rel=1e-12)
    assert state.keys() == true_state.keys()
    largest = greatest_entry(true_state.values())
    for name, tensor in true_state.items():
        assert relative_error(state[name], tensor, largest) < 1e-9, name


def test_relative_error_spares_what_is_zero_but_for_rounding() -> None:
    tiny = torch.tensor([1e-18])
    assert relative_error(tiny, torch.zeros(1), largest=1.0) == pytest.approx(1e-15)
    assert relative_error(torch.tensor([1.1]), torch.tensor([1.0]), 1.0) == pytest.approx(0.1)
    assert relative_error(torch.zeros(0), torch.zeros(0), 1.0) == 0.0
