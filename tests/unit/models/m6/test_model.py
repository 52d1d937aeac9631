"""The model: who sees whom, what padding changes, sharing and delinking, learning."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import whale as wh
from whale.annotations import tag_of
from whale.errors import AnnotationError
from whale.models.m6.annotate import expert_parallel
from whale.models.m6.config import M6Config
from whale.models.m6.layers import ConvStem, prefix_mask
from whale.models.m6.model import M6, delink
from whale.models.m6.objectives import caption, collate, draw, example_batch
from whale.models.m6.pictures import patch_vectors
from whale.models.m6.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("untried")

Batch = dict[str, Tensor]


def logits(model: M6, batch: Batch) -> Tensor:
    with torch.no_grad():
        return model(**batch)["logits"]


@pytest.fixture
def model(config: M6Config) -> M6:
    return M6(config).double().eval()


@pytest.fixture
def batch(config: M6Config) -> Batch:
    batch = example_batch(config, 4)
    batch["num_source"][:] = config.num_patches + 6
    return batch


def changed(batch: Batch, position: int) -> Batch:
    tokens = batch["tokens"].clone()
    tokens[:, position] = (tokens[:, position] + 1) % 300
    return {**batch, "tokens": tokens}


def test_prefix_mask_in_full() -> None:
    mask = prefix_mask(torch.tensor([3, 2]), torch.tensor([True, False]), 2, 3)
    assert mask.shape == (2, 1, 5, 5)
    with_image = ["11100", "11100", "11100", "11110", "11111"]
    without = ["10000", "01000", "00100", "00110", "00111"]
    for row, lines in zip(mask[:, 0], (with_image, without), strict=True):
        assert ["".join(str(int(x)) for x in line) for line in row] == lines


def test_a_later_target_token_never_reaches_back(model: M6, batch: Batch) -> None:
    before = logits(model, batch)
    for position in (6, 10, 23):
        after = logits(model, changed(batch, position))
        torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=0)
        assert not torch.allclose(after[:, position:], before[:, position:])


def test_a_source_token_reaches_everywhere(model: M6, batch: Batch) -> None:
    before, after = logits(model, batch), logits(model, changed(batch, 5))
    assert ((before - after).abs().amax(-1) > 1e-9).all()


def test_pictures_count_only_where_there_are_any(model: M6, batch: Batch) -> None:
    has_image = batch["has_image"]
    assert has_image.any() and not has_image.all()
    before = logits(model, batch)
    after = logits(model, {**batch, "patches": -batch["patches"]})
    torch.testing.assert_close(after[~has_image], before[~has_image], rtol=0, atol=0)
    assert ((before - after)[has_image].abs().amax(-1) > 1e-9).all()


def test_no_source_and_no_picture_is_finite(model: M6, batch: Batch, config: M6Config) -> None:
    batch["num_source"][:] = config.num_patches
    batch["has_image"][:] = False
    model.train()
    out = model(**batch)
    out["loss"].backward()
    assert out["logits"].isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_padding_does_not_change_the_loss(
    model: M6, config: M6Config, tokenizer: Tokenizer, pictures: NDArray[np.uint8]
) -> None:
    rows = [
        caption(tokenizer, pictures[0], "red apple", "en", limit=16),
        draw(tokenizer, "狗脸", [1, 2, 3, 4], limit=16),
    ]
    losses = [model(**collate(config, tokenizer, rows, length))["loss"] for length in (12, 16, 24)]
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0], rtol=1e-12, atol=0)
    padded = collate(config, tokenizer, rows)
    padded["tokens"][:, 14:] = 99
    torch.testing.assert_close(model(**padded)["loss"], losses[0], rtol=1e-12, atol=0)


def test_loss_is_the_mean_over_targets(model: M6, batch: Batch) -> None:
    out = model(**batch)
    valid = batch["labels"] >= 0
    chosen = out["logits"].log_softmax(-1)[valid].gather(1, batch["labels"][valid][:, None])
    torch.testing.assert_close(out["loss"], -chosen.mean())
    assert set(model(**{k: v for k, v in batch.items() if k != "labels"})) == {"logits"}


@pytest.mark.parametrize("num_experts", [0, 4])
@pytest.mark.parametrize("tie", [True, False])
def test_a_few_steps_lower_the_loss(config: M6Config, num_experts: int, tie: bool) -> None:
    config = replace(config, num_experts=num_experts, moe_every=2, dropout=0.1, tie_embeddings=tie)
    model = M6(config)
    assert (model.lm_head.weight is model.text_stem.token_embedding.weight) == tie
    batch = example_batch(config, 4)
    first = model(**batch)["loss"].item()
    assert 0.8 < first / np.log(config.vocab_size) < 1.3
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(15):
        loss = model(**batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        optimizer.step()
    assert loss.item() < 0.8 * first


# ---- pseudo to real ----


@pytest.fixture
def shared(config: M6Config) -> M6:
    return M6(replace(config, num_experts=4, moe_every=2, share_layers=True)).double()


def test_shared_layers_have_one_layer_of_each_kind(shared: M6) -> None:
    names = [name for name, _ in shared.named_parameters() if name.startswith("blocks.")]
    assert {name.split(".")[1] for name in names} == {"0", "1"}
    assert shared.blocks[2] is not shared.blocks[0]
    assert shared.blocks[3].ffn.w_in is shared.blocks[1].ffn.w_in


def test_delinked_computes_the_same_and_then_parts(shared: M6, batch: Batch) -> None:
    real = delink(shared)
    assert not real.config.share_layers
    before = shared(**batch)["loss"]
    torch.testing.assert_close(real(**batch)["loss"], before, rtol=0, atol=0)
    parameters = list(real.blocks.parameters())
    assert len(parameters) == 2 * len(list(shared.blocks.parameters()))
    assert len({p.data_ptr() for p in parameters}) == len(parameters)
    assert real.lm_head.weight is real.text_stem.token_embedding.weight
    assert not {p.data_ptr() for p in real.parameters()} & {
        p.data_ptr() for p in shared.parameters()
    }
    # Gradients of the copies add up to the gradient of what was shared.
    before.backward()
    real(**batch)["loss"].backward()
    for i in (0, 1):
        for name, parameter in shared.blocks[i].named_parameters():
            parts = [dict(real.blocks[j].named_parameters())[name].grad for j in (i, i + 2)]
            assert parts[0] is not None and parts[1] is not None
            torch.testing.assert_close(parts[0] + parts[1], parameter.grad, msg=name)


def test_state_round_trip(shared: M6, batch: Batch) -> None:
    state = shared.state_dict()
    for config in (shared.config, replace(shared.config, share_layers=False)):
        other = M6(config).double()
        assert list(other.state_dict()) == list(state)
        other.load_state_dict(state)
        torch.testing.assert_close(other(**batch)["loss"], shared(**batch)["loss"])


# ---- parallel ----


def test_annotations_split_the_experts_and_nothing_else(config: M6Config) -> None:
    model = expert_parallel(M6(replace(config, num_experts=4, moe_every=2)))
    for path, module in model.named_modules():
        if not list(module.children()) and not path.startswith(("blocks.1.ffn", "blocks.3.ffn")):
            assert [scope.kind for scope in tag_of(module)] == ["replicate"], path
    assert [scope.kind for scope in tag_of(model.blocks[3].ffn)] == ["split"]
    with pytest.raises(AnnotationError, match="num_experts is 0"):
        expert_parallel(M6(config))


def test_convolutions_see_the_picture_that_was_cut(config: M6Config) -> None:
    stem = ConvStem(config)
    pictures = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
    seen: list[torch.Tensor] = []
    stem.patches.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    vectors = torch.from_numpy(patch_vectors(pictures, config.patch_size))
    assert stem(vectors).shape == (2, config.num_patches, config.dim)
    back = ((seen[0] + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1)
    assert torch.equal(back, torch.from_numpy(pictures))


@pytest.mark.parametrize(
    "layout",
    [
        "experts",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("heads", "stages", "copies", "copies conv")
        ),
    ],
)
def test_equal_to_one_device(config: M6Config, layout: str) -> None:
    """The model's own glue, mask and heads; dense, the rules for experts are tested with them."""
    layout, _, stem = layout.partition(" ")
    model = M6(replace(config, dropout=0.1, num_layers=2, stem=stem or "patch"))
    settings: dict[str, object] = {}
    if layout == "copies":
        wh.replicate()(model)
    elif layout == "heads":
        wh.split()(model)
    elif layout == "experts":
        blocks = "blocks.0|blocks.1.norm1|blocks.1.attention|blocks.1.dropout*|blocks.1.norm2"
        rest = f"patch_stem|text_stem|dropout|norm|lm_head|{blocks}"
        wh.annotate(model, {rest: wh.replicate(), "blocks.1.ffn": wh.split()})
    else:
        stems = "patch_stem|text_stem|dropout|blocks.0"
        wh.annotate(model, {stems: wh.stage(), "blocks.1|norm|lm_head": wh.stage()})
        settings = {"pipeline.num_micro_batch": 2}
    verdict = wh.verify(
        model, batch=example_batch(config, 4), cluster="1x2xCPU", config=settings, steps=1
    )
    assert verdict.ok, verdict
