"""Cases and layouts by name, of all the zoos: a rank gets names, since neither can be pickled.

Place in the flow: below `parity.py` and other tests that train on ranks.
"""

from __future__ import annotations

from tests.parity import zoo
from tests.parity.expert_zoo import EXPERT_LAYOUTS, expert_case
from tests.parity.hf_expert_zoo import HF_EXPERT_LAYOUTS, HF_EXPERT_MODELS, hf_case
from tests.parity.layouts import HETEROGENEOUS, LAYOUTS, Layout

_LAYOUTS = LAYOUTS | HETEROGENEOUS | EXPERT_LAYOUTS | HF_EXPERT_LAYOUTS


def case_named(name: str, *, dropout: float = 0.0) -> zoo.Case:
    """A case of any zoo; those with experts have no dropout."""
    family = name.partition("/")[0]
    if family == "moe":
        return expert_case(name)
    if family in HF_EXPERT_MODELS:
        return hf_case(name)
    return zoo.case(name, dropout=dropout)


def layout_named(name: str) -> Layout:
    """A layout of the matrix, one the planner chooses, or one of experts."""
    return _LAYOUTS[name]
