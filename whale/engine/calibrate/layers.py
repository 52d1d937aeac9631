"""Measure Layers: each kind of Layer of a model alone on this rank's device, as in a step.

Place in the flow: the part of `engine.calibrate` that knows the model.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from whale.engine.calibrate.stopwatch import WARM_UP, Stopwatch, Synchronize, Work
from whale.engine.capture.captured import Captured
from whale.engine.state.copies import copied
from whale.engine.trace.examples import Example
from whale.engine.trace.program import tensors_in, tree_map
from whale.ir.profile import NOISE, Curve, LayerTime

Made = TypeVar("Made")

_ROUND_S = {"cuda": 10e-3, "cpu": 2e-3}
_ALONE_S = 0.1
"""Of a Layer while the neighbours rest, at most."""
_CLOSE = 0.7
"""Of the device's seconds: a host that needs more cannot be counted on to be ahead of it."""
_TRIALS = 3
REPEATS = 7
"""Rounds of each measurement, of which the median counts."""
_MOST_CALLS = 8
_MOST_WEIGHTS = 1 << 27
"""Of a Linear that is timed as it is."""
_LOADED_S = 0.1
"""Of a Layer at least: ranks that share a core take several turns in it, and those that share a
card are all at work."""
_WEIGHT_SCALE = 0.02  # as small as trained weights, so that nothing overflows


def measure_layers(
    model: nn.Module,
    captured: Captured,
    device: torch.device,
    rows: Sequence[int],
    *,
    repeats: int = REPEATS,
    budget_s: float = 60.0,
    synchronize: Synchronize | None = None,
    turn: tuple[int, int] = (0, 1),
) -> dict[str, LayerTime]:
    """Seconds of every kind of Layer at each number of rows, forward and backward, by signature.

    A number of rows that does not fit in memory, or in this Layer's part of `budget_s`, ends the
    Layer's curve. A Layer that cannot be run alone is left out with a warning: it is priced by the
    device's rates.

    `turn` is this rank's place among those that share its card, and how many share one at most:
    where several do, each Layer is timed once more while the neighbours rest.
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
        alone = bench.alone(times, turn, synchronize)
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
                alone=alone,
            )
    return found


@contextmanager
def heaviest(
    model: nn.Module,
    captured: Captured,
    times: Mapping[str, LayerTime],
    device: torch.device,
) -> Iterator[Work | None]:
    """The Layer that takes most of a step, as work that does not wait for the device.

    `times` are what `measure_layers` found; None where it found nothing.
    """
    if not times:
        yield None
        return
    totals: dict[str, float] = {}
    paths: dict[str, str] = {}
    for layer in captured.graph.layers:
        if layer.signature in times and layer.path in captured.examples:
            found = times[layer.signature]
            seconds = found.forward.points[-1][1] + found.backward.points[-1][1]
            totals[layer.signature] = totals.get(layer.signature, 0.0) + seconds
            paths.setdefault(layer.signature, layer.path)
    most = max(totals, key=lambda signature: totals[signature])
    module, _ = _narrow(dict(model.named_modules(remove_duplicate=False))[paths[most]])
    bench = _Bench(module, captured.examples[paths[most]], paths[most], device)
    try:
        yield bench.load(int(times[most].forward.points[-1][0]))
    finally:
        bench.close()


def _num_calls(captured: Captured, path: str) -> int:
    ops = captured.program.ops if captured.program is not None else []
    return max(1, sum(op.layer == path for op in ops))


class _Round(NamedTuple):
    """Some forwards and the backward through all of them."""

    marks: tuple[Any, ...]
    """Before, between and after."""
    host_s: tuple[float, float]
    """Until the host had given the device each part."""


class _Ready(NamedTuple):
    """What is known of a Layer at one size before its timed rounds."""

    calls: int
    """Of a round."""
    once_s: float
    """Of one call, the host's part included."""
    host_s: tuple[float, float] = (0.0, 0.0)
    """Of a round's forwards and backward, until the host has given them to a GPU."""
    lead_s: float = 0.0
    """What a GPU is given to do before a round, so that the host is ahead of it."""


class _Bench:
    """One Layer, alone on a device."""

    def __init__(self, layer: nn.Module, example: Example, path: str, device: torch.device) -> None:
        self.layer, self.example, self.path, self.device = layer, example, path, device
        self.watch = Stopwatch(device)
        self.spent_s = 0.0
        self.kept: dict[int, int] = {}
        """Bytes on the device after a forward, by rows: its output and what backward needs."""
        self._full, self._failure = False, ""
        """No larger size is tried; why one did not run."""
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
        """(forward, backward) by rows. Every rank makes all sizes' calls of `synchronize`.

        All begin each size together: one that is still getting ready would leave its neighbours
        memory and power that they will not have in training.
        """
        times: dict[int, tuple[float, float]] = {}
        last = 0
        cost = 0.0
        for rows in sizes:
            # The first size is tried whatever it takes; a larger one takes longer in proportion.
            if last and cost * rows / last > budget_s - self.spent_s:
                self._full = True
            spent_s = self.spent_s
            ready = None if self._full else self._attempt(partial(self._prepare, rows))
            if synchronize is not None:
                synchronize(None)
            if ready is not None:
                found = self._attempt(partial(self._timed, ready, repeats, budget_s / len(sizes)))
                if found is not None:
                    times[rows], last = found, rows
            cost = self.spent_s - spent_s
            if synchronize is not None:
                synchronize(self._once if rows in times else None)
        if self._failure and not times:
            warnings.warn(
                f"{self.path or 'the model'} cannot be timed alone: {self._failure}"[:300],
                stacklevel=3,
            )
        return times

    def _attempt(self, work: Callable[[], Made]) -> Made | None:
        """What `work` makes; None where it does not run, and then the device is free again."""
        start = time.monotonic()
        try:
            return work()
        except torch.OutOfMemoryError:
            self._full = True
        except Exception as error:  # noqa: BLE001 - a user's module, on its own
            # Another size may do: batch norm wants more than one row. Only the text is kept,
            # because an error holds on to the tensors of its frames.
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            self.spent_s += time.monotonic() - start
        self.close()
        return None

    def load(self, rows: int) -> Work:
        """One forward and backward that nothing waits for."""
        self._module = _alone(self.layer, self.device)
        self._args = self.example.make(rows, self.device)

        def work() -> None:
            with torch.enable_grad():
                self._round(1)

        return work

    def alone(
        self,
        times: Mapping[int, tuple[float, float]],
        turn: tuple[int, int],
        synchronize: Synchronize | None,
    ) -> float:
        """Seconds while the neighbours on the card rest, over those with all of them at work."""
        mine, most = turn
        ratio = 1.0
        if most > 1 and synchronize is not None:
            for number in range(most):
                if number == mine and times:
                    rows = max(times)
                    found = self._attempt(partial(self._once_more, rows))
                    ratio = min(1.0, sum(found) / sum(times[rows])) if found else 1.0
                synchronize(None)
        return ratio if ratio < 1.0 - NOISE else 1.0

    def _once_more(self, rows: int) -> tuple[float, float]:
        return self._timed(self._prepare(rows), REPEATS, _ALONE_S)

    def _prepare(self, rows: int) -> _Ready:
        """Everything before the first timed round."""
        if self._module is None:
            self._module = _alone(self.layer, self.device)
        self._args, self._ones = ((), {}), None
        self._args = self.example.make(rows, self.device)
        for _ in range(WARM_UP - 1):
            self._once()
        once_s, held = self._cost()
        calls = min(int(_ROUND_S[self.device.type] / max(once_s, 1e-9)), _MOST_CALLS, held)
        calls = max(calls, 1)
        if self.device.type == "cpu":
            return _Ready(calls, once_s)
        with torch.enable_grad():
            self.kept[rows] = self._kept()
            self._round(calls)  # takes from the driver the memory of so many calls
            trials = [self._trial(calls) for _ in range(_TRIALS)]
        # All that disturbs a host only adds to its time.
        host_s = (min(t.host_s[0] for t in trials), min(t.host_s[1] for t in trials))
        # A host that is hardly faster than the device does not get ahead of it by itself. Where it
        # does, the neighbours are to see this Layer at work, and nothing else.
        device_s = min(self.watch.between(t.marks[0], t.marks[2]) for t in trials)
        lead_s = 0.5 * calls * once_s if sum(host_s) > _CLOSE * device_s else 0.0
        if lead_s:
            self.watch.ahead(lead_s)
        self.watch.synchronize()
        return _Ready(calls, once_s, host_s, lead_s)

    def _trial(self, calls: int) -> _Round:
        """A round on a device that has nothing to do: the host waits for it nowhere."""
        self.watch.synchronize()
        return self._round(calls)

    def _timed(self, ready: _Ready, repeats: int, budget_s: float) -> tuple[float, float]:
        """Seconds of one forward and of one backward: the device's, or the host's if it needs more.

        Several forwards, then one backward through all, with nothing between them that waits: as in
        a step, the host runs ahead of a GPU, activations are new memory, and autograd's engine,
        which takes as long to start as several kernels, starts once. A GPU that the host can hardly
        keep up with is given other work first, so that a host that is held up for a moment is not
        taken for a slow device.
        """
        round_s = ready.calls * max(ready.once_s, 1e-9)
        repeats = max(repeats, int(_LOADED_S / round_s))
        rounds = min(repeats, max(2, int(budget_s / round_s)))
        found = []
        with torch.enable_grad(), _no_collector():
            for _ in range(rounds):
                if ready.lead_s:
                    self.watch.ahead(ready.lead_s)
                found.append(self._round(ready.calls))
        return self._middle(ready, found, 0), self._middle(ready, found, 1)

    def _middle(self, ready: _Ready, rounds: Sequence[_Round], part: int) -> float:
        """Seconds of one call's forward (part 0) or backward (part 1)."""
        times = [self.watch.between(r.marks[part], r.marks[part + 1]) for r in rounds]
        if self.device.type == "cpu":
            # Ranks may outnumber cores: who shares one is stopped now and then, which is in the
            # mean.
            return statistics.fmean(times) / ready.calls
        return max(statistics.median(times), ready.host_s[part]) / ready.calls

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

    def _round(self, calls: int) -> _Round:
        assert self._module is not None
        # Inputs of their own for each call: gradients of one would be added up over the calls,
        # where in a step they go on to the Layer before.
        given = [tree_map(self._args, _leaf) for _ in range(calls)]
        clock, marks = [time.perf_counter()], [self.watch.mark()]
        made = [self._module(*args, **kwargs) for args, kwargs in given]
        marks.append(self.watch.mark())
        clock.append(time.perf_counter())
        outputs = [t for t in tensors_in(made) if t.requires_grad]
        if outputs:
            if self._ones is None:
                self._ones = [torch.ones_like(t) for t in outputs]
            torch.autograd.backward(outputs, self._ones * calls)
        marks.append(self.watch.mark())
        clock.append(time.perf_counter())
        return _Round(tuple(marks), (clock[1] - clock[0], clock[2] - clock[1]))

    def _once(self) -> None:
        with torch.enable_grad():
            self._round(1)
        self.watch.synchronize()


@contextmanager
def _no_collector() -> Iterator[None]:
    """Without Python's collector of cycles, which stops the host for longer than a round takes."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


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
    module = copied(layer, memo)
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
