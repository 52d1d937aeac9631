"""`run_ranks`: calls a function in n processes, as torchrun would, and returns what they return.

Place in the flow: under every test that needs a process group. Processes are forked from a server
that has torch loaded already; the parent holds the rendezvous store on a port the system chose, so
that any number of runs can go on side by side.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import io
import multiprocessing
import operator
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast, overload

import torch
import torch.distributed as dist

# torch._dynamo: the first optimizer step imports it, which takes seconds in each rank, as do the
# models of transformers. pytest: a child runs the parent's main script, which may be pytest's.
PRELOAD = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "pytest",
    "whale",
    "whale.parallel",
    "whale.engine.recorder",
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("bert", "gpt2", "mixtral", "qwen2_moe")
    ),
    "tests.frozen",
]

START_S = 120.0
"""How long processes may take to start: the first run waits for the server to load its modules."""

PATIENCE = 3.0
"""Times the timeouts that tests name, which are for two idle cores; a hang is one later too."""

GRACE_S = 0.5
"""How long the other ranks may still report after the first failure, before they are killed."""

EXPECTED_GRACE_S = 5.0
"""The same when a failure is expected: time for every rank to notice it."""


class RankFailure(AssertionError):  # noqa: N818 - it is a failed test, not an error of the harness
    """Ranks that raised, died or hung. Its text leads with the rank that failed first.

    Attributes:
        tracebacks: text of each rank that raised, the first one first.
        exit_codes: of each rank that ended without a report (a negative one is a signal).
        hung: stacks of each rank that was still running at the timeout.
    """

    def __init__(
        self, n: int, tracebacks: dict[int, str], exit_codes: dict[int, int], hung: dict[int, str]
    ) -> None:
        self.tracebacks = tracebacks
        self.exit_codes = exit_codes
        self.hung = hung
        lines = [f"rank {r} of {n} died silently, exit code {c}" for r, c in exit_codes.items()]
        lines += [f"rank {r} of {n} raised {_last_line(t)}" for r, t in tracebacks.items()]
        lines += [f"rank {r} of {n} hung" for r in hung]
        if tracebacks:
            rank, text = next(iter(tracebacks.items()))
            lines += ["", f"rank {rank}, first to raise:", text.rstrip()]
        for rank, stacks in hung.items():
            lines += ["", f"rank {rank}, hung at:", stacks.rstrip()]
        super().__init__("\n".join(lines))


@dataclass(slots=True)
class _Rank:
    """The parent's end of one process."""

    process: BaseProcess
    pipe: Connection
    stacks: Path
    report: bytes | None = None
    raised_at: float | None = None
    traceback: str | None = None
    died: bool = False

    @property
    def failed(self) -> bool:
        return self.died or self.traceback is not None

    @property
    def running(self) -> bool:
        return self.report is None and not self.failed


@overload
def run_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = ...,
    expect_failure: Literal[False] = ...,
) -> list[Any]: ...


@overload
def run_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = ...,
    expect_failure: Literal[True],
) -> RankFailure: ...


def run_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    expect_failure: bool = False,
) -> list[Any] | RankFailure:
    """Calls `fn(*args)` in `n` processes with torchrun's environment and one thread each.

    `fn` joins the process group by itself; the group is destroyed after it. It lives at the top of
    a module, which each child loads by name or, where that finds nothing or another file, by path.
    Arguments and return values may hold tensors.

    Returns:
        The return values by rank; with `expect_failure`, the failure.

    Raises:
        RankFailure: a rank raised, ended without a word or was not done after `timeout` seconds; or
            `expect_failure` was set and none did.

    `timeout` is for two idle cores: see `PATIENCE`.
    """
    target = _describe(fn)
    payload = _dump(args)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            for rank in range(n):
                ours, theirs = context.Pipe()
                stacks = Path(folder, str(rank))
                arguments = (_environment(rank, n, store.port), theirs, stacks, target, payload)
                process = context.Process(target=_main, args=arguments, name=f"rank-{rank}")
                process.start()
                theirs.close()
                ranks.append(_Rank(process, ours, stacks))
            _await_start(ranks)
            _collect(ranks, PATIENCE * timeout, EXPECTED_GRACE_S if expect_failure else GRACE_S)
            failure = _failure(ranks)
            if failure is None:
                for r in ranks:
                    r.pipe.send(None)
                for r in ranks:
                    r.process.join(GRACE_S + timeout / 10)
        finally:
            _kill(ranks)
    if failure is None and not expect_failure:
        return [_load(r.report) for r in ranks if r.report is not None]
    if failure is None:
        raise AssertionError(f"all {n} ranks succeeded where a failure was expected")
    if expect_failure:
        return failure
    raise failure


def _environment(rank: int, n: int, port: int) -> dict[str, str]:
    """This process's environment, as torchrun would add to it."""
    return {
        # A child would have that of the moment at which the fork server began.
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The parent holds the store, as torchrun's agent does: every rank connects as a client.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def _await_start(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        with contextlib.suppress(EOFError, ConnectionResetError):
            if rank.pipe.poll(START_S):
                rank.pipe.recv()


def _collect(ranks: Sequence[_Rank], timeout: float, grace: float) -> None:
    """Reads reports until every rank has one, or has died, or time is up."""
    deadline = time.monotonic() + timeout
    failed = False
    while running := [r for r in ranks if r.running]:
        left = deadline - time.monotonic()
        if left <= 0:
            return
        wait([r.pipe for r in running] + [r.process.sentinel for r in running], left)
        for rank in running:
            _read(rank)
        if not failed and any(r.failed for r in ranks):
            failed = True
            deadline = min(deadline, time.monotonic() + grace)


def _read(rank: _Rank) -> None:
    """Takes the report of a rank that has sent one; one that ended without is dead."""
    ended = not rank.process.is_alive()  # asked first: what it sent is then there to be read
    try:
        if rank.pipe.poll():
            rank.raised_at, rank.traceback, rank.report = rank.pipe.recv()
            return
    except (EOFError, ConnectionResetError):
        rank.process.join()
        ended = True
    rank.died = ended


def _failure(ranks: Sequence[_Rank]) -> RankFailure | None:
    """The ranks that raised, by time, those that died, else those that are still running."""
    raised = sorted((r.raised_at, i) for i, r in enumerate(ranks) if r.raised_at is not None)
    tracebacks = {i: ranks[i].traceback or "" for _, i in raised}
    exit_codes = {i: r.process.exitcode or 0 for i, r in enumerate(ranks) if r.died}
    if tracebacks or exit_codes:
        # The others were given moments only; that they wait for the failed rank is no news.
        return RankFailure(len(ranks), tracebacks, exit_codes, {})
    hung = {i: _stacks(r) for i, r in enumerate(ranks) if r.running}
    return RankFailure(len(ranks), {}, {}, hung) if hung else None


def _stacks(rank: _Rank) -> str:
    """Asks a running rank where it is; faulthandler answers even from inside a collective."""
    assert rank.process.pid is not None
    os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(0.1)
    return rank.stacks.read_text()


def _kill(ranks: Sequence[_Rank]) -> None:
    """Ends the ranks that still run, with their own children."""
    for rank in ranks:
        if rank.process.is_alive():
            assert rank.process.pid is not None
            try:
                os.killpg(rank.process.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has not made its group yet
                rank.process.kill()
    for rank in ranks:
        rank.process.join()
        rank.pipe.close()


def _main(
    environment: dict[str, str],
    pipe: Connection,
    stacks: Path,
    target: tuple[str, str, str],
    payload: bytes,
) -> None:
    """One rank: calls the function, reports, and waits for the word to leave."""
    os.setsid()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    with stacks.open("w") as stacks_file:
        faulthandler.register(signal.SIGUSR1, file=stacks_file, all_threads=True)
        pipe.send(None)
        try:
            report = _dump(_resolve(target)(*_load(payload)))
        except BaseException:
            pipe.send((time.monotonic(), traceback.format_exc(), None))
        else:
            pipe.send((None, None, report))
            # A rank that left now could break a collective that its peers are still finishing.
            pipe.recv()
        faulthandler.unregister(signal.SIGUSR1)
    if dist.is_initialized():
        dist.destroy_process_group()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)  # what it started itself


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _describe(fn: Callable[..., Any]) -> tuple[str, str, str]:
    """Module name, file and qualified name: pickle has the names only, which is not enough where
    pytest imports a test module by its path.
    """
    if "<" in fn.__qualname__:
        raise ValueError(
            f"{fn.__qualname__} must be at the top of its module, for ranks to find it"
        )
    file = sys.modules[fn.__module__].__file__
    assert file is not None
    return fn.__module__, str(Path(file).resolve()), fn.__qualname__


def _resolve(target: tuple[str, str, str]) -> Callable[..., Any]:
    name, file, qualname = target
    return cast(Callable[..., Any], operator.attrgetter(qualname)(_load_module(name, file)))


def _load_module(name: str, file: str) -> ModuleType:
    """The module of this name if it is this file, else the file under this name."""
    if name == "__main__":
        name = "__rank_main__"
    else:
        try:
            module = importlib.import_module(name)
            if module.__file__ and Path(module.__file__).resolve() == Path(file):
                return module
        except ModuleNotFoundError as error:
            if not name.startswith(error.name or ""):
                raise
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _dump(value: Any) -> bytes:
    """Tensors by value: `multiprocessing` alone passes handles, which die with the rank."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _last_line(text: str) -> str:
    return text.rstrip().rsplit("\n", 1)[-1]
