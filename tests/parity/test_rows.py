"""Lone Linears by rows, chosen by cost: loss, gradients and weights equal one device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.parity import compare

pytestmark = pytest.mark.usefixtures("untried")

TOLERANCE = 1e-9


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("layout", "rows", "more"),
    [
        ("tensor-accumulate-uneven", {"blocks.0.down", "blocks.1.down", "squeeze", "last"}, None),
        ("data-tensor-uneven", {"blocks.0.down", "blocks.1.down", "squeeze", "last"}, None),
        ("colocated-uneven", {"blocks.0.down", "squeeze"}, None),
        ("head", {"last"}, None),
        (
            "tensor-pipeline",
            {"blocks.0.down", "blocks.1.down", "squeeze", "last"},
            {"pipeline.schedule": "zero-bubble"},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rows_equal_one_device(layout: str, rows: set[str], more: dict[str, Any] | None) -> None:
    worst = compare("narrow", layout, more)
    assert {path for path, rule in worst["rules"].items() if rule == "row"} == rows
    assert worst["loss"] < TOLERANCE, worst
    assert worst["gradient"] < TOLERANCE, worst
    assert worst["weight"] < TOLERANCE, worst
