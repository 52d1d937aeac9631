"""Generators: torch's, Python's and numpy's random state around a forward.

Place in the flow: around every stage's forward. What is drawn there is keyed (`nn.randomness`) and
moves no generator, so one that moved was asked by code nobody saw: an error, for its numbers
depend on the layout. The user's own states are the same after a step as before it.

Python's and numpy's generators cannot be keyed call by call. Where capture saw the model use them,
they are seeded for each micro-batch; whether the numbers have to do with the rows, capture knows.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from whale.errors import WhaleError

_SEED = 0x5748414C45
_FIRST_STEPS = 3
"""Steps in which Python's and numpy's states are compared: reading them takes some time."""

_fresh: list[torch.Tensor] = []


@contextmanager
def kept() -> Iterator[None]:
    """Restores all states at the end."""
    states, device = _states(), _devices()
    cpu = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(cpu)
        _set_devices(device)
        _restore(states)


@dataclass(slots=True)
class Asked:
    """What was drawn from Python's and numpy's generators."""

    moved: list[str] = field(default_factory=list)
    """Whose state moved."""
    end: Any = None
    """Their states after it."""


@contextmanager
def seeded(seed: int) -> Iterator[Asked]:
    """Python's and numpy's generators start at `seed` inside, and are as before afterwards."""
    before = _states()
    _seed(seed)
    start, asked = _states(), Asked()
    try:
        yield asked
        asked.end = _states()
        asked.moved = [name for name, state in asked.end.items() if state != start[name]]
    finally:
        _restore(before)


@contextmanager
def untouched(step: int, num_ranks: int) -> Iterator[None]:
    """Around a forward or a backward: torch's generators stay as they are, and nobody asks them.

    Inside, the CPU's is seeded with a number of our own, so that a seed set by the model shows.
    """
    generator = torch.default_generator
    device = _devices()
    states = _states() if num_ranks > 1 and abs(step) < _FIRST_STEPS else {}
    before = generator.get_state()
    generator.manual_seed(_SEED)
    if not _fresh:
        _fresh.append(generator.get_state())
    try:
        yield
        if not torch.equal(generator.get_state(), _fresh[0]) or _devices() != device:
            raise WhaleError(
                "the model draws random numbers from torch's generator that are not keyed by "
                "sample (a kernel of its own, code that capture did not see, a backward of its "
                "own, or a seed set in its forward), so they depend on the layout",
                hint="draw them with torch's functions (torch.rand, F.dropout, ...) in the forward "
                "of a module, and set no seed there",
            )
        moved = [name for name, state in states.items() if state != _states()[name]]
        if moved:
            raise WhaleError(
                f"the model draws from {' and '.join(moved)}, which cannot be keyed by sample, in "
                "code that capture did not see",
                hint="draw with torch's functions",
            )
    finally:
        generator.set_state(before)
        _set_devices(device)


def check_unseeded() -> None:
    """Raises where the model set a seed inside its forward, and now draws."""
    if torch.default_generator.initial_seed() != _SEED:
        raise WhaleError(
            "the model sets torch's seed in its forward and draws numbers, which Whale keys by "
            "step and row instead",
            hint="keep fixed random numbers in a buffer, made once",
        )


def _devices() -> list[tuple[int, int]]:
    """Seeds and offsets of the GPUs' generators, where they are in use."""
    if not torch.cuda.is_initialized():
        return []
    found = torch.cuda.default_generators
    return [(g.initial_seed(), g.get_offset()) for g in found]


def _set_devices(states: list[tuple[int, int]]) -> None:
    if states and states != _devices():
        for generator, (seed, offset) in zip(torch.cuda.default_generators, states, strict=True):
            generator.manual_seed(seed)
            generator.set_offset(offset)


def _states() -> dict[str, Any]:
    found: dict[str, Any] = {"Python's random": random.getstate()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, place, has_gauss, gauss = numpy.random.get_state()
        found["numpy.random"] = (kind, tuple(keys.tolist()), place, has_gauss, gauss)
    return found


def _restore(states: dict[str, Any]) -> None:
    random.setstate(states["Python's random"])
    if "numpy.random" in states:
        sys.modules["numpy"].random.set_state(states["numpy.random"])


def _seed(seed: int) -> None:
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
