"""One virtual GPU's part of the NCCL parity run.

Trains every layout of its size in float32, in one process.

Run by `benchmarks/parity_gpu.py` and `test_parity.py` through
`benchmarks.virtual_gpus.start_ranks`. Rank 0 trains the reference in float64 on the CPU from the
same (float32) weights and prints one JSON line per layout.

Tolerances are for float32: 2e-5 on the loss, 1e-3 on gradients and weights. AdamW's eps is 1e-4
here: with the usual 1e-8 a gradient that is zero but for rounding would be blown up to a full step
on either side.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

import whale as wh
from tests.parity import zoo
from tests.parity.layouts import LAYOUTS
from tests.parity.parity import ROWS, STEPS, in_dtype, train, worst_errors
from tests.parity.reference import train_reference
from whale.ir.virtual_device import micro_batch_cuts

OPTIMIZER = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-4)
LOSS, TENSOR = 2e-5, 1e-3


def main() -> None:
    """Trains `--cases case/layout,...` and prints the errors."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", required=True)
    parser.add_argument("--synchronize", action="store_true", help="every module waits")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    faulthandler.dump_traceback_later(100.0)
    wh.init()
    if options.synchronize:
        for kind in (nn.Linear, nn.LayerNorm, nn.Embedding, nn.Conv2d, nn.BatchNorm2d):
            _wait_in(kind)
    rank = torch.distributed.get_rank()
    for pair in options.cases.split(","):
        case_name, layout_name = pair.split("/")
        began = time.time()
        result = train(case_name, layout_name, {"guard": 1}, 0.0, torch.float32, OPTIMIZER)
        if rank == 0:
            errors = _errors(case_name, layout_name, result)
            ok = errors["loss"] < LOSS and max(errors["gradient"], errors["weight"]) < TENSOR
            report = {"case": case_name, "layout": layout_name, "ok": ok, **errors}
            report["ranks"] = LAYOUTS[layout_name].num_ranks
            report["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
            report["seconds"] = time.time() - began
            print(json.dumps(report), flush=True)
        torch.distributed.barrier()


def _wait_in(kind: type[nn.Module]) -> None:
    forward = kind.forward

    def waiting(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        _wait_for_the_device(output)
        return output

    kind.forward = waiting  # type: ignore[method-assign]


def _wait_for_the_device(output: object) -> None:
    """In the forward of a module and in its backward, as an allocation may have to."""
    _synchronize()
    traced = isinstance(output, FakeTensor)  # what hangs on a traced tensor is refused
    if isinstance(output, torch.Tensor) and output.requires_grad and not traced:
        output.register_hook(lambda gradient: _synchronize())


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _errors(case_name: str, layout_name: str, result: dict) -> dict:
    case, layout = zoo.case(case_name), LAYOUTS[layout_name]

    def build() -> torch.nn.Module:
        return case.build().float().double()

    points = micro_batch_cuts(ROWS, layout.config.get("pipeline.num_micro_batch", 1))
    sizes = [b - a for a, b in zip(points, points[1:], strict=False)]
    batches = [
        in_dtype(in_dtype(case.batch(seed, ROWS), torch.float32), torch.float64)
        for seed in range(STEPS)
    ]
    truth = train_reference(replace(case, build=build), batches, [sizes] * STEPS, OPTIMIZER)
    for kind in ("gradients", "state"):
        result[kind] = {
            name: t.double() if t.is_floating_point() else t for name, t in result[kind].items()
        }
    return worst_errors([result], truth, with_gradients=True)


if __name__ == "__main__":
    sys.exit(main())
