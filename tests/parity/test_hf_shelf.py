"""The quick part of the Hugging Face shelf: architectures under layouts, against plain torch.

The whole of it is `python -m benchmarks.hf_shelf`, and `make test-full` here.
"""

from __future__ import annotations

import pytest

from benchmarks.hf_models import SHELF
from benchmarks.hf_shelf import LAYOUTS, run_groups

QUICK = {
    "split": ("phi3", "deepseek_v3", "gpt_oss", "llama+lora"),
    "stage-split": ("qwen3",),
}
HEADS = {name for names in QUICK.values() for name in names}


def _check(names: tuple[str, ...], layout: str) -> None:
    for name, _, cell in run_groups(names, [layout]):
        assert cell["state"] == "exact", (name, cell)
        if name in HEADS and "split" in layout:
            assert cell["attention"] == "heads" and cell["share"] > 0.9, (name, cell)


@pytest.mark.parametrize("layout", QUICK)
def test_architectures_equal_one_device_and_keep_heads_together(layout: str) -> None:
    _check(QUICK[layout], layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_whole_shelf_is_exact_or_refused(layout: str) -> None:
    wrong = {
        name: cell
        for name, _, cell in run_groups(list(SHELF), [layout])
        if cell["state"] not in ("exact", "refused")
    }
    assert not wrong, wrong
