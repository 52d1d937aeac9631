"""The CUDA kernels of keyed dropout and batch norm: needs a GPU, skipped elsewhere."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.kernels_check import CHECKS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", CHECKS)
def test_kernels(name: str) -> None:
    torch.manual_seed(0)
    CHECKS[name]("cuda")
