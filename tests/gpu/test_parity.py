"""Parity over NCCL on virtual GPUs: needs a GPU and CUDA MPS, skipped elsewhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.virtual_gpus import start_ranks

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(shutil.which("nvidia-cuda-mps-control") is None, reason="needs CUDA MPS"),
    pytest.mark.timeout(400),
]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_layouts_equal_one_device(ranks: int) -> None:
    run("--ranks", str(ranks))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_computes_may_wait_for_their_device(ranks: int) -> None:
    """Messages under way occupy it: no circle of waits, in any module's forward or backward."""
    run("--ranks", str(ranks), "--synchronize")


def run(*arguments: str) -> None:
    command = [sys.executable, "-m", "benchmarks.parity_gpu", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_dropout_and_autocast_are_the_same_under_every_layout() -> None:
    start_ranks([66, 33], "tests.gpu.edges_rank", timeout=300.0)
