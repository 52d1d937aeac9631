"""The presets' ModelGraphs that come with the package, so that `whale plan` needs no torch.

Place in the flow: below `whale plan`. A file `presets/graphs/<preset>.json.gz` holds what a capture
of the preset at its own sequence length and precision gives, and what the preset is trained with;
`scripts/preset_graphs.py` writes them all, and a test compares them with fresh captures.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from whale.errors import CaptureError, WhaleError
from whale.ir.model_graph import ModelGraph

_SUFFIX = ".json.gz"
_FACTS = ("about", "rows", "seq", "precision", "optimizer", "num_micro_batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSubject:
    """What is planned: a captured model, and what it is trained with unless flags say otherwise."""

    graph: ModelGraph
    rows: int
    """Global batch."""
    seq: int | None = None
    """Sequence length of the capture; None where there is none, or none is known."""
    precision: str = "fp32"
    optimizer: str = "adamw"
    num_micro_batch: int = 1
    about: str = ""
    refusal: CaptureError | None = None
    """Why the model cannot be cut into stages, if it cannot."""

    @property
    def annotated(self) -> bool:
        """Whether the model's author said how it is parallel."""
        return any(taskgraph.tag for taskgraph in self.graph.taskgraphs)


def shipped() -> dict[str, str]:
    """The presets that have a graph here, with what they are."""
    names = sorted(f.name.removesuffix(_SUFFIX) for f in _folder().iterdir() if _is_graph(f))
    return {name: _read(name)["about"] for name in names}


def load(name: str) -> PlanSubject | None:
    """A preset's graph and facts; None: none is shipped under this name."""
    if not any(f.name == f"{name}{_SUFFIX}" for f in _folder().iterdir()):
        return None
    data = _read(name)
    try:
        facts = {key: data[key] for key in _FACTS}
        return PlanSubject(graph=ModelGraph.from_dict(data["graph"]), **facts)
    except (LookupError, TypeError) as error:
        raise WhaleError(
            f"the graph of preset {name!r} is of another version: {type(error).__name__}: {error}",
            hint="write it again: PYTHONPATH=. python scripts/preset_graphs.py",
        ) from error


def pack(subject: PlanSubject) -> bytes:
    """A file's content; equal subjects give equal bytes."""
    assert subject.refusal is None, subject.refusal
    values = {f.name: getattr(subject, f.name) for f in fields(subject)}
    data = {key: values[key] for key in _FACTS} | {"graph": subject.graph.to_dict()}
    return gzip.compress(json.dumps(data, separators=(",", ":")).encode(), 9, mtime=0)


def file_name(name: str) -> str:
    """Where a preset's graph lies in the folder."""
    return f"{name}{_SUFFIX}"


def _read(name: str) -> Mapping[str, Any]:
    data: Mapping[str, Any] = json.loads(
        gzip.decompress((_folder() / file_name(name)).read_bytes())
    )
    return data


def _is_graph(file: Traversable) -> bool:
    return file.name.endswith(_SUFFIX)


def _folder() -> Traversable:
    return files("whale") / "presets" / "graphs"
