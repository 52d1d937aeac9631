"""The models of the parity matrix: small, in float64, with the same weights and batches every time.

Place in the flow: beside it. `reference.py` trains a `Case` in one process, Whale trains it under
some plan, and a test compares them. A rank finds a case by its name: none has to be pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.parity.narrow import Narrow
from whale.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from whale.models.gpt import GPT, GPTConfig
from whale.models.resnet import resnet_tiny
from whale.models.seq2seq_lstm import Seq2SeqLSTM, Seq2SeqLSTMConfig

Batch = tuple[Tensor, ...] | dict[str, Tensor]

VOCAB_SIZE = 37
SEQ_LEN = 7
SRC_LEN = 6
DIM = 24
DEPTH = 2
NUM_HEADS = 6  # 4:2 and 3:2:1 are uneven cuts
NUM_CLASSES = 5
IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with its data.

    Attributes:
        name: what `case` finds it by.
        build: makes the model, in training mode, always with the same weights.
        batch: makes the global batch of a seed and a number of rows. With `loss` it is a tuple
            whose last element is the target; without, a mapping that holds `labels`. Every row has
            a label that counts, so that no micro-batch is without one.
        loss: mean loss of (output, target), which also takes `reduction="sum"`; None if the model
            returns its own mean.
        count: how many labels of a batch the mean is over.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[..., Tensor] | None
    count: Callable[[Batch], int]

    @property
    def outputs_loss(self) -> bool:
        """Whether the model returns its loss, as Hugging Face models do."""
        return self.loss is None


def case(name: str, *, dropout: float = 0.0) -> Case:
    """The case of this name; `dropout` goes to every dropout of the model that has any."""
    return _CASES[name](dropout) if name in _CASES else _BESIDE[name]()


def flat_cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy of [B, T, V] logits over the labels [B, T] that are not ignored."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction=reduction)


@contextmanager
def _float64_from_seed() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_default_dtype(before)


def _build(make: Callable[[], nn.Module]) -> nn.Module:
    with _float64_from_seed():
        return make().train()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


def _tokens(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(1, VOCAB_SIZE, shape, generator=generator)


def _ignore_some(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Keeps a share of the labels that differs from row to row, the last one always."""
    share = torch.rand(labels.shape[0], 1, generator=generator)
    ignored = torch.rand(labels.shape, generator=generator) > share
    ignored[:, -1] = False
    return labels.masked_fill(ignored, IGNORED)


def _count_labels(batch: Batch, *, shift: int = 0) -> int:
    labels = batch["labels"] if isinstance(batch, Mapping) else batch[-1]
    return int((labels[..., shift:] != IGNORED).sum()) if labels.dim() > 1 else labels.numel()


def _lm_batch(seed: int, rows: int) -> Batch:
    generator = _generator(seed)
    labels = _ignore_some(_tokens(generator, rows, SEQ_LEN), generator)
    return _tokens(generator, rows, SEQ_LEN), labels


def _seq2seq_batch(seed: int, rows: int) -> Batch:
    generator = _generator(seed)
    src = _tokens(generator, rows, SRC_LEN)
    return src, *_lm_batch(seed, rows)


def _image_batch(seed: int, rows: int) -> Batch:
    generator = _generator(seed)
    images = torch.randn(rows, 3, 16, 16, generator=generator, dtype=torch.float64)
    return images, torch.randint(0, NUM_CLASSES, (rows,), generator=generator)


def _bert_batch(seed: int, rows: int) -> Batch:
    """Rows of different length, padded on the right; the first row of a batch is always padded."""
    generator = _generator(seed)
    lengths = torch.randint(2, SEQ_LEN + 1, (rows, 1), generator=generator)
    lengths[0] = SEQ_LEN - 2
    mask = torch.arange(SEQ_LEN) < lengths
    labels = _ignore_some(_tokens(generator, rows, SEQ_LEN), generator)
    labels[:, 0] = _tokens(generator, rows)
    return {
        "input_ids": _tokens(generator, rows, SEQ_LEN).masked_fill(~mask, 0),
        "attention_mask": mask.long(),
        "labels": labels.masked_fill(~mask, IGNORED),
    }


def _gpt2_batch(seed: int, rows: int) -> Batch:
    generator = _generator(seed)
    tokens = _tokens(generator, rows, SEQ_LEN)
    return {"input_ids": tokens, "labels": _ignore_some(tokens, generator)}


def _gpt(dropout: float) -> Case:
    config = GPTConfig(
        vocab_size=VOCAB_SIZE,
        max_seq_len=SEQ_LEN,
        dim=DIM,
        num_layers=DEPTH,
        num_heads=NUM_HEADS,
        dropout=dropout,
    )
    return Case(
        name="gpt",
        build=partial(_build, partial(GPT, config)),
        batch=_lm_batch,
        loss=flat_cross_entropy,
        count=_count_labels,
    )


def _encdec(dropout: float) -> Case:
    config = EncoderDecoderConfig(
        vocab_size=VOCAB_SIZE,
        max_seq_len=SEQ_LEN,
        dim=DIM,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_heads=NUM_HEADS,
        dropout=dropout,
        share_embeddings=True,
    )
    return Case(
        name="encdec",
        build=partial(_build, partial(EncoderDecoder, config)),
        batch=_seq2seq_batch,
        loss=flat_cross_entropy,
        count=_count_labels,
    )


def _resnet(dropout: float) -> Case:
    del dropout  # it has none
    return Case(
        name="resnet",
        build=partial(_build, partial(resnet_tiny, NUM_CLASSES)),
        batch=_image_batch,
        loss=F.cross_entropy,
        count=_count_labels,
    )


def _lstm(dropout: float) -> Case:
    config = Seq2SeqLSTMConfig(
        vocab_size=VOCAB_SIZE,
        dim=DIM,
        num_encoder_layers=2,
        num_decoder_layers=2,
        dropout=dropout,
    )
    return Case(
        name="lstm",
        build=partial(_build, partial(Seq2SeqLSTM, config)),
        batch=_seq2seq_batch,
        loss=flat_cross_entropy,
        count=_count_labels,
    )


def _vector_batch(seed: int, rows: int) -> Batch:
    generator = _generator(seed)
    sizes = (5, 4)
    read, target = (
        torch.randn(rows, 3, size, generator=generator, dtype=torch.float64) for size in sizes
    )
    return read, target


def _narrow() -> Case:
    return Case(
        name="narrow",
        build=partial(_build, Narrow),
        batch=_vector_batch,
        loss=F.mse_loss,
        count=lambda batch: batch[-1].numel(),
    )


def _make_bert(dropout: float) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM  # noqa: PLC0415 - seconds to import

    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=DIM,
        num_hidden_layers=DEPTH,
        num_attention_heads=NUM_HEADS,
        intermediate_size=4 * DIM,
        max_position_embeddings=SEQ_LEN + 1,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForMaskedLM(config)


def _hf_bert(dropout: float) -> Case:
    return Case(
        name="hf_bert",
        build=partial(_build, partial(_make_bert, dropout)),
        batch=_bert_batch,
        loss=None,
        count=_count_labels,
    )


def _causal_loss(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    """Hugging Face's causal loss less its cast to float32, which would hide errors above 1e-7."""
    del kwargs
    labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, vocab_size), labels.view(-1), ignore_index=IGNORED)


def _make_gpt2(dropout: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 - seconds to import

    config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_positions=SEQ_LEN + 1,
        n_embd=DIM,
        n_layer=DEPTH,
        n_head=NUM_HEADS,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    model.loss_function = _causal_loss
    return model


def _hf_gpt2(dropout: float) -> Case:
    return Case(
        name="hf_gpt2",
        build=partial(_build, partial(_make_gpt2, dropout)),
        batch=_gpt2_batch,
        loss=None,
        count=partial(_count_labels, shift=1),
    )


_CASES: dict[str, Callable[[float], Case]] = {
    "gpt": _gpt,
    "encdec": _encdec,
    "resnet": _resnet,
    "lstm": _lstm,
    "hf_bert": _hf_bert,
    "hf_gpt2": _hf_gpt2,
}

# Not of the matrix: made for one thing.
_BESIDE: dict[str, Callable[[], Case]] = {"narrow": _narrow}

CASE_NAMES: tuple[str, ...] = tuple(_CASES)
