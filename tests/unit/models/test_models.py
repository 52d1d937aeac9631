"""The plain models: shapes, ties, gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from whale.models import encoder_decoder, gpt, resnet, seq2seq_lstm
from whale.models.encoder_decoder import EncoderDecoder
from whale.models.gpt import GPT, GPTConfig
from whale.models.seq2seq_lstm import Seq2SeqLSTM

TINY = GPTConfig(vocab_size=37, max_seq_len=8, dim=24, num_layers=2, num_heads=6)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 37, shape)


def check_trains(model: nn.Module, inputs: tuple[Tensor, ...], num_classes: int) -> None:
    """The loss starts near that of a guess, and every parameter gets a finite gradient."""
    logits = model(*inputs)
    assert logits.shape[-1] == num_classes
    labels = torch.randint(0, num_classes, logits.shape[:-1])
    loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
    assert 0.5 < loss.item() / torch.tensor(num_classes).log().item() < 2
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("num_kv_heads", [None, 3, 1])
@pytest.mark.parametrize("tie", [True, False])
def test_gpt_trains(num_kv_heads: int | None, tie: bool) -> None:
    model = GPT(replace(TINY, num_kv_heads=num_kv_heads, tie_embeddings=tie, dropout=0.1))
    x = tokens(3, 7)
    assert model(x).shape == (3, 7, 37)
    check_trains(model, (x,), 37)


def test_gpt_head_is_the_token_embedding() -> None:
    model = GPT(TINY)
    assert model.lm_head.weight is model.token_embedding.weight
    assert "lm_head.weight" in model.state_dict()
    assert "lm_head.weight" not in dict(model.named_parameters())
    untied = GPT(replace(TINY, tie_embeddings=False))
    assert untied.lm_head.weight is not untied.token_embedding.weight


def test_gpt_is_causal() -> None:
    model = GPT(TINY).eval()
    x = tokens(2, 7)
    changed = x.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 37
    before, after = model(x), model(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_grouped_query_equals_repeated_heads() -> None:
    grouped = GPT(replace(TINY, num_kv_heads=2)).double().eval()
    full = GPT(TINY).double().eval()
    state = grouped.state_dict()
    for name in list(state):
        if "k_proj" in name or "v_proj" in name:
            heads = state[name].unflatten(0, (2, 4))
            state[name] = heads.repeat_interleave(3, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    x = tokens(2, 7)
    torch.testing.assert_close(grouped(x), full(x))


def test_gpt_config_refuses_uneven_heads() -> None:
    with pytest.raises(ValueError, match="not a multiple of num_heads 5"):
        replace(TINY, num_heads=5)
    with pytest.raises(ValueError, match="not a multiple of num_kv_heads 4"):
        replace(TINY, num_kv_heads=4)


@pytest.mark.parametrize("share", [True, False])
def test_encoder_decoder_trains(share: bool) -> None:
    config = replace(encoder_decoder.presets["encdec-tiny"], vocab_size=37, share_embeddings=share)
    model = EncoderDecoder(config)
    assert (model.src_embedding.weight is model.tgt_embedding.weight) == share
    assert model.lm_head.weight is model.tgt_embedding.weight
    x = tokens(3, 6), tokens(3, 5)
    assert model(*x).shape == (3, 5, 37)
    check_trains(model, x, 37)


def test_every_decoder_layer_reads_the_memory() -> None:
    config = replace(encoder_decoder.presets["encdec-tiny"], vocab_size=37)
    model = EncoderDecoder(config)
    model(tokens(2, 6), tokens(2, 5)).sum().backward()
    for i in range(config.num_decoder_layers):
        grad = model.get_parameter(f"decoder.{i}.cross_attention.k_proj.weight").grad
        assert grad is not None
        assert grad.abs().sum() > 0


def test_resnet_tiny_trains() -> None:
    check_trains(resnet.resnet_tiny(5), (torch.randn(4, 3, 16, 16),), 5)


def test_resnet50_is_the_published_size() -> None:
    with torch.device("meta"):
        model = resnet.resnet50()
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
    assert sum(p.numel() for p in model.parameters()) == 25_557_032


def test_seq2seq_lstm_trains() -> None:
    config = replace(seq2seq_lstm.presets["lstm-tiny"], vocab_size=37, src_vocab_size=41)
    x = tokens(3, 6), tokens(3, 5)
    model = Seq2SeqLSTM(config)
    assert model(*x).shape == (3, 5, 37)
    check_trains(model, x, 37)


def test_presets_build_on_the_meta_device() -> None:
    with torch.device("meta"):
        for name, config in gpt.presets.items():
            assert sum(p.numel() for p in GPT(config).parameters()) > 0, name
        small = sum(p.numel() for p in GPT(gpt.presets["gpt-small"]).parameters())
    assert small == 124_439_808  # the published size of GPT-2 small
