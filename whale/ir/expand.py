"""The nested Schedule: what is inside a stage's forward or backward, Layer by Layer.

Place in the flow: one pure function of the Plan. The executor's recording of a real run is compared
with it, the simulator times it, later issues add gather, free, prefetch and recompute to it. It is
made per role on demand: nothing is stored per rank or micro-batch (design, decision 8).
"""

from __future__ import annotations

from dataclasses import dataclass

from whale.ir.homes import Bucket, sum_groups
from whale.ir.plan import Plan, SplitLayer, StageLayer, StagePlan
from whale.ir.schedule import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class SubAction:
    """`forward`/`backward` of a Layer, a `collective` in it, or the `reduce` of a bucket."""

    kind: str
    name: str
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        where = f"@{','.join(map(str, self.ranks))}" if self.ranks else ""
        return f"{self.kind}:{self.name}{where}"


# (forward, backward) collectives of a split, `*` times the number of inputs that need a gradient.
_INSIDE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "pair": (("all_reduce",), ("all_reduce*",)),
    "attention": (("all_reduce",), ("all_reduce*",)),
    "multihead": (("all_reduce",), ("all_reduce*",)),
    "embedding": (("all_reduce",), ()),
    "conv": (("all_gather",), ("all_reduce*",)),
    "column": (("all_gather",), ("all_reduce*",)),
    "column/loss": (("all_gather", "all_reduce", "all_reduce"), ("all_reduce*",)),
}
# The same where the split spans several data parallel replicas: `+` per input that has rows.
_BRIDGED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "pair": (("all_gather", "reduce_scatter"), ("all_gather", "reduce_scatter*")),
    "attention": (("all_gather+", "all_reduce"), ("all_gather", "all_reduce*")),
    "multihead": (("all_gather+", "all_reduce"), ("all_gather", "all_reduce*")),
    "embedding": (("all_gather", "reduce_scatter"), ("all_gather",)),
    "conv": (("all_gather", "all_to_all"), ("all_to_all", "reduce_scatter*")),
    "column": (("all_gather", "all_to_all"), ("all_to_all", "reduce_scatter*")),
    "column/loss": (
        ("all_gather", "all_gather", "all_gather", "all_reduce", "all_reduce"),
        ("reduce_scatter*",),
    ),
}
# The loss of a bridged vocabulary split belongs to the glue after the Layer: its part of backward
# comes before.
_LOSS_BACKWARD = "all_gather"


def split_collectives(
    split: SplitLayer, *, bridged: bool, backward: bool
) -> tuple[str, ...] | None:
    """The collectives of one sharded module, in order.

    None for a user's own rule, which only the user knows.
    """
    key = "column/loss" if (split.rule, split.joined) == ("column", "loss") else split.rule
    table = _BRIDGED if bridged else _INSIDE
    if key not in table:
        return None
    found: list[str] = []
    for kind in table[key][backward]:
        if kind.endswith("*"):
            found += [kind[:-1]] * split.entered
        elif kind.endswith("+"):
            found += [kind[:-1]] * sum(dim is not None for dim in split.dims[0])
        else:
            found.append(kind)
    return tuple(found)


def layer_actions(
    plan: Plan, rank: int, stage: StagePlan, layer: StageLayer, *, backward: bool
) -> list[SubAction]:
    """One Layer's forward or backward on one rank: its compute, then its collectives.

    `stage` is where it runs: a Layer that is called again later runs outside its TaskGraph's stage.
    """
    found = [SubAction(kind="backward" if backward else "forward", name=layer.path)]
    taskgraph = plan.taskgraphs[layer.taskgraph]
    rows = next(
        g for g in sum_groups([r.ranks for r in stage.virtual_device.replicas]) if rank in g.ranks
    )
    if len(rows.ranks) > 1:
        # Batch norm gathers its statistics, and sums what their gradient needs.
        name = "all_reduce" if backward else "all_gather"
        norm = SubAction(kind="collective", name=name, ranks=rows.ranks)
        found += [norm] * layer.num_norms
    if rank in taskgraph.virtual_device.ranks and taskgraph.splits:
        replica, _ = taskgraph.virtual_device.position(rank)
        ranks = taskgraph.virtual_device.replicas[replica].ranks
        bridged = taskgraph.virtual_device != stage.virtual_device
        inside = [s for s in taskgraph.splits if _within(s.path, layer.path)]
        for split in reversed(inside) if backward else inside:
            kinds = split_collectives(split, bridged=bridged, backward=backward) or ()
            found += [SubAction(kind="collective", name=k, ranks=ranks) for k in kinds]
            if backward and bridged and split.joined == "loss":
                found.insert(0, SubAction(kind="collective", name=_LOSS_BACKWARD, ranks=ranks))
    return found


def _within(path: str, layer: str) -> bool:
    return path == layer or layer == "" or path.startswith(f"{layer}.")


def expand(
    plan: Plan,
    rank: int,
    action: Action,
    buckets: tuple[Bucket, ...] = (),
    *,
    first_bucket: int = 0,
) -> list[SubAction]:
    """The inside of a forward or backward.

    `buckets` are those this backward completes, by what they hold.
    """
    stage = plan.stages[action.stage]
    if action.kind == "F":
        return [
            sub
            for layer in stage.layers
            for sub in layer_actions(plan, rank, stage, layer, backward=False)
        ]
    if action.kind not in ("B", "I"):
        return []
    found: list[SubAction] = []
    waiting = [{s.home.name for s in bucket.slices} for bucket in buckets]
    number = 0
    layers = stage.layers
    for index in range(len(layers) - 1, -1, -1):
        found += layer_actions(plan, rank, stage, layers[index], backward=True)
        earlier = {name for layer in layers[:index] for name in layer.params}
        done = set(layers[index].params) - earlier
        for names in waiting:
            names -= done
        while number < len(waiting) and not waiting[number]:
            if len(buckets[number].sync.ranks) > 1:
                found.append(_reduce(first_bucket + number, buckets[number]))
            number += 1
    found += [
        _reduce(first_bucket + i, buckets[i])
        for i in range(number, len(buckets))
        if len(buckets[i].sync.ranks) > 1
    ]
    return found


def _reduce(number: int, bucket: Bucket) -> SubAction:
    return SubAction(kind="reduce", name=str(number), ranks=bucket.sync.ranks)
