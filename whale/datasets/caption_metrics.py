"""BLEU and CIDEr-D: how like the captions of people a model's captions are.

Place in the flow: captions made and captions given in, figures out; `coco` reads the files they
come from. Both are as in the COCO caption evaluation, but for its tokenizer, which is a Java
program: figures may differ a little from published ones.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from whale.errors import WhaleError

MAX_NGRAM = 4
_SIGMA = 6.0
"""Width of CIDEr-D's penalty for another length, in words."""

# A word may have apostrophes inside; a Chinese, Japanese or Korean character is a word of its own.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_CJK}]|(?:(?![{_CJK}])\w)+(?:['’](?:(?![{_CJK}])\w)+)*")

Ngram = tuple[str, ...]
Tokenize = Callable[[str], list[str]]


def tokenize(text: str) -> list[str]:
    """Lower-case words without punctuation; each Chinese character is one."""
    return _WORD.findall(text.lower())


def bleu(
    made: Mapping[int, str],
    given: Mapping[int, Sequence[str]],
    *,
    tokenize: Tokenize = tokenize,
) -> tuple[float, float, float, float]:
    """BLEU-1 to BLEU-4 of a whole set, from 0 to 1.

    Counts of all captions are added up before they are divided. The length to compare with is that
    of the given caption nearest in length, of two equally near the shorter.

    Args:
        made: One caption for each image.
        given: All captions people wrote, by the same images.
        tokenize: Text -> words.
    """
    _check_images(made, given)
    matched, possible = [0] * MAX_NGRAM, [0] * MAX_NGRAM
    made_length = given_length = 0
    for image, caption in made.items():
        words = tokenize(caption)
        references = [tokenize(reference) for reference in given[image]]
        made_length += len(words)
        given_length += min((abs(len(r) - len(words)), len(r)) for r in references)[1]
        allowed: Counter[Ngram] = Counter()
        for reference in references:
            allowed |= _ngrams(reference)
        for ngram, count in _ngrams(words).items():
            matched[len(ngram) - 1] += min(count, allowed[ngram])
            possible[len(ngram) - 1] += count
    if not made_length:
        return (0.0, 0.0, 0.0, 0.0)
    brevity = min(1.0, math.exp(1 - given_length / made_length))
    precisions = [m / p if p else 0.0 for m, p in zip(matched, possible, strict=True)]
    b1, b2, b3, b4 = (
        brevity * math.prod(precisions[:n]) ** (1 / n) for n in range(1, MAX_NGRAM + 1)
    )
    return b1, b2, b3, b4


def cider_d(
    made: Mapping[int, str],
    given: Mapping[int, Sequence[str]],
    *,
    tokenize: Tokenize = tokenize,
) -> float:
    """CIDEr-D of a whole set: 0 where no words agree, 10 where all captions are the given ones.

    How rare a word or phrase is, is learnt from `given`: what every image has counts nothing, so a
    set of one image scores 0 whatever was made.

    Args:
        made: One caption for each image.
        given: All captions people wrote, by the same images.
        tokenize: Text -> words.
    """
    _check_images(made, given)
    counts = {i: [_ngrams(tokenize(text)) for text in given[i]] for i in made}
    num_images_with = Counter(
        ngram for references in counts.values() for ngram in set().union(*references)
    )
    total = 0.0
    for image, caption in made.items():
        vector = _weighed(_ngrams(tokenize(caption)), num_images_with, len(made))
        references = counts[image]
        similar = sum(
            _similarity(vector, _weighed(reference, num_images_with, len(made)))
            for reference in references
        )
        total += 10.0 * similar / len(references)
    return total / len(made)


Vector = tuple[list[dict[Ngram, float]], int]
"""For each length of n-grams their weights; and the number of pairs of words in the caption."""


def _weighed(counts: Counter[Ngram], num_images_with: Counter[Ngram], num_images: int) -> Vector:
    """Each n-gram by how often it is in the caption and how few images have it."""
    weights: list[dict[Ngram, float]] = [{} for _ in range(MAX_NGRAM)]
    for ngram, count in counts.items():
        rarity = math.log(num_images) - math.log(max(1, num_images_with[ngram]))
        weights[len(ngram) - 1][ngram] = count * rarity
    # The length is counted in pairs, as the evaluation everybody compares with does.
    return weights, sum(count for ngram, count in counts.items() if len(ngram) == 2)


def _similarity(made: Vector, given: Vector) -> float:
    """The mean over n of a cosine in which repeating a word does not help, times the penalty."""
    penalty = math.exp(-((made[1] - given[1]) ** 2) / (2 * _SIGMA**2))
    cosines = []
    for ours, theirs in zip(made[0], given[0], strict=True):
        dot = sum(
            min(weight, theirs[ngram]) * theirs[ngram]
            for ngram, weight in ours.items()
            if ngram in theirs
        )
        norms = math.sqrt(sum(w * w for w in ours.values()) * sum(w * w for w in theirs.values()))
        cosines.append(dot / norms if norms else 0.0)
    return penalty * sum(cosines) / MAX_NGRAM


def _ngrams(words: Sequence[str]) -> Counter[Ngram]:
    """All runs of one to four words, and how often each occurs."""
    return Counter(
        tuple(words[start : start + n])
        for n in range(1, MAX_NGRAM + 1)
        for start in range(len(words) - n + 1)
    )


def _check_images(made: Mapping[int, str], given: Mapping[int, Sequence[str]]) -> None:
    if not made:
        raise WhaleError("no captions were made", hint="give one for each image")
    if missing := [image for image in made if not given.get(image)]:
        raise WhaleError(
            f"{len(missing)} of {len(made)} images have no given caption, image {missing[0]} first",
            hint="score against the annotation file of the same split",
        )
