"""The plain models: shapes, ties, gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from whale.models import bert, encoder_decoder, gnmt, gpt, resnet, seq2seq_lstm, t5
from whale.models.bert import BERT
from whale.models.encoder_decoder import EncoderDecoder
from whale.models.gnmt import GNMT
from whale.models.gpt import GPT, GPTConfig
from whale.models.seq2seq_lstm import Seq2SeqLSTM
from whale.models.t5 import T5

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


# ---- BERT ----------------------------------------------------------------------------------------

BERT_TINY = replace(bert.presets["bert-tiny"], vocab_size=37)


def test_bert_trains() -> None:
    model = BERT(replace(BERT_TINY, dropout=0.1))
    x = tokens(3, 7), torch.randint(0, 2, (3, 7))
    assert model(*x).shape == (3, 7, 37)
    check_trains(model, x, 37)
    assert model.lm_head.decoder.weight is model.token_embedding.weight


def test_bert_does_not_see_padding() -> None:
    model = BERT(BERT_TINY).eval()
    x, mask = tokens(2, 7), torch.arange(7).expand(2, 7) < 5
    changed = x.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 37
    before, after = (model(t, None, mask)[:, :5] for t in (x, changed))
    torch.testing.assert_close(before, after)
    torch.testing.assert_close(before, model(x[:, :5]))
    assert not torch.allclose(before, model(x)[:, :5])


def test_bert_with_a_pooler_predicts_the_next_sentence() -> None:
    model = BERT(replace(BERT_TINY, pooler=True))
    logits, follows = model(tokens(3, 7))
    assert (logits.shape, follows.shape) == ((3, 7, 37), (3, 2))
    (logits.sum() + follows.sum()).backward()
    assert all(p.grad is not None for p in model.parameters())


def _bert_names(name: str) -> str:
    """The name a weight has in transformers."""
    if not name.startswith("blocks."):
        head, _, leaf = name.rpartition(".")
        return f"{BERT_PARTS[head]}.{leaf}"
    _, index, *part, leaf = name.split(".")
    return f"bert.encoder.layer.{index}.{BERT_PARTS['.'.join(part)]}.{leaf}"


BERT_PARTS = {
    "token_embedding": "bert.embeddings.word_embeddings",
    "position_embedding": "bert.embeddings.position_embeddings",
    "token_type_embedding": "bert.embeddings.token_type_embeddings",
    "norm": "bert.embeddings.LayerNorm",
    "attention.q_proj": "attention.self.query",
    "attention.k_proj": "attention.self.key",
    "attention.v_proj": "attention.self.value",
    "attention.out_proj": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
    "norm2": "output.LayerNorm",
    "lm_head.dense": "cls.predictions.transform.dense",
    "lm_head.norm": "cls.predictions.transform.LayerNorm",
    "lm_head.decoder": "cls.predictions.decoder",
}


def unsettle(model: nn.Module) -> nn.Module:
    """Moves every weight: norms of one and biases of zero would hide that they are mixed up."""
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval()


def test_bert_computes_what_the_public_one_does() -> None:
    from transformers import BertConfig, BertForMaskedLM  # noqa: PLC0415 - seconds to import

    config = BertConfig(
        vocab_size=37,
        hidden_size=48,
        num_hidden_layers=4,
        num_attention_heads=6,
        intermediate_size=192,
        max_position_embeddings=64,
    )
    public = unsettle(BertForMaskedLM(config).double())
    model = BERT(BERT_TINY).double().eval()
    state = public.state_dict()
    model.load_state_dict({name: state[_bert_names(name)] for name in model.state_dict()})
    x, types = tokens(3, 9), torch.randint(0, 2, (3, 9))
    mask = torch.arange(9) < torch.tensor([[9], [5], [3]])
    want = public(input_ids=x, token_type_ids=types, attention_mask=mask.long()).logits
    torch.testing.assert_close(model(x, types, mask)[mask], want[mask])


# ---- T5 ------------------------------------------------------------------------------------------

T5_TINY = replace(t5.presets["t5-tiny"], vocab_size=37)


def test_t5_trains_and_its_biases_learn() -> None:
    model = T5(replace(T5_TINY, dropout=0.1))
    x = tokens(3, 6), tokens(3, 5)
    assert model(*x).shape == (3, 5, 37)
    check_trains(model, x, 37)
    assert model.lm_head.weight is model.embedding.weight
    for bias in (model.encoder_bias, model.decoder_bias):
        assert bias.table.grad is not None
        assert bias.table.grad.abs().sum() > 0


def test_t5_is_causal_in_the_target_alone() -> None:
    model = T5(T5_TINY).eval()
    src, tgt = tokens(2, 6), tokens(2, 7)
    changed = tgt.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 37
    before, after = model(src, tgt), model(src, changed)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])
    assert not torch.allclose(before[:, :1], model(src.flip(1), tgt)[:, :1])


T5_PARTS = {
    ("encoder", "attention"): "0.SelfAttention",
    ("encoder", "mlp"): "1.DenseReluDense",
    ("decoder", "self_attention"): "0.SelfAttention",
    ("decoder", "cross_attention"): "1.EncDecAttention",
    ("decoder", "mlp"): "2.DenseReluDense",
}
T5_LEAVES = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "out_proj": "o",
    "fc1": "wi",
    "fc2": "wo",
}


def _t5_names(name: str) -> str:
    """The name a weight has in transformers."""
    stack, *part, leaf = name.split(".")
    if stack in ("embedding", "lm_head"):
        return "shared.weight"
    if stack.endswith("_norm"):
        return f"{stack.removesuffix('_norm')}.final_layer_norm.weight"
    if stack.endswith("_bias"):
        first = f"{stack.removesuffix('_bias')}.block.0.layer.0.SelfAttention"
        return f"{first}.relative_attention_bias.weight"
    inside = f"{stack}.block.{part[0]}.layer"
    if len(part) == 2:
        return f"{inside}.{int(part[1].removeprefix('norm')) - 1}.layer_norm.{leaf}"
    return f"{inside}.{T5_PARTS[stack, part[1]]}.{T5_LEAVES[part[2]]}.{leaf}"


def test_t5_computes_what_the_public_one_does() -> None:
    from transformers import T5Config, T5ForConditionalGeneration  # noqa: PLC0415 - seconds

    config = T5Config(
        vocab_size=37,
        d_model=48,
        d_kv=8,
        d_ff=96,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=6,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        decoder_start_token_id=0,
    )
    public = unsettle(T5ForConditionalGeneration(config).double())
    model = T5(T5_TINY).double().eval()
    state = public.state_dict()
    model.load_state_dict({name: state[_t5_names(name)] for name in model.state_dict()})
    src, tgt = tokens(2, 40), tokens(2, 30)
    want = public(input_ids=src, decoder_input_ids=tgt).logits
    # Its norms are computed in float32 whatever the model's dtype.
    torch.testing.assert_close(model(src, tgt), want, rtol=1e-5, atol=1e-5)


# ---- GNMT ----------------------------------------------------------------------------------------

GNMT_TINY = replace(gnmt.presets["gnmt-tiny"], vocab_size=37)


def test_gnmt_trains() -> None:
    model = GNMT(replace(GNMT_TINY, dropout=0.1))
    x = tokens(3, 6), tokens(3, 5)
    assert model(*x).shape == (3, 5, 37)
    check_trains(model, x, 37)


def test_gnmt_is_laid_out_as_published() -> None:
    model = GNMT(GNMT_TINY)
    lstms = [layer.lstm for layer in (*model.encoder, *model.decoder)]
    assert [lstm.bidirectional for lstm in lstms] == [True] + [False] * 7
    assert [lstm.input_size // 32 for lstm in lstms] == [1, 2, 1, 1, 1, 2, 2, 2]
    added = [layer.residual for layer in (*model.encoder, *model.decoder)]
    assert added == [False, False, True, True] * 2
    with pytest.raises(ValueError, match="num_encoder_layers is 1; allowed: 2 or more"):
        replace(GNMT_TINY, num_encoder_layers=1)


def test_gnmt_scores_do_not_depend_on_the_length_of_the_direction() -> None:
    model = GNMT(GNMT_TINY).eval()
    x = tokens(2, 6), tokens(2, 5)
    before = model(*x)
    model.attention.direction.data *= 3
    torch.testing.assert_close(model(*x), before)
    model.attention.length.data *= 30
    assert not torch.allclose(model(*x), before)


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "config", "size"),
    [
        (GPT, gpt.presets["gpt-small"], 124_439_808),
        (BERT, bert.presets["bert-base"], 109_514_298),
        (BERT, bert.presets["bert-large"], 335_174_458),
        (BERT, replace(bert.presets["bert-large"], pooler=True), 336_226_108),
        (T5, t5.presets["t5-small"], 60_506_624),
        (T5, t5.presets["t5-large"], 737_668_096),
        # NVIDIA's has the same layers and about 160 million; the vocabulary makes the difference.
        (GNMT, gnmt.presets["gnmt"], 160_015_617),
    ],
)
def test_presets_are_of_the_published_size(
    model: Callable[[Any], nn.Module], config: Any, size: int
) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in model(config).parameters()) == size


def test_a_model_on_the_meta_device_is_drawn_by_its_own_rule() -> None:
    """What Whale calls for a module that has no values must fill all of it."""
    for make, config in ((BERT, BERT_TINY), (T5, T5_TINY), (GNMT, GNMT_TINY)):
        model = make(config)
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            for parameter in own:
                nn.init.constant_(parameter, torch.nan)
            model._init_weights(module)
            assert all(p.isfinite().all() for p in own), module
