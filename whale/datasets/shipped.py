"""The files of `whale/presets/data/m6`: where they are and how their lines are packed.

Place in the flow: under `emoji` and `texts`, which read them, and `scripts/build_m6_data.py`, which
writes them. Standard library only; a line is one JSON record, the file is compressed with xz.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from whale.errors import WhaleError

FOLDER = Path(__file__).resolve().parents[1] / "presets" / "data" / "m6"
EMOJI_PICTURES = "emoji.npz"
EMOJI_RECORDS = "emoji.jsonl.xz"
TEXTS = {"zh": "song_ci.jsonl.xz", "en": "addresses.jsonl.xz"}
"""The running text of each language."""


def shipped_file(name: str, folder: Path = FOLDER) -> Path:
    """The path of a file that comes with the package."""
    path = folder / name
    if not path.is_file():
        raise WhaleError(
            f"{path} is missing; it comes with the package",
            hint="install whale again, or in a checkout run `scripts/build_m6_data.py`",
        )
    return path


def pack_records(records: Iterable[dict[str, Any]]) -> bytes:
    """One JSON line each, keys in the order given, compressed."""
    lines = (json.dumps(r, ensure_ascii=False, separators=(",", ":")) + "\n" for r in records)
    return lzma.compress("".join(lines).encode("utf-8"), preset=9)


def unpack_records(content: bytes) -> list[dict[str, Any]]:
    """What `pack_records` packed."""
    text = lzma.decompress(content).decode("utf-8")
    # Not splitlines(), which would also cut at rarer line ends inside a JSON string.
    return [json.loads(line) for line in text.split("\n") if line]
