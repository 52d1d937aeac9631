"""Updates: when a rank's sums begin and its weights change, as actions among the others.

Place in the flow: one pass over what a rank computes (`rank_step`). The executor runs the list, the
recorder compares it with a real step, the price reads which backward completes which bucket, the
simulator which compute is a stage's last.

[Note: sums between stages] A sum that has begun occupies the device until all its ranks are there.
Where a compute then waits for the whole device (an allocation does), it waits for them. Replicas of
a stage need nothing of each other for that. But a weight that is tied over stages is summed by
ranks that wait for each other's messages: such a sum begins when a rank has computed and sent all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from whale.ir.homes import Bucket, Stretch, crosses, rank_buckets
from whale.ir.plan import Home, Plan, StagePlan
from whale.ir.schedule import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One thing a rank does with its sums and weights.

    | kind | meaning                                                           | text |
    |------|-------------------------------------------------------------------|------|
    | `L`  | the sum of the loss and its count over all ranks begins           | `L0` |
    | `G`  | a gradient bucket is complete; its sum, if not yet begun, begins  | `G3` |
    | `A`  | an apply group's weights are updated                              | `A0` |

    `number` counts buckets and apply groups.
    """

    kind: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """All that one rank does in a step, in order, and the gradient buckets it speaks of."""

    actions: tuple[Action | Update, ...]
    buckets: tuple[Bucket, ...]

    def completed(self) -> Iterator[tuple[Action, tuple[int, ...]]]:
        """The computes that complete buckets, and which."""
        for index, action in enumerate(self.actions):
            if isinstance(action, Action) and action.is_compute:
                numbers = completed_by(self.actions, index)
                if numbers:
                    yield action, numbers

    def completing(self) -> dict[int, int]:
        """The apply group that is complete with it, by the place of a `G` among the actions."""
        last: dict[int, int] = {}
        for index, action in enumerate(self.actions):
            if isinstance(action, Update) and action.kind == "G":
                last[self.buckets[action.number].apply_group] = index
        return {index: group for group, index in last.items()}

    def late(self) -> tuple[int, ...]:
        """The buckets whose sums begin after the last message."""
        begun = {number for _, numbers in self.completed() for number in numbers}
        return tuple(number for number in range(len(self.buckets)) if number not in begun)


def completed_by(actions: Sequence[Action | Update], index: int) -> tuple[int, ...]:
    """The buckets that the compute at `index` completes: they stand right after it."""
    numbers: list[int] = []
    for action in actions[index + 1 :]:
        if action.kind != "G":
            break
        assert isinstance(action, Update)
        numbers.append(action.number)
    return tuple(numbers)


def last_backwards(actions: Sequence[Action | Update]) -> dict[int, int]:
    """By stage, the place of the compute that makes the last of its gradients."""
    return {
        action.stage: index
        for index, action in enumerate(actions)
        if isinstance(action, Action) and action.kind in ("B", "W")
    }


def earlier_backwards(
    actions: Sequence[Action | Update], last: Mapping[int, int]
) -> dict[int, list[int]]:
    """By stage, the places of the computes that make the last of other micro-batches' gradients."""
    found: dict[int, list[int]] = {}
    for index, action in enumerate(actions):
        if isinstance(action, Action) and action.is_compute:
            end = last.get(action.stage, -1)
            if index < end and action.kind == actions[end].kind:
                found.setdefault(action.stage, []).append(index)
    return found


def rank_step(
    plan: Plan,
    rank: int,
    actions: Sequence[Action],
    trainable: frozenset[str],
    known: list[tuple[Home, list[Stretch]]] | None = None,
) -> RankStep:
    """The actions of a rank's device group, with the rank's own sums and updates among them.

    A bucket is complete with the last backward of all stages that use what is in it; one that is
    summed over ranks never before the one ahead of it, for all ranks sum in one order. See [Note:
    sums between stages]. Gradients of which a rank keeps a part are summed with every micro-batch:
    there is no room for all of them until the last. `known` is as for `rank_buckets`.
    """
    buckets = tuple(rank_buckets(plan, rank, trainable, known))
    last = last_backwards(actions)
    early = earlier_backwards(actions, last)
    after: dict[int, list[Update]] = {}
    forwards = [i for i, action in enumerate(actions) if action.kind in ("F", "SF")]
    after.setdefault(max(forwards, default=-1), []).append(Update(kind="L"))
    latest = -1
    for number, bucket in enumerate(buckets):
        stages = {stage for piece in bucket.slices for stage in piece.home.stages}
        place = max((place for stage, place in last.items() if stage in stages), default=-1)
        if bucket.zero > 1 and len(stages) == 1 and not crosses(plan, bucket.sync):
            for before in early.get(min(stages), ()):
                after.setdefault(before, []).append(Update(kind="G", number=number))
        if len(bucket.sync.ranks) > 1:
            place = latest = max(latest, len(actions) - 1 if crosses(plan, bucket.sync) else place)
        after.setdefault(place, []).append(Update(kind="G", number=number))
    found: list[Action | Update] = list(after.get(-1, ()))
    for index, action in enumerate(actions):
        found += [action, *after.get(index, ())]
    # A rank that holds nothing takes part in what all tell each other before an update.
    mine = set(plan.stages_of(rank))
    groups = {h.apply_group for h in plan.homes if not mine.isdisjoint(h.stages)} or {0}
    found += [Update(kind="A", number=number) for number in sorted(groups)]
    return RankStep(actions=tuple(found), buckets=buckets)


def completing_layers(stage: StagePlan, buckets: Sequence[Bucket]) -> list[int]:
    """By bucket that a stage's last backward completes, the Layer whose backward is its last.

    Layers by their place in the stage; -1 where code between Layers has a gradient in the bucket,
    which may come at the very end. Later sums wait for earlier ones.
    """
    found: list[int] = []
    latest = len(stage.layers)
    for bucket in buckets:
        names = {s.home.name for s in bucket.slices if stage.index in s.home.stages}
        place = _first_use(stage, names)
        if len(bucket.sync.ranks) > 1:
            place = latest = min(latest, place)
        found.append(place)
    return found


def _first_use(stage: StagePlan, names: Collection[str]) -> int:
    first: dict[str, int] = {}
    for index, layer in enumerate(stage.layers):
        for name in layer.params:
            first.setdefault(name, index)
    return min((first.get(name, -1) for name in names), default=len(stage.layers))
