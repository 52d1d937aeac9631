"""`whale calibrate`: a profile in a file or on standard output, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from whale.cli.calibrate import DEFAULT_FILE
from whale.cli.main import main
from whale.ir.profile import Profile


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    # As in a rank; threads on a busy machine wait for each other.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_preset_to_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "gpt-tiny", "--json", "f.json", "-n", "1", "--rows", "2,1"]) == 0
    profile = Profile.read("f.json")
    assert {len(t.forward.points) for t in profile.device(0).layers.values()} == {2}
    out = capsys.readouterr().out
    assert "rank 0: CPU" in out
    assert "matmul" in out
    assert "written to f.json" in out


def test_the_machine_alone_to_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--json", "-", "-n", "1"]) == 0
    assert not json.loads(capfd.readouterr().out)["devices"][0]["layers"]


def test_a_file_of_ones_own_and_the_default_name(capsys: pytest.CaptureFixture[str]) -> None:
    Path("net.py").write_text(
        "import torch\n"
        "def build():\n"
        "    print('hello')\n"
        "    x = torch.randn(3, 4)\n"
        "    return torch.nn.Sequential(torch.nn.Linear(4, 4)), (x, x), torch.nn.MSELoss()\n"
    )
    assert main(["calibrate", "net.py:build", "-n", "1"]) == 0
    (time,) = Profile.read(DEFAULT_FILE).device(0).layers.values()
    assert [x for x, _ in time.forward.points] == [1, 3]
    shown = capsys.readouterr()
    assert "hello" in shown.err
    assert f"written to {DEFAULT_FILE}" in shown.out


@pytest.mark.full
def test_two_ranks(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", "")
    # What the launcher would set, so that it is undone.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert main(["calibrate", "gpt-nano", "--json", "-", "-n", "2", "--rows", "1"]) == 0
    profile = Profile.from_dict(json.loads(capfd.readouterr().out))
    assert len(profile.devices) == 2
    assert ("all_reduce", 2, 1) in profile.links


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["gpt-tin"], "MODEL 'gpt-tin'"),
        (["gpt-tiny", "--rows", "1,x"], "--rows '1,x'; allowed: numbers above 0"),
        (["gpt-tiny", "--batch", "0"], "--batch 0; allowed: 1 or more"),
        (["gpt-tiny", "--json", "no/such/f.json"], "not a folder"),
        (["net.py:build", "--seq", "8"], "--seq 8 with 'net.py:build'"),
        (["-n", "0"], "-n 0; allowed: 1 or more"),
    ],
)
def test_what_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *flags]) == 2
    assert message in capsys.readouterr().err
    assert not Path(DEFAULT_FILE).exists()
