"""The wire that the settings ask for, as the plan says it.

Place in the flow: read by `make_plan`.
"""

from __future__ import annotations

from whale.config import Config
from whale.ir.wire import Wire

_TOKENS = {"": "", "bf16": "bfloat16", "fp16": "float16"}


def wire_of(config: Config) -> Wire:
    """Of `communication.*`."""
    asked = config.communication
    gradients = "float16" if asked.fp16 else "bfloat16" if asked.bf16 else ""
    return Wire(
        gradients=gradients,
        room=asked.fp16_scale if asked.fp16 else 1,
        tokens=_TOKENS[asked.token_dtype],
        symmetric=asked.symmetric_memory,
        divides=asked.gradients_reduce_method == "mean",
    )
