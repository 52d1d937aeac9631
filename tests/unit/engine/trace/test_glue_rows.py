"""Glue that computes with the number of rows: constants at 2 and 3 rows are not constants."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from whale.engine.capture.captured import capture, trace
from whale.engine.trace.program import check_rows
from whale.errors import CaptureError


class Glue(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x))).mean()


def thirds(h: Tensor) -> Tensor:
    return h * (h.shape[0] // 4)


def many(h: Tensor) -> Tensor:
    return h * 2 if len(h) > 4 else h + 1


def longer(h: Tensor) -> Tensor:
    return torch.tanh(h) * 3 if h.numel() > 4 * 4 else h * 3


def linear(h: Tensor) -> Tensor:
    return (h.reshape(h.shape[0] * 2, 2) * (h.shape[0] + 1)).view(-1, 4) + float("nan")


BATCH = torch.zeros(8, 4)


@pytest.mark.parametrize("between", [thirds, many, longer], ids=lambda f: f.__name__)
def test_more_rows_take_another_way(between: Callable[[Tensor], Tensor]) -> None:
    model = Glue(between)
    program = capture(model, BATCH, None).program
    assert program is not None
    check_rows(program, trace(model, BATCH, None, 3), 3)
    with pytest.raises(CaptureError, match="8 rows") as error:
        check_rows(program, trace(model, BATCH, None, 8), 8)
    assert "inside one annotated module" in str(error.value)


def test_linear_in_rows_is_fine() -> None:
    model = Glue(linear)
    program = capture(model, BATCH, None).program
    assert program is not None
    for rows in (1, 5, 8):
        check_rows(program, trace(model, BATCH, None, rows), rows)
