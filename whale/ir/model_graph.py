"""ModelGraph: the captured model as a value.

Layers, parameters, TaskGraphs, and the values between them.

Place in the flow: made by `engine.capture`, the only thing the planner knows of a model.
A *Layer* is a module that is never cut: it runs whole inside one stage. Everything between Layers
is *glue*.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whale.ir.codec import from_plain, to_plain
from whale.ir.sharding import DimSharding
from whale.ir.strategy import Tag
from whale.ir.text import dumps, loads

ITEM_BYTES = {
    **{"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2},
    # What does not train may be anything.
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
    **{"complex128": 16, "complex64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1},
}
"""Of an element, by dtype."""


def item_bytes(dtype: str) -> int:
    """Bytes of an element; one of an unknown dtype is taken to be as large as a float32."""
    return ITEM_BYTES.get(dtype, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter by its first name; `aliases` are the other names of the same tied tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter."""
        return self.numel * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A quantity of a Layer for a number of rows: `fixed + rows * per_row`."""

    fixed: float = 0.0
    per_row: float = 0.0

    def at(self, rows: float) -> float:
        """The quantity for so many rows; nothing is computed for none."""
        return self.fixed + rows * self.per_row if rows else 0.0


BatchDims = tuple[tuple[int | None, ...], tuple[int | None, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOption:
    """One way to shard some modules of a Layer.

    The rule, its units, and where each parameter is cut. A lone Linear has two, by columns and by
    rows, of which the planner takes one.
    """

    rule: str
    path: str
    modules: tuple[str, ...]
    units: int
    unit: str
    params: tuple[tuple[str, DimSharding], ...]
    dims: BatchDims = ((0,), (0,))
    """Batch dims of the tensors it reads and makes; None: no batch in one (position ids, say)."""
    inside: tuple[str, ...] = ()
    """Dropout modules that see only a shard of the columns."""
    entered: int = 1
    """Distinct inputs that need a gradient: one sum each in backward."""
    joined: str = "gather"
    """What becomes of a lone column split's output: `gather`, or `loss` (vocabulary parallel);
    `returned` while capture only knows that it is its Layer's output."""
    meets_before: int = 0
    """How many of its Layer's `meets` come before it."""
    copies: int = 1
    """Rows that travel for each that comes in: an expert layer's choices per token."""
    read: Linear = Linear()
    """Bytes of the input of a module split alone; 0: not known, those of its Layer are taken."""
    made: Linear = Linear()
    """Bytes of its output."""
    marks: tuple[tuple[str, str], ...] = ()
    """What else the rule does, as (what, where); the table is in `engine.split.unit_marks`."""
    instead: tuple[SplitOption, ...] = ()
    """What is taken where there are more devices than units: fewer heads than devices, say."""


DROPOUT_BYTES = 31.0
"""What dropping one element costs on a GPU, in bytes moved: the keyed dropout's kernel takes 3 to 4
times as long as torch's, which moves 9 bytes per element of float32; it is the hash that takes the
time, whatever the dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The operations of one kind in a Layer's forward: what the cost model prices.

    Kinds: `matmul`, `conv`, `attention`, `rnn`, `dropout` (keyed), and `memory` for all else, which
    only moves data.
    """

    kind: str
    calls: int
    flops: Linear = Linear()
    moved: Linear = Linear()
    """Bytes read and written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A module that runs whole in one stage.

    FLOPs are of the forward, as `flops + rows * flops_per_row`. The glue after a Layer is counted
    to it.
    """

    path: str
    kind: str
    taskgraph: int
    params: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    """Of these, what only its own code reads, and only while it runs."""
    flops: float = 0.0
    flops_per_row: float = 0.0
    splits: tuple[SplitOption, ...] = ()
    whole: tuple[str, ...] = ()
    """Why modules in it that a rule covers are not split, a line each."""
    meets: tuple[str, ...] = ()
    """Where its replicas meet, in the order they do: `norm` (batch norm), `route` and `choice` (the
    routers of experts, with `+loss` if they have one)."""
    interleaved: tuple[tuple[str, int | None], ...] = ()
    """Modules in it that go by the order of tokens, and whose batch dim is not 0 (None: there is
    no batch): the tokens of several replicas are then not in the order one device has."""
    work: tuple[Work, ...] = ()
    glue: tuple[Work, ...] = ()
    """Of the glue after it (the loss, after the last)."""
    kept: Linear = Linear()
    """Bytes its forward leaves for the backward."""
    entered: Linear = Linear()
    """Bytes of its inputs that no Layer before it was given: what is left of a forward that runs
    again in the backward."""
    products: Linear = Linear()
    """Bytes of what its matrix products, convolutions and attention make."""
    once: str = ""
    """Why its forward cannot run again in the backward; empty: it can."""
    read: Linear = Linear()
    """Bytes of its inputs."""
    made: Linear = Linear()
    """Bytes of its outputs: what travels when a stage ends here."""
    largest: Linear = Linear()
    """Bytes of the largest tensor made in it."""
    signature: str = ""
    """Layers of one signature take the same time: class, shapes and dtypes."""
    reasons: tuple[tuple[str, str], ...] = ()
    """(module, why) of those that no rule covers, and of attention not split by heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """Something a node makes: its bytes by rows, and whether a gradient comes back for it."""

    nbytes: Linear
    grad: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A step of the captured program: a Layer call or a glue operation, with the nodes it reads.

    `pure` nodes depend on the batch and constants alone; every stage that needs one computes it
    itself.
    """

    name: str
    layer: int | None
    reads: tuple[tuple[int, int], ...]
    """The values it reads: a node, and which of those it makes."""
    made: tuple[Value, ...]
    params: tuple[str, ...] = ()
    pure: bool = False

    @property
    def inputs(self) -> tuple[int, ...]:
        """The nodes it reads, each once."""
        return tuple(dict.fromkeys(node for node, _ in self.reads))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGraph:
    """One use of a primitive and the Layers it holds. Paper section 3.1."""

    index: int
    tag: Tag
    layers: tuple[int, ...]

    @property
    def kind(self) -> str:
        """`split` if any scope shards it, else `replicate`."""
        return "split" if any(scope.kind == "split" for scope in self.tag) else "replicate"

    @property
    def name(self) -> str:
        """The user's name, or kind and index."""
        named = [scope.name for scope in self.tag if scope.name]
        return named[-1] if named else f"{self.kind}{self.index}"

    @property
    def where(self) -> str:
        """file:line of the annotation, for messages."""
        return self.tag[-1].where if self.tag else "the model's root"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGraph:
    """The whole captured model.

    `nodes` is empty when the model was not traced (one stage needs no trace).
    """

    layers: tuple[Layer, ...]
    parameters: tuple[Parameter, ...]
    taskgraphs: tuple[TaskGraph, ...]
    nodes: tuple[Node, ...] = ()

    @property
    def calls(self) -> list[int]:
        """How often each Layer is called. What is known of a Layer is of all its calls together."""
        found = Counter(node.layer for node in self.nodes)
        return [found[i] or 1 for i in range(len(self.layers))]

    @property
    def hash(self) -> str:
        """Identifies the model and its annotations, so that a plan for another model is refused.

        Names, shapes and structure count; where the annotation stands in the user's file does not.
        """
        parts: list[Any] = [
            [p.name, list(p.shape), p.dtype, list(p.aliases)] for p in self.parameters
        ]
        parts += [[layer.path, layer.kind, layer.taskgraph] for layer in self.layers]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def parameter(self, name: str) -> Parameter:
        """The parameter of that first name."""
        return next(p for p in self.parameters if p.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        found: dict[str, Any] = to_plain(self)
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelGraph:
        """The inverse of `to_dict`."""
        return from_plain(cls, data, "the graph")

    def to_text(self) -> str:
        """The text form (`ir/text.py`); `from_text` gives an equal ModelGraph back."""
        return dumps(self.to_dict(), title="model-graph")

    @classmethod
    def from_text(cls, text: str) -> ModelGraph:
        """The inverse of `to_text`."""
        return cls.from_dict(loads(text, title="model-graph"))


def assign_stages(
    nodes: Sequence[Node], stage_of_layer: Sequence[int]
) -> tuple[tuple[int | None, ...], tuple[tuple[int, int], ...]]:
    """The stage of every node, and the stage pairs between which values travel.

    A Layer runs in its own stage, or in a later one when it is called again after it (its weights
    are then tied across both); glue runs where its latest input is, and glue that reads only
    parameters, or makes something without rows of rows (a mean), where it is first used; a pure
    node has no stage (None): each stage that reads it computes it.
    """
    stages: list[int | None] = []
    floating: list[int] = []
    # What is made of rows and has none: a stage whose rows are cut otherwise could not take it, and
    # a mean is weighed in the stage of the loss.
    reduced: set[int] = set()
    readers: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        for source in node.inputs:
            readers[source].append(index)
        read = [stage for source in node.inputs if (stage := stages[source]) is not None]
        if node.layer is not None:
            stages.append(max([stage_of_layer[node.layer], *read]))
        elif node.pure or not read:
            stages.append(None)
            if not node.pure:
                floating.append(index)
        else:
            stages.append(max(read))
            if _reduces(nodes, node, reduced):
                reduced.add(index)
    for index in sorted({*floating, *reduced}, reverse=True):
        used = [stage for reader in readers[index] if (stage := stages[reader]) is not None]
        stages[index] = min(used, default=stages[index] or 0)
    edges: set[tuple[int, int]] = set()
    for index, node in enumerate(nodes):
        target = stages[index]
        for origin in (stages[i] for i in node.inputs):
            if origin is not None and target is not None and origin != target:
                edges.add((origin, target))
    return tuple(stages), tuple(sorted(edges))


def placed(
    graph: ModelGraph, taskgraphs: Sequence[Any]
) -> tuple[tuple[int | None, ...], tuple[tuple[int, int], ...]]:
    """`assign_stages` with Layers in the stages of a plan's TaskGraphs."""
    stage_of = {path: taskgraph.stage for taskgraph in taskgraphs for path in taskgraph.layers}
    return assign_stages(graph.nodes, [stage_of[layer.path] for layer in graph.layers])


def _reduces(nodes: Sequence[Node], node: Node, reduced: set[int]) -> bool:
    """Whether glue makes values without rows of values with rows, and changes none in place."""
    if any(value.nbytes.per_row for value in node.made) or node.name in IN_PLACE:
        return False
    if node.name.endswith("_") and not node.name.endswith("__"):
        return False
    return any(n in reduced or nodes[n].made[v].nbytes.per_row for n, v in node.reads)


IN_PLACE = frozenset(
    "set_item __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ "
    "__ior__ __ixor__".split()
)
"""Functions that change their first argument, beside those whose names end in `_`."""
