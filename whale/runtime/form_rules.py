"""Rules: the Form of what a torch function gives, from the Forms of what it was given.

Place in the flow: `runtime.weighing` asks them at every call the loss code makes. A rule that does
not apply gives None, and so does a function without one: the result then has no Form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from whale.runtime import forms
from whale.runtime.form_table import FormTable, dims_of, tensors
from whale.runtime.forms import Form, Term
from whale.runtime.means import Count, address, elements, summed_count


def mean_of_rows(
    t: FormTable, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, ragged: bool
) -> tuple[Tensor, Count] | None:
    """(sum, count) of a mean over all elements, or over the rows of each of the others."""
    x = args[0] if args else kwargs["input"]
    if not x.is_floating_point() or not x.dim() or kwargs.get("out") is not None:
        return None
    if not t.over_rows(x, args, kwargs) or t.fixed(x):
        return None
    more = {key: value for key, value in kwargs.items() if key != "input"}
    if name == "nanmean":
        whole = dims_of(args, kwargs) is None
        return (x.nansum(), summed_count(~x.isnan())) if whole else None
    # A sum of many may be more than float16 holds.
    narrow = x.dtype == torch.float16 and dims_of(args, kwargs) is None and not more.get("dtype")
    total = torch.sum(x.float() if narrow else x, *args[1:], **more)
    size = x.numel() // max(1, total.numel())
    return total, elements(size, t.rows, x, ragged=ragged)


# ---- rules ---------------------------------------------------------------------------------------


def _sum(t: FormTable, func: Any, args: Any, kwargs: Any, out: Tensor) -> Form | None:
    x = args[0] if args else kwargs["input"]
    form = t.form(x)
    if form is not None:
        more = {key: value for key, value in kwargs.items() if key != "input"}
        if form.inverse or form.floor or (not form.summed and not t.over_rows(x, args, kwargs)):
            return None
        return forms.each(form, lambda total: func(total, *args[1:], **more), summed=True)
    if not x.dim() or t.fixed(x) or not t.over_rows(x, args, kwargs):
        return None
    # A copy: the user's may be changed in place.
    term = Term(total=out.clone(), size=0 if id(x) in t.ragged else x.numel())
    return Form(terms=(term,), origin=address("sum", x), keep=(x,))


def _mean_of(t: FormTable, func: Any, args: Any, kwargs: Any, out: Tensor) -> Form | None:
    form = t.form(args[0] if args else kwargs["input"])
    if form is None or not form.summed or form.inverse or form.floor:
        return None
    if args[1:] or set(kwargs) - {"dim"}:
        return None
    if out.dim():
        return forms.each(form, lambda total: func(total, **kwargs))
    # How many were put together may be how many rows there are.
    size = (args[0] if args else kwargs["input"]).numel()
    return forms.scaled(forms.each(form, torch.sum), float(size), divide=True)


def _product(t: FormTable, func: Any, args: Any, kwargs: Any, out: Any) -> Form | None:
    """dot, einsum and the like, if they leave one number."""
    if not isinstance(out, Tensor) or out.dim():
        return None
    given = list(tensors(args, kwargs))
    made = [form for x in given if (form := t.form(x)) is not None]
    if not made:
        if any(t.fixed(x) or not x.dim() for x in given):
            return None
        total = out.clone()
        return Form(terms=(Term(total=total),), origin=("sum", id(total)), keep=(total,))
    if len(made) > 1 or made[0].inverse or made[0].floor:
        return None

    def again(total: Tensor) -> Tensor:
        new = [total if t.form(x) is made[0] else x for x in args]
        result: Tensor = func(*new, **kwargs)
        return result

    if any(isinstance(x, (tuple, list)) for x in args) or kwargs:
        return None
    return forms.each(made[0], again, summed=True)


def _linear(t: FormTable, func: Any, args: Any, kwargs: Any, out: Any) -> Form | None:
    form = t.form(args[0]) if args else None
    if form is None or not isinstance(out, Tensor):
        return None
    keep = form.summed and not out.dim() and func.__name__ in _CASTS
    if form.inverse or form.floor:
        return form if keep else None
    made = forms.each(form, lambda total: func(total, *args[1:], **kwargs))
    # A count stays one through a change of dtype.
    return replace(made, origin=form.origin) if keep else made


def _multiply(t: FormTable, func: Any, args: Any, kwargs: Any, out: Tensor) -> Form | None:
    if kwargs or len(args) != 2:
        return None
    a, b = t.form(args[0]), t.form(args[1])
    if a is None and b is None:
        return None
    if a is not None and b is not None:
        if bool(a.inverse) == bool(b.inverse):
            return None
        left, right = (a, b) if b.inverse else (b, a)
        return _by(left, args[0] if left is a else args[1], right)
    form, other = (a, args[1]) if a is not None else (b, args[0])
    assert form is not None
    if form.inverse and isinstance(other, Tensor):
        return _by(None, other, form)
    return forms.scaled(form, other, divide=False)


def _divide(t: FormTable, func: Any, args: Any, kwargs: Any, out: Tensor) -> Form | None:
    if kwargs.get("rounding_mode") is not None or len(args) != 2:
        return None
    return _over(t, args[0], args[1])


def _divided_by(t: FormTable, func: Any, args: Any, kwargs: Any, out: Tensor) -> Form | None:
    return _over(t, args[1], args[0])


def _over(t: FormTable, top: Any, bottom: Any) -> Form | None:
    a, b = t.form(top), t.form(bottom)
    if b is None:
        return None if a is None else forms.scaled(a, bottom, divide=True)
    if b.inverse:
        return None
    if a is None and not isinstance(top, Tensor):
        return replace(b, inverse=float(top))
    return _by(a, top, b)


def _by(form: Form | None, value: Tensor, bottom: Form) -> Form | None:
    """Something by a sum, or times a number by one."""
    if forms.has_grad(bottom):
        if forms.count_of(replace(bottom, inverse=0.0)) is None:
            return None
        return Form(
            terms=(),
            problem="the loss divides by a sum over rows that has a gradient itself, which cannot "
            "be done in parts",
        )
    count = forms.count_of(replace(bottom, inverse=0.0))
    if count is None or (form is None and not value.dim()):
        return None
    made = forms.by_rows(value, count) if form is None else forms.divided(form, count)
    if made is None or not bottom.inverse:
        return made
    return forms.scaled(made, bottom.inverse, divide=False)


def _add(t: FormTable, func: Any, args: Any, kwargs: Any, out: Tensor) -> Form | None:
    return _plus(t, args, kwargs, out, 1.0)


def _subtract(t: FormTable, func: Any, args: Any, kwargs: Any, out: Tensor) -> Form | None:
    return _plus(t, args, kwargs, out, -1.0)


def _subtracted(t: FormTable, func: Any, args: Any, kwargs: Any, out: Tensor) -> Form | None:
    return _plus(t, (args[1], args[0]), kwargs, out, -1.0)


def _plus(t: FormTable, args: Any, kwargs: Any, out: Tensor, sign: float) -> Form | None:
    if kwargs or len(args) != 2:
        return None
    a, b = t.form(args[0]), t.form(args[1])
    if a is not None and b is not None:
        return forms.added(a, b, sign)
    if a is not None and isinstance(args[1], Tensor) and not args[1].is_floating_point():
        return None  # n + (n == 0)
    if a is not None:
        return forms.shifted(a, args[1] * sign, out)
    if b is None or b.inverse:
        return None
    negated = b if sign > 0 else forms.each(b, torch.neg)
    if negated.summed and out.numel() == 1 and not negated.fits(out):  # acc = zeros(1); acc += loss
        negated = forms.each(negated, lambda total: total.reshape(out.shape))
    return forms.shifted(negated, args[0], out)


def _at_least(t: FormTable, func: Any, args: Any, kwargs: Any, out: Tensor) -> Form | None:
    """`clamp(min=...)` of a count."""
    form = t.form(args[0]) if args else None
    low = kwargs.get("min", kwargs.get("other", args[1] if len(args) > 1 else None))
    if form is None or low is None or kwargs.get("max") is not None or len(args) > 2:
        return None
    if forms.has_grad(form) or forms.count_of(form) is None or form.floor:
        return None
    if func.__name__ in ("max", "maximum") and not isinstance(low, Tensor):
        return None
    return None if isinstance(low, Tensor) and low.dim() else replace(form, floor=low)


def _inverse(t: FormTable, func: Any, args: Any, kwargs: Any, out: Tensor) -> Form | None:
    form = t.form(args[0]) if args else None
    power = args[1] if len(args) > 1 else -1
    if form is None or form.inverse or not isinstance(power, int | float) or power != -1:
        return None
    return replace(form, inverse=1.0)


def _finite(t: FormTable, func: Any, args: Any, kwargs: Any, out: Tensor) -> Form | None:
    """`nan_to_num` of a mean: nothing by nothing is nothing."""
    form = t.form(args[0]) if args else None
    if form is None or form.inverse or not form.summed or args[1:] or kwargs:
        return None
    return _forgiving(form)


def _where(t: FormTable, func: Any, args: Any, kwargs: Any, out: Tensor) -> Form | None:
    """`where(n > 0, total / n, 0)`: what is not taken adds nothing."""
    if len(args) != 3 or args[0].dim():
        return None
    taken, other = t.form(args[1]), args[2]
    picks = args[0]
    if taken is None:
        taken, other, picks = t.form(args[2]), args[1], ~args[0]
    if taken is None or t.form(other) is not None or taken.inverse or taken.floor:
        return None
    if not forms.has_grad(taken):  # a count, in the place of which something else may stand
        return None

    def masked(total: Tensor) -> Tensor:
        return torch.where(picks, total, torch.zeros_like(total))

    form = _forgiving(forms.each(taken, masked))
    if isinstance(other, Tensor) and not other.requires_grad and not bool(other.any()):
        return form
    return forms.shifted(form, torch.where(picks, torch.zeros_like(out), other), out)


def _forgiving(form: Form) -> Form:
    return replace(
        form,
        terms=tuple(
            term
            if term.count is None or float(term.count.floor)
            else replace(term, count=replace(term.count, floor=forms.TINY))
            for term in form.terms
        ),
    )


def _stack(t: FormTable, func: Any, args: Any, kwargs: Any, out: Tensor) -> Form | None:
    """stack, cat and hstack of sums and means."""
    parts = args[0] if args else kwargs["tensors"]
    made = [t.form(x) for x in parts]
    if all(form is None for form in made) or kwargs.get("out") is not None:
        return None
    more = {key: value for key, value in kwargs.items() if key != "tensors"}
    return forms.joined(made, parts, lambda each: func(each, *args[1:], **more))


_CASTS = frozenset(
    "float double half bfloat16 long int to type type_as clone cpu cuda detach view reshape "
    "squeeze unsqueeze contiguous".split()
)
Rule = Callable[[FormTable, Any, Any, Any, Any], Form | None]
RULES: dict[str, Rule] = {
    # By the name of the function.
    **dict.fromkeys(("sum", "nansum", "count_nonzero"), _sum),
    "mean": _mean_of,
    **dict.fromkeys("dot vdot inner einsum tensordot matmul __matmul__ mm".split(), _product),
    **dict.fromkeys(_CASTS, _linear),
    **dict.fromkeys(
        "neg __neg__ negative positive flatten t transpose permute select index_select narrow "
        "__getitem__ ravel movedim".split(),
        _linear,
    ),
    **dict.fromkeys("mul __mul__ __rmul__ __imul__ mul_ multiply".split(), _multiply),
    **dict.fromkeys(
        "div __truediv__ __div__ __itruediv__ __idiv__ div_ true_divide divide".split(), _divide
    ),
    **dict.fromkeys("__rtruediv__ __rdiv__".split(), _divided_by),
    **dict.fromkeys("add __add__ __radd__ __iadd__ add_".split(), _add),
    **dict.fromkeys("sub __sub__ __isub__ sub_ subtract".split(), _subtract),
    **dict.fromkeys("__rsub__ rsub".split(), _subtracted),
    **dict.fromkeys("clamp clamp_min clip maximum max clamp_ clamp_min_".split(), _at_least),
    **dict.fromkeys("reciprocal pow __pow__".split(), _inverse),
    "nan_to_num": _finite,
    "where": _where,
    **dict.fromkeys("stack cat concat concatenate hstack".split(), _stack),
}
