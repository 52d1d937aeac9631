"""`run_ranks` itself: values come back, and each way to fail is named."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import RankFailure, run_ranks


@dataclass(frozen=True)
class Pair:
    """A type of this module, to cross both ways."""

    number: int
    tensor: Tensor


def add_over_ranks(pair: Pair) -> Pair:
    dist.init_process_group("gloo")
    total = pair.tensor * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return Pair(pair.number + dist.get_rank(), total)


def environment() -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "SET_BY_THE_TEST")
    return {k: os.environ[k] for k in names} | {"threads": str(torch.get_num_threads())}


def train_a_little() -> Tensor:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.full((2, 3), float(dist.get_rank()))).sum().backward()
    optimizer.step()
    return model.module.weight


def fail_on(rank: int) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == rank:
        raise KeyError("the cause")
    dist.barrier()


def fail_everywhere() -> None:
    raise KeyError(int(os.environ["RANK"]))


def die_on(rank: int) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def hang_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        fall_asleep()


def fall_asleep() -> None:
    time.sleep(600)


def leave_a_child(folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(folder, os.environ["RANK"]).write_text(str(child.pid))
    if os.environ["RANK"] == "0":
        time.sleep(0.2)
        raise KeyError("the cause")
    time.sleep(600)


def return_a_function() -> object:
    return lambda: None


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_four_ranks_add_up() -> None:
    pairs = run_ranks(4, add_over_ranks, Pair(10, torch.tensor([1.0, 2.0])))
    assert [p.number for p in pairs] == [10, 11, 12, 13]
    for pair in pairs:
        assert isinstance(pair, Pair)
        torch.testing.assert_close(pair.tensor, torch.tensor([10.0, 20.0]))


def test_environment_is_that_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BY_THE_TEST", "yes")
    for rank, found in enumerate(run_ranks(2, environment)):
        assert found == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "SET_BY_THE_TEST": "yes",
            "threads": "1",
        }


def test_parameters_with_gradients_come_back() -> None:
    first, second = run_ranks(2, train_a_little)
    assert first.requires_grad
    torch.testing.assert_close(first, second)


def test_the_failing_rank_is_shown() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(4, fail_on, 2)
    assert time.monotonic() - start < 30
    text = str(caught.value)
    assert "rank 2, first to raise:" in text
    assert "in fail_on" in text
    assert "KeyError: 'the cause'" in text
    assert next(iter(caught.value.tracebacks)) == 2


def test_an_expected_failure_holds_every_rank() -> None:
    failure = run_ranks(3, fail_everywhere, expect_failure=True)
    assert sorted(failure.tracebacks) == [0, 1, 2]
    with pytest.raises(AssertionError, match="all 1 ranks succeeded"):
        run_ranks(1, train_a_little, expect_failure=True)


def test_a_dying_rank_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankFailure, match="^rank 1 of 4 died silently, exit code 3") as caught:
        run_ranks(4, die_on, 1)
    assert caught.value.exit_codes == {1: 3}


def test_a_hung_rank_is_named_with_its_stack() -> None:
    with pytest.raises(RankFailure, match="rank 1 of 3 hung") as caught:
        run_ranks(3, hang_on, 1, timeout=2.0)
    assert list(caught.value.hung) == [1]
    assert "in fall_asleep" in caught.value.hung[1]


def test_a_value_that_cannot_be_sent_is_a_failure() -> None:
    with pytest.raises(RankFailure, match="pickle"):
        run_ranks(1, return_a_function)


def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    """Rank 0 fails and leaves; rank 1 is killed."""
    with pytest.raises(RankFailure, match="rank 0 of 2 raised KeyError"):
        run_ranks(2, leave_a_child, tmp_path)
    pids = [int(Path(tmp_path, str(rank)).read_text()) for rank in range(2)]
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.01)


def test_a_local_function_is_refused() -> None:
    with pytest.raises(ValueError, match="top of its module"):
        run_ranks(1, lambda: None)
