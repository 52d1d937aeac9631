"""Fakes: the user's model and batch as tensors with shapes and no memory.

Place in the flow: made by `engine.capture`, inside `runtime.compat.fake_mode`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from whale.engine.state.copies import plain_tensors
from whale.errors import CaptureError
from whale.nn.encoders import install_padding
from whale.runtime import batch as batches
from whale.runtime.compat import real_tensors, run_eagerly


def fake_copy(model: nn.Module) -> tuple[nn.Module, dict[int, str], dict[int, torch.Tensor]]:
    """The model on fake tensors; names of its state by id; real values of its buffers by id."""
    # By their first names, each tied tensor once.
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    memo: dict[int, Any] = {}
    names: dict[int, str] = {}
    values: dict[int, torch.Tensor] = {}
    for name, parameter in parameters.items():
        fake = nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype),
            requires_grad=parameter.requires_grad,
        )
        memo[id(parameter)] = fake
        names[id(fake)] = name
    for name, buffer in buffers.items():
        fake_buffer = torch.empty(buffer.shape, dtype=buffer.dtype)
        memo[id(buffer)] = fake_buffer
        names[id(fake_buffer)] = name
        if not buffer.is_meta:
            with real_tensors():
                # A copy: glue that writes to a buffer is evaluated on it.
                values[id(fake_buffer)] = buffer.detach().to("cpu", copy=True)
    for tensor in plain_tensors(model):
        if id(tensor) in memo:
            continue
        fake_tensor = torch.empty(tensor.shape, dtype=tensor.dtype)
        memo[id(tensor)] = fake_tensor.requires_grad_(tensor.requires_grad)
        if not tensor.is_meta:
            with real_tensors():
                values[id(fake_tensor)] = tensor.detach().to("cpu", copy=True)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Generator):
                with real_tensors():
                    memo[id(value)] = value.clone_state()
    try:
        fake_model = copy.deepcopy(model, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied: {error}",
            hint="attributes such as locks, files or process groups must not sit on modules",
        ) from error
    run_eagerly(fake_model)
    install_padding(fake_model)
    for module in fake_model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None:
            module.momentum = 0.1  # not by how many batches it has seen, which are none
    # The memo keeps the originals' ids alive; the fakes live in the copied model.
    return fake_model, names, values


def fake_batch(batch: Any, rows: int) -> Any:
    """The batch with so many rows, without memory."""
    total = batches.num_rows(batch)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        shape = list(tensor.shape)
        if batches.has_rows(tensor, total):
            shape[0] = rows
        return torch.empty(shape, dtype=tensor.dtype)

    return batches.rebuild(batch, [fake(t) for t in batches.leaves(batch)])
