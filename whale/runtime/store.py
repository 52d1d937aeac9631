"""ParameterStore: the parameters of one rank from the beginning of a step to their update.

Place in the flow: made by Step around what `engine.lower` laid out. It begins the gradients of a
step, and applies them once their sums and the batch's counts are there: divided, clipped, given to
the optimizer. Nobody else touches a parameter's gradient or calls the optimizer.

[Note: the division] Gradients are those of sums, and are divided by the global count once. That
takes no pass over them where it can be had for nothing: a rank that computes the whole batch at
once begins its backward with it (`ahead`), and a fused optimizer divides while it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from whale.ir.updates import Update
from whale.runtime.absent import Presence
from whale.runtime.grads import GradientBuckets
from whale.runtime.optimizer import check_no_hooks, check_parameters, has_hooks, is_torchs

Add = Callable[[torch.Tensor], torch.Tensor]
"""Adds numbers up over all ranks."""


class ParameterStore:
    """What a rank holds of the model, its gradients and its optimizer.

    Args:
        params: This rank's parameters, by name.
        grads: Their gradients.
        optimizer: Over those that train.
        trainable: Names of all parameters of the model that train, in its order.
        ahead: Whether gradients come divided: the executor seeds the backward with the factor.
        in_pieces: Whether the optimizer has not all of the model, or parts of its parameters.
        max_norm: Above which the norm of all gradients is clipped.
    """

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        grads: GradientBuckets,
        optimizer: torch.optim.Optimizer,
        trainable: Iterable[str],
        *,
        device: torch.device,
        ahead: bool,
        in_pieces: bool,
        max_norm: float | None,
    ) -> None:
        self.params, self.grads, self.optimizer = params, grads, optimizer
        self.device, self.ahead, self.in_pieces, self.max_norm = device, ahead, in_pieces, max_norm
        self._presence = Presence(trainable, params, device)
        self._members = sum(len(group["params"]) for group in optimizer.param_groups)
        self._narrow = all(p.dtype.itemsize <= 4 for p in params.values())

    def begin(self) -> None:
        """Before a step."""
        self.grads.begin()

    def reduce(self, update: Update) -> None:
        """A bucket of gradients is complete: its sum over ranks begins, if it has not."""
        self.grads.reduce(update.number)

    def wait(self) -> None:
        """All sums are there."""
        self.grads.wait()

    def apply(self, update: Update, factor: torch.Tensor, add: Add) -> torch.Tensor | None:
        """Updates a group's parameters by their gradients, which are summed by now, times `factor`.

        Returns:
            The norm of all gradients before it was clipped, where it is.
        """
        assert update.number == 0, "there is one apply group"
        grads, norm = self.grads, None
        flags = self._presence.flags(grads.touched)
        squares = grads.square_sum(self.device) if self.max_norm is not None else factor
        shared = add(torch.cat([squares.double().reshape(1), flags]))
        scaled = not self.ahead
        if self.max_norm is not None:
            norm = shared[0].sqrt() if self.ahead else shared[0].sqrt() * factor
            clip = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
            factor, scaled = clip if self.ahead else factor * clip, True
        grads.complete(self._presence.absent(grads.touched, shared[1:]))
        self._check_optimizer()
        self._update(factor if scaled else None)
        return norm

    def _check_optimizer(self) -> None:
        """A script may have hung something on it, or added parameters, since the last step."""
        if self.in_pieces:
            check_no_hooks(self.optimizer)
        members = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if members != self._members:
            check_parameters(self.optimizer, list(self.params.items()))
            self._members = members

    def _update(self, factor: torch.Tensor | None) -> None:
        """One step of the optimizer on gradients times `factor`."""
        optimizer = self.optimizer
        if factor is None or not self._divides():
            if factor is not None:
                self.grads.scale(factor)
            optimizer.step()
            return
        # As torch's GradScaler hands it over.
        vars(optimizer)["grad_scale"] = (1.0 / factor).float().reshape(())
        try:
            optimizer.step()
        finally:
            del vars(optimizer)["grad_scale"]

    def _divides(self) -> bool:
        """Whether the optimizer's step divides by `grad_scale`, in the kernel that reads gradients.

        That number is a float32, so nothing here may be exact to more digits; and nobody else may
        look at the gradients first.
        """
        optimizer = self.optimizer
        return (
            self._narrow
            and is_torchs(optimizer)
            and not has_hooks(optimizer)
            and getattr(optimizer, "_step_supports_amp_scaling", False)
            and all(group.get("fused") for group in optimizer.param_groups)
        )

    def close(self) -> None:
        """Gives all memory back.

        Modules, hooks and graphs refer to parameters in circles that are collected late or never;
        it goes now. The user's own parameters have their own.
        """
        self.grads.close()
        self.optimizer.state.clear()
        for parameter in self.params.values():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        self.params.clear()
