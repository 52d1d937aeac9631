"""Forms: how a number of the loss code is made of sums over rows, followed through its arithmetic.

Place in the flow: used by `runtime.weighing`. A Form says `value = totals / counts + rest` where
totals and counts are sums over rows: they add up over parts, the value does not. The functions here
are the arithmetic of Forms, `runtime.form_rules` says which torch function does which. A Form is a
guess about code that is not read: `engine.trials.parts` tries it before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from whale.runtime.means import Count, Number

TINY = 1e-300
"""A floor that only a count of zero is below: 0 / 0 is taken for 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A sum over rows, by its count if it is a mean.

    Attributes:
        total: The sum; in a Form that is not `summed`, what is yet to be added up.
        count: None: it is no mean.
        divisor: A number it is divided by. Whether that is the same for all parts (a coefficient)
            or a count of this part's rows cannot be seen in a number.
        size: Elements that were added up.
        scaled: Whether anything was multiplied with it, or divided by: with other sums, it is not
            one sum any more.
        factor: A coefficient of it; unlike what it is divided by, never a count.
    """

    total: Tensor
    count: Count | None = None
    divisor: Number = 1.0
    size: int = 0
    scaled: bool = False
    factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a tensor is made.

    Attributes:
        terms: Its sums.
        rest: What is added to them, of which nothing is known.
        summed: Whether the terms are sums; else they have rows, and become sums when added up.
        origin: Names what a sum without a gradient counts.
        keep: Tensors whose addresses are in `origin`.
        floor: `clamp(min=...)` of a sum.
        inverse: If not 0, the value is this number by that of the terms.
        problem: Why it cannot be computed in parts, if it gets to the loss.
    """

    terms: tuple[Term, ...]
    rest: Tensor | None = None
    summed: bool = True
    origin: tuple[Any, ...] = ()
    keep: tuple[Tensor, ...] = ()
    floor: Number = 0.0
    inverse: float = 0.0
    problem: str = ""

    def fits(self, out: Tensor) -> bool:
        """Whether it is of this very tensor: what broadcasts is not followed."""
        totals = [term.total for term in self.terms]
        return all(
            t.shape == out.shape for t in (*totals, *([] if self.rest is None else [self.rest]))
        )


def count_of(form: Form) -> Count | None:
    """A sum without a gradient as what something is divided by."""
    if not form.summed or form.inverse or not form.terms:
        return None
    if any(t.count is not None or t.total.dim() for t in form.terms):
        return None
    origin, per, keep = form.origin, 1.0, form.keep
    value = _by(form.terms[0])
    for term in form.terms[1:]:
        value = value + _by(term)
    if len(form.terms) > 1 or isinstance(form.terms[0].divisor, Tensor) or not origin:
        origin, keep = ("made", id(value)), (value,)
    else:
        per = form.terms[0].factor / form.terms[0].divisor
    extra = 0.0 if form.rest is None else form.rest
    return Count(
        value=value,
        origin=origin,
        per=per,
        extra=extra,
        floor=form.floor,
        keep=keep,
        divides=True,
    )


def _by(term: Term) -> Tensor:
    total = term.total.detach()
    if term.factor != 1.0:
        total = total * term.factor
    one = not isinstance(term.divisor, Tensor) and term.divisor == 1.0
    return total if one else total / term.divisor


def has_grad(form: Form) -> bool:
    """Whether any of it has a gradient."""
    rests = () if form.rest is None else (form.rest,)
    return any(t.requires_grad for t in (*(t.total for t in form.terms), *rests))


def each(form: Form, change: Callable[[Tensor], Tensor], *, summed: bool | None = None) -> Form:
    """The Form of a linear function of it."""
    return replace(
        form,
        terms=tuple(replace(t, total=change(t.total)) for t in form.terms),
        rest=None if form.rest is None else change(form.rest),
        summed=form.summed if summed is None else summed,
        origin=(),
        floor=0.0,
    )


def scaled(form: Form, by: Number, *, divide: bool) -> Form | None:
    """Times, or by, something that is no Form."""
    if form.inverse:
        if isinstance(by, Tensor) or not by:
            return None
        return replace(form, inverse=form.inverse / by if divide else form.inverse * by)
    if form.floor:
        if isinstance(by, Tensor) or by <= 0 or isinstance(form.floor, Tensor):
            return None
        floor = form.floor / by if divide else form.floor * by
        made = scaled(replace(form, floor=0.0), by, divide=divide)
        return None if made is None else replace(made, floor=floor)
    if isinstance(by, Tensor) and (by.dim() or by.requires_grad):
        act = torch.div if divide else torch.mul
        return each(form, lambda total: act(total, by))
    if not isinstance(by, Tensor) and not by:
        if not divide:
            return each(form, lambda total: total * 0.0)
        if form.rest is not None:  # a count of nothing divides nothing else
            return None
    if divide or isinstance(by, Tensor):
        terms = tuple(
            replace(t, divisor=t.divisor * by if divide else t.divisor / by, scaled=True)
            for t in form.terms
        )
    else:
        terms = tuple(replace(t, factor=t.factor * by, scaled=True) for t in form.terms)
    rest = form.rest
    if rest is not None:
        rest = rest / by if divide else rest * by
    return replace(form, terms=terms, rest=rest)


def divided(form: Form, count: Count) -> Form | None:
    """A sum, or something that has rows, by a count."""
    if any(t.count is not None for t in form.terms) or form.rest is not None:
        return None
    if form.inverse or form.floor:
        return None
    terms = tuple(replace(t, count=count) for t in form.terms)
    return replace(form, terms=terms, origin=(), keep=())


def by_rows(total: Tensor, count: Count) -> Form:
    """Something that has rows, by a count: what it adds up to is a mean."""
    return Form(terms=(Term(total=total, count=count),), summed=False)


def added(a: Form, b: Form, sign: float) -> Form | None:
    """The sum or difference of two."""
    if a.inverse or b.inverse or a.floor or b.floor or not (a.summed and b.summed):
        return None
    terms = b.terms if sign > 0 else tuple(replace(t, total=-t.total) for t in b.terms)
    rests = [r for r in (a.rest, None if b.rest is None else b.rest * sign) if r is not None]
    rest = None if not rests else rests[0] if len(rests) == 1 else rests[0] + rests[1]
    return Form(terms=_merged(a.terms + terms), rest=rest, problem=a.problem or b.problem)


def _merged(terms: Sequence[Term]) -> tuple[Term, ...]:
    """Plain sums are one sum: a loop over rows or chunks may add any number of them."""
    plain = [t for t in terms if t.count is None and not t.scaled]
    if len(plain) < 2:
        return tuple(terms)
    total = plain[0].total
    for term in plain[1:]:
        total = total + term.total
    sizes = [term.size for term in plain]
    one = Term(total=total, size=sum(sizes) if all(sizes) else 0)
    return tuple(
        one if t is plain[0] else t
        for t in terms
        if t is plain[0] or not any(t is p for p in plain)
    )


def shifted(form: Form, by: Number, like: Tensor) -> Form | None:
    """Plus something that is no Form."""
    if form.inverse or form.floor or not form.summed:
        return None
    if not isinstance(by, Tensor):
        if not by:
            return form
        by = torch.full((), float(by), dtype=like.dtype, device=like.device)
    by = by.expand(like.shape).clone()
    return replace(form, rest=by if form.rest is None else form.rest + by)


def joined(
    forms: Sequence[Form | None], parts: Sequence[Tensor], join: Callable[[list[Tensor]], Tensor]
) -> Form | None:
    """Sums and means put together in one tensor, each in its place."""
    zeros = [torch.zeros_like(part) for part in parts]

    def alone(place: int, value: Tensor) -> Tensor:
        return join([*zeros[:place], value, *zeros[place + 1 :]])

    terms: list[Term] = []
    rest: list[Tensor] = []
    problem = ""
    for place, (form, part) in enumerate(zip(forms, parts, strict=True)):
        if form is None:
            if part.dim() > 1 or part.numel() > 1:  # it may have rows
                return None
            rest.append(part)
            continue
        if form.inverse or form.floor or not form.summed or not form.fits(part):
            return None
        problem = problem or form.problem
        rest.append(zeros[place] if form.rest is None else form.rest)
        terms += [replace(term, total=alone(place, term.total)) for term in form.terms]
    return Form(terms=_merged(terms), rest=join(rest), problem=problem)


def assigned(old: Form | None, new: Form | None, before: Tensor, index: Any, value: Any) -> Form:
    """`x[index] = value` of an x that was `before`."""

    def put(base: Tensor, item: Any) -> Tensor:
        made = base.clone()
        made[index] = item
        return made

    none = torch.zeros_like(before)
    terms = [replace(t, total=put(t.total, 0.0)) for t in (() if old is None else old.terms)]
    terms += [replace(t, total=put(none, t.total)) for t in (() if new is None else new.terms)]
    base = before if old is None else none if old.rest is None else old.rest
    item = value if new is None else 0.0 if new.rest is None else new.rest
    problem = next((form.problem for form in (old, new) if form is not None and form.problem), "")
    return Form(terms=tuple(terms), rest=put(base, item), problem=problem)
