"""Choices: does the code of stacked experts take each choice of a token by itself?

Place in the flow: one of the trials of `engine.trials.look`. A split by expert hands the module's
own code other tokens than the user's model does: those that chose the experts at hand, one choice
in a row. Code that drops what an expert has no room for, or that looks at how many tokens there
are, would give another result and never know. So the module is run on the very tokens of a batch,
at once and as its shards will be, and the two are compared: output and gradients.

Weights of choices are multiplied in elsewhere, after the module ran. No batch shows what other code
does with them one day (leave out small ones, say), so the run is watched: they may only be picked,
cast and multiplied, and no number of a token may be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from whale.engine.state.copies import copied, in_dtype, module_in
from whale.engine.state.stillness import Still, as_before
from whale.engine.trace.program import tensors_in
from whale.engine.trials.calls import calls_of
from whale.errors import PlanError
from whale.ir.plan import Plan, SplitLayer
from whale.nn.moe.stacked import plain_activation
from whale.runtime import batch as batches
from whale.runtime.recompute import RerunMode

_TOLERANCE = 1e-5
"""Of the largest element; code may make float32 tensors of its own."""
_NAMES = ("hidden_states", "top_k_index", "top_k_weights")


def check_choices(
    model: nn.Module,
    batch: Any,
    loss: batches.Loss | None,
    plan: Plan,
    *,
    training: bool,
) -> None:
    """Refuses a split by expert of code for which a choice among others is another one alone.

    Where not `training`, in evaluation alone; else in both.
    """
    splits = {
        s.path: s
        for t in plan.taskgraphs
        for s in t.splits
        if s.rule == "stacked experts" and plain_activation(model.get_submodule(s.path)) is None
    }
    if not splits or any(t.is_meta for t in (*model.parameters(), *batches.leaves(batch))):
        return
    rows = batches.num_rows(batch)
    for mode in dict.fromkeys((training, False)):
        with _mode(model, mode):
            calls = calls_of(model, set(splits), batch, loss, rows, [])
            for path, (args, kwargs) in calls.items():
                given = [*args, *(kwargs[name] for name in _NAMES[len(args) :] if name in kwargs)]
                if len(given) == len(_NAMES):
                    tokens, ids, gates = given
                    module = model.get_submodule(path)
                    _compare(module, splits[path], tokens, ids, gates, training=mode)


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """In evaluation all modules are in eval mode; training ones are as they are."""
    flags = [(module, module.training) for module in model.modules()]
    for module, _ in flags if not training else ():
        module.training = False  # not by `eval`, in which modules may change their weights
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def _compare(
    module: nn.Module,
    split: SplitLayer,
    tokens: Tensor,
    ids: Tensor,
    gates: Tensor,
    *,
    training: bool,
) -> None:
    own = module_in(copied(module), torch.float64)
    tokens, gates = (in_dtype(t.detach(), torch.float64) for t in (tokens, gates))
    cuts = split.cuts_of(0)

    def apart(rows: Tensor, weights: Tensor) -> Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        out = torch.zeros_like(flat)
        for low, high in zip(cuts, cuts[1:], strict=False):
            token, slot = torch.where((ids >= low) & (ids < high))
            order = ids[token, slot].argsort(stable=True)
            token, slot = token[order], slot[order]
            if len(token):
                ones = flat.new_ones(len(token), 1)
                made = own(flat[token], ids[token, slot].unsqueeze(1), ones)
                made = made.reshape(len(token), -1) * weights[token, slot].unsqueeze(1)
                out = out.index_add(0, token, made.to(out.dtype))
        return out.view_as(rows)

    watch = _Weights()

    def at_once(rows: Tensor, weights: Tensor) -> Tensor:
        watch.follow(weights)
        with watch:
            out = own(rows, ids, weights)
        assert isinstance(out, Tensor)
        return out

    with as_before(own), Still(), torch.enable_grad():
        try:
            whole = _results(own, at_once, tokens, gates)
        except Exception:  # noqa: BLE001 - not in float64: the rehearsal has tried it as it is
            return
        parts = _results(own, apart, tokens, gates)
    if watch.wrong:
        raise PlanError(
            f"{split.path} is split by expert, and its code does more with the weights of choices "
            f"than multiply by them, or reads a number of a token ({watch.wrong}): a shard of it "
            "would see others",
            hint="leave the experts out of the split, or use wh.nn.MoE",
        )
    for a, b in zip(whole, parts, strict=True):
        size = float(a.abs().max()) if a.numel() else 0.0
        off = float((a - b).abs().max()) if a.numel() else 0.0
        if not off <= _TOLERANCE * max(size, 1e-6):
            where = "" if training else " in evaluation"
            raise PlanError(
                f"{split.path} is split by expert, and a token's choice gives another result{where}"
                f" beside the {len(ids)} tokens of this batch than among those of its experts alone"
                f" (off by {off / max(size, 1e-6):.2g}): its code looks at how many tokens there "
                "are, or leaves some out",
                hint="leave the experts out of the split, or use wh.nn.MoE, whose capacity is that "
                "of all tokens",
            )


def _results(own: nn.Module, run: Any, tokens: Tensor, gates: Tensor) -> list[Tensor]:
    """The output and all gradients for one random seed of the backward."""
    rows, weights = tokens.clone().requires_grad_(), gates.clone().requires_grad_()
    out = run(rows, weights)
    wanted = [rows, weights, *(p for p in own.parameters() if p.requires_grad)]
    generator = torch.Generator().manual_seed(3)
    seed = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    found = torch.autograd.grad(out, wanted, seed, allow_unused=True)
    gradients = [
        torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)
    ]
    return [out.detach(), *gradients]


_LINEAR = frozenset(
    "__getitem__ index_select gather take_along_dim mul __mul__ __rmul__ mul_ __imul__ "
    "multiply unsqueeze unsqueeze_ squeeze view reshape flatten unflatten expand expand_as "
    "permute t transpose T mT contiguous clone to type type_as float double half bfloat16 sum "
    "index_add index_add_ scatter_add scatter_add_ scatter scatter_ add __add__ __radd__ "
    "__iadd__ add_ cat stack einsum matmul __matmul__ bmm baddbmm mm addmm repeat_interleave "
    "repeat split chunk unbind masked_fill masked_fill_ where div __truediv__ div_ index_put_ "
    "index_put __setitem__ copy_ neg __neg__ movedim view_as reshape_as narrow select linear "
    "requires_grad_ dropout".split()
)
_SUMS = frozenset(
    "index_add index_add_ scatter_add scatter_add_ scatter scatter_ add __add__ __radd__ "
    "__iadd__ add_ cat stack index_put_ index_put __setitem__ copy_ where baddbmm addmm".split()
)
"""Of these, several arguments may come of the weights."""
_ABOUT = frozenset(
    "shape dtype device size dim ndim numel stride zeros_like ones_like empty_like new_zeros "
    "new_ones new_empty new_full full_like is_floating_point requires_grad is_cuda "
    "is_contiguous layout __len__ element_size is_complex names grad_fn is_leaf data_ptr "
    "device_type __get__ is_meta _version grad is_sparse is_nested itemsize nbytes is_cpu".split()
)
"""What they give has nothing of a tensor's values in it."""
_READS = frozenset(
    "__bool__ item __float__ __int__ __index__ tolist __contains__ allclose equal".split()
)


class _Weights(RerunMode):
    """Follows the weights of choices, and notes what is more than a product with them."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong = ""
        self._followed: dict[int, Tensor] = {}

    def follow(self, tensor: Tensor) -> None:
        """From here on, also what comes of this tensor."""
        self._followed[id(tensor)] = tensor

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        given = tensors_in((args, kwargs))
        if name in _READS and any(t.is_floating_point() for t in given):
            self.wrong = self.wrong or name
        followed = [t for t in given if id(t) in self._followed]
        if not followed or name in _ABOUT:
            return out
        first = bool(args) and any(args[0] is t for t in followed)
        picks = name in ("__getitem__", "index_select", "gather", "div", "__truediv__", "div_")
        several = len({id(t) for t in followed}) > 1 and name not in _SUMS
        chooses = name == "where" and first
        if name not in _LINEAR or several or chooses or (picks and not first):
            self.wrong = self.wrong or name
        for tensor in tensors_in(out):
            self.follow(tensor)
        if name.endswith("_") and args and isinstance(args[0], Tensor):
            self.follow(args[0])
        return out
