"""Recall at k: whether what belongs to a query is among the k best of all candidates.

Place in the flow: a model's matrix of scores (every picture against every caption) in, figures of
both directions out. A query may have several right candidates: five captions, or equal labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from whale.errors import WhaleError


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalls:
    """Recall at each k, in both directions."""

    forward: Mapping[int, float]
    """Rows are the queries: captions found for a picture, if pictures are the rows."""
    backward: Mapping[int, float]
    """Columns are the queries."""


def same_label(rows: Sequence[str], columns: Sequence[str]) -> npt.NDArray[np.bool_]:
    """What is right where rows and columns have names, and equal names belong together."""
    numbers = {name: number for number, name in enumerate({*rows, *columns})}
    of_rows, of_columns = (np.array([numbers[n] for n in names]) for names in (rows, columns))
    right: npt.NDArray[np.bool_] = of_rows[:, None] == of_columns[None, :]
    return right


def recalls(
    scores: npt.NDArray[Any],
    right: npt.NDArray[np.bool_] | None = None,
    ks: Sequence[int] = (1, 5, 10),
) -> Recalls:
    """Recall at each of `ks`: the share of queries with a right candidate among the k best.

    A wrong candidate with the same score as a right one counts as better, so a model that gives
    everything the same score finds nothing.

    Args:
        scores: [rows, columns], higher is better.
        right: [rows, columns], whether they belong together; default: row i with column i.
        ks: How many candidates to look at.
    """
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim != 2 or not scores.size:
        raise WhaleError(
            f"scores have shape {scores.shape}; [rows, columns] is needed",
            hint="score every row against every column",
        )
    if right is None:
        right = np.eye(*scores.shape, dtype=np.bool_)
    right = np.asarray(right, dtype=np.bool_)
    if right.shape != scores.shape:
        raise WhaleError(
            f"scores have shape {scores.shape}, `right` {right.shape}; they must be the same",
            hint="`same_label(rows, columns)` makes it from names",
        )
    if np.isnan(scores).any():
        raise WhaleError(
            f"{int(np.isnan(scores).sum())} of {scores.size} scores are not numbers (NaN)",
            hint="a NaN has no rank; look for the step that made it",
        )
    if min(ks, default=0) < 1:
        raise WhaleError(f"ks {tuple(ks)}; each must be at least 1", hint="for example (1, 5, 10)")
    return Recalls(
        forward=_recalls_of_rows(scores, right, ks),
        backward=_recalls_of_rows(scores.T, right.T, ks),
    )


def _recalls_of_rows(
    scores: npt.NDArray[np.float64], right: npt.NDArray[np.bool_], ks: Sequence[int]
) -> dict[int, float]:
    if not right.any(axis=1).all():
        nothing = int(np.argmin(right.any(axis=1)))
        raise WhaleError(
            f"query {nothing} has no right candidate; each needs at least one",
            hint="leave queries out that nothing belongs to",
        )
    best = np.where(right, scores, -np.inf).max(axis=1, keepdims=True)
    num_better = ((scores >= best) & ~right).sum(axis=1)
    return {k: float((num_better < k).mean()) for k in ks}
