"""Options of the whole test suite: `--full` also runs what is marked `full`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", default=False, help="also run the tests marked `full`"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: runs only with --full")


# What does not hold yet, now that the parts of issue 13 are together. Each is to be mended, and
# its line taken out, before the issue is resolved. They run, so that one that passes is seen.
OPEN = (
    "parity/test_hf_shelf.py::test_architectures_equal_one_device_and_keep_heads_together[split]",
    "parity/test_hf_shelf.py::test_architectures_equal_one_device_and_keep_heads_together[stage-split]",
    "parity/test_own_code.py::test_an_own_cross_entropy_gets_whole_logits",
    "parity/test_own_code.py::test_own_code_is_exact[",
    "parity/test_own_code.py::test_what_cannot_be_exact_is_said",
    "unit/engine/test_own_code.py::test_a_pair_is_offered_only_where_its_inside_is_elementwise[in-place]",
    "unit/engine/test_own_code.py::test_attention_that_computes_with_its_width_is_not_cut_by_heads",
    "unit/engine/test_random_capture.py::test_draws_in_a_backward_are_refused",
    "unit/planner/test_given.py::test_an_edited_plan_is_refused_or_computes_the_same[tensor-uneven]",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if any(name in item.nodeid for name in OPEN):
            item.add_marker(pytest.mark.xfail(reason="open in issue 13", strict=False))
    if config.getoption("--full"):
        return
    skip = pytest.mark.skip(reason="runs only with --full")
    for item in items:
        if item.get_closest_marker("full") is not None:
            item.add_marker(skip)
