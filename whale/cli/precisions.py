"""Precisions: what `--precision` and presets name, as settings and as the dtype they compute in.

Place in the flow: read by `whale plan` and by what captures a model for it. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """One name."""

    computes: str
    """The dtype of products, as the table of device types names it."""
    model: str = "float32"
    """The dtype that the model itself is in."""
    settings: Mapping[str, Any] = field(default_factory=dict)


def _masters(dtype: str, master: str) -> Named:
    settings = {"amp.level": "O2", "amp.dtype": dtype, "amp.master": master}
    return Named(computes=dtype, settings=settings)


def _autocast(dtype: str) -> Named:
    return Named(computes=dtype, settings={"amp.level": "O1", "amp.dtype": dtype})


PRECISIONS: Mapping[str, Named] = {
    "fp32": Named(computes="float32"),
    "tf32": Named(computes="tf32"),
    "bf16": Named(computes="bfloat16", model="bfloat16"),
    "fp16": Named(computes="float16", model="float16"),
    "amp-bf16": _autocast("bfloat16"),
    "amp-fp16": _autocast("float16"),
    "bf16-master": _masters("bfloat16", "float32"),
    "bf16-split": _masters("bfloat16", "split"),
    "bf16-stochastic": _masters("bfloat16", "stochastic"),
    "fp16-master": _masters("float16", "float32"),
}
"""Half precision alone, under autocast, or with what is updated kept apart."""


def same_tensors(one: str, other: str) -> bool:
    """Whether two names make the same graph: TF32 is only how float32 products are computed."""
    return one == other or {one, other} == {"fp32", "tf32"}
