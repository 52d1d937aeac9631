"""The nested Schedule: what is inside a stage's forward or backward, Layer by Layer.

Place in the flow: one pure function of the Plan. The executor's recording of a real run is compared
with it, the simulator times it. It is made per role on demand: nothing is stored per rank or
micro-batch (design, decision 8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whale.ir.homes import Bucket, sum_groups
from whale.ir.levels import level_groups
from whale.ir.model_graph import SplitOption
from whale.ir.plan import TRAVELLING, Plan, SplitLayer, StageLayer, StagePlan
from whale.ir.schedule import Action
from whale.ir.updates import completing_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class SubAction:
    """One thing inside a compute.

    `forward`/`backward` of a Layer, the `gather` of its parameters where they are brought for each
    use, a `collective` in it, the `reduce` of a bucket, or the update (`apply`) of a group.
    """

    kind: str
    name: str
    ranks: tuple[int, ...] = ()
    carries: str = ""
    """What a collective moves: a Layer's `input` or `output`, a few numbers per `row`, or a batch
    norm's `statistics`."""
    split: str = ""
    """The path of the split that a collective belongs to."""
    share: float = 1.0
    """How much of what it carries it moves: a part in chunks, copies in an expert layer."""

    def __str__(self) -> str:
        where = f"@{','.join(map(str, self.ranks))}" if self.ranks else ""
        return f"{self.kind}:{self.name}{where}"


# (forward, backward) collectives of a split and what each carries; `*` times the number of inputs
# that need a gradient.
_INSIDE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "pair": (("all_reduce output",), ("all_reduce* input",)),
    "attention": (("all_reduce output",), ("all_reduce* input",)),
    "multihead": (("all_reduce output",), ("all_reduce* input",)),
    "embedding": (("all_reduce output",), ()),
    "experts": (("all_reduce output",), ("all_reduce* input", "all_reduce row")),
    "expert columns": (("all_reduce output",), ("all_reduce* input", "all_reduce row")),
    "stacked experts": (("all_reduce output",), ("all_reduce* input", "all_reduce row")),
    "stacked columns": (("all_reduce output",), ("all_reduce* input", "all_reduce row")),
    "batched experts": (("all_gather output",), ("all_reduce* input",)),
    "conv": (("all_gather output",), ("all_reduce* input",)),
    "column": (("all_gather output",), ("all_reduce* input",)),
    "row": (("all_reduce output",), ("all_gather* input",)),
    "column/loss": (("all_gather row", "all_reduce row", "all_reduce row"), ("all_reduce* input",)),
}
# (forward, backward) collectives where replicas meet: what they tell each other about their rows.
_MEETS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "": ((), ()),
    "norm": (("all_gather",), ("all_reduce",)),
    "route": (("all_gather",), ()),
    "route+loss": (("all_gather", "all_reduce"), ("all_reduce",)),
    "choice": (("all_gather", "all_gather"), ()),
    "choice+loss": (("all_gather", "all_gather", "all_reduce"), ("all_reduce",)),
}
# The same where the split spans several data parallel replicas: `+` per input that has rows.
_BRIDGED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "expert columns": (
        ("all_gather row", "all_gather row", "all_gather input", "reduce_scatter output"),
        ("all_gather output", "reduce_scatter* input", "reduce_scatter row"),
    ),
    "pair": (
        ("all_gather input", "reduce_scatter output"),
        ("all_gather output", "reduce_scatter* input"),
    ),
    "attention": (
        ("all_gather+ input", "all_reduce output"),
        ("all_gather output", "all_reduce* input"),
    ),
    "multihead": (
        ("all_gather+ input", "all_reduce output"),
        ("all_gather output", "all_reduce* input"),
    ),
    "embedding": (("all_gather input", "reduce_scatter output"), ("all_gather output",)),
    # Who has how many rows for whom; then they travel: see `_journeys`.
    "stacked experts": (("all_gather row",), ()),
    "stacked columns": (
        ("all_gather row", "all_gather input", "all_gather row", "reduce_scatter output"),
        ("all_gather output", "reduce_scatter* input", "reduce_scatter row"),
    ),
    "conv": (
        ("all_gather input", "all_to_all output"),
        ("all_to_all output", "reduce_scatter* input"),
    ),
    "column": (
        ("all_gather input", "all_to_all output"),
        ("all_to_all output", "reduce_scatter* input"),
    ),
    "row": (
        ("all_to_all input", "reduce_scatter output"),
        ("all_gather output", "all_to_all* input"),
    ),
    "column/loss": (
        (
            "all_gather input",
            "all_gather row",
            "all_gather row",
            "all_reduce row",
            "all_reduce row",
        ),
        ("reduce_scatter* input",),
    ),
}


def split_collectives(
    split: SplitLayer | SplitOption, ranks: tuple[int, ...], *, bridged: bool, backward: bool
) -> list[SubAction]:
    """The collectives of one sharded module, in order; none known for a user's own rule.

    Asked of an option too: the planner prices it before it chooses.
    """
    key = "column/loss" if (split.rule, split.joined) == ("column", "loss") else split.rule
    table = _BRIDGED if bridged else _INSIDE
    found: list[SubAction] = []
    for entry in table.get(key, ((), ()))[backward]:
        name, carries = entry.split()
        times = 1
        if name.endswith("*"):
            times = split.entered
        elif name.endswith("+"):
            times = sum(dim is not None for dim in split.dims[0])
        action = SubAction(
            kind="collective",
            name=name.rstrip("*+"),
            ranks=ranks,
            carries=carries,
            split=split.path,
        )
        found += [action] * times
    return found


def _journeys(
    split: SplitLayer, ranks: tuple[int, ...], rank: int, *, backward: bool
) -> list[SubAction]:
    """The all-to-alls of tokens to their experts and back, between replicas.

    In backward the last chunk comes first, and a chunk's gradients leave for its tokens' owners
    while those of the next are computed: see `nn.moe.courier`.
    """

    def legs(carries: str, levels: Sequence[int]) -> list[SubAction]:
        groups = level_groups(ranks, split.per_node, rank) if split.per_node else (ranks,)
        share = split.copies / split.chunks
        return [
            SubAction(
                kind="collective",
                name="all_to_all",
                ranks=groups[level],
                carries=carries,
                split=split.path,
                share=share * len(groups[level]) / len(ranks),
            )
            for level in levels
            if len(groups[level]) > 1
        ]

    two = bool(split.per_node)
    up, first, last = ((0, 1), (0,), (1,)) if two else ((0,), (), (0,))
    if not backward:
        return legs("input", up) * split.chunks + legs("output", up) * split.chunks
    found = legs("output", last) * split.chunks
    for _ in range(split.chunks):
        found += legs("output", first)
        found += legs("input", last) * split.entered
    return found + legs("input", first) * split.chunks * split.entered


def layer_actions(
    plan: Plan, rank: int, stage: StagePlan, layer: StageLayer, *, backward: bool
) -> list[SubAction]:
    """One Layer's forward or backward on one rank: its compute, then its collectives.

    `stage` is where it runs: a Layer that is called again later runs outside its TaskGraph's stage.
    What runs again in a backward has its collectives again, before those of the backward; where
    products stay, so does what collectives made.
    """
    found = _once(plan, rank, stage, layer, backward=backward)
    if not backward or layer.recompute != "inputs":
        return found
    again = [a for a in _once(plan, rank, stage, layer, backward=False) if a.kind == "collective"]
    begin = next((i for i, a in enumerate(found) if a.kind == "collective"), len(found))
    return found[:begin] + again + found[begin:]


def _once(
    plan: Plan, rank: int, stage: StagePlan, layer: StageLayer, *, backward: bool
) -> list[SubAction]:
    found = [SubAction(kind="backward" if backward else "forward", name=layer.path)]
    if any(name in plan.away for name in layer.params):
        found.append(SubAction(kind="gather", name=layer.path))
    taskgraph = plan.taskgraphs[layer.taskgraph]
    rows = next(
        g for g in sum_groups([r.ranks for r in stage.virtual_device.replicas]) if rank in g.ranks
    )
    meets = [
        [
            SubAction(kind="collective", name=name, ranks=rows.ranks, carries="statistics")
            for name in _MEETS[kind][backward]
        ]
        for kind in (layer.meets if len(rows.ranks) > 1 else ())
    ]
    inside: list[SplitLayer] = []
    if rank in taskgraph.virtual_device.ranks:
        inside = [s for s in taskgraph.splits if _within(s.path, layer.path)]
    if not inside:
        return found + [action for meet in (meets[::-1] if backward else meets) for action in meet]
    replica, _ = taskgraph.virtual_device.position(rank)
    ranks = taskgraph.virtual_device.replicas[replica].ranks
    bridged = taskgraph.virtual_device != stage.virtual_device
    if backward and bridged and any(split.joined == "loss" for split in inside):
        # The loss of a bridged vocabulary split belongs to the glue after the Layer: its part of
        # the backward comes before.
        loss = SubAction(kind="collective", name="all_gather", ranks=ranks, carries="row")
        found.insert(0, loss)
    # Meetings and splits in the order they run: forward up, backward down.
    steps: list[list[SubAction]] = []
    given = 0
    for split in inside:
        before = min(split.meets_before, len(meets))
        steps += meets[given:before]
        step = split_collectives(split, ranks, bridged=bridged, backward=backward)
        if bridged and split.rule in TRAVELLING:
            step += _journeys(split, ranks, rank, backward=backward)
        steps.append(step)
        given = max(given, before)
    steps += meets[given:]
    return found + [action for step in (steps[::-1] if backward else steps) for action in step]


def _within(path: str, layer: str) -> bool:
    return path == layer or layer == "" or path.startswith(f"{layer}.")


def expand(
    plan: Plan,
    rank: int,
    action: Action,
    completed: Mapping[int, Bucket] | None = None,
    groups: Mapping[int, int] | None = None,
) -> list[SubAction]:
    """The inside of a compute; `completed` are the buckets it completes, by number, in order.

    `groups` are those that are updated inside it, by the bucket with which they are complete.
    """
    stage = plan.stages[action.stage]
    if action.kind == "F":
        return [
            sub
            for layer in stage.layers
            for sub in layer_actions(plan, rank, stage, layer, backward=False)
        ]
    completed, groups = completed or {}, groups or {}
    sums: list[tuple[int, SubAction]] = []
    places = completing_layers(stage, list(completed.values()))
    for place, (number, bucket) in zip(places, completed.items(), strict=True):
        if len(bucket.sync.ranks) > 1:
            reduce = SubAction(kind="reduce", name=str(number), ranks=bucket.sync.ranks)
            sums.append((place, reduce))
        if number in groups:
            sums.append((place, SubAction(kind="apply", name=str(groups[number]))))
    found: list[SubAction] = []
    if action.kind in ("B", "I"):
        for index in range(len(stage.layers) - 1, -1, -1):
            found += layer_actions(plan, rank, stage, stage.layers[index], backward=True)
            found += [sub for place, sub in sums if place == index]
        sums = [(place, sub) for place, sub in sums if not 0 <= place < len(stage.layers)]
    return found + [sub for _, sub in sums]
