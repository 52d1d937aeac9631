"""Changes: what a forward leaves behind in a model beside its output.

Buffers, attributes, even weights.

Place in the flow: capture notes the names on fake tensors; `wh.parallelize` asks here whether the
plan can keep them as one device would. A counter stays the same on every replica. What depends on
the rows (a moving average, a queue, a renormalised embedding) would go its own way on each, so
such a model is tried on a few real rows and refused where a stage has several replicas. Batch norms
and `wh.nn.MoE` have exact ways of their own.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from whale.engine.state.copies import copied
from whale.engine.state.outside import Outside, as_it_was
from whale.errors import PlanError
from whale.ir.model_graph import placed
from whale.ir.plan import Plan
from whale.nn.forwards import global_forward_hooks
from whale.nn.moe.layer import MoE
from whale.runtime import batch as batches
from whale.runtime import generators
from whale.runtime.compat import run_eagerly

_OWN = frozenset(nn.Module().__dict__) | {"forward"}
"""What every module has: not the user's."""

LOSS = "loss"
"""Stands before the names of a loss that is a module."""

_LARGE = 2e9
"""Bytes of weights that are not copied because a forward might write to them, unseen."""

_DEPTH = 4
_NORM = nn.modules.batchnorm._BatchNorm


def state_of(model: nn.Module, loss: Any = None, *, values: bool) -> dict[str, Any]:
    """Every parameter, buffer and attribute by name, as something that can be compared.

    With `values` tensors are compared by their bytes, else by who they are and how often they
    were written.
    """
    found: dict[str, Any] = {}
    modules = [*model.named_modules()]
    if isinstance(loss, nn.Module):
        modules += loss.named_modules(prefix=LOSS)
    for path, module in modules:
        prefix = f"{path}." if path else ""
        every = {**attributes(module), **module._parameters, **module._buffers}
        for name, value in every.items():
            found[f"{prefix}{name}"] = _token(value, values, _DEPTH)
    return found


def attributes(module: nn.Module) -> dict[str, Any]:
    """What a module holds beside parameters, buffers and modules."""
    return {k: v for k, v in module.__dict__.items() if k not in _OWN and "_whale" not in k}


def attributes_of(model: nn.Module, only: Collection[str] | None = None) -> dict[str, Any]:
    """Attributes of modules by name, compared by who they are; with `only`, these by value."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for key, value in attributes(module).items():
            name = f"{path}.{key}" if path else key
            if only is None or name in only:
                found[name] = _token(value, only is not None, _DEPTH)
    return found


def _token(value: Any, values: bool, depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        if not values or value.is_meta:
            return id(value), value._version
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        return tuple(value.shape), value.dtype, zlib.crc32(data.tobytes())
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, nn.Module) or depth == 0:
        return type(value)
    if isinstance(value, Mapping):
        return [(repr(k), _token(v, values, depth - 1)) for k, v in value.items()]
    if isinstance(value, Sequence):
        return [_token(item, values, depth - 1) for item in value]
    if isinstance(value, Iterable) and hasattr(value, "__len__"):  # a set, a deque
        return sorted(repr(_token(item, values, depth - 1)) for item in value)
    inside = getattr(value, "__dict__", None)
    if isinstance(inside, dict) and not callable(value):
        return [(k, _inside_token(v, values, depth - 1)) for k, v in inside.items()]
    return type(value)


def _inside_token(value: Any, values: bool, depth: int) -> Any:
    if value is None or isinstance(value, str):
        return _Word(value)
    return _token(value, values, depth)


@dataclass(frozen=True, slots=True, eq=False)
class _Word:
    """A word in an object that is no module: filling it in is no change.

    Hugging Face's losses write into the model's config which problem they are for.
    """

    text: str | None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Word) and (
            self.text == other.text or self.text is None or other.text is None
        )

    def __hash__(self) -> int:
        return 0


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> frozenset[str]:
    """Names whose state is not what it was, new and lost ones too."""
    names = before.keys() | after.keys()
    return frozenset(n for n in names if before.get(n, _token) != after.get(n, _token))


def exact_buffers(model: nn.Module) -> frozenset[str]:
    """Buffers of modules whose replicas meet: all see the same statistics.

    Those of subclasses too, whose `super().forward` is what is joined (`nn.batch_norm`, `nn.moe`);
    what their own code keeps beside is not.
    """
    found: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, _NORM | nn.SyncBatchNorm):
            names: Iterable[str] = ("running_mean", "running_var", "num_batches_tracked")
        elif isinstance(module, MoE):
            names = ("bias", "tokens_seen", "tokens_dropped")
        else:
            continue
        found.update(f"{path}.{name}" if path else name for name in names)
    return frozenset(found)


def spare(
    model: nn.Module, changes: frozenset[str] | None, memo: dict[int, Any] | None = None
) -> nn.Module:
    """A copy to try things on. Weights are shared, but for those that a forward writes to.

    `memo` then tells what stands for what, by id.
    """
    memo = {} if memo is None else memo
    if changes is None and sum(p.nbytes for p in model.parameters()) > _LARGE:
        renormed = (m for m in model.modules() if getattr(m, "max_norm", None) is not None)
        own = {id(p) for module in renormed for p in module.parameters(recurse=False)}
        changes = frozenset(n for n, p in model.named_parameters() if id(p) in own)
    for name, parameter in model.named_parameters():
        if changes is not None and name not in changes:
            memo[id(parameter)] = parameter
    made = copied(model, memo)
    run_eagerly(made)
    return made


def spare_loss(loss: Any) -> Any:
    """A copy of a loss that is a module; its tensors are shared, its attributes its own."""
    if not isinstance(loss, nn.Module):
        return loss
    return copy.deepcopy(loss, {id(t): t for t in (*loss.parameters(), *loss.buffers())})


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What a training forward changes, without what is exact anyway.

    Attributes:
        names: All of it.
        by_rows: Those that depend on which rows a replica has, and matter.
        tried: Whether this was tried on real rows; if not, the steps must tell.
    """

    names: frozenset[str]
    by_rows: tuple[str, ...]
    tried: bool


def find_changes(
    model: nn.Module,
    batch: Any,
    loss: Any,
    seen: frozenset[str] | None,
    plan: Plan,
    *,
    moves: bool = False,
) -> Changes:
    """Tries a few rows on copies of the model, if the capture saw changes or could not look.

    Where no stage has several replicas, nothing can differ by rows. `moves`: whether its code
    changes something outside of modules.
    """
    exact = exact_buffers(model)
    single = all(sum(w > 0 for w in s.virtual_device.weights) == 1 for s in plan.stages)
    if single or (seen is not None and not seen - exact and not moves):
        return Changes(names=(seen or frozenset()) - exact, by_rows=(), tried=True)
    rows = min(7, batches.num_rows(batch))
    tensors = [*model.parameters(), *model.buffers(), *batches.leaves(batch)]
    untried = Changes(names=(seen or frozenset()) - exact, by_rows=(), tried=False)
    if rows < 2 or any(tensor.is_meta for tensor in tensors):
        return untried
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    few = batches.spread_rows(batch, rows, device)
    cut = 2 if rows >= 4 else 1
    first, second = batches.take_rows(few, 0, cut), batches.take_rows(few, cut, rows)
    before = {**_outside(model, loss), **state_of(model, loss, values=True)}
    with generators.kept():
        try:
            one, _ = _run(model, loss, seen, exact, (first,))
            two, _ = _run(model, loss, seen, exact, (second,))
            # As many forwards, so that a counter is the same after both.
            _, again = _run(model, loss, seen, exact, (second, second))
            _, after = _run(model, loss, seen, exact, (first, second))
        except Exception:  # noqa: BLE001 - a forward that wants more rows, say: the steps will tell
            return untried
    names = (changed(before, one) | changed(before, two)) - exact
    by_rows = {name for name in names if one.get(name) != two.get(name)}
    kept = set(_kept(model, loss))
    # An attribute that the next forward only overwrites (the last attention, say) is nobody's.
    carried = by_rows if again != after else {n for n in by_rows if n in kept}
    return Changes(names=names, by_rows=tuple(sorted(carried)), tried=True)


def _kept(model: nn.Module, loss: Any) -> Iterator[str]:
    """Names of what a state dict has: whoever reads them, they must be right."""
    yield from model.state_dict()
    if isinstance(loss, nn.Module):
        yield from (f"{LOSS}.{name}" for name in loss.state_dict())


def _run(
    model: nn.Module, loss: Any, seen: frozenset[str] | None, exact: frozenset[str], parts: Any
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The state after some forwards, and what the last rows' loss is, in training and after it."""
    tried = spare(model, seen)
    judge = copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss
    fixed = {name: tensor.clone() for name, tensor in tried.named_buffers() if name in exact}
    losses = []
    with as_it_was(tried, judge):
        for part in parts:
            torch.manual_seed(0)
            losses = [_loss(tried, judge, part)]
            with torch.no_grad():
                for name, tensor in tried.named_buffers():
                    if name in fixed:
                        tensor.copy_(fixed[name])
        state = {**_outside(tried, judge), **state_of(tried, judge, values=True)}
        for module in tried.modules():
            module.training = False  # not by `eval`, in which modules may change shared weights
        torch.manual_seed(0)
        return state, (losses[-1], _loss(tried, judge, parts[-1]))


def _outside(model: nn.Module, loss: Any) -> dict[str, Any]:
    """What code holds outside of modules, by name."""
    found = Outside(model, None if isinstance(loss, nn.Module) else loss, objects=False).state()
    return {name: _token(values, True, _DEPTH) for name, values in found.items()}


def _loss(model: nn.Module, loss: Any, part: Any) -> Any:
    return _token(batches.call_model(model, loss, batches.own(part))["loss"], True, 1)


def refuse_cut(plan: Plan, changes: Changes) -> None:
    """A rank that holds a part of a weight cannot change it as one device changes the whole."""
    for home in plan.homes:
        if home.splits and home.name in changes.names:
            raise PlanError(
                f"{home.name} is changed by the forward, and the plan splits it: a rank would "
                "change its part as if it were the whole",
                hint="leave its module out of `split`, or change it after the step",
            )


def refuse_by_rows(plan: Plan, changes: Changes) -> None:
    """Several replicas cannot each keep their own version of what one device has once."""
    for name in changes.by_rows:
        for stage in stages_running(plan, name.rpartition(".")[0]):
            device = plan.stages[stage].virtual_device
            replicas = sum(weight > 0 for weight in device.weights)
            if replicas > 1:
                raise PlanError(
                    f"{name} is changed by the forward, by the rows it sees, and stage {stage} has "
                    f"{replicas} replicas, each with rows of its own: they would differ",
                    hint="exact over replicas are batch norms and wh.nn.MoE; give this stage one "
                    "replica, or compute it from values that are the same for all rows",
                )


def refuse_across_stages(plan: Plan, model: nn.Module, captured: Any) -> None:
    """With several stages, what a forward changes must belong to a Layer of one of them."""
    if len(plan.stages) == 1 or captured.program is None:
        return
    if captured.counted is not None:
        raise captured.counted
    _refuse_outside(plan, model, captured)
    if global_forward_hooks():
        raise PlanError(
            f"forward hooks on all modules (register_module_forward_hook) see modules that "
            f"{len(plan.stages)} stages do not call, and Layers twice",
            hint="register hooks on the modules they are for, or use one stage",
        )
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)
    by_path = {path: every for every in paths.values() for path in every}
    readers = _readers(plan, captured)
    _refuse_shared(plan, model, captured.changes or ())
    for name in sorted(captured.changes or ()):
        owner, _, leaf = name.rpartition(".")
        stages: set[int] = set()
        glue = owner not in by_path
        for path in by_path.get(owner, ()):
            stages.update(stages_running(plan, path, glue=False))
            stages.update(readers.get(f"{path}.{leaf}" if path else leaf, ()))
            glue |= not _layers_of(plan, path)
        if glue and not stages and _set_once(model, owner, leaf):
            continue
        if glue or len(stages) > 1:
            what = "between Layers" if glue else f"and used in stages {sorted(stages)}"
            raise PlanError(
                f"{name} is changed by the forward, {what}: {len(plan.stages)} stages would not "
                "see it as one device does",
                hint="change and read it inside one annotated module, or use one stage",
            )


def _set_once(model: nn.Module, owner: str, leaf: str) -> bool:
    """Whether it is a private flag that is down yet: so libraries note that they are set up.

    Whether what follows is the same with the flag up, `engine.trials.relay` tries in a second
    forward.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    return leaf.startswith("_") and getattr(modules.get(owner), leaf, False) is False


def _refuse_outside(plan: Plan, model: nn.Module, captured: Any) -> None:
    """A global, a class or a closure that Layers of several stages reach, and a forward changes."""
    if not captured.moved:
        return
    reach = {
        stage.index: Outside(model, layers=[layer.path for layer in stage.layers])
        for stage in plan.stages
    }
    for place, name in captured.moved.items():
        stages = [index for index, code in reach.items() if code.holds(place)]
        if len(stages) > 1:
            raise PlanError(
                f"{name} is changed by the forward, outside of modules, and code of stages "
                f"{stages} reaches it: each would have its own",
                hint="keep it in an attribute of one module, or put both modules into one stage",
            )


def _refuse_shared(plan: Plan, model: nn.Module, changes: Iterable[str]) -> None:
    """A dict or list that modules of several stages hold, and a forward changes."""
    modules = dict(model.named_modules(remove_duplicate=False))
    holders: dict[int, dict[str, set[int]]] = {}
    for name in sorted(changes):
        owner, _, leaf = name.rpartition(".")
        value = modules[owner].__dict__.get(leaf) if owner in modules else None
        if value is None or isinstance(value, bool | int | float | complex | str | torch.Tensor):
            continue
        found = stages_running(plan, owner, glue=False)
        holders.setdefault(id(value), {})[name] = found
    for named in holders.values():
        if len(set().union(*named.values())) > 1:
            raise PlanError(
                f"{' and '.join(list(named)[:2])} are one object, which the forward changes, in "
                "different stages: what one puts in, the other would not see",
                hint="return it and pass it on as a tensor, or put both modules into one stage",
            )


def _readers(plan: Plan, captured: Any) -> dict[str, set[int]]:
    """The stages whose glue reads a tensor of the model, by its name."""
    stages, _ = placed(captured.graph, plan.taskgraphs)
    found: dict[str, set[int]] = {}
    for op, stage in zip(captured.program.ops, stages, strict=True):
        for name in op.state:
            found.setdefault(name, set()).add(-1 if stage is None else stage)
    return found


def _layers_of(plan: Plan, path: str) -> list[str]:
    layers = {layer for t in plan.taskgraphs for layer in t.layers}
    return [x for x in layers if x == "" or path == x or path.startswith(f"{x}.")]


def stages_running(plan: Plan, path: str, *, glue: bool = True) -> set[int]:
    """The stages that run a module; of one in the glue or the loss, with `glue`, all."""
    layers = set(_layers_of(plan, path))
    found = {s.index for s in plan.stages if any(layer.path in layers for layer in s.layers)}
    return found or ({s.index for s in plan.stages} if glue else set())


def stages_of_changes(plan: Plan, changes: Changes, rank: int) -> frozenset[int]:
    """Stages that `rank` must run without rows too: its counters go with the others'."""
    names = {name.rpartition(".")[0] for name in changes.names}
    found = {stage for path in names for stage in stages_running(plan, path)}
    return frozenset(s for s in found if rank in plan.stages[s].virtual_device.active)
