"""A user's folder: read piece by piece, with errors that name the file and line."""

import json
import pickle

import numpy as np
import pytest

from whale.datasets.folder import FolderPictures, FolderTexts
from whale.datasets.stream import MixedStream
from whale.errors import WhaleError


@pytest.fixture
def pillow():
    pytest.importorskip("PIL")
    from PIL import Image  # noqa: PLC0415

    return Image


def write_lines(folder, *lines):
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (folder / "captions.jsonl").write_text(text, encoding="utf-8")


def test_pictures_come_with_their_texts(tmp_path, pillow):
    pillow.new("RGB", (64, 64), (255, 0, 0)).save(tmp_path / "red.png")
    pillow.new("RGB", (10, 20), (0, 0, 255)).save(tmp_path / "blue.png")
    write_lines(
        tmp_path,
        {"image": "red.png", "en": "red", "zh": "红"},
        "",
        {"image": "blue.png", "text": "blau", "id": 7},
        {"image": "red.png", "question": "Which colour?", "answer": "red"},
    )
    pictures = FolderPictures(tmp_path, side=8, language="de")
    assert len(pictures) == 3
    assert pictures[0].captions == {"en": "red", "zh": "红"}
    assert pictures[1].captions == {"de": "blau"}
    assert (pictures[2].question, pictures[2].answer) == ("Which colour?", "red")
    assert len({pictures[i].key for i in range(3)}) == 3
    assert pictures[1].image.shape == (8, 8, 3)
    assert (pictures[1].image == [0, 0, 255]).all()
    pictures.check()
    drawn = MixedStream({"mine": pickle.loads(pickle.dumps(pictures))}).take(3)
    assert sorted(d.index for d in drawn) == [0, 1, 2]


def test_the_middle_square_is_kept_and_transparent_becomes_white(tmp_path, pillow):
    wide = np.zeros((10, 30, 4), dtype=np.uint8)
    wide[:, 10:20] = (0, 255, 0, 255)
    pillow.fromarray(wide).save(tmp_path / "wide.png")
    clear = np.zeros((10, 10, 4), dtype=np.uint8)
    pillow.fromarray(clear).save(tmp_path / "clear.png")
    write_lines(tmp_path, {"image": "wide.png", "en": "x"}, {"image": "clear.png", "en": "y"})
    pictures = FolderPictures(tmp_path, side=4)
    assert (pictures[0].image == [0, 255, 0]).all()
    assert (pictures[1].image == 255).all()


def test_fine_patterns_are_averaged(tmp_path, pillow):
    checks = np.indices((64, 64)).sum(axis=0) % 2 * 255
    pillow.fromarray(checks.astype(np.uint8)).save(tmp_path / "checks.png")
    write_lines(tmp_path, {"image": "checks.png", "en": "checks"})
    image = FolderPictures(tmp_path, side=8)[0].image
    assert (abs(image.astype(int) - 127) < 8).all()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "captions.jsonl:2: this line is not JSON"),
        ("[1]", "captions.jsonl:2: this line has list"),
        ({"en": "a"}, r"captions.jsonl:2: this line has \['en'\].*\"image\""),
        ({"image": "a.png"}, r"captions.jsonl:2: .*needs a caption \(text, en, zh\)"),
        ({"image": "a.png", "caption": "x"}, r"captions.jsonl:2: this line has \['caption', 'ima"),
        ({"image": "a.png", "en": 3}, 'captions.jsonl:2: "en" is 3'),
        ({"image": "a.png", "en": " "}, "captions.jsonl:2: \"en\" is ' '"),
        ({"image": "a.png", "en": "x", "question": "?"}, "captions.jsonl:2: .*needs an answer"),
    ],
)
def test_a_bad_line_is_named_when_the_folder_is_opened(tmp_path, line, message):
    write_lines(tmp_path, {"image": "good.png", "en": "good"}, line)
    with pytest.raises(WhaleError, match=message) as caught:
        FolderPictures(tmp_path)
    assert caught.value.hint


def test_a_missing_or_broken_picture_is_named(tmp_path, pillow):
    pillow.new("RGB", (4, 4)).save(tmp_path / "good.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    pillow.fromarray(noise).save(tmp_path / "short.png")
    whole = (tmp_path / "short.png").read_bytes()
    (tmp_path / "short.png").write_bytes(whole[: len(whole) // 2])
    names = ["good.png", "gone.png", "broken.png", "short.png"]
    write_lines(tmp_path, *({"image": name, "en": "x"} for name in names))
    pictures = FolderPictures(tmp_path)
    with pytest.raises(WhaleError, match="captions.jsonl:2: there is no picture .*gone.png"):
        pictures[1]
    with pytest.raises(WhaleError, match="captions.jsonl:3: cannot read the picture .*broken.png"):
        pictures[2]
    with pytest.raises(WhaleError, match=r"3 of 4 samples(.|\n)*jsonl:2(.|\n)*jsonl:4"):
        pictures.check()


def test_a_folder_without_captions_is_refused(tmp_path):
    with pytest.raises(WhaleError, match="has no captions.jsonl"):
        FolderPictures(tmp_path)


def test_a_folder_is_split_by_picture(tmp_path):
    write_lines(tmp_path, *({"image": f"{i // 2}.png", "en": str(i)} for i in range(400)))
    train, rest = (FolderPictures(tmp_path, split=s) for s in ("train", "held_out"))
    assert len(train) + len(rest) == 400
    assert 10 < len(rest) < 80
    # Both lines of a picture are on the same side.
    assert len(rest) % 2 == 0


def test_text_files_come_whole_or_in_pieces(tmp_path):
    (tmp_path / "more").mkdir()
    long = "".join(f"line {i} 中文\n" for i in range(300))
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfshort\r\ntext")
    (tmp_path / "more" / "b.txt").write_bytes(long.encode())
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "c.md").write_text("not read")
    texts = FolderTexts(tmp_path, language="zh", max_bytes=200)
    assert texts[0].text == "short\ntext"
    assert (texts[0].key, texts[0].title, texts[0].language) == ("a.txt#0", "a", "zh")
    pieces = [texts[i] for i in range(1, len(texts))]
    assert "".join(p.text for p in pieces) == long
    assert all(len(p.text.encode()) <= 200 and p.text.endswith("\n") for p in pieces)
    with pytest.raises(IndexError):
        texts[len(texts)]
    train, rest = (FolderTexts(tmp_path, max_bytes=200, split=s) for s in ("train", "held_out"))
    keys = [{source[i].key for i in range(len(source))} for source in (train, rest)]
    assert keys[0] | keys[1] == {texts[i].key for i in range(len(texts))}
    assert not keys[0] & keys[1]


@pytest.mark.parametrize("text", ["中" * 500, "a" + "𠺕é" * 300, "x" * 999])
def test_text_without_spaces_is_cut_between_characters(tmp_path, text):
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    for size in (8, 9, 10, 11):
        texts = FolderTexts(tmp_path, max_bytes=size)
        assert "".join(texts[i].text for i in range(len(texts))) == text


def test_text_errors_name_the_file_and_line(tmp_path):
    with pytest.raises(WhaleError, match="has no .txt files"):
        FolderTexts(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"one\n" * 100 + b"caf\xe9\n" + b"more\n" * 9)
    with pytest.raises(WhaleError, match="a.txt:101: this line is not UTF-8"):
        FolderTexts(tmp_path, max_bytes=64)
    with pytest.raises(WhaleError, match="at most 2 bytes"):
        FolderTexts(tmp_path, max_bytes=2)
