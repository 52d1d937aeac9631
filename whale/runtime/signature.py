"""Signature: what of a batch may change the program, beside its number of rows.

Place in the flow: read off every batch a Step gets. All ranks must have the same one; a pipeline
traced for one signature is traced again for another, because the glue between stages holds sizes,
dtypes and Python values of the batch as constants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from whale.errors import WhaleError
from whale.ir.precision import Precision
from whale.runtime import batch as batches
from whale.runtime.batch import LocalBatch
from whale.runtime.fingerprint import combined, fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A tensor of the batch: `shape` is without the rows where it has rows."""

    name: str
    dtype: torch.dtype
    batched: bool
    shape: tuple[int, ...]

    def __str__(self) -> str:
        rows = "rows, " if self.batched else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name}: {dtype}[{rows}{', '.join(map(str, self.shape))}]".replace(", ]", "]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """All that the program for a batch depends on, but its rows and the values of its tensors."""

    leaves: tuple[Leaf, ...]
    constants: tuple[tuple[str, str], ...]
    autocast: torch.dtype | None
    training: bool

    def lines(self) -> dict[str, str]:
        """The same in words, for messages and for comparison between ranks."""
        return {
            "tensors": "; ".join(map(str, self.leaves)),
            "values": "; ".join(f"{name}={value}" for name, value in self.constants),
            "autocast": str(self.autocast).removeprefix("torch."),
        }

    def example(self) -> Any:
        """(rows, tensors): empty tensors of these shapes in which only rows look like rows."""
        taken = {leaf.shape[0] for leaf in self.leaves if not leaf.batched and leaf.shape}
        rows = next(n for n in range(2, 3 + len(taken)) if n not in taken)
        return [
            torch.empty(
                (rows, *leaf.shape) if leaf.batched else leaf.shape,
                dtype=leaf.dtype,
                device="meta",
            )
            for leaf in self.leaves
        ]


def named_leaves(batch: Any) -> Iterator[tuple[str, Any]]:
    """Every leaf of a batch, tensor or not, by where it stands (`[0]`, `input_ids`, `x.mask`)."""
    yield from _named("", batch)


def _named(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(f"{name}.{key}" if name else str(key), item)
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _named(f"{name}[{index}]", item)
    else:
        yield name, value


def signature_of(
    batch: LocalBatch, *, device: torch.device, training: bool, autocast: torch.dtype | None
) -> Signature:
    """The signature of a batch as it is at hand: every rank's part of one batch has the same."""
    leaves, constants = [], []
    flags = iter(batch.batched)
    for name, value in named_leaves(batch.data):
        if not isinstance(value, torch.Tensor):
            constants.append((name, _constant(name, value)))
            continue
        batched = next(flags)
        shape = tuple(value.shape[1:] if batched else value.shape)
        leaves.append(Leaf(name=name, dtype=value.dtype, batched=batched, shape=shape))
    return Signature(
        leaves=tuple(leaves), constants=tuple(constants), autocast=autocast, training=training
    )


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def _constant(name: str, value: Any) -> str:
    if value is None or isinstance(value, _PLAIN):
        return repr(value)
    hidden = _hidden_tensors(value)
    if hidden:
        raise WhaleError(
            f"the batch holds a {type(value).__name__} at {name or 'its top'} with {hidden} "
            "inside, whose rows Whale does not see",
            hint="a batch is made of tensors in tuples, lists and mappings; unpack it there, and "
            "turn arrays into tensors",
        )
    text = repr(value)
    # An address is another one on every rank and every step.
    return type(value).__qualname__ if " at 0x" in text else text[:200]


def _hidden_tensors(value: Any) -> str | None:
    """What of an object looks like rows of the batch: a tensor or an array."""
    shape = getattr(value, "shape", ())
    if type(value).__module__ == "numpy" and shape:
        return f"an array of shape {shape}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    else:
        fields = getattr(value, "__dict__", {}) or {}
    for field, item in fields.items():
        for found in batches.leaves_anywhere(item):
            return f"a tensor of shape {tuple(found.shape)} (`{field}`)"
    return None


def content(batch: Any) -> int:
    """A hash of all values of a batch, the same on whatever device it lies."""
    parts = [
        fingerprint(value) if isinstance(value, torch.Tensor) else _words(name, value)
        for name, value in named_leaves(batch)
    ]
    return combined(parts)


def _words(name: str, value: Any) -> int:
    return combined(list(f"{name}={_constant(name, value)}".encode()))


# ---- autocast ------------------------------------------------------------------------------------


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast computes in on this device, as the caller set it; None where it is off."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


Context = Callable[[], AbstractContextManager[Any]]


def autocast(device: torch.device, dtype: torch.dtype | None) -> Context:
    """Autocast as the caller had it, to be entered around forwards only.

    Backward, sums and the update run without, as they do in a loop that leaves autocast before
    `loss.backward()`. Weights cast before an update are not kept for after it.
    """
    if dtype is None:
        return nullcontext

    @contextmanager
    def cast() -> Iterator[None]:
        with torch.autocast(device.type, dtype=dtype):
            yield
        torch.clear_autocast_cache()

    return cast


def autocast_of(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Around all that looks at the user's code before it trains: as the plan will run it."""
    if not precision.autocast:
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision.autocast))


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Around all that is no forward."""
    return torch.autocast(device.type, enabled=False)
