"""Unit options: Linears that keep heads or columns apart until other Linears read them.

Place in the flow: asked by `engine.split.match` for the trace of a Layer. Nothing goes by the names
of modules: from each Linear the trace is followed back to the Linears before it (columns), which
are tried in the ways their outputs are taken apart, with as many units as the shapes and attributes
there tell of. A way is offered when `engine.split.units` shows that units stay apart, and when the
code runs with one of them: the same operations on the shapes that follow (`engine.split.rerun`).

| found | rule |
|---|---|
| units that meet in a softmax or an attention product | `attention`, by heads |
| columns of several sections (gate and up in one), or several rows (adapters) | `pair` |
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

from whale.engine.split.heads import ATTENTION, Cut, Inside, is_elementwise
from whale.engine.split.rerun import counts_of, reruns
from whale.engine.split.unit_ops import name_of
from whale.engine.split.units import ELEMENTWISE, UnitFollower
from whale.engine.trace.program import Op, Ref
from whale.ir.model_graph import SplitOption
from whale.ir.sharding import DimSharding
from whale.nn.sharded import features, is_linear, is_tied, linear_dims

Names = dict[int, str]
Sections = dict[str, tuple[int, ...]]
_MOST_TRIED = 48
"""Ways tried for one set of Linears."""


def unit_options(inside: Inside, names: Names, reasons: dict[str, str]) -> list[SplitOption]:
    """Attention by heads, and pairs that are not plain; `reasons` gets why others are not."""
    found: list[SplitOption] = []
    taken: set[str] = set()
    for rows, columns, products in _candidates(inside):
        if taken & (rows | columns):
            continue
        path = _around(inside, rows | columns)
        if path is None:
            continue
        if products:
            option = _by_heads(inside, names, path, columns, rows, reasons)
        else:
            option = _by_columns(inside, names, path, columns, rows)
        if option is not None:
            found.append(option)
            taken.update(option.modules)
    return found


def is_norm(module: nn.Module) -> bool:
    """Whether a leaf module is a norm, by its name."""
    return "norm" in type(module).__name__.lower()


def is_clear(module: nn.Module) -> bool:
    """Whether a leaf module's own code is worth following: a norm, or one of the user's own."""
    if type(module) in (nn.LayerNorm, nn.RMSNorm, nn.Softmax):
        return True
    known = type(module).__module__.startswith(("torch.nn", "transformers.activations", "whale."))
    return not known and not is_linear(module)


# ---- which Linears belong together -------------------------------------------------------------


def _candidates(inside: Inside) -> Iterator[tuple[set[str], set[str], bool]]:
    """(rows, columns, whether a softmax or attention product is between), in order."""
    program, modules = inside.program, inside.modules
    called = Counter(op.layer for op in program.ops if op.layer is not None)
    makers = {value: op for op in program.ops for value in op.outputs}
    written = _written(program.ops, makers)
    groups: dict[int, set[str]] = {}
    for op in program.ops:
        if op.layer is not None and is_linear(modules[op.layer]) and op.inputs:
            groups.setdefault(_source(op.inputs[0], makers, modules), set()).add(op.layer)
    for value, rows in groups.items():
        columns, between = _back(value, makers, written, modules)
        products = any(name_of(op) in (ATTENTION, "softmax", "log_softmax") for op in between)
        linears = rows | columns
        if not columns or rows & columns or any(called[m] != 1 for m in linears):
            continue
        if any(is_tied(modules[m], modules) for m in linears):
            continue
        yield rows, columns, products


def _source(value: int, makers: dict[int, Op], modules: dict[str, nn.Module]) -> int:
    """The value before dropouts and casts: an adapter's rows read it through them."""
    op = makers.get(value)
    while op is not None and len(op.inputs) == 1 and len(op.outputs) == 1:
        same = op.layer is not None and type(modules[op.layer]) in (nn.Dropout, nn.Identity)
        if not same and not (op.layer is None and name_of(op) == "to"):
            break
        value = op.inputs[0]
        op = makers.get(value)
    return value


def _written(ops: list[Op], makers: dict[int, Op]) -> dict[int, set[int]]:
    """What is written into a value in place, maybe through a view of it."""
    found: dict[int, set[int]] = {}
    for op in ops:
        target = op.args[0] if op.args else None
        if op.layer is not None or not isinstance(target, Ref):
            continue
        if name_of(op) == "set_item" or (name_of(op).endswith("_") and name_of(op)[-2:] != "__"):
            value: int | None = target.index
            while value is not None:
                found.setdefault(value, set()).update(op.inputs)
                maker = makers.get(value)
                view = maker is not None and name_of(maker) in _VIEWS and maker.args
                source = maker.args[0] if maker is not None and view else None
                value = source.index if isinstance(source, Ref) else None
    return found


_VIEWS = frozenset("__getitem__ view transpose narrow select unsqueeze squeeze permute".split())


def _back(
    value: int,
    makers: dict[int, Op],
    written: dict[int, set[int]],
    modules: dict[str, nn.Module],
) -> tuple[set[str], list[Op]]:
    """The Linears that a value comes from, and the operations between."""
    columns: set[str] = set()
    between: list[Op] = []
    waiting, seen = [value], {value}
    while waiting:
        value = waiting.pop()
        more = written.get(value, set()) - seen
        waiting += more
        seen |= more
        op = makers.get(value)
        if op is None:
            continue
        if op.layer is not None and is_linear(modules[op.layer]):
            columns.add(op.layer)
            continue
        between.append(op)
        waiting += [v for v in op.inputs if v not in seen]
        seen.update(op.inputs)
    return columns, between


def _around(inside: Inside, linears: set[str]) -> str | None:
    """The innermost module that is called once and runs all of them."""
    places = [i for i, op in enumerate(inside.program.ops) if op.layer in linears]
    found = [
        (call.last - call.first, path)
        for path, calls in inside.calls.items()
        for call in calls
        if len(calls) == 1 and call.first <= min(places) and max(places) < call.last
    ]
    return min(found)[1] if found else None


# ---- heads ---------------------------------------------------------------------------------------


def _by_heads(
    inside: Inside,
    names: Names,
    path: str,
    columns: set[str],
    rows: set[str],
    reasons: dict[str, str],
) -> SplitOption | None:
    """The finest way to cut one attention by heads that its code allows."""
    width = {features(inside.modules[row])[1] for row in rows}
    if len(width) != 1:
        return None
    key = _kind(inside, path, columns, rows)
    if key in _FAILED:
        reasons[path] = _FAILED[key]
        return None
    reason, progress = "", -1
    for units in _head_counts(inside, path, width.pop()):
        for chosen, entries, state in _choices(inside, path, columns, units):
            for sections in _ways(inside, chosen, units):
                follower = UnitFollower(inside, path, units)
                follower.cut_state = {name: Cut(0, size // units) for name, size in state.items()}
                kept = follower.follow(sections, rows, entries)
                if not kept or not follower.products:
                    if follower.progress > progress:
                        reason, progress = follower.reason, follower.progress
                    continue
                option = _option(inside, names, path, sections, rows, entries, follower)
                counted = reruns(option, inside, follower)
                if counted is not None:
                    return counted
                reason, progress = "its code does not run with fewer heads", 1 << 30
    if reason:
        reasons[path] = _FAILED[key] = f"not by heads: {reason}"
    return None


_FAILED: dict[object, str] = {}
"""Why attention of a kind cannot be split by heads: the blocks of a model are mostly alike."""


def _kind(inside: Inside, path: str, columns: set[str], rows: set[str]) -> object:
    """All that the answer depends on: what is called, with what shapes, and sizes in attributes."""
    (call,) = inside.calls[path]
    own = len(path)
    prefix = f"{path}." if path else ""
    program = inside.program
    called = tuple(
        (
            op.layer[own:] if op.layer is not None else name_of(op),
            repr(op.args).replace(prefix, "") if prefix else repr(op.args),
            tuple((program.specs[v].shape, program.specs[v].grad) for v in op.outputs),
        )
        for op in program.ops[call.first : call.last]
    )
    sizes = tuple(
        (name[own:], type(module), tuple(counts_of(module)))
        for name, module in inside.modules.items()
        if name == path or name.startswith(prefix)
    )
    ends = tuple(sorted(m[own:] for m in columns)), tuple(sorted(m[own:] for m in rows))
    return called, sizes, ends


def _head_counts(inside: Inside, path: str, width: int) -> list[int]:
    """Numbers of units to try, the largest first: what attributes and shapes tell of."""
    (call,) = inside.calls[path]
    told: set[int] = set()
    prefix = f"{path}." if path else ""
    for name, module in inside.modules.items():
        if name == path or name.startswith(prefix):
            told.update(value for _, value in counts_of(module))
    for op in inside.program.ops[call.first : call.last]:
        if name_of(op) in (ATTENTION, "softmax"):
            for value in op.inputs:
                told.update(inside.program.specs[value].shape[1:-2])
    # Keys and values may have fewer heads, each for several of the queries'.
    told |= {n // d for n in told if n > 0 for d in range(2, n) if n % d == 0}
    return sorted((n for n in told if n > 1 and width % n == 0), reverse=True)


def _choices(
    inside: Inside, path: str, columns: set[str], units: int
) -> Iterator[tuple[list[str], set[str], dict[str, int]]]:
    """(columns that are cut, those whose whole output is entered, parameters cut with units)."""
    own = {
        name: parameter.shape[0]
        for name, parameter in inside.state.items()
        if parameter.dim() == 1
        and parameter.shape[0] % units == 0
        and any(parameter is p for p in inside.modules[path].parameters(recurse=False))
    }
    ordered = sorted(columns)
    for state in [{}, own] if own else [{}]:
        for entries in [(), *((c,) for c in ordered)]:
            if len(entries) < len(ordered):
                yield [c for c in ordered if c not in entries], set(entries), state


def _ways(inside: Inside, columns: list[str], units: int) -> Iterator[Sections]:
    """How the outputs of columns may be laid out in sections that each hold all units."""
    every = []
    for column in columns:
        width = features(inside.modules[column])[0]
        laid = [
            s
            for s in dict.fromkeys([*_seen(inside, column), (width,), *_equal(width)])
            if all(size % units == 0 for size in s)
        ]
        every.append(laid if len(columns) <= 2 else [s for s in laid if len(s) == 1])
    for way in itertools.islice(itertools.product(*every), _MOST_TRIED):
        yield dict(zip(columns, way, strict=True))


def _equal(width: int) -> list[tuple[int, ...]]:
    return [(width // n,) * n for n in (2, 3) if width % n == 0]


def _seen(inside: Inside, column: str) -> list[tuple[int, ...]]:
    """Sections at the borders where the code splits or slices the output."""
    program = inside.program
    made = {v for op in program.ops if op.layer == column for v in op.outputs}
    width = features(inside.modules[column])[0]
    borders = {0, width}
    found = []
    for op in program.ops:
        if not made.intersection(op.inputs) or not isinstance(op.args[0], Ref):
            continue
        if name_of(op) in ELEMENTWISE and len(op.inputs) == 1:
            made.update(op.outputs)
        if name_of(op) in ("split", "chunk", "split_with_sizes"):
            sizes = tuple(program.specs[v].shape[-1] for v in op.outputs)
            if sum(sizes) == width:
                found.append(sizes)
        elif name_of(op) == "__getitem__" and isinstance(op.args[1], tuple):
            last = op.args[1][-1]
            if type(last) is slice:
                low, high, _ = last.indices(width)
                borders |= {low, high}
    points = sorted(borders)
    found.append(tuple(b - a for a, b in itertools.pairwise(points)))
    return found


def _option(
    inside: Inside,
    names: Names,
    path: str,
    sections: Sections,
    rows: set[str],
    entries: set[str],
    follower: UnitFollower,
    rule: str = "attention",
) -> SplitOption:
    modules, program, units = inside.modules, inside.program, follower.units
    params: list[tuple[str, DimSharding]] = []
    for column, laid in sections.items():
        dim = linear_dims(modules[column])[0]
        params.append(
            (_name(modules[column], names), DimSharding(dim=dim, sections=laid, units=units))
        )
        if getattr(modules[column], "bias", None) is not None:
            cut = DimSharding(dim=0, sections=laid, units=units)
            params.append((_name(modules[column], names, "bias"), cut))
    for row in sorted(rows):
        size = features(modules[row])[1]
        dim = linear_dims(modules[row])[1]
        params.append(
            (_name(modules[row], names), DimSharding(dim=dim, sections=(size,), units=units))
        )
    for name, _ in follower.cut_state.items():
        size = inside.state[name].shape[0]
        params.append((name, DimSharding(dim=0, sections=(size,), units=units)))
    marks = [("row", row) for row in sorted(rows)]
    marks += [("cut", name) for name in follower.cut_state]
    marks += [("entry", entry) for entry in sorted(entries)]
    marks += [("summed", name) for name in sorted(_places(inside, path, follower.summed))]
    marks += [
        ("operand", f"{function}:{dim}:{size}")
        for (function, dim), sizes in sorted(follower.operands.items())
        for size in sorted(sizes)
    ]
    marks += [("mean", str(width)) for width in sorted(set(follower.means.values()))]
    marks += [("returned", ":".join(map(str, place))) for place in follower.returned]
    marks += [
        (
            "spread",
            f"{place}:{follower.alike[value]}:{follower.shape(value)[follower.alike[value]]}",
        )
        for place, value in enumerate(follower.call.values)
        if value is not None and value in follower.alike
    ]
    marks += [("head dropout", name) for name in follower.head_dropouts]
    reads = {
        value
        for op in program.ops
        if op.layer in sections
        for value in op.inputs
        if value not in follower.entered
    }
    marks += [
        ("inside", str(op.layer))
        for op in program.ops
        if op.layer in sections and follower.entered.intersection(op.inputs)
    ]
    entered = sum(1 for value in reads if program.specs[value].grad)
    entered += (
        len(follower.means)
        + follower.mask_grads
        + len(follower.operand_grads)
        + len(follower.summed)
    )
    return SplitOption(
        rule=rule,
        path=path if rule == "attention" else max(rows),
        modules=(*sections, *sorted(rows)),
        units=units,
        unit="columns" if rule == "pair" else _unit(inside, path, units),
        params=tuple(params),
        inside=tuple(follower.dropouts),
        entered=entered + len(entries),
        marks=tuple(marks),
    )


def _unit(inside: Inside, path: str, units: int) -> str:
    """Heads, or groups of heads that share keys and values."""
    (call,) = inside.calls[path]
    for op in inside.program.ops[call.first : call.last]:
        if name_of(op) in (ATTENTION, "softmax"):
            shape = inside.program.specs[op.inputs[0]].shape
            if len(shape) > 2 and shape[1] > units and shape[1] % units == 0:
                return "kv groups"
    return "heads"


def _name(module: nn.Module, names: Names, which: str = "weight") -> str:
    return names[id(getattr(module, which))]


def _places(inside: Inside, path: str, summed: Iterable[str]) -> set[str]:
    """`module:attribute` of every place below `path` that holds one of the parameters."""
    found = set()
    for name in summed:
        for place, module in inside.modules.items():
            for attribute, parameter in module.named_parameters(recurse=False):
                if parameter is inside.state[name]:
                    found.add(f"{place}:{attribute}")
    return found


# ---- columns -------------------------------------------------------------------------------------

_TAKEN_APART = frozenset(("chunk", "split", "__getitem__", "glu", "dropout"))


def _by_columns(
    inside: Inside, names: Names, path: str, columns: set[str], rows: set[str]
) -> SplitOption | None:
    """A pair of which a column holds several sections, or which has several rows."""
    widths = {features(inside.modules[row])[1] for row in rows}
    if len(widths) != 1:
        return None
    (width,) = widths
    sizes = {c: features(inside.modules[c])[0] for c in columns}
    if any(size % width for size in sizes.values()):
        return None
    sections = {c: (width,) * (sizes[c] // width) for c in sorted(columns)}
    plain = len(rows) == 1 and all(len(s) == 1 for s in sections.values())
    follower = UnitFollower(inside, path, width)
    if not follower.follow(sections, rows, set()):
        return None
    more = follower.summed or follower.operands or follower.means
    if more or follower.products or follower.head_dropouts:
        return None
    between = [
        op
        for op in inside.program.ops
        if op.layer not in rows and any(v in follower.cuts for v in op.inputs)
    ]
    if plain and all(is_elementwise(op, inside.modules) for op in between):
        return None  # `engine.split.match` finds it
    for op in between:
        known = name_of(op) in _TAKEN_APART | ELEMENTWISE
        if not (known if op.layer is None else is_elementwise(op, inside.modules)):
            return None
    option = _option(inside, names, path, sections, rows, set(), follower, rule="pair")
    return reruns(option, inside, follower, path)
