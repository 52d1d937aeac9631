"""Schedule and Action: the order in which every device group of a pipeline works, as plain data.

Place in the flow: the planner chooses a Schedule, `planner/schedules.py` expands it to actions per
device group, `ir/deadlock.py` checks those, and the executor, the simulator and the viewer read the
same lists. A Schedule is stored per role: micro-batches are generated, never listed, so its size
grows with the number of stages only (unless a user hands in explicit `orders`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whale.errors import PlanError, ScheduleError
from whale.ir.codec import from_plain, to_plain
from whale.ir.text import dumps, loads

COMPUTE_KINDS = ("F", "B", "I", "W")
SEND_KINDS = ("SF", "SB")
RECEIVE_KINDS = ("RF", "RB")

_TEXT = re.compile(r"(\d+)(?:([FBIW])(\d+)|(S[FB])(\d+)>(\d+)|(R[FB])(\d+)<(\d+))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing a device group does for one stage and one micro-batch.

    | kind | meaning                                             | text     |
    |------|-----------------------------------------------------|----------|
    | `F`  | forward                                             | `2F0`    |
    | `B`  | full backward                                       | `2B0`    |
    | `I`  | backward for the gradients of the inputs only       | `2I0`    |
    | `W`  | the weight gradients that `I` put off               | `2W0`    |
    | `SF` | send the activations of `stage` to its consumer     | `0SF3>2` |
    | `RF` | receive activations for `stage` from its producer   | `2RF3<0` |
    | `SB` | send the gradients of `stage`'s inputs to the producer | `2SB3>0` |
    | `RB` | receive gradients of `stage`'s outputs from a consumer | `0RB3<2` |

    `peer` is the other stage of a message and None for a compute.
    """

    kind: str
    stage: int
    micro_batch: int
    peer: int | None = None

    def __post_init__(self) -> None:
        kinds = COMPUTE_KINDS if self.peer is None else SEND_KINDS + RECEIVE_KINDS
        if self.kind not in kinds:
            raise ScheduleError(
                f"action kind {self.kind!r} with peer {self.peer}, allowed: {', '.join(kinds)}",
                hint="a message names the other stage as its peer, a compute has none",
            )

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind}{self.micro_batch}"
        if self.peer is None:
            return text
        return f"{text}{'>' if self.is_send else '<'}{self.peer}"

    @staticmethod
    def parse(text: str) -> Action:
        """The action whose `str` is `text`."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an action",
                hint="write stage, kind, micro-batch: 2F0, 2B0, 2I0 or 2W0; with the other stage "
                "for a message: 0SF3>2, 2RF3<0, 2SB3>0 or 0RB3<2",
            )
        stage, *rest = (part for part in match.groups() if part is not None)
        return Action(
            kind=rest[0],
            stage=int(stage),
            micro_batch=int(rest[1]),
            peer=int(rest[2]) if len(rest) == 3 else None,
        )

    @property
    def is_compute(self) -> bool:
        """Whether this is `F`, `B`, `I` or `W`."""
        return self.kind in COMPUTE_KINDS

    @property
    def is_send(self) -> bool:
        """Whether this is `SF` or `SB`."""
        return self.kind in SEND_KINDS

    @property
    def is_receive(self) -> bool:
        """Whether this is `RF` or `RB`."""
        return self.kind in RECEIVE_KINDS

    @property
    def mate(self) -> Action:
        """The other end of this message: `0SF3>2` and `2RF3<0` are each other's mate."""
        assert self.peer is not None, f"{self} is a compute"
        other = ("R" if self.is_send else "S") + self.kind[1]
        return Action(kind=other, stage=self.peer, micro_batch=self.micro_batch, peer=self.stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Who feeds whom, indexed by stage: what a pass over many actions looks up (`Schedule.links`).

    Edges between two stages of one device group are local and need no message.
    """

    group: tuple[int, ...]
    producers: tuple[tuple[int, ...], ...]
    consumers: tuple[tuple[int, ...], ...]

    def sends_after(self, action: Action) -> list[Action]:
        """The messages that the compute `action` makes due, in the order they are sent."""
        if action.kind == "F":
            return self._messages("SF", action, self.consumers)
        return self._messages("SB", action, self.producers) if action.kind in "BI" else []

    def receives_before(self, action: Action) -> list[Action]:
        """The messages that the compute `action` waits for."""
        if action.kind == "F":
            return self._messages("RF", action, self.producers)
        return self._messages("RB", action, self.consumers) if action.kind in "BI" else []

    def _messages(
        self, kind: str, action: Action, peers: tuple[tuple[int, ...], ...]
    ) -> list[Action]:
        stage = action.stage
        return [
            Action(kind=kind, stage=stage, micro_batch=action.micro_batch, peer=peer)
            for peer in peers[stage]
            if self.group[peer] != self.group[stage]
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How the stages of one pipeline are run by its device groups.

    Args:
        kind: `gpipe`, `1f1b`, `interleaved`, `zero-bubble`: the name of a generator in
            `planner/schedules.py`; any name when `orders` is given.
        num_micro_batch: micro-batches per step.
        groups: `groups[g]` are the stages that device group g runs, in order (round robin when
            interleaved: g, g+p, g+2p ... for p groups).
        edges: (producer stage, consumer stage), the producer always the lower one; an edge may
            skip stages.
        orders: an explicit compute order per group in text form, which overrides the generator.

    Example:
        >>> Schedule(kind="1f1b", num_micro_batch=4, groups=((0,), (1,)), edges=((0, 1),))
    """

    kind: str
    num_micro_batch: int
    groups: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, int], ...]
    orders: tuple[tuple[str, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.num_micro_batch < 1:
            raise ScheduleError(
                f"num_micro_batch is {self.num_micro_batch}, allowed: 1 or more",
                hint="one micro-batch is the whole batch",
            )
        stages = sorted(stage for group in self.groups for stage in group)
        if not stages or stages != list(range(len(stages))):
            raise ScheduleError(
                f"groups {self.groups} hold the stages {stages}, allowed: 0 to n-1, each once",
                hint="give every stage to exactly one device group",
            )
        for edge in self.edges:
            if not 0 <= edge[0] < edge[1] < len(stages) or self.edges.count(edge) > 1:
                raise ScheduleError(
                    f"edge {edge} is not allowed among {len(stages)} stages",
                    hint="an edge is (producer, consumer) with producer < consumer, given once",
                )
        if self.orders is not None and len(self.orders) != len(self.groups):
            raise ScheduleError(
                f"{len(self.orders)} orders for {len(self.groups)} device groups",
                hint="give one order per device group, or none at all",
            )

    @property
    def num_stages(self) -> int:
        """The number of stages over all device groups."""
        return sum(len(group) for group in self.groups)

    def group_of(self, stage: int) -> int:
        """The device group that runs `stage`."""
        for index, group in enumerate(self.groups):
            if stage in group:
                return index
        raise ScheduleError(
            f"no stage {stage}, allowed: 0 to {self.num_stages - 1}",
            hint="stages are counted from 0 over all device groups",
        )

    def links(self) -> Links:
        """Producers, consumers and device group of every stage; take it once per pass."""
        stages = range(self.num_stages)
        return Links(
            group=tuple(self.group_of(stage) for stage in stages),
            producers=tuple(tuple(p for p, c in self.edges if c == stage) for stage in stages),
            consumers=tuple(tuple(c for p, c in self.edges if p == stage) for stage in stages),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers for JSON; `from_dict` gives an equal Schedule back."""
        found: dict[str, Any] = to_plain(self)
        return found

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Schedule:
        """The Schedule that `to_dict` wrote."""
        try:
            return from_plain(Schedule, data, "the schedule")
        except PlanError as error:
            raise ScheduleError(error.message, hint=error.hint) from error

    def to_text(self) -> str:
        """The text form (`ir/text.py`); `from_text` gives an equal Schedule back."""
        return dumps(self.to_dict(), title="schedule")

    @staticmethod
    def from_text(text: str) -> Schedule:
        """The inverse of `to_text`."""
        return Schedule.from_dict(loads(text, title="schedule"))


def grid(
    columns: Mapping[int, Sequence[Action]],
    arrows: Mapping[int, int] | None = None,
    *,
    context: int = 8,
) -> str:
    """Text table: a column per device group, a row per position.

    Args:
        columns: the actions of each device group.
        arrows: device group -> position to mark with `-->`; the length of a column marks its end.
        context: with arrows, only rows this near to one are shown, the others become `...`.
    """
    arrows = arrows or {}
    groups = sorted(columns)
    num_rows = max([len(columns[group]) for group in groups] + [at + 1 for at in arrows.values()])
    shown = [
        row
        for row in range(num_rows)
        if not arrows or any(abs(row - at) <= context for at in arrows.values())
    ]
    table = [["step", *(f"group {group}" for group in groups)]]
    previous = -1
    for row in shown:
        if row != previous + 1:
            table.append(["..."])
        cells = (_cell(columns[group], row, arrows.get(group)) for group in groups)
        table.append([str(row), *cells])
        previous = row
    if previous != num_rows - 1:
        table.append(["..."])
    widths = [max(len(line[i]) for line in table if i < len(line)) for i in range(len(groups) + 1)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip()
        for line in table
    )


def _cell(column: Sequence[Action], row: int, arrow: int | None) -> str:
    text = str(column[row]) if row < len(column) else ""
    return f"--> {text or '(end)'}" if row == arrow else f"    {text}"
