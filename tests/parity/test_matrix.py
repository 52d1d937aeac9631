"""The parity matrix: loss, gradients and weights after 3 AdamW steps equal one device."""

from __future__ import annotations

import pytest

from tests.parity.layouts import LAYOUTS
from tests.parity.matrix import MATRIX, REFUSED, family, pairwise, traits
from tests.parity.parity import compare_in_group, compare_with_one_rank, grouped, train
from tests.parity.zoo import CASE_NAMES
from tests.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.usefixtures("untried_if_quick")

TOLERANCE = 1e-9
CHOSEN = set(pairwise())
# At least 90 % of the parameters of a split TaskGraph that holds whole blocks are truly split.
MOSTLY_SPLIT = ("gpt", "hf_bert", "hf_gpt2")


# Which cases train together depends on what runs, so that `make test` starts no rank for nothing.
GROUPS = grouped(p for p in MATRIX if p in CHOSEN and p not in REFUSED)
GROUPS |= grouped(p for p in MATRIX if p not in CHOSEN and p not in REFUSED)


def _params() -> list[object]:
    found = []
    for case, layout in MATRIX:
        group = GROUPS.get((case, layout), ())
        marks = [pytest.mark.xdist_group("-".join([layout, *group]))]
        if (case, layout) not in CHOSEN:
            marks.append(pytest.mark.full)
        found.append(pytest.param(case, layout, id=f"{case}-{layout}", marks=marks))
    return found


@pytest.mark.parametrize(("case", "layout"), _params())
def test_equal_to_one_device(case: str, layout: str) -> None:
    if (case, layout) in REFUSED:
        with pytest.raises(RankFailure, match=r"can be split[\s\S]*hint:"):
            run_ranks(LAYOUTS[layout].num_ranks, train, case, layout)
        return
    worst = compare_in_group(case, layout, GROUPS[case, layout])
    assert worst["loss"] < TOLERANCE, worst
    assert worst["gradient"] < TOLERANCE, worst
    assert worst["weight"] < TOLERANCE, worst
    if case in MOSTLY_SPLIT and family(layout) in (
        "tensor",
        "data-tensor",
        "3d",
        "tensor-pipeline",
    ):
        assert min(worst["split_share"]) >= 0.9, worst


def test_pairwise_part_covers_the_matrix() -> None:
    assert {c for c, _ in CHOSEN} == set(CASE_NAMES)
    assert {name for _, name in CHOSEN} == set(LAYOUTS) - {"one"}
    small = [(c, n) for c, n in MATRIX if LAYOUTS[n].num_ranks < 8 and (c, n) not in REFUSED]
    met = {(c, trait) for c, n in CHOSEN for trait in traits(n)}
    assert {(c, trait) for c, n in small for trait in traits(n)} <= met
    assert len(CHOSEN - REFUSED) < len(MATRIX) / 2
    for case in CASE_NAMES:
        nested = [n for c, n in MATRIX if c == case and LAYOUTS[n].nested and (c, n) not in REFUSED]
        assert len(nested) >= 8


DROPOUT = [
    ("gpt", "data-uneven"),
    ("gpt", "tensor-uneven"),
    ("encdec", "1f1b"),
]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(c, n, marks=() if (c, n) in DROPOUT else pytest.mark.full, id=f"{c}-{n}")
        for c, n in MATRIX
        if c != "resnet" and (c, n) not in REFUSED
    ],
)
def test_dropout_masks_do_not_depend_on_the_layout(case: str, layout: str) -> None:
    worst = compare_with_one_rank(case, layout, 0.1)
    assert max(worst["loss"], worst["gradient"], worst["weight"]) < TOLERANCE, worst
