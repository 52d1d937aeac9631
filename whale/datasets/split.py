"""Which samples are held out: decided by a hash of a sample's name, so it never changes.

Place in the flow: below every loader here and the scripts that build the shipped data. A hash needs
no list to keep beside the data and gives the same answer whatever the order of the samples.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from whale.errors import WhaleError

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")


def fraction_of(key: str) -> float:
    """A number in [0, 1) that depends on nothing but `key`, evenly spread over keys."""
    digest = hashlib.sha256(key.encode("utf-8")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def held_out(key: str, share: float = 0.1) -> bool:
    """Whether the sample of this name is in the held-out `share`."""
    return fraction_of(key) < share


def checked_split(split: str | None) -> None:
    """Refuses a split that is neither None (all samples) nor one of `SPLITS`."""
    if split is not None and split not in SPLITS:
        raise WhaleError(
            f"split {split!r}; there are {', '.join(map(repr, SPLITS))}, and None for both",
            hint='train on split="train" and report figures of split="held_out"',
        )
