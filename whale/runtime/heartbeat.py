"""Heartbeats: how far each rank has come, so that the others can name a dead or hung one.

Place in the flow: started by `wh.parallelize`, told of every call by the Step and of every action
by the executor. A thread writes this rank's position to the job's store once a second and reads
nothing; the others' positions are read only when communication fails, or by a rank that waits for
them in a meeting (`runtime.meeting`). With NCCL, whose waiting cannot be interrupted, the thread
itself ends a rank whose peer is gone.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from whale.errors import RankError, WhaleError
from whale.runtime.compat import set_world_timeout

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
    call: int
    """Number of the call of the Step it is in, or was in last; all ranks make the same calls."""
    doing: str
    """That call."""
    state: str
    """`in`: inside the call; `meeting`: about to compare it with the others; `out`; `ended`."""
    idle: float
    """Seconds since the last call began or ended."""

    @property
    def dead(self) -> bool:
        """Whether it has not written for many periods."""
        return self.age > _DEAD_AFTER


class Heartbeat:
    """One rank's pulse and its view of the others."""

    def __init__(
        self, store: dist.Store, rank: int, num_ranks: int, timeout: float, serial: int = 0
    ) -> None:
        self.store = dist.PrefixStore(f"whale/heartbeat/{serial}", store)
        self.rank, self.num_ranks, self.timeout, self.serial = rank, num_ranks, timeout, serial
        self.step, self.action, self.name = 0, 0, "starting"
        self.since = time.time()
        self.call, self.doing, self.state, self.moved = 0, "parallelize", "out", time.time()
        self.error: str | None = None
        self.fatal = False
        self.host: dist.Store | None = None
        self._seen: dict[int, tuple[float, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="whale-heartbeat", daemon=True)
        self._write()
        self._thread.start()
        atexit.register(self.close)

    def enter(self, doing: str, *, meets: bool) -> None:
        """This rank begins a call of its Step; with `meets` the ranks compare it first."""
        self.call, self.doing, self.error = self.call + 1, doing, None
        self.state, self.moved = "meeting" if meets else "in", time.time()
        self.action, self.name, self.since = 0, doing, self.moved

    def leave(self) -> None:
        """The call is over."""
        self.state, self.moved = "out", time.time()

    def at(self, step: int, action: int, name: str) -> None:
        """This rank begins an action."""
        self.step, self.action, self.name, self.since = step, action, name, time.time()

    def _write(self) -> None:
        now = time.time()
        beat = [now, self.step, self.action, self.name, now - self.since, self.error]
        beat += [self.call, self.doing, self.state, now - self.moved]
        self.store.set(str(self.rank), json.dumps(beat))

    def fail(self, error: BaseException) -> None:
        """This rank is about to raise: the others are told why, until it begins another call."""
        self.error = f"{type(error).__name__}: {error}"[:500]
        try:
            self._write()
        except Exception:  # noqa: BLE001 - the store may be gone, and there is already an error to raise
            return

    def _beat(self) -> None:
        while not self._stop.wait(_PERIOD):
            try:
                self._write()
                waits = self.state == "in" and time.time() - self.since > _DEAD_AFTER
                if self.fatal and waits:
                    self._end_if_a_peer_is_gone()
            except Exception:  # noqa: BLE001 - the store's host is gone: the main thread finds out by itself
                return

    def _end_if_a_peer_is_gone(self) -> None:
        gone = [
            b
            for b in self.beats()
            if b.dead or b.state == "ended" or (b.error and b.call >= self.call)
        ]
        stuck = time.time() - self.since > self.timeout
        if gone or stuck:
            print(f"whale: {self.explain(None)}", file=sys.stderr, flush=True)
            os._exit(1)

    def beats(self) -> list[Beat]:
        """The last position of every rank that ever wrote one.

        Hosts' clocks differ, so a rank's age is how long this one has seen nothing new of it.
        """
        now = time.monotonic()
        found = []
        for rank in range(self.num_ranks):
            if not self.store.check([str(rank)]):
                continue
            written, *rest = json.loads(self.store.get(str(rank)))
            if self._seen.get(rank, (None, 0.0))[0] != written:
                self._seen[rank] = (written, now)
            found.append(Beat(rank, now - self._seen[rank][1], *rest))
        return found

    def explain(self, error: BaseException | None) -> RankError:
        """The error to raise when communication failed: it names the rank that is to blame."""
        # A rank that just failed needs a moment to say so; a dead one is known by its silence.
        try:
            if error is not None:
                self.beats()
                time.sleep(2.5 * _PERIOD)
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
        ended = [b for b in others if b.state == "ended" and not b.error]
        silent = [b for b in others if b.age > 2 * _PERIOD and not b.error]
        other = [b for b in others if b.state == "in" and b.call == self.call]
        other = [b for b in other if b.doing != self.doing]
        if failed:
            first = min(failed, key=lambda b: (b.step, b.action))
            what = f"rank {first.rank} failed in step {first.step} at {first.name}: {first.error}"
        elif ended:
            first = ended[0]
            what = f"rank {first.rank} has ended; its last call was {first.doing}"
        elif other:
            what = differing(self.rank, self.doing, [(b.rank, b.doing) for b in other])
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
        """Stops the thread; the others know that this rank takes part in nothing any more."""
        if self._stop.is_set():
            return
        atexit.unregister(self.close)
        self._stop.set()
        self._thread.join(timeout=5.0)
        self.state = "ended"
        try:
            self._write()
        except Exception:  # noqa: BLE001 - at the end of a job its store may be gone
            return


_VERBS = {
    "step": "steps", "evaluate": "evaluates", "save": "saves", "load": "loads",
    "report": "reports",
}  # fmt: skip


def verb(doing: str) -> str:
    """`save` -> "saves"; `state_dict` -> "calls state_dict()"."""
    return _VERBS.get(doing, f"calls {doing}()")


def differing(rank: int, doing: str, others: list[tuple[int, str]]) -> str:
    """Such as "rank 0 saves, rank 1 steps"."""
    return ", ".join(f"rank {r} {verb(what)}" for r, what in sorted([(rank, doing), *others]))


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


Build = TypeVar("Build", bound=Callable[..., Any])


def says_who_is_lost(build: Build) -> Build:
    """A function that all ranks call together before they have heartbeats.

    What breaks their connections there is no fault of the model, and may be older than the call.
    """

    @functools.wraps(build)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return build(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error, WhaleError) or not is_communication_error(error):
                raise
            raise RankError(
                f"rank {dist.get_rank() if dist.is_initialized() else 0} lost the others while "
                f"they build a step: {error}",
                hint="the rank that failed says why in its own output; if a step failed before on "
                "some of the ranks, their connections are closed since then: start the job again",
            ) from error

    return cast(Build, called)


_serial = itertools.count()
"""Steps are built in the same order on all ranks, so the number of one is the same on all."""


def own_store() -> dist.Store:
    """A connection of one's own to the job's store: nobody waits for another's wait."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store  # type: ignore[no-any-return]


def start(rank: int, num_ranks: int, timeout: timedelta) -> Heartbeat | None:
    """The heartbeat of this job, or None for a single process."""
    if num_ranks == 1 or not dist.is_initialized():
        return None
    # The default group carries sums, and messages where they have no group of their own. Only now:
    # ranks that build wait for each other as long as `wh.init` said.
    set_world_timeout(timeout)
    beat = Heartbeat(own_store(), rank, num_ranks, timeout.total_seconds(), serial=next(_serial))
    beat.fatal = dist.get_backend() == "nccl"
    # Where a rank hosts the store, it must outlive the process group that it came with.
    beat.host = dist.distributed_c10d._get_default_store()
    return beat
