"""Adafactor: a second moment by rows and columns, in float32, updated a stretch at a time.

Place in the flow: an optimizer of `wh.optim`. Its arithmetic is that of `torch.optim.Adafactor`,
which keeps the factors in the parameter's dtype and makes several tensors as large as the
parameter. This one keeps them in float32 (float64 for float64), reads a large parameter by
stretches of its first dim, and on CUDA does so in one kernel for each pass (`adafactor_kernels`).

A parameter in half precision is updated in float32 a stretch at a time and rounded back: to the
nearest, or by chance where `rounding` says so (`runtime.masters`). So nothing as large as the
parameter is ever made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from whale.errors import WhaleError
from whale.runtime.masters import Rounding

STRETCH = 1 << 24
"""Elements that are updated at a time, about."""


class Adafactor(torch.optim.Optimizer):
    """Adafactor without momentum (Shazeer and Stern 2018), for parameters of any float dtype.

    Args:
        params: As for any optimizer.
        lr: The largest step, relative to a parameter's own size.
        beta2_decay: The running mean's weight of the newest step is `step ** beta2_decay`.
        eps: Smallest square of a gradient (None: the dtype's own), and smallest size of a
            parameter.
        d: Updates whose root mean square is larger are scaled down to it.
        weight_decay: Of the weights themselves, times `lr`.

    Example:
        >>> weight = nn.Parameter(torch.ones(2, 3))
        >>> optimizer = Adafactor([weight], lr=0.1)
        >>> weight.grad = torch.ones(2, 3)
        >>> optimizer.step()
        >>> round(float(weight[0, 0]), 6)
        0.9
    """

    widens_itself = True
    """Half precision is updated in float32 here: nobody needs to make wide copies before."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        wrong = {
            "lr": (lr, lr >= 0, "0 or more"),
            "beta2_decay": (beta2_decay, beta2_decay <= 0, "0 or less"),
            "eps": (eps, (eps[0] is None or eps[0] >= 0) and eps[1] >= 0, "None or 0 or more"),
            "d": (d, d >= 1, "1 or more"),
            "weight_decay": (weight_decay, weight_decay >= 0, "0 or more"),
        }
        for name, (value, fine, allowed) in wrong.items():
            if not fine:
                raise WhaleError(
                    f"Adafactor: {name} = {value!r}; allowed: {allowed}",
                    hint="the defaults are those of torch.optim.Adafactor",
                )
        values = {
            "lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay
        }  # fmt: skip
        super().__init__(params, values)
        self.rounding: Mapping[nn.Parameter, Rounding] = {}
        """By parameter in half precision that is rounded by chance, how."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param.grad.is_sparse:
                    raise WhaleError(
                        "Adafactor: a sparse gradient has no rows and columns to sum over",
                        hint="make the embedding with sparse=False",
                    )
                _Update(self, group, param, param.grad, self.rounding.get(param)).run()
        return loss


class _Update:
    """One update of one parameter."""

    def __init__(
        self,
        optimizer: Adafactor,
        group: Mapping[str, Any],
        param: nn.Parameter,
        grad: torch.Tensor,
        rounding: Rounding | None,
    ) -> None:
        self.param, self.grad, self.rounding = param, grad, rounding
        self.wide = torch.promote_types(param.dtype, torch.float32)
        self.lr, self.d = float(group["lr"]), float(group["d"])
        self.decay = float(group["weight_decay"])
        least, self.least_size = group["eps"]
        self.least = torch.finfo(self.wide).eps if least is None else least
        self.state: dict[str, Any] = optimizer.state[param]
        if not self.state:
            self._begin()
        self.state["step"] += 1
        count = float(self.state["step"])
        self.newest = count ** group["beta2_decay"]
        self.rate = min(self.lr, count**-0.5)

    def _begin(self) -> None:
        shape = self.param.shape

        def zeros(*sizes: int) -> torch.Tensor:
            return torch.zeros(sizes, dtype=self.wide, device=self.param.device)

        self.state["step"] = torch.zeros((), dtype=torch.float32)
        if self.param.dim() > 1:
            self.state["row_var"] = zeros(*shape[:-1], 1)
            self.state["col_var"] = zeros(*shape[:-2], 1, shape[-1])
        else:
            self.state["variance"] = zeros(*shape)

    def run(self) -> None:
        """All passes over it."""
        if not self.param.numel():
            return
        kernels = self._kernels()
        if kernels is not None:
            rows, cols = kernels.mean_squares(self.grad)
            self._fold(rows, cols)
            scales = kernels.Scales.of(self.state, self.least)
            sizes = kernels.square_sums(self.param, self.grad, scales)
            kernels.update(self.param, self.grad, scales, self._change(*sizes), self.rounding)
            return
        if self.param.dim() > 1:
            self._fold(*self._mean_squares())
        else:
            self.state["variance"].lerp_(self.grad.to(self.wide).square(), self.newest)
        of_updates = of_params = torch.zeros((), dtype=torch.float64, device=self.param.device)
        for low, high in self._stretches():
            of_updates = of_updates + self._made(low, high).double().square().sum()
            of_params = of_params + self._part(self.param, low, high).double().square().sum()
        self._apply(self._change(of_updates, of_params))

    def _kernels(self) -> Any:
        """Where the parameter is one that they take."""
        if not self.param.is_cuda:
            return None
        from whale.optim import adafactor_kernels  # noqa: PLC0415 - it loads Triton

        taken = adafactor_kernels.takes(self.param, self.grad, self.rounding)
        return adafactor_kernels if taken else None

    # ---- by stretches of the first dim ----------------------------------------------------------

    def _stretches(self) -> Iterator[tuple[int, int]]:
        if not self.param.dim():
            yield 0, 1
            return
        rows = self.param.shape[0]
        step = max(1, STRETCH // max(1, self.param.numel() // max(1, rows)))
        for low in range(0, rows, step):
            yield low, min(rows, low + step)

    def _part(self, tensor: torch.Tensor, low: int, high: int) -> torch.Tensor:
        part = tensor[low:high] if tensor.dim() else tensor
        return part.detach().to(self.wide)

    def _mean_squares(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the gradient, by rows and by columns."""
        rows = torch.empty_like(self.state["row_var"])
        cols = torch.zeros_like(self.state["col_var"])
        for low, high in self._stretches():
            squares = self._part(self.grad, low, high).square()
            rows[low:high] = squares.mean(-1, keepdim=True)
            if self.param.dim() == 2:
                cols += squares.sum(-2, keepdim=True)
            else:
                cols[low:high] = squares.sum(-2, keepdim=True)
        return rows, cols.div_(self.param.shape[-2])

    def _fold(self, rows: torch.Tensor, cols: torch.Tensor) -> None:
        self.state["row_var"].lerp_(rows.view_as(self.state["row_var"]), self.newest)
        self.state["col_var"].lerp_(cols.view_as(self.state["col_var"]), self.newest)

    def _made(self, low: int, high: int) -> torch.Tensor:
        """The update of a stretch before it is scaled."""
        if self.param.dim() > 1:
            rows, cols = self.state["row_var"], self.state["col_var"]
            mean = rows.mean(-2, keepdim=True).clamp_(min=self.least)
            if self.param.dim() > 2:
                rows, cols, mean = rows[low:high], cols[low:high], mean[low:high]
            else:
                rows = rows[low:high]
            variance = (rows * cols).div_(mean)
        else:
            variance = self._part(self.state["variance"], low, high).clone()
        made = variance.clamp_(min=self.least * self.least).rsqrt_()
        found: torch.Tensor = made.mul_(self._part(self.grad, low, high))
        return found

    def _change(self, of_updates: torch.Tensor, of_params: torch.Tensor) -> torch.Tensor:
        """What the update is multiplied by; stays on the device."""
        numel = self.param.numel()
        size = (of_params.double() / numel).sqrt().clamp(min=self.least_size)
        limit = ((of_updates.double() / numel).sqrt() / self.d).clamp(min=1.0)
        factors = torch.stack([self.rate * size / limit, torch.full_like(size, self._shrinks())])
        return factors.to(self.wide)

    def _shrinks(self) -> float:
        return 1.0 - self.lr * self.decay

    def _apply(self, change: torch.Tensor) -> None:
        for low, high in self._stretches():
            value = self._part(self.param, low, high) * change[1]
            value -= self._made(low, high) * change[0]
            place = self.param[low:high] if self.param.dim() else self.param
            if self.rounding is not None:
                place.copy_(self.rounding.rounded(value, low, high))
            else:
                place.copy_(value)
