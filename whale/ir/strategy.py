"""What the user wrote: scopes, as values.

A module's tag is the tuple of scopes it was built in, outermost first.

Place in the flow: made by `whale.annotations`, carried by modules, read by the planner. Paper
section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from whale.errors import AnnotationError

KINDS = ("replicate", "split", "stage", "pipeline")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """One use of a primitive. `uid` tells two uses apart; each use is one TaskGraph."""

    kind: str
    uid: int
    where: str
    device_count: int | None = None
    ranks: tuple[int, ...] | None = None
    name: str | None = None
    num_micro_batch: int | None = None
    schedule: str | None = None

    @property
    def count(self) -> int | None:
        """How many devices were asked for, by number or by name; None when left to the planner."""
        return len(self.ranks) if self.ranks is not None else self.device_count

    @property
    def shards(self) -> bool:
        """Whether it decides how a module is computed, not only where."""
        return self.kind in ("replicate", "split")

    def __str__(self) -> str:
        parts = [str(self.count)] if self.count is not None else []
        if self.name:
            parts.append(f"name={self.name!r}")
        return f"{self.kind}({', '.join(parts)})"


Tag = tuple[Scope, ...]


def check_nesting(tag: Tag) -> None:
    """Refuses a nesting that means nothing; the last scope of `tag` is the one being entered."""
    *outer, inner = tag
    kinds = [scope.kind for scope in outer]

    def refuse(why: str, hint: str) -> None:
        path = " > ".join(str(scope) for scope in tag)
        raise AnnotationError(f"{path}: {why}", hint=hint, where=inner.where)

    if inner.kind in kinds and inner.kind in ("split", "pipeline", "stage"):
        refuse(
            f"`{inner.kind}` inside `{inner.kind}` (opened at "
            f"{outer[kinds.index(inner.kind)].where})",
            f"close the outer `{inner.kind}` first; allowed inside it: "
            + {"split": "nothing", "stage": "replicate, split", "pipeline": "stage"}[inner.kind],
        )
    if "split" in kinds:
        refuse(
            f"`{inner.kind}` inside `split`: a sharded TaskGraph cannot be divided again",
            "put the `split` innermost: replicate > split, stage > split",
        )
    if inner.kind == "pipeline" and "stage" in kinds:
        refuse("`pipeline` inside `stage`", "a pipeline encloses its stages: pipeline > stage")
    if inner.kind == "replicate" and kinds and kinds[-1] == "replicate":
        refuse(
            "`replicate` directly inside `replicate`",
            "one `replicate` with the product of both device counts says the same",
        )
