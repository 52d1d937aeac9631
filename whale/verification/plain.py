"""Plain: the user's model in plain torch, and how the loss of its global batch is put together.

Place in the flow: under the one-device run of `wh.verify`. With several micro-batches, the loss of
the global batch is what the user's loss says of all their outputs together; nothing is counted.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whale.engine.trace.draw_recorder import Randomness
from whale.nn.encoders import install_padding
from whale.runtime import batch as batches
from whale.verification.masks import Handed, Watch
from whale.verification.shares import Span, cut, value_of
from whale.verification.task import Task


class Untrainable(Exception):  # noqa: N818 - caught by the one-device run
    """A loss that is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How the loss of a global batch is computed.

    Attributes:
        kind: `one` (there is one micro-batch), `whole` (all rows at once), `joined` (the model by
            micro-batch, the loss of all outputs together), `weighed` (a loss by micro-batch, each
            with its share) or `rows` (the same, by rows for want of better).
        spans: The rows of each forward.
        shares: Of each forward; empty unless weighed.
    """

    kind: str
    spans: tuple[Span, ...]
    shares: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a forward left: its named outputs, its rows, and how much its loss counts."""

    named: dict[str, Any]
    span: Span
    share: float


class Plain:
    """A plain model and its random numbers."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        random: Randomness | None,
        watch: Watch | None = None,
        *,
        autocast: bool = False,
    ) -> None:
        self.model, self.task, self.autocast = model, task, autocast
        self.draws = None
        if random is not None:
            install_padding(model)  # under a function mode torch makes no nested tensors
            self.draws = Handed(model, random, task.config.seed, watch or Watch())

    def at(self, step: int, micro_batch: int, span: Span) -> AbstractContextManager[None]:
        """The random numbers of some rows."""
        return nullcontext() if self.draws is None else self.draws.at(step, micro_batch, *span)

    def _low(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.autocast)

    def run(self, step: int, micro_batch: int, batch: Any, span: Span) -> dict[str, Any]:
        """The named outputs of some rows of a global batch."""
        with self.at(step, micro_batch, span), self._low():
            return batches.call_model(self.model, self.task.loss, cut(batch, *span))

    def parts(self, step: int, batch: Any, how: How) -> list[Part]:
        """All forwards of a step, in order."""
        whole = (0, batches.num_rows(batch))
        if how.kind == "joined":
            return [Part(named=self._joined(step, batch, how.spans), span=whole, share=1.0)]
        spans, shares = (how.spans, how.shares) if how.shares else ((whole,), (1.0,))
        return [
            Part(named=self.run(step, number, batch, span), span=span, share=share)
            for number, (span, share) in enumerate(zip(spans, shares, strict=True))
        ]

    def _joined(self, step: int, batch: Any, spans: tuple[Span, ...]) -> dict[str, Any]:
        """The loss of the outputs of all micro-batches, one after another in dim 0."""
        loss = self.task.loss
        assert loss is not None
        outputs: list[Any] = []
        for number, span in enumerate(spans):
            inputs, _ = batches.split_target(cut(batch, *span))
            with self.at(step, number, span), self._low():
                outputs.append(batches.run_model(self.model, inputs))
        leaves = [batches.leaves(out) for out in outputs]
        rows = [high - low for low, high in spans]
        for same in zip(*leaves, strict=True):
            if any(not t.dim() or t.shape[0] % size for t, size in zip(same, rows, strict=True)):
                raise ValueError(f"an output of shape {tuple(same[0].shape)} has no rows")
        joined = [torch.cat(same) for same in zip(*leaves, strict=True)]
        out = batches.rebuild(outputs[0], joined)
        _, target = batches.split_target(batch)
        with self.at(step, 0, (0, batches.num_rows(batch))), self._low():
            value = loss(out, target)
        named = {} if isinstance(value, Tensor) else batches.named_outputs(value)
        return {"output": out, **named, "loss": value_of(value)}

    def backward(self, step: int, batch: Any, how: How) -> tuple[Tensor, torch.dtype, list[Part]]:
        """Leaves the gradient of the global loss; gives that loss, its dtype and all outputs."""
        total = torch.zeros((), dtype=torch.float64)
        dtype = torch.float64
        parts = self.parts(step, batch, how)
        for part in parts:
            value: Tensor = part.named["loss"]
            dtype = value.dtype
            if part.share:
                torch.autograd.backward(value, torch.tensor(part.share, dtype=dtype))
                total += part.share * value.detach().double()
        if not torch.isfinite(total):
            raise Untrainable(f"the loss is {total.item()} on one device")
        return total, dtype, parts


def loss_of(parts: list[Part]) -> Tensor:
    """The loss of the global batch."""
    return torch.stack([p.share * p.named["loss"].double() for p in parts if p.share]).sum()


def rows_meet(model: nn.Module, changes: bool) -> bool:
    """Whether a row's result may depend on the others of its micro-batch, or on their order.

    `changes`: a forward changes buffers.
    """
    norms = nn.modules.batchnorm._BatchNorm
    return changes or any(
        getattr(m, "rows_interact", False) or (isinstance(m, norms) and m.training)
        for m in model.modules()
    )
