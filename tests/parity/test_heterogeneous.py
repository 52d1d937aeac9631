"""Plans that the planner makes for unequal devices by itself, run and compared with one device."""

from __future__ import annotations

import pytest

from tests.parity.layouts import HETEROGENEOUS
from tests.parity.parity import compare

pytestmark = pytest.mark.usefixtures("untried")

TOLERANCE = 1e-9
PAIRS = [
    *(("gpt", name) for name in HETEROGENEOUS),
    ("resnet", "aware-data"),
    ("resnet", "aware-idle"),
    ("lstm", "aware-stages"),
    ("encdec", "aware-widths"),
]


@pytest.mark.every(4)
@pytest.mark.parametrize(("case", "layout"), PAIRS)
def test_a_hardware_aware_plan_is_equal_to_one_device(case: str, layout: str) -> None:
    worst = compare(case, layout)
    assert max(worst["loss"], worst["gradient"], worst["weight"]) < TOLERANCE, worst["where"]
    shares = worst["rows"]
    assert sum(shares) == pytest.approx(1.0)
    assert len(set(shares)) > 1, "the devices are unequal, and so must the shares be"
    if layout == "aware-subset":
        assert worst["stages"] in ([(0, 1)], [(0,)], [(1,)]), "the slow one is left out altogether"
    if layout in ("aware-idle", "aware-unused", "aware-subset"):
        slow = 1 if layout == "aware-idle" else 2
        assert shares[slow] == 0.0, "a device that only slows the others down gets nothing"
    if layout == "aware-order":
        assert worst["stages"] != [(0,), (1,), (2,)], "the fast device gets the heavy stage"
