"""Options of the whole test suite: `--full` also runs what is marked `full`.

`covering(n)` on a parametrized test lets the quick run take a part of its cases in which every
value of every parameter (n = 1), or every pair of values of two parameters (n = 2), occurs;
`every(n)` lets it take every n-th.
"""

from __future__ import annotations

import os
from collections import defaultdict

import pytest

from tests.covering import FULL, covering


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", default=False, help="also run the tests marked `full`"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--full"):
        os.environ[FULL] = "1"
    config.addinivalue_line("markers", "full: runs only with --full")
    config.addinivalue_line("markers", "covering(n): the quick run covers n-tuples of parameters")
    config.addinivalue_line("markers", "every(n): the quick run takes every n-th case")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    skip = pytest.mark.skip(reason="runs only with --full")
    for item in items:
        if item.get_closest_marker("full") is not None:
            item.add_marker(skip)
    matrices = _cases_of(items, "covering")
    for test, cases in _cases_of(items, "every").items():
        nth = cases[0].get_closest_marker("every")
        assert nth is not None, test
        for number, item in enumerate(cases):
            if number % nth.args[0]:
                item.add_marker(skip)
    left_out = pytest.mark.skip(reason="runs only with --full: others cover its parameters")
    for matrix in matrices.values():
        for item in _not_needed(matrix):
            item.add_marker(left_out)


def _cases_of(items: list[pytest.Item], marker: str) -> dict[str, list[pytest.Item]]:
    """By test that has a marker, its cases that are not for the full run anyway."""
    found = defaultdict(list)
    for item in items:
        chosen = item.get_closest_marker(marker) and not item.get_closest_marker("full")
        if chosen and hasattr(item, "callspec"):
            found[item.nodeid.partition("[")[0]].append(item)
    return found


def _not_needed(items: list[pytest.Item]) -> list[pytest.Item]:
    """Cases that are left out: those kept have every parameter, or every pair of them, of all."""
    marker = items[0].get_closest_marker("covering")
    assert marker is not None
    cases = {
        tuple(repr(value) for _, value in sorted(item.callspec.params.items())): item  # type: ignore[attr-defined]
        for item in items
    }
    kept = {cases[case] for case in covering(cases, marker.args[0])}
    return [item for item in items if item not in kept]


@pytest.fixture
def untried_if_quick(request: pytest.FixtureRequest) -> None:
    """`untried`, but in the full run: for models that others try in the quick one."""
    if not request.config.getoption("--full"):
        request.getfixturevalue("untried")


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is tried at build, on the test's ranks too: for tests of what runs after it.

    Trials take most of the time of a small step. Those of `parity`, `odd` and `verify` run them.
    """
    monkeypatch.setenv("WHALE_CHECK_PARTS", "0")
    monkeypatch.setenv("WHALE_CHECK_SPLITS", "0")
