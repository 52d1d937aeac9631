"""Weighing: what a part of the rows adds to the loss of all rows, seen while the loss is computed.

Place in the flow: wraps the code that computes the loss, in `engine.lower.stages` and in
`engine.trials.parts`, which tries on a few rows whether the parts make up the whole, and how. The
user's code sees the values it would see anyway; beside them a Form is followed to the loss. A part
then gives a sum and a count; both are added up over parts, and one is divided by the other once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from whale.errors import WhaleError
from whale.runtime.compat import in_transform
from whale.runtime.form_rules import RULES, mean_of_rows
from whale.runtime.form_table import FormTable
from whale.runtime.forms import TINY, Form, Term
from whale.runtime.means import Count, Number, known_mean, weighted_mean
from whale.runtime.recompute import RerunMode

NOTHING = ("nothing",)
"""The origin of a count of no rows, which is like any other."""
MOST_COUNTS = 15
"""Different counts in one loss."""
NUMBERS = 7
"""What a part adds to the numbers of a step (`Weighed.numbers`)."""

Meet = Callable[[Tensor], Tensor]
"""The SUM of some numbers over all parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """How the loss of a model is computed in parts, as a trial on a few rows found.

    Attributes:
        divisors: By term, whether numbers it is divided by are the same for all parts (`same`) or
            counts of a part's rows (`count`). No term: the loss is weighed by rows.
        means: By term, whether it has a count.
        joins: Whether its terms have different counts: parts that run side by side tell each other
            theirs; of parts that run in turn all must have them in the same ratio.
    """

    divisors: tuple[str, ...]
    means: tuple[bool, ...]
    joins: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a trial on a few rows found out about a loss.

    Attributes:
        weighing: How it is computed in parts; None: it could not be tried.
        router_losses: Whether it has losses over all tokens, for which replicas meet.
        written: Parameters that a forward writes to.
    """

    weighing: Weighing | None = None
    router_losses: bool = False
    written: frozenset[str] = frozenset()

    @property
    def meets(self) -> bool:
        """Whether replicas wait for each other in its code."""
        return self.router_losses or (self.weighing is not None and self.weighing.joins)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """What a part adds: the loss of all parts is the sum of totals by that of counts.

    Attributes:
        total: Where backward begins.
        count: Its weight.
        floor: The count of all parts is at least the sum of these.
        divides: Whether the loss code itself divides by its count (`Count.divides`).
        sizes: Of several means under one count, how many elements each has for one of the first.
            They must be the same on all parts; nan: nothing to compare.
    """

    total: Tensor
    count: Tensor
    floor: Tensor
    divides: bool = False
    sizes: tuple[Number, ...] = ()

    @property
    def numbers(self) -> Tensor:
        """[NUMBERS]: the loss that it adds, the count, the least count, the parts that divide.

        Then the parts with several means, and of a number made of their sizes the sum and that of
        its square: alike on all parts, these two tell nothing new.
        """
        mark = sum(place * size for place, size in enumerate(self.sizes, 1))
        added = (self.total.detach(), self.count, self.floor)
        device = self.count.device
        if isinstance(mark, Tensor):
            divides = torch.full((), float(self.divides), device=device)
            none = mark.isnan()
            seen = torch.where(none, 0.0, torch.stack([torch.ones_like(mark), mark, mark * mark]))
            more = torch.cat([divides.double().reshape(1), seen.double()])
        else:
            plain = (float(self.divides), float(bool(self.sizes)), mark, mark * mark)
            more = torch.tensor(plain, dtype=torch.float64).to(device, non_blocking=True)
        return torch.cat([torch.stack([number.double() for number in added]), more])


class MeanTracker(RerunMode):
    """Follows sums and means to the loss of `rows` rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.table = FormTable(rows)

    def again(self) -> MeanTracker:
        """Computes means the same way, and counts nothing twice."""
        return MeanTracker(self.rows)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        table = self.table
        if name in ("__get__", "__set__"):
            return table.property(func, args, kwargs)
        if in_transform():  # of torch.func: what its functions see is of no row, and has no address
            return func(*args, **kwargs)
        ragged = table.has_ragged(args, kwargs)
        if func is weighted_mean or not table.has_form(args, kwargs):
            found = None
            if func is weighted_mean or not table.penalty(name, args, kwargs):
                found = known_mean(func, args, kwargs, self.rows, ragged)
            if found is None and name in ("mean", "nanmean"):
                found = mean_of_rows(table, name, args, kwargs, ragged=ragged)
            if found is not None:
                return self._made(*found)
        given = table.before(name, args, kwargs)
        out = func(*args, **kwargs)
        if name == "__setitem__":
            table.assigned(args, given[0])
            return out
        rule = RULES.get(name)
        form = table.bent(name, args, kwargs, out)
        if form is None and rule is not None:
            form = rule(table, func, given, kwargs, out)
        if form is not None and isinstance(out, Tensor) and form.fits(out):
            table.set(out, form)
        elif args and out is args[0]:
            table.forget(out)
        table.mark(name, args, kwargs, out, ragged=ragged)
        return out

    def _made(self, total: Tensor, count: Count | None) -> Tensor:
        term = Term(total=total, count=count)
        if count is None:
            return self.table.set(total.clone(), Form(terms=(term,), origin=("sum", id(total))))
        # An empty part (no valid label, no row) averages to 0, not to nan; its weight is 0.
        safe = torch.where(count.value == 0, torch.ones_like(count.value), count.value)
        return self.table.set(total / safe.to(total.dtype), Form(terms=(term,)))

    # ---- the part --------------------------------------------------------------------------------

    def weigh(
        self,
        loss: Tensor,
        share: float,
        weighing: Weighing | None = None,
        meet: Meet | None = None,
    ) -> Weighed:
        """What these rows add to the loss.

        Args:
            loss: Of these rows.
            share: They are this share of all rows.
            weighing: What a trial found; None: there was none.
            meet: Adds up counts over all parts, where they run side by side.
        """
        form = self.table.form(loss)
        rows = torch.full((), float(self.rows), device=loss.device)
        none = torch.zeros((), device=loss.device)
        if form is not None and form.problem:
            raise WhaleError(form.problem, hint=_WAY_OUT)
        if form is None or not form.summed or form.inverse or form.floor:
            if not self.rows:  # nothing to add, but others may wait for its backward
                return Weighed(total=loss.nan_to_num(0.0, 0.0, 0.0) * 0.0, count=none, floor=none)
            if weighing is not None and weighing.divisors and torch.is_grad_enabled():
                raise _otherwise(0, weighing)
            return Weighed(total=_wide(loss) * self.rows, count=rows, floor=none)
        terms = self._resolved(form, weighing)
        counts = [t.count for t in terms if t.count is not None]
        alike = len(counts) == len(terms) and len(_origins(counts)) < 2
        portion = torch.full((), share, device=loss.device, dtype=torch.float64)
        rest = form.rest
        if not self.rows and rest is not None and not bool(rest.isfinite().all()):
            # Nothing by nothing. What is finite stays: others may wait for its backward.
            rest = None
        if not counts and not (weighing is not None and weighing.joins):
            total = _added([t.total for t in terms], rest, share)
            return Weighed(total=total, count=portion, floor=none)
        if alike and not (weighing is not None and weighing.joins):
            first = next((c for c in counts if c.origin != NOTHING), counts[0])
            totals = [
                t.total if c.per == first.per else t.total * (first.per / c.per)
                for t, c in zip(terms, counts, strict=True)
            ]
            total = _added(totals, rest, first.value.detach())
            floor = min((c.floor for c in counts), key=float)
            if floor == TINY and not bool(total.isfinite().all()):
                raise WhaleError(
                    "rows of this batch give a loss that is nan or infinite, and the loss code "
                    "makes another number of it (nan_to_num, where): for all rows at once that is "
                    "the loss of the whole batch, in parts it would be that of a part",
                    hint="make each row's loss finite before it is averaged "
                    "(losses.nan_to_num().mean()), or leave such rows out of the batch",
                )
            return Weighed(
                total=total,
                count=first.value.detach().double() + first.extra * portion,
                floor=floor * portion,
                divides=any(c.divides for c in counts),
                sizes=self._sizes(counts, first),
            )
        if weighing is None or not weighing.joins or (meet is None and any(map(_more, counts))):
            raise WhaleError(
                "the loss adds means over different counts, which no single weight of a part makes "
                "exact",
                hint=OTHER_COUNTS,
            )
        if meet is None:
            return _in_turn(terms, rest, portion)
        known = _met(counts, meet, loss.device)
        totals = []
        for term in terms:
            if term.count is None:
                totals.append(term.total)
            else:
                over = (known.pop(0) + term.count.extra).clamp(min=float(term.count.floor))
                totals.append(term.total / over.to(term.total.dtype))
        return Weighed(total=_added(totals, rest, share), count=portion, floor=none)

    def _sizes(self, counts: list[Count], first: Count) -> tuple[float, ...]:
        """None where there is nothing to compare: one mean, no rows, or means over nothing."""
        if len(counts) < 2 or not self.rows or any(c.origin == NOTHING for c in counts):
            return ()
        return tuple(c.per / first.per for c in counts)

    def divisors(self, loss: Tensor) -> list[float] | None:
        """The numbers that the terms of the loss are divided by; None: it has no Form."""
        form = self.table.form(loss)
        if form is None or not form.summed or form.inverse or form.floor:
            return None
        return [float(t.divisor) for t in form.terms]

    def num_counts(self, loss: Tensor, weighing: Weighing) -> int:
        """How many different counts its terms have; sums without one count as one more."""
        form = self.table.form(loss)
        if form is None or not form.summed or form.inverse or form.floor:
            return 1
        terms = self._resolved(form, weighing)
        counts = [t.count for t in terms if t.count is not None]
        return len(_origins(counts)) + (len(counts) < len(terms))

    def means(self, loss: Tensor, divisors: tuple[str, ...]) -> tuple[bool, ...]:
        """By term of the loss, whether it has a count."""
        form = self.table.form(loss)
        assert form is not None
        pairs = zip(form.terms, divisors, strict=True)
        return tuple(term.count is not None or kind == "count" for term, kind in pairs)

    def _resolved(self, form: Form, weighing: Weighing | None) -> list[Term]:
        """Terms without divisors: they are in the sums, or are counts."""
        kinds: tuple[str, ...] = tuple(map(self._guess, form.terms))
        if weighing is not None and len(weighing.divisors) == len(kinds):
            kinds = weighing.divisors
        elif weighing is not None and torch.is_grad_enabled():
            raise _otherwise(len(kinds), weighing)
        found = []
        means = weighing.means if weighing is not None and kinds is weighing.divisors else ()
        for number, (term, kind) in enumerate(zip(form.terms, kinds, strict=True)):
            if term.factor != 1.0:
                term = replace(term, total=term.total * term.factor, factor=1.0)
            divisor = term.divisor
            if kind == "count":
                if term.count is not None:
                    raise WhaleError("a mean is divided by another count", hint=_WAY_OUT)
                found.append(replace(term, count=self._number(term, number), divisor=1.0))
                continue
            if isinstance(divisor, Tensor) or divisor != 1.0:
                term = replace(term, total=term.total / divisor, divisor=1.0)
            if number < len(means) and means[number] != (term.count is not None):
                term = self._nothing(term)
            found.append(term)
        return found

    def _number(self, term: Term, number: int) -> Count:
        """The number that a term is divided by, as a count."""
        value = torch.as_tensor(term.divisor, device=term.total.device).detach()
        if isinstance(term.divisor, Tensor) or term.divisor not in (self.rows, term.size):
            if not self.rows:
                return Count(value=torch.zeros_like(value), origin=("number", number), divides=True)
            if not bool(term.total.detach().any()):
                raise WhaleError(
                    f"a sum of the loss over {self.rows} rows is 0, divided by {float(value):g}: "
                    "whether that counts anything, or stands in for a count of nothing "
                    "(`max(n, 1)`), cannot be told from a number",
                    hint="divide by a count that can be followed (mask.sum().clamp(min=1), without "
                    "`.item()`), or use wh.weighted_mean(total, count)",
                )
            return Count(value=value, origin=("number", number), divides=True)
        per = term.divisor / self.rows if self.rows and term.divisor else 1.0
        return Count(value=value, origin=("rows",), per=per, divides=True)

    def _nothing(self, term: Term) -> Term:
        """A part where `max(n, 1)` took the 1: there was nothing to count."""
        if term.count is not None or float(term.total.detach()) != 0.0:
            raise WhaleError(
                "a term of the loss is a mean on some rows and none on others",
                hint="compute it the same way for every batch (n.clamp(min=1) instead of "
                "`max(n, 1)`, no branches on values), or use wh.weighted_mean(total, count)",
            )
        none = torch.zeros((), device=term.total.device)
        return replace(term, count=Count(value=none, origin=NOTHING, floor=TINY))

    def _guess(self, term: Term) -> str:
        """Untried: a number that is how many were added up is a count."""
        known = (float(self.rows), float(term.size))
        if isinstance(term.divisor, Tensor) or term.count is not None:
            return "same"
        return "count" if term.divisor in known and term.divisor != 1.0 else "same"


_WAY_OUT = (
    "say what is averaged with wh.weighted_mean(total, count), where both are sums over rows and "
    "the count has no gradient"
)


def _otherwise(number: int, weighing: Weighing) -> WhaleError:
    return WhaleError(
        f"the loss is made of {number} sums or means, on the example it was made of "
        f"{len(weighing.divisors)}",
        hint="compute it the same way for every batch (n.clamp(min=1) instead of `max(n, 1)`, no "
        "branches on values), or use wh.weighted_mean(total, count); in a pipeline, let a Layer of "
        "an earlier stage return what is averaged, and average it outside",
    )


def mean_loss(sums: torch.Tensor) -> torch.Tensor:
    """The mean loss, from what all parts added (`Weighed.numbers`)."""
    return sums[0] / torch.maximum(sums[1], sums[2])


def gradient_factor(sums: torch.Tensor) -> torch.Tensor:
    """What gradients of sums are multiplied by.

    torch's means over nothing (a batch of padding) are nan, and their gradients zero.
    """
    count = torch.maximum(sums[1], sums[2])
    nothing = (count == 0) & (sums[3] == 0)
    return 1.0 / torch.where(nothing, torch.ones_like(count), count)


OTHER_COUNTS = (
    "plan one micro-batch (pipeline.num_micro_batch=1): then parts can tell each other their "
    "counts; or use one count for all terms: n = mask.sum(), wh.weighted_mean(a + b, n)"
)


def _in_turn(terms: list[Term], rest: Tensor | None, portion: Tensor) -> Weighed:
    """A part of means over different counts, where no part knows those of the others.

    Weighed by the first count it is exact, as long as all parts have their counts in one ratio (no
    label left out, say). `sizes` tells whether they do. A sum counts a part's share of the rows.
    """
    counts = [t.count or Count(value=portion, origin=("share",)) for t in terms]
    values = [c.value.detach().double() for c in counts]
    empty = torch.stack([value == 0 for value in values]).all()
    ratios = [values[0] / value for value in values]
    totals = [
        t.total * torch.where(ratio.isfinite(), ratio, 1.0).to(_wide(t.total).dtype)
        for t, ratio in zip(terms, ratios, strict=True)
    ]
    sizes = [torch.where(empty, torch.nan, r.nan_to_num(torch.inf, torch.inf)) for r in ratios]
    return Weighed(
        total=_added(totals, rest, values[0]),
        count=values[0],
        floor=min((c.floor for c in counts), key=float) * portion,
        divides=any(c.divides for c in counts),
        sizes=tuple(sizes),
    )


def _more(count: Count) -> bool:
    """Whether a count has something added once for all parts."""
    return isinstance(count.extra, Tensor) or count.extra != 0.0


def _met(counts: list[Count], meet: Meet, device: torch.device) -> list[Tensor]:
    if len(counts) > MOST_COUNTS:
        raise WhaleError(
            f"the loss adds {len(counts)} means; with different counts at most {MOST_COUNTS} can "
            "be added",
            hint="use one count for several of them",
        )
    numbers = torch.zeros(MOST_COUNTS + 2, dtype=torch.float64, device=device)
    numbers[0], numbers[1] = 1.0, float(len(counts))
    for place, count in enumerate(counts):
        numbers[2 + place] = count.value.detach()
    numbers = meet(numbers)
    if float(numbers[1]) != len(counts) * float(numbers[0]):
        raise WhaleError(
            f"the loss adds {len(counts)} means here, on other replicas another number",
            hint="compute it the same way for every batch, without branches on values",
        )
    return list(numbers[2 : 2 + len(counts)].unbind())


def _added(totals: list[Tensor], rest: Tensor | None, weight: Number) -> Tensor:
    total = _wide(totals[0])
    for more in totals[1:]:
        total = total + _wide(more)
    return total if rest is None else total + _wide(rest) * weight


def _wide(number: Tensor) -> Tensor:
    """Half precision does not hold a sum over many, nor a count."""
    return number.float() if number.dtype in (torch.float16, torch.bfloat16) else number


def _origins(counts: list[Count]) -> set[Any]:
    return {(c.origin, _key(c.extra)) for c in counts if c.origin != NOTHING}


def _key(number: Number) -> float | int:
    return id(number) if isinstance(number, Tensor) else number
