"""The CUDA kernels under the mixture of experts: needs a GPU, skipped elsewhere."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.moe_check import CHECKS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", CHECKS)
def test_moe_kernels(name: str) -> None:
    torch.manual_seed(0)
    CHECKS[name]("cuda")
