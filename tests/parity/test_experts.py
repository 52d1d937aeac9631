"""Experts under every router, balance and capacity, on every layout: equal to one device."""

from __future__ import annotations

from itertools import product

import pytest

from tests.parity.expert_zoo import EXPERT_LAYOUTS
from tests.parity.parity import compare_in_group, grouped

pytestmark = pytest.mark.usefixtures("untried_if_quick")

TOLERANCE = 1e-9
ROUTERS = ("top-k/1", "top-k/2", "prototype/2", "expert-choice/2")
BALANCES = ("bias", "loss", "loss+z", "none")
CAPACITIES = ("none", "0.5", "1.25")

Point = tuple[str, str, str, str]


def every_point() -> list[Point]:
    """The product, less what the layer refuses: expert choice is balanced as it is."""
    return [
        point
        for point in product(EXPERT_LAYOUTS, ROUTERS, BALANCES, CAPACITIES)
        if not (point[1].startswith("expert-choice") and point[2].startswith("loss"))
    ]


def pairwise_cover(points: list[Point]) -> set[Point]:
    """A part of the points with every layout, in which every two other values meet (greedily)."""

    def pairs(point: Point) -> set[tuple[int, str, int, str]]:
        # Many processes take as long as all the rest: what such a layout has met does not count.
        small = EXPERT_LAYOUTS[point[0]].num_ranks <= 3
        met = {(i, point[i], j, point[j]) for i in range(1, 4) for j in range(i + 1, 4) if small}
        return met | {(0, point[0], 0, "")}

    missing = set().union(*(pairs(point) for point in points))
    chosen: set[Point] = set()
    while missing:
        best = max(points, key=lambda point: len(pairs(point) & missing))
        chosen.add(best)
        missing -= pairs(best)
    return chosen


POINTS = every_point()
CHOSEN = pairwise_cover(POINTS)


def case_of(point: Point) -> str:
    return "moe/" + "/".join(point[1:])


GROUPS = grouped((case_of(p), p[0]) for p in POINTS if p in CHOSEN)
GROUPS |= grouped((case_of(p), p[0]) for p in POINTS if p not in CHOSEN)


def _params() -> list[object]:
    found = []
    for point in POINTS:
        group = GROUPS[case_of(point), point[0]]
        marks = [pytest.mark.xdist_group("-".join([point[0], *group]))]
        marks += [] if point in CHOSEN else [pytest.mark.full]
        found.append(pytest.param(*point, id="-".join(point), marks=marks))
    return found


@pytest.mark.parametrize(("layout", "router", "balance", "capacity"), _params())
def test_equal_to_one_device(layout: str, router: str, balance: str, capacity: str) -> None:
    case = case_of((layout, router, balance, capacity))
    worst = compare_in_group(case, layout, GROUPS[case, layout])
    assert worst["loss"] < TOLERANCE, worst
    assert worst["gradient"] < TOLERANCE, worst
    assert worst["weight"] < TOLERANCE, worst
    if not layout.startswith("replicas"):
        rule = "experts" if layout.startswith("experts") else "expert columns"
        split = {path for path, found in worst["rules"].items() if found == rule}
        assert split == {"blocks.0.moe", "blocks.1.moe"}


def test_the_cover_is_small_and_whole() -> None:
    assert len(CHOSEN) < len(POINTS) / 4
    for axis in range(4):
        assert {p[axis] for p in CHOSEN} == {p[axis] for p in POINTS}
