"""Matching: which modules of a Layer the split rules cover, and where each parameter would be cut.

Place in the flow: `split_options` is asked by capture for every Layer under `split`. Pairs are
found in a trace of the Layer, not by name, and attention by heads is taken only where the trace
shows heads in `scaled_dot_product_attention`, apart from each other from the projections to the
output (`engine.split.heads`), and the code runs with fewer of them (`engine.trial`). So a module
never seen before is safe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from whale.engine.split.batched_experts import batched_options
from whale.engine.split.expert_options import expert_options
from whale.engine.split.fingerprints import fingerprint
from whale.engine.split.heads import Call, Inside, is_elementwise
from whale.engine.split.lone import is_returned, works_on_shards
from whale.engine.split.reasons import whole_reasons
from whale.engine.split.rules import user_rule
from whale.engine.split.stacked_experts import is_stacked, stacked_options
from whale.engine.split.unit_options import is_clear, is_norm, unit_options
from whale.engine.state.copies import reachable
from whale.engine.trace.program import KEPT, Asked, Program, tensors_in, tree_map
from whale.engine.trace.tracer import GlueTracer, is_cache
from whale.errors import CaptureError
from whale.ir.model_graph import SplitOption
from whale.ir.sharding import DimSharding
from whale.nn.attention import supported
from whale.nn.forwards import has_hooks, has_own_call, replace_forward, runs
from whale.nn.moe.layer import MoE
from whale.nn.sharded import features, holds, is_conv, is_linear, is_tied, linear_dims
from whale.runtime import recompute

Names = dict[int, str]
"""First names of parameters by the id of their tensor."""


def split_options(
    path: str,
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: Names,
    reasons: dict[str, str],
    traces: dict[str, str],
) -> tuple[SplitOption, ...]:
    """All the ways found to shard the modules of one Layer; `reasons` says why others stay whole.

    `traces` gets the fingerprint of its code, if that can be traced. No module appears twice, but
    for a lone Linear: by columns, and by rows right after.
    """
    modules = {
        f"{path}.{name}" if path and name else path or name: module
        for name, module in layer.named_modules()
    }
    options: list[SplitOption] = []
    taken: set[str] = set()

    def add(found: Iterable[SplitOption]) -> None:
        for option in found:
            if not taken.intersection(option.modules):
                taken.update(option.modules)
                # Modules between an entry and the units are computed whole.
                places = [where for what, where in option.marks if what in ("entry", "summed")]
                taken.update(place.partition(":")[0] for place in places)
                options.append(option)

    add(_user_options(modules, names))
    options += expert_options(modules, names, args, kwargs)
    taken.update(name for option in options for name in option.modules)
    add(stacked_options(modules, names, args, kwargs))
    add(_multihead_options(modules, names))
    inside = _inside(path, layer, modules, args, kwargs, names)
    if inside is not None:
        traces[path] = fingerprint(inside, path)
        add(batched_options(inside, names))
        add(unit_options(inside, names, reasons))
        add(_pair_options(modules, inside.program, names))
    add(_leaf_options(modules, names))
    reasons.update(whole_reasons(modules, options, inside is not None))
    if inside is None:
        grad = any(t.requires_grad for t in tensors_in((args, kwargs)))
        # A Layer that is the Linear itself; the code of any other was not seen.
        options = [
            replace(o, entered=int(grad), joined="returned" if o.path == path else "gather")
            for o in options
        ]
    else:
        options = [_lone(o, inside) if o.rule in ("column", "conv") else o for o in options]
        leaves = list(_leaf_options(modules, names))
        options = [
            replace(o, instead=tuple(_lone(x, inside) for x in leaves if x.path in o.modules))
            if o.rule == "attention"
            else o
            for o in options
        ]
    found: list[SplitOption] = []
    for option in options:
        # Another module adds the same bias, whole.
        shared = option.rule == "column" and is_tied(modules[option.path], modules, "bias")
        if not shared:
            found.append(option)
        if option.rule == "column" and _may_cut_rows(option, layer, inside):
            found.append(_by_rows(option, modules[option.path], names))
    return tuple(found)


def _may_cut_rows(option: SplitOption, layer: nn.Module, inside: Inside | None) -> bool:
    """Whether a lone Linear by rows is an alternative, as far as its Layer's inside shows.

    It runs once there, or is the Layer, and nothing works on the columns of its output.
    """
    if inside is None:
        return is_linear(layer)
    calls = sum(op.layer == option.path for op in inside.program.ops)
    return calls == 1 and option.joined != "loss"


def _by_rows(column: SplitOption, module: nn.Module, names: Names) -> SplitOption:
    """The same Linear cut by its input features."""
    size = features(module)[1]
    return replace(
        column,
        rule="row",
        units=size,
        unit="rows",
        params=tuple(_row_params(module, size, names)),
    )


def _lone(option: SplitOption, inside: Inside) -> SplitOption:
    """What the trace says of a module split alone.

    Does its input need a gradient, is its output the Layer's, or does it end in a loss there?
    """
    program, joined = inside.program, "gather"
    hooked = has_hooks(inside.modules[option.path])
    if is_returned(program, option.path, inside.modules) and not hooked:
        joined = "returned"
    elif option.rule == "column" and not hooked:
        stays = works_on_shards(program, option.path, inside.modules, 0)
        joined = "loss" if stays else "gather"
    entered = _entered(program, frozenset(option.modules))
    return replace(option, entered=entered, joined=joined)


def _user_options(modules: dict[str, nn.Module], names: Names) -> Iterable[SplitOption]:
    for path, module in modules.items():
        rule = user_rule(module) if not has_own_call(module) else None
        cut = rule.match(module) if rule else None
        if rule and cut:
            own = dict(module.named_parameters(recurse=False))
            yield SplitOption(
                rule="user",
                path=path,
                modules=(path,),
                units=next(iter(cut.values())).units,
                unit=rule.unit,
                params=tuple((names[id(own[name])], sharding) for name, sharding in cut.items()),
            )


class _LayerTracer(GlueTracer):
    """Traces a Layer once more in the middle of a capture, which must not count its dropouts."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return super().__torch_function__(func, types, args, kwargs)


def _inside(
    path: str,
    layer: nn.Module,
    modules: dict[str, nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: Names,
) -> Inside | None:
    """A trace of the Layer with its leaf modules opaque; None when its code reads values.

    Norms and leaf modules of the user's own are looked into where that can be traced.
    """
    # Experts are opaque too: where their tokens go is not for the trace to see.
    leaves = {
        p: m
        for p, m in modules.items()
        if not list(m.children()) or is_stacked(m) or isinstance(m, MoE)
    }
    if path in leaves:
        return None
    opaque = {p for p, m in leaves.items() if not is_clear(m) or user_rule(m) is not None}
    while True:
        failed: list[str] = []
        shown = _trace(layer, modules, opaque, args, kwargs, names, failed)
        closed = set(failed[:1]) & leaves.keys() - opaque
        closed = closed or {p for p in leaves if not is_norm(modules[p])} - opaque
        closed = closed or leaves.keys() - opaque
        if shown is not None or not closed:
            return shown
        opaque |= closed


def _trace(
    layer: nn.Module,
    modules: dict[str, nn.Module],
    leaves: set[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: Names,
    failed: list[str],
) -> Inside | None:
    """The trace with these modules opaque; `failed` gets those it failed in, innermost first."""
    # The Layer ran once already and left its keys and values in a cache: this time it gets none.
    args, kwargs = tree_map((args, kwargs), lambda leaf: None if is_cache(leaf) else leaf)
    inputs = tensors_in((args, kwargs))
    tracer = _LayerTracer(list({id(t): t for t in inputs}.values()), names)
    originals: list[tuple[nn.Module, Any]] = []
    calls: dict[str, list[Call]] = {}

    def outer(name: str, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = len(tracer.program.ops)
        reads = tuple(tracer.refs.get(id(t)) for t in tensors_in((args, kwargs)))
        try:
            out = forward(*args, **kwargs)
        except CaptureError:
            failed.append(name)
            raise
        made = tuple(tuple(t.shape) for t in tensors_in(out))
        values = tuple(tracer.refs.get(id(t)) for t in tensors_in(out))
        last = len(tracer.program.ops)
        calls.setdefault(name, []).append(
            Call(
                first=first,
                last=last,
                args=args,
                kwargs=kwargs,
                made=made,
                values=values,
                reads=reads,
            )
        )
        return out

    try:
        for name, module in modules.items():
            watch = tracer.layer_call if name in leaves else outer
            originals.append((module, module.__dict__.get("forward")))

            def call(
                *a: Any, _w: Any = watch, _n: str = name, _f: Any = module.forward, **k: Any
            ) -> Any:
                return _w(_n, _f, a, k)

            replace_forward(module, call)
        with recompute.watched(tracer), tracer, tracer.functions():
            out = layer(*args, **kwargs)
        tracer.program.result = [tracer.refs.get(id(t)) for t in tensors_in(out)]
        held = (*(vars(module) for module in modules.values()), args, kwargs)
        values = {tracer.refs.get(id(t)) for t in reachable(held)}
        for value in (v for v in values if v is not None):
            tracer.program.asked.append(Asked(value=value, name=KEPT, where=""))
    except CaptureError:
        return None
    finally:
        for module, original in originals:
            if original is None:
                del module.__dict__["forward"]
            else:
                replace_forward(module, original)
    state = [t for m in modules.values() for t in (*m.parameters(False), *m.buffers(False))]
    return Inside(
        program=tracer.program,
        modules=modules,
        state={names[id(tensor)]: tensor for tensor in state},
        calls=calls,
    )


def _weight_name(module: nn.Module, names: Names, which: str = "weight") -> str:
    return names[id(getattr(module, which))]


def _column_params(
    module: nn.Module, units: int, sections: tuple[int, ...], names: Names
) -> list[tuple[str, DimSharding]]:
    dim = linear_dims(module)[0]
    params = [(_weight_name(module, names), DimSharding(dim=dim, sections=sections, units=units))]
    if getattr(module, "bias", None) is not None:
        params.append(
            (
                _weight_name(module, names, "bias"),
                DimSharding(dim=0, sections=sections, units=units),
            )
        )
    return params


def _row_params(module: nn.Module, units: int, names: Names) -> list[tuple[str, DimSharding]]:
    size = features(module)[1]
    dim = linear_dims(module)[1]
    return [(_weight_name(module, names), DimSharding(dim=dim, sections=(size,), units=units))]


def _pair_options(
    modules: dict[str, nn.Module], program: Program, names: Names
) -> list[SplitOption]:
    """Column splits that meet only elementwise code before one Linear, split by rows."""
    sources: dict[int, frozenset[str]] = {}
    passed: dict[str, frozenset[str]] = {}
    spoiled: set[str] = set()
    rows: dict[str, frozenset[str]] = {}
    called = Counter(op.layer for op in program.ops)
    asked = {a.value for a in program.asked}
    for op in program.ops:
        reached = [sources[i] for i in op.inputs if i in sources]
        linear = op.layer is not None and is_linear(modules[op.layer])
        if linear and op.layer is not None:
            if reached:
                rows[op.layer] = rows.get(op.layer, frozenset()) | reached[0]
            for value in op.outputs:
                sources[value] = frozenset([op.layer])
            if has_hooks(modules[op.layer]):
                spoiled |= {op.layer}.union(*reached)
        elif reached:
            plain_inputs = [i for i in op.inputs if i not in sources]
            widths = {program.specs[i].shape[-1:] for i in op.inputs if i in sources}
            # A scalar's gradient would be that of the own columns only.
            scalars = all(program.specs[i].shape == () for i in plain_inputs) and not any(
                program.specs[i].grad for i in plain_inputs
            )
            union = frozenset().union(*reached)
            apart = is_elementwise(op, modules) and scalars and not op.state and len(widths) == 1
            # A dropout's mask is cut like the columns, whatever it is called with.
            drops = op.layer is not None and runs(modules[op.layer], nn.Dropout)
            if apart and (not drops or called[op.layer] == 1):
                sources.update(dict.fromkeys(op.outputs, union))
                if op.layer is not None and drops:
                    passed[op.layer] = union
            else:
                spoiled |= union
    for value in (*program.result, *asked):
        # Code that asked for the width of a shard, or hangs a hook on one, would see a part.
        if value in sources:
            spoiled |= sources[value]
    options = []
    for row, columns in rows.items():
        users = [r for r, c in rows.items() if c & columns]
        width = features(modules[row])[1]
        if (
            columns & spoiled
            or len(users) != 1
            or any(called[m] != 1 for m in (row, *columns))
            or any(features(modules[c])[0] != width for c in columns)
            or columns & rows.keys()
            or any(is_tied(modules[m], modules) for m in (row, *columns))
        ):
            continue
        params: list[tuple[str, DimSharding]] = []
        for column in sorted(columns):
            params += _column_params(modules[column], width, (width,), names)
        params += _row_params(modules[row], width, names)
        options.append(
            SplitOption(
                entered=_entered(program, columns),
                rule="pair",
                path=row,
                modules=(*sorted(columns), row),
                units=width,
                unit="columns",
                params=tuple(params),
                inside=tuple(d for d, through in passed.items() if through & columns),
            )
        )
    return options


def _entered(program: Program, columns: frozenset[str]) -> int:
    """Distinct inputs of the column modules that carry a gradient."""
    read = {value for op in program.ops if op.layer in columns for value in op.inputs}
    return sum(1 for value in read if program.specs[value].grad)


def _multihead_options(modules: dict[str, nn.Module], names: Names) -> Iterable[SplitOption]:
    for path, module in modules.items():
        if not isinstance(module, nn.MultiheadAttention) or not supported(module):
            continue
        width, heads = module.embed_dim, module.num_heads
        fused = DimSharding(dim=0, sections=(width,) * 3, units=heads)
        params = [(_weight_name(module, names, "in_proj_weight"), fused)]
        if module.in_proj_bias is not None:
            params.append((_weight_name(module, names, "in_proj_bias"), fused))
        params += _row_params(module.out_proj, heads, names)
        yield SplitOption(
            rule="multihead",
            path=path,
            modules=(path, f"{path}.out_proj"),
            units=heads,
            unit="heads",
            params=tuple(params),
        )


def _leaf_options(modules: dict[str, nn.Module], names: Names) -> Iterable[SplitOption]:
    for path, module in modules.items():
        if is_linear(module):
            size = features(module)[0]
            yield SplitOption(
                rule="column",
                path=path,
                modules=(path,),
                units=size,
                unit="columns",
                params=tuple(_column_params(module, size, (size,), names)),
            )
        elif (
            runs(module, nn.Embedding)
            and holds(module, "weight")
            and isinstance(module, nn.Embedding)
            and module.max_norm is None
            and not module.scale_grad_by_freq
        ):
            rows = module.num_embeddings
            yield SplitOption(
                rule="embedding",
                path=path,
                modules=(path,),
                units=rows,
                unit="ids",
                params=(
                    (_weight_name(module, names), DimSharding(dim=0, sections=(rows,), units=rows)),
                ),
            )
        elif is_conv(module) and getattr(module, "groups", 0) == 1:
            channels = int(getattr(module, "out_channels", 0))
            cut = DimSharding(dim=0, sections=(channels,), units=channels)
            params = [(_weight_name(module, names), cut)]
            if module.bias is not None:
                params.append((_weight_name(module, names, "bias"), cut))
            yield SplitOption(
                rule="conv",
                path=path,
                modules=(path,),
                units=channels,
                unit="channels",
                params=tuple(params),
            )
