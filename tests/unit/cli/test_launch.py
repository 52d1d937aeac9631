"""`whale launch`: what is refused before it starts, and how real ranks end."""

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from whale.cli import launch
from whale.cli.main import main
from whale.errors import ClusterError, ConfigError, RankError

ROOT = Path(__file__).resolve().parents[3]
OUTSIDE = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("print('ran')")
    return str(path)


def check(*flags, environ=None, num_cuda_devices=0):
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    launch.check(parser.parse_args(flags), environ or {}, num_cuda_devices=num_cuda_devices)


def test_a_good_launch_passes(script):
    check("-n", "2", script, "--lr", "1", "-n", "0")
    check("-n", "2", "--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "a:1", script)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-n", "0"], "-n 0; allowed: 1 or more"),
        (["-n", "1", "--nnodes", "0"], "--nnodes 0; allowed: 1 or more"),
        (["-n", "1", "--max-restarts", "-1"], "--max-restarts -1; allowed: 0 or more"),
        (["-n", "1", "--node-rank", "1"], "--node-rank 1 with --nnodes 1; allowed: 0 to 0"),
        (["-n", "1", "--nnodes", "2"], "--nnodes 2 without --rdzv-endpoint"),
        (["-n", "1", "--rdzv-endpoint", "host"], "'host'; allowed: HOST:PORT"),
        (["-n", "1", "--rdzv-endpoint", "host:x"], "'host:x'; allowed: HOST:PORT"),
        (["-n", "1", "--rdzv-endpoint", "host:65536"], "'host:65536'; allowed: HOST:PORT"),
    ],
)
def test_flags_that_cannot_work(script, flags, message):
    with pytest.raises(ConfigError, match=message):
        check(*flags, script)


def test_a_missing_script(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.py' is not a file"):
        check("-n", "1", str(tmp_path / "nowhere.py"))
    with pytest.raises(ConfigError, match="is not a file"):
        check("-n", "1", str(tmp_path))


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE"])
def test_a_nested_launch(script, variable):
    with pytest.raises(RankError, match=f"{variable}=1 already set"):
        check("-n", "1", script, environ={variable: "1"})


def test_a_port_in_use_is_named(script):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = ["-n", "1", "--rdzv-endpoint", f"127.0.0.1:{port}", script]
        with pytest.raises(ClusterError, match=f"port {port} .* is in use"):
            check(*flags)
        # The port is node 0's to open: another node finds it in use, rightly.
        check("--nnodes", "2", "--node-rank", "1", *flags)
    check(*flags)


def test_each_rank_needs_its_own_cuda_device(script):
    with pytest.raises(ClusterError, match=r"-n 4 on a node with 2 CUDA device\(s\)"):
        check("-n", "4", script, num_cuda_devices=2)
    check("-n", "2", script, num_cuda_devices=2)
    check("-n", "4", script, num_cuda_devices=0)
    check("-n", "4", script, num_cuda_devices=2, environ={"WHALE_ALLOW_SHARED_DEVICE": "1"})


def test_main_turns_an_error_into_one_message(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["launch", "-n", "1", "nowhere.py"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("whale: error: script 'nowhere.py' is not a file\n  hint: ")
    assert main(["lunch", "-n", "1"]) == 2
    assert "did you mean `whale launch`?" in capsys.readouterr().err


def test_help_needs_no_torch():
    code = (
        "import sys\nfrom whale.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "launch" in done.stdout


def environment(**extra):
    clean = {name: value for name, value in os.environ.items() if name not in OUTSIDE}
    return {**clean, "PYTHONPATH": str(ROOT), **extra}


def start(script, *flags, **extra):
    return subprocess.Popen(
        [sys.executable, "-m", "whale.cli.main", "launch", *flags, str(script), "--flag", "x"],
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_ranks_run_and_meet(tmp_path):
    script = tmp_path / "meet.py"
    script.write_text(
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor([dist.get_rank() + 1])\n"
        "dist.all_reduce(total)\n"
        "e = os.environ\n"
        "print(e['RANK'], int(total), e['OMP_NUM_THREADS'], e['MASTER_ADDR'], *sys.argv[1:])\n"
        "dist.destroy_process_group()\n"
    )
    done = start(script, "-n", "2", "--log-dir", str(tmp_path / "logs"))
    out, err = done.communicate(timeout=100)
    assert done.returncode == 0, err
    for rank in (0, 1):
        assert f"{rank} 3 1 127.0.0.1 --flag x\n" in out
        (log,) = (tmp_path / "logs").glob(f"*/attempt_0/{rank}/stdout.log")
        assert log.read_text() == f"{rank} 3 1 127.0.0.1 --flag x\n"


def test_the_users_environment_wins(tmp_path):
    script = tmp_path / "environment.py"
    script.write_text("import os\nprint(os.environ['OMP_NUM_THREADS'])\n")
    out, err = start(script, "-n", "1", OMP_NUM_THREADS="5").communicate(timeout=100)
    assert out == "5\n", err


def test_a_failed_rank_is_named_and_its_status_passed_on(tmp_path):
    script = tmp_path / "fail.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "if os.environ['RANK'] == '1':\n    sys.exit(3)\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "time.sleep(90)\n"
    )
    done = start(script, "-n", "2")
    _, err = done.communicate(timeout=80)
    assert done.returncode == 3
    assert "whale launch: rank 1 exited with 3" in err
    assert "Traceback" not in err
    if (tmp_path / "pid").exists():
        assert_gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_the_launcher(tmp_path, sent):
    if sent == signal.SIGKILL and not shutil.which("setpriv"):
        pytest.skip("a killed launcher takes its ranks along by setpriv, which is not here")
    script = tmp_path / "sleep.py"
    # One write: lines of two ranks must not mix.
    said = "os.write(1, f'pid {os.getpid()}\\n'.encode())"
    script.write_text(f"import os, time\n{said}\ntime.sleep(90)\n")
    launcher = start(script, "-n", "2")
    pids = [int(re.fullmatch(r"pid (\d+)\n", launcher.stdout.readline())[1]) for _ in range(2)]
    launcher.send_signal(sent)
    launcher.communicate(timeout=60)
    assert launcher.returncode == (143 if sent == signal.SIGTERM else -signal.SIGKILL)
    for pid in pids:
        assert_gone(pid)


def assert_gone(pid):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            # Field 3 is the state: a zombie has ended and only waits to be reaped by init.
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")
