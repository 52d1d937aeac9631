"""Which (model, layout) pairs make the parity matrix, what `make test` runs, what is refused."""

from __future__ import annotations

from tests.parity.layouts import LAYOUTS
from tests.parity.zoo import CASE_NAMES

# The head is tied to the embedding, which the data parallel trunk of the same devices holds whole;
# and two LSTM Layers
# alone have nothing to split. Whale says so instead of planning it.
REFUSED = {
    *(
        (case, head)
        for case in ("gpt", "encdec", "hf_gpt2")
        for head in ("head", "head-uneven", "head-part")
    ),
    ("lstm", "interleaved-tensor"),
}  # fmt: skip

MATRIX = [(case, name) for case in CASE_NAMES for name in LAYOUTS if name != "one"]


def family(layout: str) -> str:
    """A layout without its unevenness."""
    return layout.removesuffix("-uneven")


_PIPELINES = {"gpipe", "1f1b", "interleaved", "zero", "pipeline", "colocated"}


def traits(layout: str) -> frozenset[str]:
    """What kinds of parallelism a layout is made of, whether it is uneven, and nested."""
    words = set(layout.replace("3d", "data-tensor-pipeline").split("-"))
    found = words & {"data", "tensor", "uneven"} | ({"pipeline"} if words & _PIPELINES else set())
    return frozenset(found | ({"nested"} if LAYOUTS[layout].nested else set()))


def pairwise() -> list[tuple[str, str]]:
    """A part with every layout, in which every model meets every trait (chosen greedily)."""
    rest = [point for point in MATRIX if point not in REFUSED]
    names = {name for _, name in rest}

    def pairs(point: tuple[str, str]) -> set[tuple[str, str]]:
        case, name = point
        # Eight processes take as long as all the rest: once each is enough.
        met = set() if LAYOUTS[name].num_ranks == 8 else {(case, t) for t in traits(name)}
        return met | {("", name)}

    missing = {pair for point in rest for pair in pairs(point)}
    chosen: list[tuple[str, str]] = []
    while missing:
        best = max(rest, key=lambda point: (len(pairs(point) & missing), -rest.index(point)))
        chosen.append(best)
        missing -= pairs(best)
    assert {name for _, name in chosen} == names
    return chosen + sorted(REFUSED)
