"""The optimizer of a rank: made by the user's factory, and refused where it cannot be exact.

Place in the flow: asked by Step when it makes the optimizer. An optimizer that looks at whole
tensors (norms, rows and columns, matrices) would silently compute something else on a shard, so it
is refused there; one over other parameters than it was given would train nothing.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from whale.errors import WhaleError
from whale.runtime import generators

_LOG = logging.getLogger(__name__)

_ELEMENTWISE = tuple(
    "SGD Adam AdamW Adamax NAdam RAdam RMSprop Adagrad Adadelta Rprop ASGD SparseAdam".split()
)

_BY_TENSOR = ("Adafactor", "LBFGS", "Muon")
"""Of torch's and ours, those that look at a parameter as a whole."""

Named = Sequence[tuple[str, torch.nn.Parameter]]

_FACTORY = "pass a factory, such as partial(torch.optim.AdamW, lr=1e-4): every rank makes its own "
"""Begins the hints below."""


def make_optimizer(
    factory: Any, named: Named, model: Named = (), device: torch.device | None = None
) -> torch.optim.Optimizer:
    """What the factory makes of [(name, parameter), ...], or of the plain parameters.

    It is called with all of `model`, in its order, so that every rank has the groups that one
    device has. Parameters that are not among `named`, or of which only a shard is, have a stand-in
    of the whole shape there, which is taken out or exchanged again. Optimizers and factories
    written for parameters without names fail on pairs. What the factory makes of the model's own
    parameters is the measure: it may tell them apart by values, by `id` or by size.
    """
    if isinstance(factory, torch.optim.Optimizer):
        raise WhaleError(
            f"`optimizer` is a {type(factory).__name__} over the whole model's parameters",
            hint=f"{_FACTORY}over the pieces it holds",
        )
    own = _over_own(factory, model)
    made = _called(factory, named, model, device or torch.device("cpu"))
    made = _as_for(model, made, own, factory, named)
    if not isinstance(made, torch.optim.Optimizer):
        raise WhaleError(
            f"`optimizer` returned {type(made).__name__}, not a torch.optim.Optimizer",
            hint=f"{_FACTORY}over the [(name, parameter), ...] it is called with",
        )
    _check_kind(made)
    check_parameters(made, named)
    return made


def _called(factory: Any, named: Named, model: Named, device: torch.device) -> Any:
    held = dict(named)
    missing = {name: p for name, p in model if name not in held}
    cut = {name: p for name, p in model if name in held and held[name].shape != p.shape}
    errors: list[Exception] = []
    # As pairs or plain; shards with the shape of the whole (rules by size) or as they are; without
    # memory, or with one element each for optimizers that look at devices or values.
    ways = itertools.product(
        (True, False),
        (True, False) if cut else (False,),
        (torch.device("meta"), device) if missing or cut else (device,),
    )
    for pairs, whole, place in ways:
        replaced = {**missing, **(cut if whole else {})}
        others = {name: _stand_in(p, place) for name, p in replaced.items()}
        every = [(name, others.get(name, held.get(name))) for name, _ in model] or list(named)
        try:
            made = factory(every if pairs else [p for _, p in every])
        except Exception as error:  # noqa: BLE001 - the user's code
            errors.append(error)
            continue
        if isinstance(made, torch.optim.Optimizer):
            if whole and (made.state or not is_torchs(made)):
                continue  # it made something of the shapes, or may keep parameters elsewhere
            _exchange(made, {id(p): held.get(name) for name, p in others.items()})
        return made
    raise WhaleError(
        f"`optimizer` failed on [(name, parameter), ...] with {_text(errors[0])}, and on plain "
        f"parameters with {_text(errors[-1])}",
        hint=f"{_FACTORY}over the parameters it is called with",
    ) from errors[0]


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its update is torch's own: the class, and its `step` but for a scheduler's count."""
    plain = own_step(optimizer) is type(optimizer).step
    return plain and type(optimizer).__module__.startswith("torch.optim")


def _as_for(model: Named, made: Any, own: Any, factory: Any, named: Named) -> Any:
    """`made` if its groups are those of `own`, the factory's over the model's own parameters.

    Else an optimizer of torch's moves over to what this rank holds; any other is refused.
    """
    if own is None or not isinstance(made, torch.optim.Optimizer):
        _check_numbers(made)
        return made
    names = {id(p): name for name, p in model}
    held = dict(named)
    wanted = _groups(own, names, held)
    found = _groups(made, {id(p): name for name, p in named}, held)
    if len(wanted) == len(found) and all(map(_same_group, wanted, found)):
        return made
    if type(own) is not type(made) or not is_torchs(made) or has_hooks(made):
        raise WhaleError(
            f"the factory of `optimizer` puts the model's parameters into other groups ({wanted}) "
            f"than those that this rank trains ({found}): it tells them apart by values, by `id` "
            "or by what they are stored as",
            hint="tell them apart by name, shape or attribute, or use a class of torch.optim",
        )
    own = _over_own(factory, model)  # once more: what the factory made last is what it returned
    assert own is not None
    for group in own.param_groups:
        group["params"] = [held[n] for p in group["params"] if (n := names[id(p)]) in held]
        if "param_names" in group:
            group["param_names"] = [n for n in group["param_names"] if n in held]
    if own.state:  # what its constructor keeps beside groups (Adagrad's sums), for these shapes
        accepted = inspect.signature(type(own)).parameters
        defaults = {key: value for key, value in own.defaults.items() if key in accepted}
        unnamed = [{k: v for k, v in g.items() if k != "param_names"} for g in own.param_groups]
        own.state.clear()
        own.state.update(type(own)(unnamed, **defaults).state)
    return own


def _over_own(factory: Any, model: Named) -> torch.optim.Optimizer | None:
    """Over the model's own parameters; None where it fails on them, or holds others."""
    names = {id(p) for _, p in model}
    for every in (list(model), [p for _, p in model]):
        versions = [p._version for _, p in model]
        try:
            made = factory(every)
        except Exception:  # noqa: BLE001 - the user's code; it is called on others, and says why
            continue
        finally:
            _refuse_written(model, versions)
        if not isinstance(made, torch.optim.Optimizer):
            return None
        known = all(id(p) in names for group in made.param_groups for p in group["params"])
        return made if model and known else None
    return None


def _refuse_written(model: Named, versions: Sequence[int]) -> None:
    for (name, parameter), version in zip(model, versions, strict=True):
        if parameter._version != version:
            raise WhaleError(
                f"the factory of `optimizer` writes to {name}, of which this rank may hold a part",
                hint="initialise the model before wh.parallelize",
            )


def _groups(
    made: torch.optim.Optimizer, names: dict[int, str], held: Collection[str]
) -> list[dict[str, Any]]:
    """The groups with names for parameters, of those alone that are held here; None: unknown."""
    found = []
    for group in made.param_groups:
        members = [names.get(id(p)) for p in group["params"]]
        rest = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        found.append({"params": [n for n in members if n is None or n in held], **rest})
    return found


def _same_group(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)


def _same(a: Any, b: Any) -> bool:
    if torch.is_tensor(a) or torch.is_tensor(b):
        both = torch.is_tensor(a) and torch.is_tensor(b) and not (a.is_meta or b.is_meta)
        return both and torch.equal(a.cpu(), b.cpu())
    return type(a) is type(b) and bool(a == b)


def _check_numbers(made: Any) -> None:
    """Refuses numbers that the factory made of a stand-in's values, which are none."""
    for group in made.param_groups if isinstance(made, torch.optim.Optimizer) else ():
        for key, value in group.items():
            if isinstance(value, float) and value != value:  # noqa: PLR0124
                raise WhaleError(
                    f"the factory of `optimizer` makes {key} = nan of parameters of which this "
                    "rank holds no or not all values",
                    hint="let it depend on names, shapes and attributes of the parameters alone",
                )


def _stand_in(parameter: torch.Tensor, device: torch.device) -> torch.nn.Parameter:
    """Of the parameter's shape, dtype and attributes, on one element of memory at most.

    Its value is no number, where there is such a thing: what is made of it can be told.
    """
    numbers = parameter.is_floating_point() or parameter.is_complex()
    nothing = math.nan if numbers else 0
    one = torch.full((), nothing, dtype=parameter.dtype, device=device)
    made = torch.nn.Parameter(one.expand(parameter.shape))
    made.__dict__.update(parameter.__dict__)
    return made


def _exchange(made: torch.optim.Optimizer, strangers: dict[int, torch.nn.Parameter | None]) -> None:
    """Puts what this rank holds in the place of stand-ins, and takes the others out."""
    for group in made.param_groups:
        params = [strangers.get(id(p), p) for p in group["params"]]
        if "param_names" in group:
            pairs = zip(group["param_names"], params, strict=True)
            group["param_names"] = [name for name, p in pairs if p is not None]
        group["params"] = [p for p in params if p is not None]
    for parameter in [p for p in made.state if id(p) in strangers]:
        del made.state[parameter]


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _check_kind(made: torch.optim.Optimizer) -> None:
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise WhaleError(
            f"{type(made).__name__} computes the loss several times in a step (`step(closure)`)",
            hint="a step is one forward and backward here: use an optimizer such as AdamW or SGD",
        )
    if isinstance(made, torch.optim.SparseAdam):
        raise WhaleError(
            "SparseAdam wants sparse gradients; here they are summed in dense buckets",
            hint="use Adam, and SGD or Adagrad for embeddings with sparse=True",
        )


def check_parameters(made: torch.optim.Optimizer, named: Named) -> None:
    """Refuses an optimizer over parameters that are not those that train."""
    given = {id(parameter) for _, parameter in named}
    for group in made.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in given:
                raise WhaleError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that it "
                    "was not called with, so it would not update the model that trains",
                    hint="make it over the [(name, parameter), ...] the factory is called with, "
                    "or over model.parameters()",
                )


def check_elementwise(
    optimizer: torch.optim.Optimizer, split: Sequence[str], promised: bool | None
) -> None:
    """Refuses an optimizer that is not known to be elementwise where parameters are split."""
    known = type(optimizer).__name__ in _ELEMENTWISE and is_torchs(optimizer)
    if known or not split or promised:
        return
    name = type(optimizer).__name__
    hint = f"use an elementwise optimizer ({', '.join(_ELEMENTWISE[:4])}, ...)"
    if name not in _BY_TENSOR:  # of these it would be false
        hint += ", or promise it with Config optimizer.elementwise=True"
    raise WhaleError(
        f"{name} is not known to update every element by itself, and {len(split)} parameters are "
        f"split ({split[0]}, ...)",
        hint=hint,
    )


_TRIAL_DIM = 5
"""Largest size of a dim of the parameters that a trial is made on."""
_SIZES = (1e-8, 1e-3, *(1.0,) * 24, 1e2, 1e4, 1e8)
"""Of the gradients of a trial, step by step: code may turn on at a norm, or after some steps."""
_NO_NUMBERS = (math.inf, math.nan)
"""Each ends a trial of its own, for all that follows is no number either."""


def check_apart(
    factory: Any, optimizer: torch.optim.Optimizer, model: Named, parts: Sequence[frozenset[str]]
) -> bool:
    """Refuses an optimizer whose update of one part of the parameters depends on the others.

    A clip or a rate by all gradients, written into a class of one's own, would see those of one
    stage only. Torch's own do nothing of the kind; others are tried on small parameters by the same
    names, all in one optimizer and each part in its own, with gradients of many sizes.

    Returns:
        Whether it was tried: the factory has made others since.
    """
    if is_torchs(optimizer):
        return False
    try:
        for last in _NO_NUMBERS:
            _compare(factory, optimizer, model, parts, (*_SIZES, last))
    except WhaleError:
        raise
    except Exception as error:  # noqa: BLE001 - the user's code, on shapes that are not the model's
        _LOG.warning(
            "whether %s updates each parameter by itself, as stages need it to, could not be tried "
            "(%s)",
            type(optimizer).__name__,
            _text(error),
        )
    return True


def check_grouped(
    factory: Any, optimizer: torch.optim.Optimizer, model: Named, groups: Sequence[frozenset[str]]
) -> bool:
    """Refuses an optimizer that updates otherwise when its step is called group by group.

    A count of steps, or a rate, of its own beside the parameters' state would move with each group.
    Returns what `check_apart` does.
    """
    if is_torchs(optimizer):
        return False
    try:
        whole = _tried(factory, model, frozenset(name for name, _ in model), (1.0,) * 6)
        parts = _tried(factory, model, frozenset(name for name, _ in model), (1.0,) * 6, groups)
    except WhaleError:
        raise
    except Exception as error:  # noqa: BLE001 - the user's code, on shapes that are not the model's
        _LOG.warning(
            "whether %s may be called group by group could not be tried (%s)",
            type(optimizer).__name__,
            _text(error),
        )
        return True
    for now, then in zip(parts, whole, strict=True):
        for name, value in now.items():
            if not torch.allclose(value, then[name], rtol=1e-9, atol=1e-12, equal_nan=True):
                raise WhaleError(
                    f"{type(optimizer).__name__} updates {name} otherwise when its step is called "
                    f"for {len(groups)} groups of parameters one after another",
                    hint="leave optimizer.num_apply_group at 1, or keep what counts steps in the "
                    "state of each parameter",
                )
    return True


@contextmanager
def only(optimizer: torch.optim.Optimizer, members: Collection[int]) -> Iterator[None]:
    """Inside, an optimizer has no parameters but those with these ids."""
    whole = [(group, group["params"]) for group in optimizer.param_groups]
    for group, params in whole:
        group["params"] = [p for p in params if id(p) in members]
    try:
        yield
    finally:
        for group, params in whole:
            group["params"] = params


def _compare(
    factory: Any,
    optimizer: torch.optim.Optimizer,
    model: Named,
    parts: Sequence[frozenset[str]],
    sizes: Sequence[float],
) -> None:
    whole = _tried(factory, model, frozenset(name for name, _ in model), sizes)
    for part in parts:
        for now, then in zip(_tried(factory, model, part, sizes), whole, strict=True):
            for name, value in now.items():
                if torch.allclose(value, then[name], rtol=1e-9, atol=1e-12, equal_nan=True):
                    continue
                raise WhaleError(
                    f"{type(optimizer).__name__} updates {name} by more than its own gradient and "
                    f"state: among the parameters of its stage alone it becomes another value than "
                    f"among all {len(model)}",
                    hint="clip with Config optimizer.max_grad_norm; anything else over all "
                    "parameters needs a plan of one stage",
                )


def _tried(
    factory: Any,
    model: Named,
    part: frozenset[str],
    sizes: Sequence[float],
    groups: Sequence[frozenset[str]] = (),
) -> list[dict[str, torch.Tensor]]:
    """Small parameters after each step of an optimizer that has `part` of them, by name."""
    generator = torch.Generator().manual_seed(7)
    small = []
    for name, parameter in model:
        shape = [min(size, _TRIAL_DIM) for size in parameter.shape]
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        small.append((name, torch.nn.Parameter(values)))
    mine = [(name, parameter) for name, parameter in small if name in part]
    found = []
    with generators.kept():
        torch.manual_seed(0)
        made = make_optimizer(factory, mine, small)
        for step, size in enumerate(sizes):
            for index, (name, parameter) in enumerate(small):
                gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                # What is no number is so in one parameter: others must not hear of it.
                own = size if math.isfinite(size) or index == step % len(small) else 1.0
                parameter.grad = gradient * own if name in part else None
            for group in groups or (part,):
                with only(made, {id(parameter) for name, parameter in small if name in group}):
                    made.step()
            found.append({name: parameter.detach().clone() for name, parameter in mine})
    return found


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether code of the user's runs around its `step`."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )


def own_step(optimizer: torch.optim.Optimizer) -> Any:
    """What runs as its `step`, without what torch's schedulers put around it to count calls."""
    found = vars(optimizer).get("step")
    while getattr(found, "_wrapped_by_lr_sched", False):
        found = getattr(found, "__wrapped__", None)
    return getattr(found, "__func__", found) or type(optimizer).step


def check_step(optimizer: torch.optim.Optimizer, before: Any) -> None:
    """Refuses another `step` than the one at build, where a rank has some of the parameters."""
    if own_step(optimizer) is not before:
        raise WhaleError(
            "the optimizer's step was exchanged after wh.parallelize; it would see only the "
            "parameters that this rank holds or one of several groups of them, and gradients of "
            "shards",
            hint="clip with Config optimizer.max_grad_norm, exchange it in the factory that is "
            "given to wh.parallelize; anything over all parameters needs a plan of replicas alone",
        )


def check_no_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Refuses hooks around `step`, where a rank has only some of the parameters."""
    if has_hooks(optimizer):
        raise WhaleError(
            "the optimizer has a hook around its step (register_step_pre_hook), which would see "
            "only the parameters that this rank holds, and gradients of shards",
            hint="clip with Config optimizer.max_grad_norm; anything else over all parameters "
            "needs a plan of replicas alone",
        )


def widens_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it makes float32 values of half precision itself, rounding as `rounding` says."""
    return bool(getattr(optimizer, "widens_itself", False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What memory depends on, of an optimizer."""

    name: str
    state_tensors: float
    """Bytes of state per byte of parameter."""
    widens_itself: bool


def kind_of(factory: Callable[[Any], torch.optim.Optimizer]) -> Kind:
    """Found by one real step.

    A factory that cannot take a lone parameter (parameter groups by name, say) counts as Adam.
    """
    parameter = torch.nn.Parameter(torch.zeros(64, 64))
    parameter.grad = torch.ones_like(parameter)
    try:
        made = make_optimizer(factory, [("weight", parameter)])
        made.step()
    except Exception:  # noqa: BLE001 - a user's factory may want its own names
        return Kind(name="unknown", state_tensors=2.0, widens_itself=False)
    state = made.state.get(parameter, {})
    size = sum(v.numel() * v.element_size() for v in state.values() if torch.is_tensor(v))
    return Kind(
        name=type(made).__name__,
        state_tensors=size / (parameter.numel() * parameter.element_size()),
        widens_itself=widens_itself(made),
    )
