"""Heartbeats: how far each rank has come, so that the others can name a dead or hung one.

Place in the flow: started by `wh.parallelize`, told of every action by the executor. A thread
writes this rank's position to the job's store once a second and reads nothing; only when
communication fails are the others' positions read. With NCCL, whose waiting cannot be interrupted,
the thread itself ends a rank whose peer is gone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from whale.errors import RankError

_PERIOD = 1.0
# A process that has not written for this long is taken for dead: many periods, since a loaded
# machine starves threads.
_DEAD_AFTER = 10.0


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank last said of itself."""

    rank: int
    age: float
    step: int
    action: int
    name: str
    since: float
    error: str | None


class Heartbeat:
    """One rank's pulse and its view of the others."""

    def __init__(self, store: dist.Store, rank: int, num_ranks: int, timeout: float) -> None:
        self.store = dist.PrefixStore("whale/heartbeat", store)
        self.rank, self.num_ranks, self.timeout = rank, num_ranks, timeout
        self.step, self.action, self.name = 0, 0, "starting"
        self.since = time.time()
        self.running = False
        self.fatal = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="whale-heartbeat", daemon=True)
        self._write(None)
        self._thread.start()

    def at(self, step: int, action: int, name: str) -> None:
        """This rank begins an action."""
        self.step, self.action, self.name, self.since = step, action, name, time.time()

    def _write(self, error: str | None) -> None:
        now = time.time()
        beat = [now, self.step, self.action, self.name, now - self.since, error]
        self.store.set(str(self.rank), json.dumps(beat))

    def fail(self, error: BaseException) -> None:
        """This rank is about to raise: the others will be told why."""
        try:
            self._write(f"{type(error).__name__}: {error}"[:500])
        except Exception:  # noqa: BLE001 - the store may be gone, and there is already an error to raise
            return
        finally:
            self._stop.set()

    def _beat(self) -> None:
        while not self._stop.wait(_PERIOD):
            try:
                self._write(None)
                if self.fatal and self.running and time.time() - self.since > _DEAD_AFTER:
                    self._end_if_a_peer_is_gone()
            except Exception:  # noqa: BLE001 - the store's host is gone: the main thread finds out by itself
                return

    def _end_if_a_peer_is_gone(self) -> None:
        gone = [b for b in self.beats() if b.age > _DEAD_AFTER or b.error]
        stuck = time.time() - self.since > self.timeout
        if gone or stuck:
            print(f"whale: {self.explain(None)}", file=sys.stderr, flush=True)
            os._exit(1)

    def beats(self) -> list[Beat]:
        """The last position of every rank that ever wrote one."""
        now = time.time()
        found = []
        for rank in range(self.num_ranks):
            if not self.store.check([str(rank)]):
                continue
            written, step, action, name, since, error = json.loads(self.store.get(str(rank)))
            found.append(Beat(rank, now - written, step, action, name, since, error))
        return found

    def explain(self, error: BaseException | None) -> RankError:
        """The error to raise when communication failed: it names the rank that is to blame."""
        # A rank that just failed needs a moment to say so; a dead one is known by its silence.
        time.sleep(0.0 if error is None else 2.5 * _PERIOD)
        try:
            beats = self.beats()
        except Exception as gone:  # noqa: BLE001 - whatever the store raises, it is not there
            return RankError(
                f"rank {self.rank}: communication failed and the job's store is gone ({gone}): "
                "the process that "
                "started the job, or rank 0, has ended",
                hint="look at the end of its log",
            )
        others = [b for b in beats if b.rank != self.rank]
        failed = [b for b in others if b.error]
        silent = [b for b in others if b.age > 2 * _PERIOD and not b.error]
        if failed:
            first = min(failed, key=lambda b: (b.step, b.action))
            what = f"rank {first.rank} failed in step {first.step} at {first.name}: {first.error}"
        elif silent:
            first = max(silent, key=lambda b: b.age)
            what = (
                f"rank {first.rank} died (silent for {first.age:.0f} s), last seen in step "
                f"{first.step} at {first.name}"
            )
        elif others:
            first = min([*others], key=lambda b: (b.step, b.action))
            what = (
                f"rank {first.rank} hangs in step {first.step} at {first.name} for "
                f"{first.since:.0f} s "
                f"(timeout {self.timeout:g} s)"
            )
        else:
            what = "communication failed"
        text = str(error).strip().splitlines()
        reason = f" [{text[0][:200]}]" if text else ""
        return RankError(
            f"rank {self.rank} in step {self.step} at {self.name}: {what}{reason}",
            hint="look at that rank's own log first; Config timeout_seconds sets how long ranks "
            "wait",
        )

    def close(self) -> None:
        """Stops the thread."""
        self._stop.set()
        self._thread.join(timeout=5.0)


_SIGNS = (
    "gloo",
    "nccl",
    "connection closed",
    "connection reset",
    "timed out",
    "timeout",
    "pair closure",
    "broken pipe",
    "socket",
)


def is_communication_error(error: BaseException) -> bool:
    """Whether an exception comes from the process group rather than from the model."""
    if isinstance(error, (dist.DistError, ConnectionError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)


def start(rank: int, num_ranks: int, timeout: timedelta) -> Heartbeat | None:
    """The heartbeat of this job, or None for a single process."""
    if num_ranks == 1 or not dist.is_initialized():
        return None
    store: Any = dist.distributed_c10d._get_default_store()
    beat = Heartbeat(
        store.clone() if hasattr(store, "clone") else store,
        rank,
        num_ranks,
        timeout.total_seconds(),
    )
    beat.fatal = dist.get_backend() == "nccl"
    return beat
