"""Measure: how fast this job's devices and links really are, as a Profile.

Place in the flow: behind `whale calibrate`, before planning. Every rank measures its own device
while the others do the same, because that is how they will train; then all hold the same Profile,
which `cost` prices plans from. Each Layer of a model is run alone, as it would be in a step.
"""

from __future__ import annotations

import copy
import socket
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from whale.engine.capture import Captured, capture
from whale.engine.examples import Example
from whale.engine.measure_device import (
    available_memory,
    default_dtypes,
    measure_apply,
    measure_launch,
    measure_rates,
)
from whale.engine.measure_links import Together, measure_links
from whale.engine.program import tensors_in, tree_map
from whale.engine.stopwatch import WARM_UP, Stopwatch, Synchronize
from whale.ir.device_types import type_in
from whale.ir.profile import Curve, DeviceProfile, LayerTime, Profile
from whale.runtime.batch import Loss

__all__ = [
    "available_memory",
    "calibrate",
    "measure_apply",
    "measure_launch",
    "measure_layers",
    "measure_links",
    "measure_rates",
]

ROWS = (1, 4, 16, 64)
_ROUND_S = {"cuda": 10e-3, "cpu": 2e-3}
_MOST_CALLS = 8
_MOST_WEIGHTS = 1 << 27
"""Of a Linear that is timed as it is."""
_LOADED_S = 0.1
"""Of a Layer on a CPU at least: several turns of ranks that share a core."""
_WEIGHT_SCALE = 0.02  # as small as trained weights, so that nothing overflows


def calibrate(
    model: nn.Module | None = None,
    batch: Any = None,
    loss: Loss | None = None,
    rows: Sequence[int] = ROWS,
    *,
    device: torch.device | None = None,
    dtypes: Sequence[str] | None = None,
    repeats: int = 5,
    budget_s: float = 60.0,
    symmetric_memory: bool = False,
) -> Profile:
    """The Profile of this job's devices and links, the same on every rank; all call it alike.

    Args:
        model: Whose Layers are timed, on the meta device or not; None: devices and links alone.
        batch: One global batch for it; its shapes are what matters.
        loss: As for `parallelize`; needed where the batch holds a target.
        rows: Numbers of rows to time each Layer at.
        device: This rank's own; default: the current GPU, or the CPU.
        dtypes: What products and copies are timed in; default: by kind of device.
        repeats: Rounds of each measurement, of which the median counts.
        budget_s: Seconds for the Layers of the model, at most (larger row counts are given up).
        symmetric_memory: Sums go through it, as `communication.symmetric_memory` will have it.
    """
    if device is None:
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    captured = capture(model, batch, loss) if model is not None else None
    with Together() as together:
        if together.num_ranks > 1:
            # Opens the communicator, whose buffers are no memory for tensors.
            dist.all_reduce(torch.zeros(1, device=device))
        together.wait()
        memory, reserved = available_memory(device)
        together.wait()
        launch_s = measure_launch(device)
        together.wait()
        dtypes = default_dtypes(device) if dtypes is None else dtypes
        rates = measure_rates(device, dtypes, synchronize=together.wait)
        apply_bytes_per_s = measure_apply(device, synchronize=together.wait)
        layers: dict[str, LayerTime] = {}
        if model is not None and captured is not None:
            layers = measure_layers(
                model,
                captured,
                device,
                rows,
                repeats=repeats,
                budget_s=budget_s,
                synchronize=together.wait,
            )
        links = measure_links(together.num_ranks, device, symmetric=symmetric_memory)
        mine = DeviceProfile(
            type=_type_of(device),
            memory_bytes=memory,
            reserved_bytes=reserved,
            launch_s=launch_s,
            apply_bytes_per_s=apply_bytes_per_s,
            rates=rates,
            layers=layers,
        )
        found = together.gather((mine, _card(device)))
    about = f"torch {torch.__version__}, {len(found)} rank{'s' if len(found) > 1 else ''}"
    if model is not None:
        about += f", Layers of {type(model).__name__}"
    return Profile(devices=_shared(found), links=links, about=about)


Card = tuple[str, int] | None
"""Which card a rank is on, and the bytes it has in all."""


def _type_of(device: torch.device) -> str:
    if device.type == "cpu":
        return "CPU"
    name = torch.cuda.get_device_name(device)
    return type_in(name) or name


def _card(device: torch.device) -> Card:
    if device.type == "cpu":
        return None
    properties = torch.cuda.get_device_properties(device)
    return f"{socket.gethostname()} {properties.uuid}", properties.total_memory


def _shared(found: Sequence[tuple[DeviceProfile, Card]]) -> tuple[DeviceProfile, ...]:
    """Devices whose ranks share a card without a limit get their part of it: each saw all of it."""
    seen: dict[str, list[int]] = {}
    for device, card in found:
        if card is not None:
            seen.setdefault(card[0], []).append(device.memory_bytes)
    devices = []
    for device, card in found:
        if card is not None and sum(seen[card[0]]) > card[1]:
            part = device.memory_bytes * max(seen[card[0]]) // sum(seen[card[0]])
            device = replace(device, memory_bytes=part)
        devices.append(device)
    return tuple(devices)


def measure_layers(
    model: nn.Module,
    captured: Captured,
    device: torch.device,
    rows: Sequence[int],
    *,
    repeats: int = 5,
    budget_s: float = 60.0,
    synchronize: Synchronize | None = None,
) -> dict[str, LayerTime]:
    """Seconds of every kind of Layer at each number of rows, forward and backward, by signature.

    A number of rows that does not fit in memory, or in this Layer's part of `budget_s`, ends the
    Layer's curve. A Layer that cannot be run alone is left out with a warning: it is priced by the
    device's rates.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    paths: dict[str, str] = {}
    for layer in captured.graph.layers:
        if layer.path in captured.examples:
            paths.setdefault(layer.signature, layer.path)
    sizes = sorted({r for r in rows if r > 0})
    found: dict[str, LayerTime] = {}
    left = budget_s
    for index, (signature, path) in enumerate(paths.items()):
        module, times_as_wide = _narrow(modules[path])
        bench = _Bench(module, captured.examples[path], path, device)
        times = bench.curve(sizes, repeats, left / (len(paths) - index), synchronize)
        bench.close()
        left -= bench.spent_s
        if times:
            # The examples are of a Layer's first call; equal signatures have equally many.
            calls = _num_calls(captured, path) * times_as_wide
            found[signature] = LayerTime(
                forward=Curve.of({r: calls * f for r, (f, _) in times.items()}),
                backward=Curve.of({r: calls * b for r, (_, b) in times.items()}),
                kept=Curve.of({r: calls * k for r, k in bench.kept.items()})
                if bench.kept
                else None,
            )
    return found


def _num_calls(captured: Captured, path: str) -> int:
    ops = captured.program.ops if captured.program is not None else []
    return max(1, sum(op.layer == path for op in ops))


class _Bench:
    """One Layer, alone on a device."""

    def __init__(self, layer: nn.Module, example: Example, path: str, device: torch.device) -> None:
        self.layer, self.example, self.path, self.device = layer, example, path, device
        self.watch = Stopwatch(device)
        self.spent_s = 0.0
        self.kept: dict[int, int] = {}
        """Bytes on the device after a forward, by rows: its output and what backward needs."""
        self._module: nn.Module | None = None
        self._args: tuple[Any, Any] = ((), {})
        self._ones: list[torch.Tensor] | None = None

    def close(self) -> None:
        """Frees the device."""
        self._module, self._args, self._ones = None, ((), {}), None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def curve(
        self, sizes: Sequence[int], repeats: int, budget_s: float, synchronize: Synchronize | None
    ) -> dict[int, tuple[float, float]]:
        """(forward, backward) by rows. Every rank makes all sizes' calls of `synchronize`."""
        times: dict[int, tuple[float, float]] = {}
        going, cost, last = True, 0.0, 0
        failure = ""
        for rows in sizes:
            # The first size is tried whatever it takes; a larger one takes longer in proportion.
            if last and cost * rows / last > budget_s - self.spent_s:
                going = False
            start = time.monotonic()
            if going:
                try:
                    times[rows] = self._timed(rows, repeats, budget_s / len(sizes))
                    last = rows
                except torch.OutOfMemoryError:
                    going = False
                except Exception as error:  # noqa: BLE001 - a user's module, on its own
                    # Another size may do: batch norm wants more than one row. Only the text is
                    # kept, because an error holds on to the tensors of its frames.
                    failure = f"{type(error).__name__}: {error}"
                if rows not in times:
                    self.close()
                cost = time.monotonic() - start
                self.spent_s += cost
            if synchronize is not None:
                synchronize(self._once if self._module is not None else None)
        if failure and not times:
            warnings.warn(
                f"{self.path or 'the model'} cannot be timed alone: {failure}"[:300], stacklevel=3
            )
        return times

    def _timed(self, rows: int, repeats: int, budget_s: float) -> tuple[float, float]:
        """Seconds of one forward and of one backward.

        Several forwards, then one backward through all, with nothing between them that waits: as in
        a step, the host runs ahead of a GPU, activations are new memory, and autograd's engine,
        which takes as long to start as several kernels, starts once.
        """
        if self._module is None:
            self._module = _alone(self.layer, self.device)
        self._args, self._ones = ((), {}), None
        self._args = self.example.make(rows, self.device)
        with torch.enable_grad():
            for _ in range(WARM_UP - 1):
                self._once()
            once, held = self._cost()
            if self.device.type == "cuda":
                self.kept[rows] = self._kept()
            calls = min(int(_ROUND_S[self.device.type] / max(once, 1e-9)), _MOST_CALLS, held)
            calls = max(calls, 1)
            if self.device.type == "cpu":
                repeats = max(repeats, int(_LOADED_S / (calls * max(once, 1e-9))))
            rounds = min(repeats, max(2, int(budget_s / (calls * max(once, 1e-9)))))
            marks = [self._round(calls) for _ in range(rounds)]
        times = [
            (self.watch.between(a, b) / calls, self.watch.between(b, c) / calls)
            for a, b, c in marks
        ]
        # Ranks may outnumber cores: who shares one is stopped now and then, which is in the mean.
        middle = statistics.fmean if self.device.type == "cpu" else statistics.median
        return middle([f for f, _ in times]), middle([b for _, b in times])

    def _cost(self) -> tuple[float, int]:
        """Seconds of one forward and backward; how many forwards fit in half of what is free."""
        if self.device.type != "cuda":
            return self.watch.once(self._once), _MOST_CALLS
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        once = self.watch.once(self._once)
        needed = torch.cuda.max_memory_allocated(self.device) - before
        free = torch.cuda.mem_get_info(self.device)[0]
        free += torch.cuda.memory_reserved(self.device) - before
        return once, free // 2 // max(needed, 1)

    def _kept(self) -> int:
        assert self._module is not None
        args, kwargs = tree_map(self._args, _leaf)
        before = torch.cuda.memory_allocated(self.device)
        made = self._module(*args, **kwargs)
        kept = torch.cuda.memory_allocated(self.device) - before
        del made
        return kept

    def _round(self, calls: int) -> tuple[Any, Any, Any]:
        assert self._module is not None
        # Inputs of their own for each call: gradients of one would be added up over the calls,
        # where in a step they go on to the Layer before.
        given = [tree_map(self._args, _leaf) for _ in range(calls)]
        start = self.watch.mark()
        made = [self._module(*args, **kwargs) for args, kwargs in given]
        middle = self.watch.mark()
        outputs = [t for t in tensors_in(made) if t.requires_grad]
        if outputs:
            if self._ones is None:
                self._ones = [torch.ones_like(t) for t in outputs]
            torch.autograd.backward(outputs, self._ones * calls)
        return start, middle, self.watch.mark()

    def _once(self) -> None:
        with torch.enable_grad():
            self._round(1)
        self.watch.synchronize()


def _leaf(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _narrow(layer: nn.Module) -> tuple[nn.Module, float]:
    """A Linear of very many columns with fewer of them, and how many times fewer; others as is.

    Alone on a device it would need its weights three times over (their values, their gradients and
    what is added to those), where only a shard of it may ever have to fit; and its time is in
    proportion to its columns. Every rank decides alike, whatever memory it has.
    """
    if type(layer) is not nn.Linear or layer.weight.numel() <= _MOST_WEIGHTS:
        return layer, 1.0
    columns = max(1, _MOST_WEIGHTS // layer.in_features)
    narrow = nn.Linear(
        layer.in_features,
        columns,
        bias=layer.bias is not None,
        dtype=layer.weight.dtype,
        device="meta",
    )
    narrow.requires_grad_(layer.weight.requires_grad)
    return narrow, layer.out_features / columns


def _alone(layer: nn.Module, device: torch.device) -> nn.Module:
    """A copy of one Layer on a device, its gradients allocated; what is on meta gets values."""
    memo: dict[int, Any] = {}
    for parameter in layer.parameters():
        data = _values(parameter, device)
        made = nn.Parameter(data, requires_grad=parameter.requires_grad)
        if made.requires_grad:
            # As in every micro-batch but a step's first, gradients are added to.
            made.grad = torch.zeros_like(made)
        memo[id(parameter)] = made
    for buffer in layer.buffers():
        if buffer.is_meta:
            memo[id(buffer)] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
        else:
            memo[id(buffer)] = buffer.detach().to(device, copy=True)
    module: nn.Module = copy.deepcopy(layer, memo)
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.train()
        if isinstance(part, nn.RNNBase):
            part.flatten_parameters()
        if getattr(part, "inplace", False) is True:
            # Its input may be the Layer's own, which here is a leaf of autograd: torch refuses to
            # change one. The bytes read and written are the same.
            part.inplace = False  # type: ignore[assignment]
    return module


def _values(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not parameter.is_meta:
        return parameter.detach().to(device, copy=True)
    if not parameter.is_floating_point():
        return torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
    values = torch.randn(parameter.shape, dtype=parameter.dtype, device=device)
    return values.mul_(_WEIGHT_SCALE)
