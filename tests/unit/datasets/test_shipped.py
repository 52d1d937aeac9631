"""The data that comes with the package: complete, split for good, and never both sides at once."""

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from whale.datasets.answers import majority
from whale.datasets.emoji import GROUP_NAMES, load_emoji
from whale.datasets.nearest import pixel_baseline
from whale.datasets.questions import group_questions, tag_questions
from whale.datasets.shipped import FOLDER, pack_records, shipped_file, unpack_records
from whale.datasets.split import fraction_of, held_out
from whale.datasets.texts import Texts, cut, load_texts
from whale.errors import WhaleError


@pytest.fixture(scope="module")
def emoji():
    return load_emoji()


def test_all_emoji_are_there_in_both_styles(emoji):
    assert len(emoji) == 1906
    assert emoji.styles == ("noto", "twemoji")
    assert emoji.images.shape == (1906, 2, 32, 32, 3)
    assert emoji.images.dtype == np.uint8
    assert len({e.code for e in emoji.emoji}) == 1906
    assert all(e.labels["en"] and e.labels["zh"] for e in emoji.emoji)
    assert {e.group for e in emoji.emoji} == set(GROUP_NAMES)
    assert sum(e.is_flag for e in emoji.emoji) == 259
    (dog,) = [e for e in emoji.emoji if e.code == "1F436"]
    assert (dog.char, dog.labels) == ("🐶", {"en": "dog face", "zh": "狗脸"})
    assert "pet" in dog.tags["en"]
    assert dog.group == "animals-nature"


def test_pictures_are_on_white(emoji):
    corners = emoji.images[:, :, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert (corners == 255).all(axis=-1).mean() > 0.9


def test_a_tenth_of_the_emoji_is_held_out_by_families(emoji):
    out = {e.code for e in emoji.emoji if e.held_out}
    assert len(out) == 191
    # A person, a man and a woman gesturing "no" are one drawing three times.
    assert {"1F645", "1F645-200D-2642", "1F645-200D-2640"} <= out


def test_selections_are_disjoint_and_complete(emoji):
    train, rest = (emoji.select(split=split) for split in ("train", "held_out"))
    assert len(train) + len(rest) == len(emoji.select()) == 2 * 1906
    assert not {e.code for e in train.emoji} & {e.code for e in rest.emoji}
    noto = emoji.select(style="noto", flags=False)
    assert len(noto) == 1647
    assert set(noto.styles) == {"noto"}
    number = int(noto.numbers[3])
    picture = noto[3]
    assert picture.key == f"{emoji.emoji[number].code}/noto"
    assert (picture.image == emoji.images[number, 0]).all()
    assert picture.captions == emoji.emoji[number].labels


def test_the_shared_pictures_cannot_be_written_to_but_a_selection_can(emoji):
    with pytest.raises(ValueError, match="read-only"):
        emoji.images[0, 0, 0, 0, 0] = 1
    emoji.select(style="noto").images[0, 0, 0, 0] = 1


def test_a_wrong_selection_is_refused(emoji):
    with pytest.raises(WhaleError, match="style 'apple'; there are 'noto', 'twemoji'"):
        emoji.select(style="apple")
    with pytest.raises(WhaleError, match="split 'test'; there are 'train', 'held_out'"):
        emoji.select(split="test")


def test_the_pixel_baseline_is_what_it_was(emoji):
    baseline = pixel_baseline(emoji)
    assert baseline.others.num_pictures == 1647
    assert baseline.others.top1 == pytest.approx(0.277, abs=0.001)
    assert baseline.others.top5 == pytest.approx(0.434, abs=0.001)
    assert baseline.flags.top1 == pytest.approx(0.861, abs=0.001)
    assert baseline.everything.top1 == pytest.approx(0.357, abs=0.001)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_group_questions_have_one_of_nine_answers(emoji, language):
    train, rest = (group_questions(emoji.select(split=s), language) for s in ("train", "held_out"))
    assert len(train.choices) == 9
    assert set(train.answers) | set(rest.answers) == set(train.choices)
    asked = rest[0]
    assert asked.answer == rest.answers[0]
    assert asked.question and asked.image.shape == (32, 32, 3)
    best = majority(train.answers, rest.answers)
    assert best.answer == GROUP_NAMES["people-body"][language]
    assert best.accuracy == pytest.approx(36 / 191)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_tag_questions_are_half_yes_and_true(emoji, language):
    pictures = emoji.select(style="noto", split="held_out")
    asked = tag_questions(pictures, language)
    assert max(Counter(asked.answers).values()) == len(pictures) == len(asked) // 2
    assert majority(asked.answers).accuracy == 0.5
    for i in range(len(asked)):
        sample = asked[i]
        fits = any(tag in sample.question for tag in sample.tags[language])
        assert fits or sample.answer == asked.choices[1]
    again = tag_questions(pictures, language)
    assert [again[i].question for i in range(9)] == [asked[i].question for i in range(9)]


@pytest.mark.parametrize(("language", "train", "rest"), [("zh", 17586, 1954), ("en", 172, 20)])
def test_texts_are_split_for_good(language, train, rest):
    parts = [load_texts(language, split) for split in ("train", "held_out")]
    assert [len(part) for part in parts] == [train, rest]
    texts = [document.text for part in parts for document in part.documents]
    assert len(set(texts)) == len(texts) == len(load_texts(language))
    assert all(document.language == language for document in parts[1].documents)


def test_texts_refuse_what_is_not_there():
    with pytest.raises(WhaleError, match="no text in 'fr', only in 'en', 'zh'"):
        load_texts("fr")
    with pytest.raises(WhaleError, match="split 'test'"):
        load_texts("en", "test")


@pytest.mark.parametrize("size", [1, 2, 7, 50, 1000])
def test_pieces_put_together_are_the_text(size):
    document = load_texts("zh", "held_out")[0]
    pieces = Texts([document]).pieces(size)
    assert "".join(piece.text for piece in pieces.documents) == document.text
    assert all(0 < len(piece.text) <= size for piece in pieces.documents)
    assert pieces[0].key == f"{document.key}#0"


def test_pieces_end_between_words_where_they_can():
    assert list(cut("one two three", 8)) == ["one two ", "three"]
    assert list(cut("unbreakable", 4)) == ["unbr", "eaka", "ble"]
    assert list(cut("", 4)) == []
    with pytest.raises(WhaleError, match="at most 0 characters"):
        load_texts("en").pieces(0)


def test_pieces_count_the_same_characters():
    texts = load_texts("en", "held_out")
    assert texts.pieces(256).num_characters == texts.num_characters


def test_the_split_never_changes():
    assert fraction_of("whale") == pytest.approx(0.64775, abs=1e-5)
    marked = sum(held_out(f"sample {i}", 0.1) for i in range(5000)) / 5000
    assert marked == pytest.approx(0.1, abs=0.015)


def test_records_survive_packing(tmp_path):
    records = [{"a": "line\nend\u2028", "b": ["中"]}, {"a": "", "b": []}]
    assert unpack_records(pack_records(records)) == records
    with pytest.raises(WhaleError, match=r"emoji.npz is missing.*\n.*build_m6_data"):
        shipped_file("emoji.npz", tmp_path)


def test_the_data_stays_small():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 8_000_000


def test_the_shipped_data_needs_neither_torch_nor_pillow():
    code = (
        "import sys\n"
        "from whale.datasets import coco, emoji, folder, nearest, questions, stream, texts, vqa\n"
        "emoji.load_emoji(), texts.load_texts('en')\n"
        "assert not {'torch', 'PIL'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=FOLDER.parents[3], timeout=60)
