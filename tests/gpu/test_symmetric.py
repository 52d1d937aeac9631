"""Sums through symmetric memory, on virtual GPUs of one card."""

from __future__ import annotations

import pytest
import torch

from benchmarks.virtual_gpus import one_node, start_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("shares", [(66, 33), (40, 20, 20, 20)])
def test_sums_and_gathers_are_exact(shares: tuple[int, ...]) -> None:
    start_ranks(
        shares, "tests.gpu.symmetric_rank", environment=one_node(len(shares)), timeout=120.0
    )
