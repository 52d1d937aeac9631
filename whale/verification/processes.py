"""Forked processes: functions run side by side, their results brought back, and none left behind.

Place in the flow: under `wh.verify`. Fork, not spawn: a model needs no pickling, and what the
user's program has imported and set is there in every rank. A rank that raises, dies or hangs ends
all of them, and is named.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch

from whale.errors import RankError, WhaleError

GRACE_S = 1.0
"""How long the others may still report after the first failure: what they meet is its echo."""


_WAITING = ("/torch/distributed/", "/whale/runtime/", "/whale/engine/checkpoint/gather.py")


class RankFailed(Exception):  # noqa: N818 - caught by `verify`, which makes it part of the verdict
    """A process that raised, died or hung; the text says which, and what it was doing."""


@dataclass(slots=True)
class _Child:
    process: ForkProcess
    pipe: Connection
    stacks: Path
    done: bool = False
    value: Any = None
    raised_at: float | None = None
    error: WhaleError | str = ""

    @property
    def failed(self) -> bool:
        return self.done and bool(self.error)


def run_forked(
    functions: Mapping[str, Callable[[], Any]],
    *,
    timeout: float,
    folder: Path,
    environments: Sequence[Mapping[str, str]] | None = None,
    is_last: Callable[[Any], bool] = lambda value: False,
) -> list[Any]:
    """What the functions return, each called in a process of its own, by their order.

    A result that `is_last` ends those who wait for the one that gave it: they return None.

    Raises:
        WhaleError: one of them raised it: the user's to fix. A RankError is no cause but an echo.
        RankFailed: one of them raised anything else, ended without a word, or was not done after
            `timeout` seconds.
    """
    context = multiprocessing.get_context("fork")
    children: dict[str, _Child] = {}
    # A child must never collect the parent's garbage: a store or process group among it would join
    # threads that the fork left behind, and abort.
    gc.collect()
    gc.freeze()
    try:
        for index, (name, function) in enumerate(functions.items()):
            ours, theirs = context.Pipe()
            stacks = folder / f"stacks{index}"
            environment = environments[index] if environments else {}
            arguments = (function, theirs, [c.pipe for c in children.values()] + [ours], stacks)
            process = context.Process(
                target=_main, args=(*arguments, dict(environment)), name=name, daemon=True
            )
            with warnings.catch_warnings():
                # A child computes on one thread and touches nothing the parent's threads hold.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            children[name] = _Child(process, ours, stacks)
        gc.unfreeze()
        _collect(list(children.values()), time.monotonic() + timeout, is_last)
        ended = [c for c in children.values() if c.done]
        if any(c.failed for c in ended) or not any(is_last(c.value) for c in ended):
            _raise_first(children, timeout)
        for child in children.values():
            child.pipe.send(None)
        for child in children.values():
            child.process.join(GRACE_S)
        return [child.value for child in children.values()]
    finally:
        gc.unfreeze()
        for child in children.values():
            child.process.kill()
        for child in children.values():
            child.process.join()
            child.pipe.close()


def _collect(children: Sequence[_Child], deadline: float, is_last: Callable[[Any], bool]) -> None:
    """Reads reports until all are there, or one is the last and the others had their moments."""
    while running := [c for c in children if not c.done]:
        left = deadline - time.monotonic()
        if left <= 0:
            return
        wait([*(c.pipe for c in running), *(c.process.sentinel for c in running)], left)
        for child in running:
            _read(child)
        if any(c.failed or (c.done and is_last(c.value)) for c in children):
            deadline = min(deadline, time.monotonic() + GRACE_S)


def _read(child: _Child) -> None:
    ended = not child.process.is_alive()  # asked first: what it sent is then there to be read
    try:
        if child.pipe.poll():
            child.raised_at, child.error, child.value = child.pipe.recv()
            child.done = True
            return
    except (EOFError, ConnectionResetError):
        child.process.join(GRACE_S)
        ended = True
    if ended:
        child.done = True
        code = child.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        child.error, child.raised_at = f"{how} before it reported", time.monotonic()


def _raise_first(children: Mapping[str, _Child], timeout: float) -> None:
    failed = sorted(
        ((name, c) for name, c in children.items() if c.failed),
        # A RankError only says that a peer is gone, so whatever else went wrong comes before it.
        key=lambda item: (isinstance(item[1].error, RankError), item[1].raised_at or 0.0),
    )
    for _, child in failed:
        if isinstance(child.error, WhaleError) and not isinstance(child.error, RankError):
            raise child.error
    if failed:
        name, child = failed[0]
        others = ", ".join(n for n, _ in failed[1:])
        raise RankFailed(f"{name} {child.error}" + (f"\nthen also: {others}" if others else ""))
    hung = {name: _stack(child) for name, child in children.items() if not child.done}
    if hung:
        stuck = [name for name, stack in hung.items() if not _waits(stack)] or list(hung)
        lines = [f"{', '.join(stuck)} did not finish in {timeout:g} s"]
        lines += [f"{name} was in {' < '.join(stack[:4])}" for name, stack in hung.items()]
        raise RankFailed("\n".join(lines))


def _stack(child: _Child) -> list[str]:
    """Where a running process is: faulthandler answers even from inside a collective."""
    assert child.process.pid is not None
    try:
        os.kill(child.process.pid, signal.SIGUSR1)
        time.sleep(0.2)
        frames = [line.strip() for line in child.stacks.read_text().splitlines()]
    except OSError:
        frames = []
    return [line for line in frames if line.startswith("File")] or ["an unknown place"]


def _waits(stack: Sequence[str]) -> bool:
    """Whether a process is waiting for another one, by the frame it is in."""
    return any(place in stack[0] for place in _WAITING)


# ---- in the child --------------------------------------------------------------------------------


def _main(
    function: Callable[[], Any],
    pipe: Connection,
    parents: Sequence[Connection],
    stacks: Path,
    environment: Mapping[str, str],
) -> None:
    """Calls the function, reports, waits for the word to leave, and leaves without any cleanup."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends us
    for end in parents:
        end.close()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ.update(environment)
    _on_one_cpu_thread()
    with stacks.open("w") as stacks_file:
        faulthandler.register(signal.SIGUSR1, file=stacks_file, all_threads=False)
        try:
            report: tuple[float | None, WhaleError | str, Any] = (None, "", function())
        except WhaleError as error:
            report = (time.monotonic(), error, None)
        except BaseException as error:
            report = (time.monotonic(), _describe(error), None)
        try:
            pipe.send(report)
            # A rank that left now could break a collective that its peers are still finishing.
            pipe.recv()
        except (OSError, EOFError):
            pass
        sys.stdout.flush()
        sys.stderr.flush()
        # Process groups are not torn down: that is a conversation, and the peers are leaving too.
        os._exit(0)


def _on_one_cpu_thread() -> None:
    """The parent's threads and GPUs are gone after a fork: nothing may reach for them."""
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.cuda.is_available = lambda: False  # optimizers ask, and would start CUDA to be answered


def _describe(error: BaseException) -> str:
    trail = traceback.extract_tb(error.__traceback__)
    where = f"{trail[-1].filename}:{trail[-1].lineno}" if trail else "?"
    text = str(error).strip().splitlines()
    first = text[0] if text else ""
    return f"raised {type(error).__name__}: {first} (at {where})\n" + "".join(
        traceback.format_exception(error)
    )


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
