"""How good answers are: exact match, and the most frequent answer as the least to beat.

Place in the flow: what a model replies and what was right in, figures out. `vqa` scores answers of
several people; here each question has one.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from whale.errors import WhaleError


@dataclass(frozen=True, slots=True, kw_only=True)
class Majority:
    """The most frequent answer and how often it is right."""

    answer: str
    accuracy: float


def same_form(text: str) -> str:
    """A text without what does not count: capitals, runs of spaces, a full stop at the end."""
    words = unicodedata.normalize("NFKC", text).casefold().split()
    return " ".join(words).rstrip(".。").rstrip()


def exact_match(replies: Sequence[str], answers: Sequence[str]) -> float:
    """The share of replies that are the answer, in the same form."""
    if len(replies) != len(answers) or not answers:
        raise WhaleError(
            f"{len(replies)} replies to {len(answers)} questions; one each is needed",
            hint="give the replies in the order of the questions",
        )
    pairs = zip(replies, answers, strict=True)
    return sum(same_form(reply) == same_form(answer) for reply, answer in pairs) / len(answers)


def majority(known: Sequence[str], asked: Sequence[str] | None = None) -> Majority:
    """What always giving the most frequent of the `known` answers scores.

    Args:
        known: Answers to choose from, of the training split.
        asked: Right answers to score against, of the held-out split; default: `known`.
    """
    if not known:
        raise WhaleError("no answers to choose from", hint="give those of the training split")
    counts = Counter(map(same_form, known))
    # Of equally frequent answers the first in the alphabet: the same each time.
    best = min(counts, key=lambda form: (-counts[form], form))
    answer = next(answer for answer in known if same_form(answer) == best)
    asked = known if asked is None else asked
    return Majority(answer=answer, accuracy=exact_match([answer] * len(asked), asked))
