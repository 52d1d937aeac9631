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


def pairwise() -> list[tuple[str, str]]:
    """A part that covers every (model, family), every layout and every unevenness."""
    chosen: list[tuple[str, str]] = []
    families = list(dict.fromkeys(family(name) for _, name in MATRIX))
    for number, case in enumerate(CASE_NAMES):
        for index, kind in enumerate(families):
            members = [name for c, name in MATRIX if c == case and family(name) == kind]
            chosen.append((case, members[(number + index) % len(members)]))
    missing = {name for _, name in MATRIX} - {name for _, name in chosen}
    chosen += [(CASE_NAMES[0], name) for name in sorted(missing)]
    return chosen
