"""The vocabulary of odd models: every word a generator may use, by kind and name.

Place in the flow: `blocks_*`, `stems`, `glue` and `losses` add their words here, `generate` draws
from them. A block maps hidden states [B, T, D] to [B, T, D] and is plain torch, as users write it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

DIM = 12
LENGTH = 5
VOCAB = 11
CLASSES = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One word.

    Attributes:
        name: How a spec writes it.
        make: Builds it: a block from (pick, dim).
        easy: It must work under every layout: a refusal is a failure.
        random: It draws random numbers in training, so plain torch is no truth for its values.
        aux: It returns `(h, loss)`, and the model adds the loss to its own.
        mixes: A row's result depends on the other rows of its micro-batch.
        masked: It is called with the padding mask of the tokens too.
        says: What is odd in it.
    """

    name: str
    make: Callable[..., Any]
    easy: bool = False
    random: bool = False
    aux: bool = False
    mixes: bool = False
    masked: bool = False
    says: str = ""


BLOCKS: dict[str, Word] = {}


def block(name: str, **flags: Any) -> Callable[[Any], Any]:
    """Adds a block: a class whose constructor takes (pick, dim), or a function of the two."""

    def add(make: Callable[[random.Random, int], nn.Module]) -> Any:
        assert name not in BLOCKS, name
        says = (make.__doc__ or "").strip().partition("\n")[0]
        BLOCKS[name] = Word(name=name, make=make, says=says, **flags)
        return make

    return add
