"""FormTable: the Forms of the tensors that the loss code has made so far, and what else is known.

Place in the flow: filled by `runtime.weighing`, read by the rules of `runtime.form_rules`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from whale.runtime import forms
from whale.runtime.forms import Form, Term

Marks = dict[int, "weakref.ref[Tensor]"]


class FormTable:
    """The Forms of the tensors seen so far, and what else is known of them.

    Attributes:
        rows: Rows of the part being computed.
        ragged: Tensors whose size depends on values.
        constant: Tensors made of parameters alone.
        turned: Tensors whose first dim is not that of the rows, whatever its size is.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.ragged: Marks = {}
        self.constant: Marks = {}
        self.turned: Marks = {}
        self._forms: dict[int, tuple[Form, bool]] = {}
        self._keep: list[Tensor] = []
        self._turns: dict[int, Tensor] = {}
        """Comparisons of sums over rows."""

    def form(self, value: Any) -> Form | None:
        """How it is made, if that is known."""
        return self._forms[id(value)][0] if isinstance(value, Tensor) and self._has(value) else None

    def _has(self, value: Tensor) -> bool:
        # The forward of an autograd.Function runs here too, without gradients; what it gives back
        # has them, by a backward of its own that the sums made in it know nothing of.
        found = self._forms.get(id(value))
        return found is not None and found[1] == value.requires_grad

    def set(self, out: Tensor, form: Form) -> Tensor:
        """`out` is made so."""
        self._keep.append(out)
        self._forms[id(out)] = (form, out.requires_grad)
        return out

    def forget(self, out: Tensor) -> None:
        """`out` was changed by something unknown."""
        self._forms.pop(id(out), None)

    def has_form(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether any argument has one."""
        return bool(self._forms) and any(map(self._has, tensors(args, kwargs)))

    def has_ragged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether any argument's size depends on values."""
        return bool(self.ragged) and any(id(t) in self.ragged for t in tensors(args, kwargs))

    def fixed(self, x: Any) -> bool:
        """Whether no row has a part in it."""
        return isinstance(x, nn.Parameter) or id(x) in self.constant

    def penalty(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a function has to do with parameters alone, or with what is held beside them.

        That is compared element by element, has the shape of what is made of parameters or one that
        broadcasts to it, and no gradient.
        """
        given = list(tensors(args, kwargs))
        if name not in _ELEMENTWISE:
            return bool(given) and all(map(self.fixed, given))
        made = {tuple(x.shape) for x in given if self.fixed(x)}
        return bool(made) and all(
            self.fixed(x)
            or (x.dim() > 0 and not x.requires_grad and any(_spreads(x, shape) for shape in made))
            for x in given
        )

    def over_rows(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a reduction leaves no rows: that of all dims, or of the first if it is theirs."""
        dims = dims_of(args, kwargs)
        if dims is None or not x.dim():
            return True
        own = {d % x.dim() for d in dims}
        by_rows = x.shape[0] == self.rows and id(x) not in self.turned
        return len(own) == x.dim() or (0 in own and by_rows)

    def property(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`x.T` and the like, of which nothing is known but what is known of x."""
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and args and isinstance(args[0], Tensor):
            if self.fixed(args[0]):
                _note(self.constant, out)
            if id(args[0]) in self.ragged:
                _note(self.ragged, out)
            self._turn("T", args[0], out)
        return out

    def before(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments as they are before a function that may write to the first."""
        edits = name in _EDITS or (name.endswith("_") and not name.endswith("__"))
        if not edits or not self.has_form(args, kwargs) or self.form(args[0]) is not None:
            return args
        return (args[0].clone(), *args[1:]) if isinstance(args[0], Tensor) else args

    def assigned(self, args: tuple[Any, ...], before: Tensor) -> None:
        """`x[index] = value`, where x was `before`."""
        x, index, value = args
        old, new = self.form(x), self.form(value)
        made = [form for form in (old, new) if form is not None]
        sums = all(form.summed and not form.inverse and not form.floor for form in made)
        if not made or not sums or not isinstance(index, int | slice | tuple):
            if old is not None:
                self.forget(x)
            return
        form = forms.assigned(old, new, before, index, value)
        if form.fits(x):
            self.set(x, form)

    def _turn(self, name: str, x: Tensor, out: Tensor) -> None:
        """Where the rows of `x` are in what is made of it."""
        was = id(x) in self.turned
        if name in _TURNS and x.dim() > 1 and out.dim() == x.dim():
            # Whether its first dim is another: that of strides is told apart, that of sizes not.
            moved = x.stride()[0] != out.stride()[0] or x.shape[0] != out.shape[0]
            if was != moved:
                _note(self.turned, out)
        elif was and out.shape == x.shape and out is not x:
            _note(self.turned, out)

    def bent(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Form | None:
        """The Form of a function of a sum over rows that bends, here or for other rows.

        A trial sees the side that its rows are on; of a part and of the whole it may be another.
        """
        # Of `where`, what decides: `where(n > 0, total / n, 0)` is a mean.
        given = list(tensors(args[:1] if name == "where" else args, kwargs))
        made = [form for x in given if (form := self.form(x)) is not None]
        problem = next((form.problem for form in made if form.problem), "")
        turns = any(id(x) in self._turns for x in given)
        bends = name in _BENDS and any(form.summed and forms.has_grad(form) for form in made)
        if not (problem or turns or bends):
            return None
        problem = problem or (
            f"the loss is `{name}` of a sum or mean over rows, which may bend in a part of them "
            "where it does not in all"
        )
        found: Form | None = None
        for tensor in tensors((out,), {}):
            if not tensor.is_floating_point():
                self._turns[id(tensor)] = tensor
                continue
            form = Form(terms=(Term(total=tensor),), problem=problem)
            found = form if tensor is out else None
            if tensor is not out:  # of several results
                self.set(tensor, form)
        return found

    def mark(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, *, ragged: bool
    ) -> None:
        """Notes of a result whether its size depends on values, or nothing of it on rows."""
        if ragged or name in _RAGGED or _masks(name, args):
            _note(self.ragged, out)
        elif self.penalty(name, args, kwargs):
            _note(self.constant, out)
        if isinstance(out, Tensor) and (self.turned or name in _TURNS):
            for x in tensors(args, kwargs):
                self._turn(name, x, out)


def _spreads(x: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether x is of that shape, or broadcasts to it."""
    own = tuple(x.shape)
    pairs = zip(reversed(own), reversed(shape), strict=False)
    return own == shape or (len(own) <= len(shape) and all(a in (1, b) for a, b in pairs))


def _masks(name: str, args: tuple[Any, ...]) -> bool:
    if name == "where":
        return len(args) == 1
    if name != "__getitem__":
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in index)


def _note(table: Marks, out: Any) -> None:
    for tensor in out if isinstance(out, (tuple, list)) else (out,):
        if isinstance(tensor, Tensor):
            key = id(tensor)
            table[key] = weakref.ref(tensor, lambda _, key=key: table.pop(key, None))  # type: ignore[misc]


def tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors among arguments."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from (item for item in value if isinstance(item, Tensor))


def dims_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """The dims of a reduction; None: all."""
    said = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    if said is None or isinstance(said, torch.dtype):
        return None
    if isinstance(said, int):
        return (said,)
    return tuple(said) or None


_BENDS = frozenset(
    "clamp clamp_ clamp_min clamp_max clip abs __abs__ abs_ relu relu_ leaky_relu max min maximum "
    "minimum fmax fmin where hardtanh sign floor ceil round trunc gt lt ge le eq ne __gt__ __lt__ "
    "__ge__ __le__ __eq__ __ne__ greater less logical_and logical_or logical_not __and__ __or__ "
    "__xor__ __invert__ __rand__ __ror__ bitwise_and bitwise_or bitwise_not amax amin aminmax "
    "argmax argmin argsort sort msort topk kthvalue median nanmedian mode cummax cummin heaviside "
    "fmod remainder __mod__ __floordiv__ floor_divide frac threshold threshold_ hardshrink "
    "softshrink hardsigmoid hardswish relu6 elu elu_ selu celu gelu silu mish softplus softsign "
    "tanhshrink logsigmoid log_sigmoid tanh tanh_ sigmoid sigmoid_ softmax log_softmax softmin "
    "logsumexp erf exp expm1 exp2 prelu rrelu hardtanh_ leaky_relu_ l1_loss smooth_l1_loss "
    "huber_loss hinge_embedding_loss relu6_".split()
)
_ELEMENTWISE = frozenset(
    "add __add__ __radd__ sub __sub__ __rsub__ rsub subtract mul __mul__ __rmul__ multiply div "
    "__truediv__ __rtruediv__ divide mse_loss l1_loss smooth_l1_loss huber_loss dist".split()
)
_EDITS = frozenset("__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __setitem__".split())
_TURNS = frozenset("T t transpose permute movedim swapaxes swapdims moveaxis mT adjoint".split())
_RAGGED = frozenset("masked_select nonzero argwhere unique unique_consecutive".split())
