"""Batches for the models of the Hugging Face shelf: small, and the same for every seed.

Place in the flow: used by `benchmarks.hf_models`.
"""

from __future__ import annotations

import torch
from torch import Tensor

VOCAB = 40
LENGTH = 6

Batch = dict[str, Tensor]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


def _ids(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(4, VOCAB, shape, generator=generator)


def causal(seed: int, rows: int) -> Batch:
    """Tokens, and the same as labels."""
    tokens = _ids(_generator(seed), rows, LENGTH)
    return {"input_ids": tokens, "labels": tokens.clone()}


def masked(seed: int, rows: int) -> Batch:
    """Tokens of different lengths, and labels of their own."""
    generator = _generator(seed)
    lengths = torch.randint(3, LENGTH + 1, (rows, 1), generator=generator)
    return {
        "input_ids": _ids(generator, rows, LENGTH),
        "attention_mask": (torch.arange(LENGTH) < lengths).long(),
        "labels": _ids(generator, rows, LENGTH),
    }


def translated(seed: int, rows: int) -> Batch:
    """Source tokens and target labels."""
    generator = _generator(seed)
    return {"input_ids": _ids(generator, rows, 5), "labels": _ids(generator, rows, LENGTH)}


def images(seed: int, rows: int, size: int = 16) -> Batch:
    """Pictures and their classes."""
    generator = _generator(seed)
    pixels = torch.randn(rows, 3, size, size, generator=generator, dtype=torch.float64)
    return {
        "pixel_values": pixels,
        "labels": torch.randint(0, 3, (rows,), generator=generator),
    }


def waves(seed: int, rows: int) -> Batch:
    """Sounds and their classes."""
    generator = _generator(seed)
    values = torch.randn(rows, 200, generator=generator, dtype=torch.float64)
    return {"input_values": values, "labels": torch.randint(0, 3, (rows,), generator=generator)}


def spoken(seed: int, rows: int, shape: tuple[int, int] = (8, 12)) -> Batch:
    """Spectra and target labels."""
    generator = _generator(seed)
    values = torch.randn(rows, *shape, generator=generator, dtype=torch.float64)
    return {"input_features": values, "labels": _ids(generator, rows, LENGTH)}
