"""Options of the whole test suite: `--full` also runs what is marked `full`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", default=False, help="also run the tests marked `full`"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: runs only with --full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    skip = pytest.mark.skip(reason="runs only with --full")
    for item in items:
        if item.get_closest_marker("full") is not None:
            item.add_marker(skip)
