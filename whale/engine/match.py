"""Matching: which modules of a Layer the split rules cover, and where each parameter would be cut.

Place in the flow: `split_options` is asked by capture for every Layer under `split`. Pairs are
found in a trace of the Layer, not by name, and attention by heads is taken only where
`scaled_dot_product_attention` shows the heads, so a module never seen before is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from whale.engine.program import Op, Program, Ref, tensors_in, tree_map
from whale.engine.rules import user_rule
from whale.engine.trace import GlueTracer, is_cache
from whale.errors import CaptureError
from whale.ir.model_graph import SplitOption
from whale.ir.sharding import DimSharding
from whale.nn.attention import supported
from whale.nn.forwards import replace_forward
from whale.nn.sharded import features, is_linear, linear_dims

Names = dict[int, str]
"""First names of parameters by the id of their tensor."""


def split_options(
    path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: Names
) -> tuple[SplitOption, ...]:
    """All the ways found to shard the modules of one Layer; no module appears twice."""
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
                options.append(option)

    add(_user_options(modules, names))
    add(_multihead_options(modules, names))
    inside = _inside(path, layer, modules, args, kwargs, names)
    if inside is not None:
        add(_attention_options(modules, inside, names))
        add(_pair_options(modules, inside, names))
    add(_leaf_options(modules, names))
    if inside is None:
        grad = any(t.requires_grad for t in tensors_in((args, kwargs)))
        return tuple(replace(o, entered=int(grad), joined="returned") for o in options)
    return tuple(_lone(o, inside) if o.rule in ("column", "conv") else o for o in options)


def _lone(option: SplitOption, program: Program) -> SplitOption:
    """What the trace says of a module split alone.

    Does its input need a gradient, is its output the Layer's?
    """
    made = {v for op in program.ops if op.layer == option.path for v in op.outputs}
    return replace(
        option,
        entered=_entered(program, frozenset(option.modules)),
        joined="returned" if made.intersection(program.result) else "gather",
    )


def _user_options(modules: dict[str, nn.Module], names: Names) -> Iterable[SplitOption]:
    for path, module in modules.items():
        rule = user_rule(module)
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


def _inside(
    path: str,
    layer: nn.Module,
    modules: dict[str, nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: Names,
) -> Program | None:
    """A trace of the Layer with its leaf modules opaque; None when its code reads values."""
    leaves = {p: m for p, m in modules.items() if not list(m.children())}
    if path in leaves:
        return None
    # The Layer ran once already and left its keys and values in a cache: this time it gets none.
    args, kwargs = tree_map((args, kwargs), lambda leaf: None if is_cache(leaf) else leaf)
    inputs = tensors_in((args, kwargs))
    tracer = GlueTracer(list({id(t): t for t in inputs}.values()), names)
    originals: list[tuple[nn.Module, Any]] = []
    try:
        for name, leaf in leaves.items():
            forward = leaf.forward
            originals.append((leaf, leaf.__dict__.get("forward")))

            def call(*a: Any, _n: str = name, _f: Any = forward, **k: Any) -> Any:
                return tracer.layer_call(_n, _f, a, k)

            replace_forward(leaf, call)
        with tracer:
            out = layer(*args, **kwargs)
        tracer.program.result = [tracer.refs.get(id(t)) for t in tensors_in(out)]
        return tracer.program
    except CaptureError:
        return None
    finally:
        for leaf, original in originals:
            if original is None:
                del leaf.__dict__["forward"]
            else:
                replace_forward(leaf, original)


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


_ELEMENTWISE = frozenset(
    "gelu relu relu_ silu sigmoid tanh leaky_relu elu softplus mish hardswish mul __mul__ __rmul__ "
    "add __add__ __radd__ sub __sub__ __rsub__ div __truediv__ pow __pow__ square neg __neg__ exp "
    "to float type_as contiguous clone".split()
)
_ELEMENTWISE_MODULES = (
    nn.GELU, nn.ReLU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Mish,
    nn.Hardswish, nn.ReLU6, nn.SELU, nn.CELU, nn.Dropout, nn.Identity,
)  # fmt: skip


def _is_elementwise(op: Op, modules: dict[str, nn.Module]) -> bool:
    if op.layer is None:
        return getattr(op.target, "__name__", "") in _ELEMENTWISE
    module = modules[op.layer]
    return isinstance(module, _ELEMENTWISE_MODULES) or (
        type(module).__module__ == "transformers.activations"
    )


def _pair_options(
    modules: dict[str, nn.Module], program: Program, names: Names
) -> list[SplitOption]:
    """Column splits that meet only elementwise code before one Linear, split by rows."""
    sources: dict[int, frozenset[str]] = {}
    passed: dict[str, frozenset[str]] = {}
    spoiled: set[str] = set()
    rows: dict[str, frozenset[str]] = {}
    called: dict[str, int] = {}
    for op in program.ops:
        reached = [sources[i] for i in op.inputs if i in sources]
        if op.layer is not None:
            called[op.layer] = called.get(op.layer, 0) + 1
        linear = op.layer is not None and is_linear(modules[op.layer])
        if linear and op.layer is not None:
            if reached:
                rows[op.layer] = rows.get(op.layer, frozenset()) | reached[0]
            for value in op.outputs:
                sources[value] = frozenset([op.layer])
        elif reached:
            plain_inputs = [i for i in op.inputs if i not in sources]
            widths = {program.specs[i].shape[-1:] for i in op.inputs if i in sources}
            scalars = all(len(program.specs[i].shape) == 0 for i in plain_inputs)
            union = frozenset().union(*reached)
            if _is_elementwise(op, modules) and scalars and not op.state and len(widths) == 1:
                for value in op.outputs:
                    sources[value] = union
                if op.layer is not None and isinstance(modules[op.layer], nn.Dropout):
                    passed[op.layer] = union
            else:
                spoiled |= union
    for value in program.result:
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
            or any(_is_tied(modules[m], modules) for m in (row, *columns))
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


def _is_tied(module: nn.Module, modules: dict[str, nn.Module]) -> bool:
    weight = getattr(module, "weight", None)
    return sum(1 for m in modules.values() if getattr(m, "weight", None) is weight) > 1


_QUERY = ("q_proj", "q", "query", "self.query", "wq", "to_q", "q_lin")
_KEY = ("k_proj", "k", "key", "self.key", "wk", "to_k", "k_lin")
_VALUE = ("v_proj", "v", "value", "self.value", "wv", "to_v", "v_lin")
_FUSED = ("c_attn", "qkv", "qkv_proj", "in_proj", "Wqkv", "query_key_value")
_OUT = tuple("out_proj o_proj o out output.dense c_proj wo to_out proj out_lin dense".split())


def _attention_options(
    modules: dict[str, nn.Module], program: Program, names: Names
) -> list[SplitOption]:
    """Attention by heads, where the trace shows the heads.

    [B, heads, T, width] into the attention product.
    """
    heads_seen = [
        (
            program.specs[q.index].shape[1],
            program.specs[k.index].shape[1],
            program.specs[q.index].shape[-1],
        )
        for op in program.ops
        if getattr(op.target, "__name__", "") == "scaled_dot_product_attention"
        for q, k in [
            (
                op.args[0] if op.args else op.kwargs["query"],
                op.args[1] if len(op.args) > 1 else op.kwargs["key"],
            )
        ]
        if isinstance(q, Ref) and isinstance(k, Ref) and len(program.specs[q.index].shape) == 4
    ]
    options = []
    for path in modules:
        find = _finder(path, modules)
        out, fused = find(_OUT), find(_FUSED)
        q, k, v = find(_QUERY), find(_KEY), find(_VALUE)
        if out is None or (fused is None and None in (q, k, v)):
            continue
        columns = [fused] if fused is not None else [q, k, v]
        found = [c for c in columns if c]
        calls = [sum(1 for op in program.ops if op.layer == m) for m in (*found, out)]
        if set(calls) != {1}:
            continue
        option = _by_heads(path, found, out, heads_seen, modules, names)
        if option is not None:
            options.append(replace(option, entered=_entered(program, frozenset(found))))
    return options


def _finder(path: str, modules: dict[str, nn.Module]) -> Callable[[tuple[str, ...]], str | None]:
    def find(candidates: tuple[str, ...]) -> str | None:
        for name in candidates:
            full = f"{path}.{name}" if path else name
            if full in modules and is_linear(modules[full]):
                return full
        return None

    return find


def _by_heads(
    path: str,
    columns: list[str],
    out: str,
    heads_seen: list[tuple[int, int, int]],
    modules: dict[str, nn.Module],
    names: Names,
) -> SplitOption | None:
    width = features(modules[out])[1]
    for heads, kv_heads, head_width in heads_seen:
        total = sum(features(modules[c])[0] for c in columns)
        # Repeated key-value heads show as `heads`; their true number follows from the widths.
        kv_heads = (total - heads * head_width) // (2 * head_width)
        if (
            heads * head_width != width
            or kv_heads < 1
            or total != (heads + 2 * kv_heads) * head_width
            or heads % kv_heads
        ):
            continue
        if len(columns) == 1:
            if kv_heads != heads:
                continue
            sections: list[tuple[int, ...]] = [(width, width, width)]
        else:
            sections = [(width,), (kv_heads * head_width,), (kv_heads * head_width,)]
        params: list[tuple[str, DimSharding]] = []
        for column, section in zip(columns, sections, strict=True):
            params += _column_params(modules[column], kv_heads, section, names)
        params += _row_params(modules[out], kv_heads, names)
        return SplitOption(
            rule="attention",
            path=path,
            modules=(*columns, out),
            units=kv_heads,
            unit="heads" if kv_heads == heads else "kv groups",
            params=tuple(params),
        )
    return None


def _multihead_options(modules: dict[str, nn.Module], names: Names) -> Iterable[SplitOption]:
    for path, module in modules.items():
        if type(module) is not nn.MultiheadAttention or not supported(module):
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
            type(module) is nn.Embedding
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
        elif (
            type(module) in (nn.Conv1d, nn.Conv2d, nn.Conv3d) and getattr(module, "groups", 0) == 1
        ):
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
