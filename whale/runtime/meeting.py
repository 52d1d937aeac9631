"""Meetings: before a call that all ranks must make together, do they all make it?

Place in the flow: asked by Step. A rank writes to the job's store what it is about to do, waits for
the word of the others, and compares. No collective is involved, so nothing can hang or be taken for
another collective; a rank that does something else is seen by its heartbeat and named. Steps on
batches like the one before do not meet: the hot path costs nothing.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Mapping

import torch.distributed as dist

from whale.errors import RankError
from whale.runtime.heartbeat import Beat, Heartbeat, differing, own_store, verb

_LOOK_S = 0.5
"""How long to wait for words before looking at heartbeats."""
_PAUSE_S = 0.02
"""The longest pause between two looks for words."""
_SAY_AFTER_S = 5.0
"""A rank that waits this long for one that is outside Whale says so."""
_HINT = (
    "every rank must make the same calls of the step in the same order: take `if rank == 0` away "
    "from around them, and give all ranks the same number of batches"
)

Details = Mapping[str, str]
Differ = Callable[[list[Details]], RankError | None]


class ElsewhereError(RankError):
    """Other ranks are in another call, where they wait for this one."""


class Meetings:
    """The meetings of one Step on one rank."""

    def __init__(self, beat: Heartbeat) -> None:
        self.beat = beat
        self.store = dist.PrefixStore(f"whale/meeting/{beat.serial}", own_store())
        self._last: str | None = None

    def meet(self, details: Details, differ: Differ) -> None:
        """Waits until every rank has come to this call with its details; `differ` judges them.

        Raises:
            RankError: A rank makes another call, has ended or failed, or `differ` says so.
        """
        beat = self.beat
        keys = [f"{beat.call}/{rank}" for rank in range(beat.num_ranks)]
        mine = keys[beat.rank]
        self.store.set(mine, json.dumps({"doing": beat.doing, **details}))
        self._wait(keys)
        words = [json.loads(self.store.get(key)) for key in keys]
        if self._last is not None:
            # All are here, so all have read what was said before.
            self.store.delete_key(self._last)
        self._last = mine
        calls = [word.pop("doing") for word in words]
        if len(set(calls)) > 1:
            others = [(r, c) for r, c in enumerate(calls) if r != beat.rank]
            raise self._mismatch(others)
        error = differ(words)
        if error is not None:
            raise error
        beat.state = "in"

    def _mismatch(self, others: list[tuple[int, str]]) -> RankError:
        beat = self.beat
        said = differing(beat.rank, beat.doing, others)
        return ElsewhereError(f"{said} (call {beat.call} of the step)", hint=_HINT)

    def _wait(self, keys: list[str]) -> None:
        began, looked, told = time.monotonic(), time.monotonic(), False
        # Asked again and again: a wait of the store's own warns whenever it runs out of time.
        pause = 0.0002
        while not self.store.check(keys):
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_S)
            waited = time.monotonic() - began
            if time.monotonic() - looked < _LOOK_S:
                continue
            looked = time.monotonic()
            missing = [r for r, key in enumerate(keys) if not self.store.check([key])]
            beats = [b for b in self.beat.beats() if b.rank in missing]
            self._look(beats)
            if waited > self.beat.timeout:
                raise RankError(
                    f"{self._waiting(beats)} (timeout {self.beat.timeout:g} s)", hint=_HINT
                )
            if waited > _SAY_AFTER_S and not told and any(b.state == "out" for b in beats):
                told = True
                print(f"whale: {self._waiting(beats)}", file=sys.stderr, flush=True)

    def _look(self, beats: list[Beat]) -> None:
        """Raises if a rank that has not come will not come."""
        call = self.beat.call
        elsewhere = [b for b in beats if b.state == "in" and b.call >= call]
        if elsewhere:
            raise self._elsewhere(elsewhere)
        lost = (b for b in beats if (b.error and b.call >= call) or b.state == "ended" or b.dead)
        if any(lost):
            raise self.beat.explain(None)

    def _elsewhere(self, beats: list[Beat]) -> RankError:
        """Ranks that make this call without a word: another one, or on a batch like their last."""
        others = [(b.rank, b.doing) for b in beats]
        if all(b.doing == self.beat.doing for b in beats):
            ranks = ", ".join(str(b.rank) for b in beats)
            return ElsewhereError(
                f"rank {self.beat.rank} has a batch of another kind than its last, or modules in "
                f"another mode, rank {ranks} has not (call {self.beat.call} of the step, "
                f"{verb(self.beat.doing)})",
                hint=SAME_BATCH,
            )
        return self._mismatch(others)

    def _waiting(self, beats: list[Beat]) -> str:
        where = "; ".join(
            f"rank {b.rank} is outside Whale for {b.idle:.0f} s, its last call was {b.doing}"
            if b.state == "out"
            else f"rank {b.rank} is still in call {b.call} ({b.doing}) at {b.name}"
            for b in beats
        )
        return f"rank {self.beat.rank} {verb(self.beat.doing)} and waits: {where}"


def wake_others() -> None:
    """Closes this rank's connections, at which ranks that wait for it stop waiting.

    Nothing more can be done together once ranks are in different calls. With NCCL the heartbeats of
    the others end them.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()
        gc.collect()


SAME_BATCH = (
    "every rank passes the same global batch, of which Whale gives each its rows: no "
    "DistributedSampler and no loader of its own per rank; `wh.shard(loader)` reads only the rows "
    "a rank needs; code that writes to its batch writes to the rows of its own rank: clone what it "
    "changes, or pass a fresh batch every step"
)
