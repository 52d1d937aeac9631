"""Tests that share their ranks must run on one worker, or every worker trains for all of them."""

from __future__ import annotations

import os

import pytest


@pytest.mark.xdist_group("together")
def test_marked_groups_stay_on_one_worker(request: pytest.FixtureRequest) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ or not request.config.getoption("loadgroup"):
        pytest.skip("one process, or another way to spread tests")
    assert request.node.nodeid.endswith("@together")
