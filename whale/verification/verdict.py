"""Verdict: what the verifier found, as a value that prints as a report.

Place in the flow: the end of `wh.verify`; `whale verify` prints it and exits by it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """One tensor of one rank that differs from one device.

    Attributes:
        kind: `loss`, `gradient`, `weight`, `buffer`, `state` (the optimizer's), `evaluation`,
            `output` or `mask`.
        tensor: Its name in the user's model.
        rank: Who holds it; -1 where the one-device run itself is at odds with plain torch.
        step: From 1; 0 is the state before the first step.
        error: The greatest difference, relative to the tensor's greatest entry.
        location: Where in the whole tensor it is greatest.
        check: Which check found it; see `Verdict.checks`.
    """

    kind: str
    tensor: str
    rank: int
    step: int
    error: float
    location: tuple[int, ...] = ()
    check: str = "steps"

    def __str__(self) -> str:
        when = f"after step {self.step}" if self.step else "before the first step"
        if self.kind in ("loss", "gradient", "output") and self.step:
            when = f"of step {self.step}"
        what = self.kind if self.tensor == "loss" else f"{self.kind} {self.tensor}"
        who = f"rank {self.rank}" if self.rank >= 0 else "one device"
        where = f" at {list(self.location)}" if self.location else ""
        check = "" if self.check == "steps" else f" ({self.check})"
        return f"{what} on {who} {when}{check}: error {self.error:.3g}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at, or was not.

    Attributes:
        name: Such as `evaluate`.
        status: `equal`, `not equal`, `refused` (Whale said no, loudly) or `not checked`.
        worst_error: The greatest error; in autocast one of norms, of a few percent when equal.
        note: What it compares, why Whale refused, or why it was not checked.
    """

    name: str
    status: str
    worst_error: float = 0.0
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a plan computes what one device computes.

    Attributes:
        ok: Every tensor agrees within the tolerance, and every rank finished.
        worst_error: The largest error of all, also when `ok`.
        tolerance: What was allowed.
        mismatches: All that is above it, worst first.
        checks: What was looked at, what was refused, and what was not looked at and why.
        failure: What stopped a rank: it raised, died or hung; empty otherwise.
        num_ranks: Processes that ran the plan.
        num_tensors: Parameters and buffers compared.
        reference: What "one device" was.
        folded: What was reduced to fit, or empty.
        seconds: How long it took.
        dtype: In what was computed.
    """

    ok: bool
    worst_error: float
    tolerance: float
    mismatches: tuple[Mismatch, ...] = ()
    failure: str = ""
    num_ranks: int = 1
    num_tensors: int = 0
    reference: str = ""
    folded: str = ""
    seconds: float = 0.0
    checks: tuple[Check, ...] = ()
    dtype: str = "float64"

    def __bool__(self) -> bool:
        return self.ok

    @property
    def first(self) -> Mismatch | None:
        """The worst mismatch of the earliest moment, which is nearest to the cause."""
        # What one rank computes: the mask, the loss, what follows from it; then what reads that.
        order = ("mask", "loss", "output", "gradient", "weight", "buffer", "state", "evaluation")
        moment = {"weight": 4, "buffer": 4}
        found = sorted(
            self.mismatches,
            key=lambda m: (
                m.check == "autocast",  # a Step of its own, from the first weights
                m.step,
                moment.get(m.kind, order.index(m.kind)),
                -m.error,
                order.index(m.kind),
            ),
        )
        return found[0] if found else None

    @property
    def line(self) -> str:
        """The verdict in one line."""
        if self.ok:
            return (
                f"equal: {self.num_tensors} tensors on {self.num_ranks} ranks, worst error "
                f"{self.worst_error:.2g} (tolerance {self.tolerance:.0e})"
            )
        if self.failure:
            return f"not equal: {self.failure.splitlines()[0]}"
        return f"not equal: {self.mismatches[0]} (tolerance {self.tolerance:.0e})"

    def __str__(self) -> str:
        lines = [self.line, f"  reference: {self.reference}"]
        if self.folded:
            lines.append(f"  folded: {self.folded}")
        lines += [f"  {text}" for text in self.failure.splitlines()[1:]]
        if self.mismatches:
            ranks = sorted({m.rank for m in self.mismatches if m.rank >= 0})
            tensors = {(m.kind, m.tensor) for m in self.mismatches}
            lines.append(f"  first seen: {self.first}")
            lines.append(f"  {len(tensors)} tensors differ, on ranks {ranks}; worst first:")
            lines += [f"    {m}" for m in self.mismatches[:_SHOWN]]
            if len(self.mismatches) > _SHOWN:
                lines.append(f"    ... and {len(self.mismatches) - _SHOWN} more")
        for status in ("equal", "not equal"):
            names = [c.name for c in self.checks if c.status == status]
            if names:
                lines.append(f"  {status}: {', '.join(names)}")
        notes: dict[str, list[str]] = {}
        for c in self.checks:
            if c.status in ("refused", "not checked"):
                notes.setdefault(f"({c.note})", []).append(f"{c.status}: {c.name}")
        for note, found in notes.items():
            rest = [text.partition(": ")[2] for text in found[1:]]
            lines.append(f"  {', '.join([found[0], *rest])} {note}")
        lines.append(f"  {self.seconds:.1f} s")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; JSON has no infinite number, so such an error is the string `inf`."""
        data = asdict(self)
        data["worst_error"] = _number(self.worst_error)
        data["mismatches"] = [
            {**asdict(m), "error": _number(m.error), "location": list(m.location)}
            for m in self.mismatches
        ]
        data["checks"] = [{**asdict(c), "worst_error": _number(c.worst_error)} for c in self.checks]
        return data


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"
