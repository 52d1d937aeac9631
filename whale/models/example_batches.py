"""Batches of random numbers for the presets, the same every time.

Place in the flow: what the registry's presets are captured, timed and verified with. All work on
the meta device, where they cost nothing: so they draw from torch's own generator, which is put back
as it was, rather than from one that is passed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whale.errors import ConfigError

IGNORED = -100
"""The label of a position that is not learned from: what `F.cross_entropy` leaves out."""

MASK_TOKEN = 103
"""[MASK] of BERT's published vocabulary."""

MASKED_SHARE = 0.15

Batch = tuple[Tensor, ...]


def _checked(seq: int | None, default: int, longest: int | None) -> int:
    """The sequence length, which the model must have positions for."""
    seq = default if seq is None else seq
    if seq < 1 or (longest is not None and seq > longest):
        allowed = "1 or more" if longest is None else f"1 to {longest}, the model's positions"
        raise ConfigError(
            f"sequence length {seq}; allowed: {allowed}", hint=f"{default} is the preset's own"
        )
    return seq


def next_tokens(
    rows: int, seq: int | None, *, vocab_size: int, default: int, longest: int
) -> Batch:
    """(tokens, the tokens after them)."""
    seq = _checked(seq, default, longest)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text = torch.randint(0, vocab_size, (rows, seq + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def masked_tokens(
    rows: int, seq: int | None, *, vocab_size: int, default: int, longest: int
) -> Batch:
    """(tokens, token types, labels): about 15 % of the tokens masked, at least one in each row."""
    seq = _checked(seq, default, longest)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text = torch.randint(0, vocab_size, (rows, seq))
        masked = torch.rand(rows, seq) < MASKED_SHARE
    masked[:, 0] = True
    types = (torch.arange(seq) >= seq // 2).long().expand(rows, seq).contiguous()
    return text.masked_fill(masked, MASK_TOKEN), types, text.masked_fill(~masked, IGNORED)


def translations(
    rows: int,
    seq: int | None,
    *,
    vocab_size: int,
    default: int,
    longest: int | None = None,
    packed: bool = False,
) -> Batch:
    """(source, target, the target's next tokens); unless packed, targets are of half to all `seq`.

    Rows then have different numbers of labels that count.
    """
    seq = _checked(seq, default, longest)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        src = torch.randint(0, vocab_size, (rows, seq))
        tgt = torch.randint(0, vocab_size, (rows, seq + 1))
        lengths = torch.randint((seq + 1) // 2, seq + 1, (rows, 1))
    labels = tgt[:, 1:].contiguous()
    if not packed:
        labels = labels.masked_fill(torch.arange(seq) >= lengths, IGNORED)
    return src, tgt[:, :-1].contiguous(), labels


def images(rows: int, seq: int | None, *, size: int, num_classes: int) -> Batch:
    """(images, classes)."""
    del seq  # an image has none
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pictures = torch.randn(rows, 3, size, size)
        return pictures, torch.randint(0, num_classes, (rows,))
