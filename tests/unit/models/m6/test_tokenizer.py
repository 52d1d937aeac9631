"""Characters, bytes and codes: nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from whale.errors import WhaleError
from whale.models.m6.tokenizer import NUM_BYTES, SPECIAL, Tokenizer


@pytest.mark.parametrize(
    "text", ["the dog face", "狗脸", "", "unknown: Ω ß 鱻 🐕 \u200d\n", "half 🐕", "\ud800 alone"]
)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_known_characters_are_one_token_unknown_ones_their_bytes(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("狗脸")) == 2
    assert len(tokenizer.encode("鱻")) == 3
    assert all(i < len(SPECIAL) + NUM_BYTES for i in tokenizer.encode("🐕"))


def test_broken_bytes_and_special_tokens(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("鱻")[:2]
    assert tokenizer.decode([tokenizer.bos, *half, *tokenizer.encode("狗"), tokenizer.eos]) == "�狗"
    assert tokenizer.decode(tokenizer.encode("<en>")) == "<en>"
    assert tokenizer.prompt("caption", "zh") == [SPECIAL.index("<caption>"), SPECIAL.index("<zh>")]
    with pytest.raises(WhaleError, match="unknown special token '<fr>'"):
        tokenizer.prompt("caption", "fr")


def test_most_frequent_characters_are_kept_ties_by_code_point() -> None:
    room = len(SPECIAL) + NUM_BYTES
    made = Tokenizer.build(["bbb", "aac狗狗"], vocab_size=room + 3 + 4, num_codes=4)
    assert made.characters == "ba狗"
    assert made == Tokenizer.build(["狗狗caa", "bbb"], vocab_size=room + 7, num_codes=4)
    assert made.decode(made.encode("c")) == "c"


def test_codes_are_the_last_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_codes([0, 15])
    assert ids == [384, 399]
    assert tokenizer.decode_codes([tokenizer.bos, *ids, tokenizer.eos]) == [0, 15]
    assert tokenizer.decode(ids) == ""
    with pytest.raises(WhaleError, match="outside 0 to 15"):
        tokenizer.encode_codes([16])


def test_written_ids_are_text_and_the_end(tokenizer: Tokenizer) -> None:
    written = tokenizer.is_written()
    assert len(written) == tokenizer.vocab_size
    assert sum(written) == 1 + NUM_BYTES + len(tokenizer.characters) + len(tokenizer.words)
    assert written[tokenizer.eos] and not written[tokenizer.pad] and not written[-1]


def test_words_have_the_room_that_characters_leave() -> None:
    room = len(SPECIAL) + NUM_BYTES
    texts = ["red heart", "red car, 红心", "a red heart"]
    num_characters = len(set("".join(texts)))
    made = Tokenizer.build(texts, vocab_size=room + num_characters + 3, num_codes=0)
    # Most frequent first, then by text; with the space before it a word is another word.
    assert made.words == (" heart", "red", " car")
    assert len(made.encode("red heart")) == 2
    # A word it does not know, or knows only without the space, is spelled as far as need be.
    assert len(made.encode("a red heart")) == 1 + 1 + 1 + 1
    assert len(made.encode("heart")) == len("heart")
    for text in (*texts, "redheart", "  red  ", "carred Red-hearted 红red", "", "naïve \ud800 car"):
        assert made.decode(made.encode(text)) == text


def test_every_source_counts_alike() -> None:
    room = len(SPECIAL) + NUM_BYTES
    book, names = ["the law of the land " * 50], ["red heart", "red car"]
    num_characters = len(set("".join([*book, *names])))
    made = Tokenizer.build(book, names, vocab_size=room + num_characters + 2, num_codes=0)
    assert made.words == ("red", " the")


def test_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    assert Tokenizer.load(path) == tokenizer
    assert Tokenizer.load(path).encode("狗 face") == tokenizer.encode("狗 face")
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "special": values["special"][:-1]}))
    with pytest.raises(WhaleError, match="special tokens"):
        Tokenizer.load(path)


def test_too_many_or_double_characters() -> None:
    room = len(SPECIAL) + NUM_BYTES
    with pytest.raises(WhaleError, match="at most 1 of them"):
        Tokenizer(characters="ab", vocab_size=room + 1, num_codes=0)
    with pytest.raises(WhaleError, match="'a' is in the vocabulary twice"):
        Tokenizer(characters="aa", vocab_size=room + 2, num_codes=0)
