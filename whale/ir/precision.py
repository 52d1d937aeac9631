"""Precision: which dtypes a plan computes in, keeps and sums, as a value in the plan.

Place in the flow: made by the planner from `amp.*`; capture, prices, the runtime and verify read it
off the plan, so that all of them speak of the same dtypes.

| `parameters` | `master` | what a rank keeps of a parameter in half precision |
|---|---|---|
| "" | | the parameter as the model has it |
| bfloat16 | float32 | a float32 copy, which is updated; what is computed with is that, rounded |
| bfloat16 | split | the same 32 bits in two halves: the upper one is computed with |
| bfloat16 | stochastic | the parameter alone; its update is rounded up or down by chance |
| bfloat16 | none | the parameter alone, rounded to the nearest |
"""

from __future__ import annotations

from dataclasses import dataclass

from whale.errors import PlanError

HALVES = ("bfloat16", "float16")
MASTERS = ("float32", "split", "stochastic", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """All dtypes that are not the model's own."""

    autocast: str = ""
    """What torch's autocast computes in; empty: it is off, unless the script turns it on."""
    parameters: str = ""
    """What parameters and floating inputs are, but those of batch norms; empty: as they are."""
    master: str = "float32"
    """How what is updated is kept, where parameters are in half precision."""
    gradients: str = ""
    """What gradients are added up and summed in; empty: in the dtype of their parameter."""
    loss_scale: float = 0.0
    """What the loss is multiplied with before the backward; 0: with nothing."""
    dynamic: bool = False
    """Whether the scale is halved where a gradient overflows, and grows where none does."""

    @property
    def half(self) -> str:
        """The half precision that most is computed in; empty: none."""
        return self.parameters or self.autocast

    def kept(self, dtype: str) -> str:
        """The dtype in which a parameter of `dtype` is kept."""
        cast = bool(self.parameters) and dtype == self.parameters
        return "float32" if cast and self.master == "float32" else dtype

    def summed(self, dtype: str) -> str:
        """The dtype in which the gradients of a parameter of `dtype` are added up."""
        return self.gradients if self.gradients and dtype == self.parameters else dtype

    def check(self) -> None:
        """Refuses what means nothing."""
        dtypes = {"autocast": self.autocast, "parameters": self.parameters}
        if self.gradients not in ("", "float32"):
            raise PlanError(
                f"the plan's precision has gradients = {self.gradients!r}; allowed: '' or float32",
                hint="make the plan again with amp.gradients",
            )
        for name, dtype in dtypes.items():
            if dtype not in ("", *HALVES):
                raise PlanError(
                    f"the plan's precision has {name} = {dtype!r}; allowed: '' or "
                    f"{', '.join(HALVES)}",
                    hint="make the plan again with amp.level and amp.dtype",
                )
        if self.master not in MASTERS or (
            self.master == "split" and self.parameters not in ("", "bfloat16")
        ):
            raise PlanError(
                f"the plan's precision has master = {self.master!r} for parameters in "
                f"{self.parameters!r}; allowed: {', '.join(MASTERS)}, split for bfloat16 alone",
                hint="make the plan again with amp.master",
            )
        if not 0.0 <= self.loss_scale < float("inf") or (self.dynamic and not self.loss_scale):
            raise PlanError(
                f"the plan's precision has loss_scale = {self.loss_scale}, dynamic = "
                f"{self.dynamic}; allowed: a finite number from 0 on, above 0 where it is dynamic",
                hint="make the plan again with amp.loss_scale",
            )


PLAIN = Precision()
