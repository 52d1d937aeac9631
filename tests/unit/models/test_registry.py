"""The registry of presets: every one builds, is captured, trains, and says what it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from whale.annotations import tag_of
from whale.cli import verify
from whale.cli.main import main
from whale.cli.precisions import PRECISIONS
from whale.engine.capture.captured import capture
from whale.errors import ConfigError
from whale.models.registry import (
    IGNORED,
    PRESETS,
    listing,
    optimizer_factory,
    preset,
    token_loss,
)
from whale.runtime.batch import leaves

SMALL = [name for name, made in PRESETS.items() if made.small is None]
LARGE = ("m6-100b", "m6-1t", "m6-10t")
EXPECTED = {
    *("gpt-tiny", "gpt-small", "bert-tiny", "bert-base", "bert-large"),
    *("t5-tiny", "t5-small", "t5-large", "gnmt-tiny", "gnmt", "lstm-tiny"),
    *("encdec-tiny", "encdec-base", "resnet-tiny", "resnet-50", "resnet-50-100k", "resnet-50-1m"),
    *("m6-tiny", "m6-small", "m6-base", "m6-10b", "m6-100b", "m6-1t", "m6-10t"),
}


def build(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return preset(name).build()


def test_all_are_there_under_their_own_names() -> None:
    assert set(PRESETS) >= EXPECTED
    for name, made in PRESETS.items():
        assert made.name == name
        assert made.about
        assert "%" not in made.about, "argparse would expand it"
        assert name in listing()
        assert made.precision in PRECISIONS
        assert callable(optimizer_factory(made.optimizer))


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "name",
    # Hundreds of Layers, of the kinds that smaller ones have: seconds each.
    [pytest.param(n, marks=pytest.mark.full) if n in LARGE else n for n in PRESETS],
)
def test_a_preset_is_captured_and_can_be_cut(name: str) -> None:
    made = preset(name)
    with torch.device("meta"):
        model, batch = made.build(), made.batch(made.rows, made.seq)
    assert all(leaf.is_meta and leaf.shape[0] == made.rows for leaf in leaves(batch))
    if made.annotate is not None:
        made.annotate(model)
    captured = capture(model, batch, made.loss)
    assert captured.refusal is None
    assert captured.program is not None
    counted = sum(parameter.numel for parameter in captured.graph.parameters)
    assert counted == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", SMALL)
def test_a_small_preset_learns_its_batch(name: str) -> None:
    made, model = preset(name), build(name)
    batch = made.batch(made.rows, None)
    optimizer = optimizer_factory(made.optimizer)(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        if made.loss is None:
            loss = model(**batch)["loss"]
        else:
            loss = made.loss(model(*batch[:-1]), batch[-1])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < losses[0]


def test_batches_are_the_same_every_time_and_leave_the_generator_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for name in SMALL:
        first, again = (preset(name).batch(4, None) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(leaves(first), leaves(again), strict=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_masked_tokens_are_about_a_seventh_and_are_what_is_learned() -> None:
    made = preset("bert-large")
    tokens, types, labels = made.batch(made.rows, made.seq)
    counts = labels != IGNORED
    assert 0.14 < counts.float().mean() < 0.17
    assert counts.any(dim=1).all()
    assert (tokens[counts] == 103).all()
    assert types.unique().tolist() == [0, 1]


def test_translations_have_rows_of_different_lengths_and_packed_ones_do_not() -> None:
    counted = (preset("gnmt-tiny").batch(16, 10)[-1] != IGNORED).sum(1)
    assert counted.min() >= 5
    assert counted.max() <= 10
    assert counted.unique().numel() > 2
    assert (preset("t5-tiny").batch(16, 10)[-1] != IGNORED).all()


def test_a_sequence_must_fit_the_positions() -> None:
    assert preset("bert-large").batch(1, 512)[0].shape == (1, 512)
    assert preset("t5-large").batch(1, 5000)[0].shape == (1, 5000)
    with pytest.raises(ConfigError, match="sequence length 513; allowed: 1 to 512, the model"):
        preset("bert-large").batch(1, 513)
    with pytest.raises(ConfigError, match="sequence length 0; allowed: 1 or more"):
        preset("gnmt").batch(1, 0)


def test_the_token_loss_is_a_mean_over_labels_that_count() -> None:
    logits, labels = torch.randn(3, 4, 5), torch.randint(0, 5, (3, 4))
    labels[0] = IGNORED
    mean, total = token_loss(logits, labels), token_loss(logits, labels, reduction="sum")
    torch.testing.assert_close(mean, total / 8)


def test_the_large_classification_splits_its_head_alone() -> None:
    made = preset("resnet-50-100k")
    assert made.annotate is not None
    with torch.device("meta"):
        model = made.annotate(made.build())
    kinds = {name: [s.kind for s in tag_of(part)] for name, part in model.named_children()}
    assert kinds.pop("fc") == ["split"]
    del kinds["blocks"]  # a list, which computes nothing; its elements are tagged
    assert all(kind == ["replicate"] for kind in kinds.values())
    assert [s.kind for s in tag_of(model.get_submodule("blocks.3.conv2"))] == ["replicate"]
    assert model.get_submodule("fc").weight.shape == (100_000, 2048)


def test_m6_spreads_its_experts_alone() -> None:
    made = preset("m6-small")
    assert made.annotate is not None
    with torch.device("meta"):
        model = made.annotate(made.build())
    kinds = {path: [s.kind for s in tag_of(part)] for path, part in model.named_modules()}
    assert kinds["blocks.1.ffn"] == kinds["blocks.7.ffn"] == ["split"]
    for path in ("text_stem", "blocks.0.ffn", "blocks.1.attention", "lm_head"):
        assert kinds[path] == ["replicate"]


def test_m6_has_eight_samples_for_each_published_gpu() -> None:
    rows = {name: preset(f"m6-{name}").rows for name in ("base", "10b", "100b", "1t", "10t")}
    assert rows == {name: 8 * n for name, n in zip(rows, (8, 16, 128, 480, 512), strict=True)}
    large = [name for name in PRESETS if preset(name).optimizer == "adafactor"]
    assert large == ["m6-100b", "m6-1t", "m6-10t"]


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown preset 'bert-lrge'") as caught:
        preset("bert-lrge")
    assert caught.value.hint == "did you mean 'bert-large'?"
    with pytest.raises(ConfigError, match="did you mean 'adamw'"):
        optimizer_factory("adamv")
    with pytest.raises(ConfigError, match="there are: adamw, sgd, adafactor"):
        optimizer_factory("x")


def test_optimizers() -> None:
    named = list(nn.Linear(2, 2).named_parameters())
    made = {name: optimizer_factory(name)(named) for name in ("adamw", "sgd", "adafactor")}
    assert [type(o).__name__ for o in made.values()] == ["AdamW", "SGD", "Adafactor"]
    assert made["sgd"].param_groups[0]["momentum"] == 0.9


def paths(model: nn.Module) -> set[str]:
    """The modules right under the root, tied ones by both names."""
    named = model.named_modules(remove_duplicate=False)
    return {path for path, _ in named if path and "." not in path}


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in SMALL])
def test_a_small_sibling_has_the_same_paths(name: str) -> None:
    """So that the annotations of the large one fit it."""
    full = preset(name)
    assert full.small is not None
    with torch.device("meta"):
        assert paths(preset(full.small).build()) == paths(full.build())
    assert preset(full.small).small is None


def subject(name: str) -> tuple[nn.Module, Any, str]:
    found = verify.find_subject(name, 3)
    return found.model, found.batch, found.note


def test_verify_takes_every_preset_and_says_what_it_reduced() -> None:
    for name in PRESETS:
        model, batch, note = subject(name)
        assert sum(p.numel() for p in model.parameters()) < 1_000_000, name
        assert leaves(batch)[0].shape[0] == 3
        assert note.startswith(f"{name} reduced: ") == (PRESETS[name].small is not None)
    assert "num_layers 24 to 4" in subject("bert-large")[2]
    assert subject("resnet-50")[2] == "resnet-50 reduced: to resnet-tiny"
    model = subject("resnet-50-1m")[0]
    assert [s.kind for s in tag_of(model.get_submodule("fc"))] == ["split"]


def test_verify_help_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["verify", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in PRESETS)
