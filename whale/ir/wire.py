"""Wire: what gradients and tokens travel in, as a value in the plan.

Place in the flow: made by the planner from `communication.*`; prices, the runtime and verify read
it off the plan, so that what is predicted is what travels.
"""

from __future__ import annotations

from dataclasses import dataclass

from whale.errors import PlanError
from whale.ir.precision import HALVES


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Dtypes on the way, and which way."""

    gradients: str = ""
    """What sums of gradients travel in; empty: in the dtype they are added up in."""
    room: int = 1
    """How many times the largest float16 gradient of a bucket must still be a float16."""
    tokens: str = ""
    """What tokens travel to their experts in; empty: in the dtype they have."""
    symmetric: bool = False
    """Whether groups inside a node meet in memory that their GPUs share."""
    divides: bool = True
    """Whether summed gradients are divided by the count of the batch."""

    def check(self) -> None:
        """Refuses what means nothing."""
        for name, dtype in (("gradients", self.gradients), ("tokens", self.tokens)):
            if dtype not in ("", *HALVES):
                raise PlanError(
                    f"the plan's wire has {name} = {dtype!r}; allowed: '' or {', '.join(HALVES)}",
                    hint="make the plan again with communication.*",
                )
        if self.room < 1:
            raise PlanError(
                f"the plan's wire has room = {self.room}; allowed: from 1 on",
                hint="make the plan again with communication.fp16_scale",
            )
