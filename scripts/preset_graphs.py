"""Writes the ModelGraph of every preset into the package.

    PYTHONPATH=. python scripts/preset_graphs.py

Place in the flow: before a release, and whenever a preset, the capture or the ModelGraph changes (a
test then says so). Each is captured on the meta device at its own sequence length and precision.
"""

from __future__ import annotations

import sys
from pathlib import Path

from whale.cli.captured import captured
from whale.cli.shipped import file_name, pack
from whale.models.registry import PRESETS, preset

FOLDER = Path(__file__).resolve().parents[1] / "whale" / "presets" / "graphs"


def main(names: list[str]) -> None:
    """Writes the presets named, or all; files of presets that are gone are removed."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names or PRESETS:
        path = FOLDER / file_name(preset(name).name)
        content = pack(captured(name))
        same = path.exists() and path.read_bytes() == content
        path.write_bytes(content)
        print(f"{path.name}: {len(content)} bytes, {'as before' if same else 'new'}")
    for path in sorted(FOLDER.iterdir()):
        if path.name not in {file_name(name) for name in PRESETS}:
            path.unlink()
            print(f"{path.name}: removed, no such preset")


if __name__ == "__main__":
    main(sys.argv[1:])
