"""VQA v2: its question and annotation files, and its accuracy against the answers of ten people.

Place in the flow: the two files and a folder of pictures in, Pictures with questions to train on
out; then replies in, figures out. Answers are brought into one form first, by the rules the data's
authors publish; here both sides are, always (their program leaves unanimous answers as they are).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from whale.datasets.annotation_file import list_in, number_in, read_json, text_in
from whale.datasets.picture_file import read_picture
from whale.datasets.samples import Picture
from whale.errors import WhaleError

_NUMBERS = "zero one two three four five six seven eight nine ten".split()
_DIGITS = {word: str(number) for number, word in enumerate(_NUMBERS)} | {"none": "0"}
_ARTICLES = frozenset({"a", "an", "the"})
_ENDINGS = {
    "n't": "ai are ca could did does do had has have is might must need ought sha should was were "
    "wo would",
    "'ve": "could i might must should they we what who would you",
    "'re": "there they what why you",
    "'s": "he how let somebody someone that there what when where who why",
    "'ll": "how it somebody someone something they what who why you",
    "'d": "he how it someone something there they where who you",
    "'m": "i",
}
"""Words that are written with an apostrophe before this ending, and often without."""
_CONTRACTIONS = {
    word + ending.replace("'", ""): word + ending
    for ending, words in _ENDINGS.items()
    for word in words.split()
} | {"maam": "ma'am", "oclock": "o'clock", "twas": "'twas", "yall": "y'all"}

_PERIOD = re.compile(r"(?<!\d)\.|\.(?!\d)")
_COMMA_IN_NUMBER = re.compile(r"(?<=\d),(?=\d)")
# Apostrophes and colons stay: they make words and times of day.
_PUNCTUATION = re.compile(r"[^\w\s':.-]|_")


@dataclass(frozen=True, slots=True, kw_only=True)
class VqaQuestion:
    """A question about a picture and what people answered."""

    question_id: int
    image_id: int
    question: str
    answers: tuple[str, ...]
    """Of ten people as a rule; empty where there is no annotation file (the test split)."""
    question_type: str = ""
    answer_type: str = ""
    """`yes/no`, `number` or `other`."""

    @property
    def best_answer(self) -> str | None:
        """What most people answered: the target to train on."""
        if not self.answers:
            return None
        counts = Counter(map(normalise_answer, self.answers))
        return min(counts, key=lambda answer: (-counts[answer], answer))


@dataclass(frozen=True, slots=True, kw_only=True)
class VqaScore:
    """Accuracies from 0 to 1."""

    overall: float
    by_answer_type: Mapping[str, float]
    num_questions: int


class VqaPictures:
    """One sample for each question, with its picture; a source of Pictures."""

    def __init__(
        self, questions: Sequence[VqaQuestion], folder: str | Path, *, file: str, side: int = 32
    ) -> None:
        """Names the folder of the pictures; they are read one by one when asked for.

        Args:
            questions: What `read_vqa` gave.
            folder: Where the pictures are.
            file: How they are called, with `{}` or `{:012d}` for the image's number:
                `COCO_val2014_{:012d}.jpg`.
            side: Of the model's pictures, in pixels.
        """
        if file.format(1) == file:
            raise WhaleError(
                f"file name {file!r} is the same for every image; it needs a place for the number",
                hint="for example COCO_val2014_{:012d}.jpg",
            )
        self._questions, self._folder = tuple(questions), Path(folder)
        self._file, self._side = file, side

    def __len__(self) -> int:
        return len(self._questions)

    def __getitem__(self, index: int) -> Picture:
        asked = self._questions[index]
        path = self._folder / self._file.format(asked.image_id)
        return Picture(
            key=str(asked.question_id),
            image=read_picture(path, self._side, where=f"question {asked.question_id}"),
            captions={},
            question=asked.question,
            answer=asked.best_answer,
        )


def read_vqa(questions: str | Path, annotations: str | Path | None = None) -> list[VqaQuestion]:
    """Reads a file of questions and the file of their answers, in the order of the questions.

    Args:
        questions: `v2_OpenEnded_mscoco_*_questions.json`.
        annotations: `v2_mscoco_*_annotations.json`; None for a split without answers.
    """
    path = Path(questions)
    answered = {} if annotations is None else _read_annotations(Path(annotations))
    found = []
    for i, entry in enumerate(list_in(read_json(path, dict), "questions", path)):
        where = f"{path}, questions[{i}]"
        number = number_in(entry, "question_id", where)
        if annotations is not None and number not in answered:
            raise WhaleError(
                f"question {number} is not among the {len(answered)} questions of {annotations}",
                where=where,
                hint="give the files of the same split",
            )
        answers, question_type, answer_type = answered.get(number, ((), "", ""))
        found.append(
            VqaQuestion(
                question_id=number,
                image_id=number_in(entry, "image_id", where),
                question=text_in(entry, "question", where),
                answers=answers,
                question_type=question_type,
                answer_type=answer_type,
            )
        )
    return found


def _read_annotations(path: Path) -> dict[int, tuple[tuple[str, ...], str, str]]:
    """Answers, type of question and type of answer, by question."""
    content = list_in(read_json(path, dict), "annotations", path)
    answered = {}
    for i, entry in enumerate(content):
        where = f"{path}, annotations[{i}]"
        answers = tuple(
            text_in(answer, "answer", where) for answer in list_in(entry, "answers", path)
        )
        answered[number_in(entry, "question_id", where)] = (
            answers,
            str(entry.get("question_type", "")),
            str(entry.get("answer_type", "")),
        )
    return answered


def normalise_answer(text: str) -> str:
    """An answer in the one form in which answers are compared.

    Lower case; no articles; numbers up to ten in digits; no punctuation but in `3.5`, `don't`,
    `12:30` and `t-shirt`; no comma within a number; apostrophes where contractions lack them.
    """
    text = _PERIOD.sub("", _COMMA_IN_NUMBER.sub("", text.lower().replace("’", "'")))
    words = _PUNCTUATION.sub(" ", text).split()
    words = [_DIGITS.get(word, word) for word in words]
    return " ".join(_CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


def vqa_accuracy(reply: str, answers: Sequence[str]) -> float:
    """How far people agree with a reply: fully if three of the others gave it.

    Each person in turn is left out and min(those of the others who agree / 3, 1) taken; the mean
    of these is the accuracy. So 2 of 10 score 0.6, 3 of 10 score 0.9, 4 or more 1.
    """
    if len(answers) < 2:
        raise WhaleError(
            f"{len(answers)} answers to compare with; at least 2 people must have answered",
            hint="where a question has one answer use whale.datasets.answers.exact_match",
        )
    form = normalise_answer(reply)
    agree = sum(normalise_answer(answer) == form for answer in answers)
    if_one_of_them_is_left_out = min((agree - 1) / 3, 1.0)
    if_another_is_left_out = min(agree / 3, 1.0)
    others = len(answers) - agree
    return (agree * if_one_of_them_is_left_out + others * if_another_is_left_out) / len(answers)


def vqa_score(replies: Mapping[int, str], questions: Sequence[VqaQuestion]) -> VqaScore:
    """The mean accuracy over all questions, and over those of each type of answer.

    Args:
        replies: By `question_id`; every question needs one.
        questions: With answers.
    """
    if missing := [q.question_id for q in questions if q.question_id not in replies]:
        raise WhaleError(
            f"{len(missing)} of {len(questions)} questions have no reply, {missing[0]} first",
            hint="an empty text is a reply, and a wrong one",
        )
    if not questions:
        raise WhaleError("no questions to score", hint="give those `read_vqa` read")
    scores: dict[str, list[float]] = {}
    for asked in questions:
        accuracy = vqa_accuracy(replies[asked.question_id], asked.answers)
        scores.setdefault(asked.answer_type, []).append(accuracy)
    return VqaScore(
        overall=sum(map(sum, scores.values())) / len(questions),
        by_answer_type={kind: sum(s) / len(s) for kind, s in scores.items() if kind},
        num_questions=len(questions),
    )
