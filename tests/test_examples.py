"""The examples run and give what one device gives; README shows them as they are."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
MAX_CHANGED_LINES = 10
TOLERANCE = 1e-5
# Eight ranks on two cores spend most of their time importing torch.
SECONDS = 240


def limit(seconds: int):
    """More time than other tests get; without pytest-timeout there is no limit to raise."""
    if importlib.util.find_spec("pytest_timeout") is None:
        return lambda test: test
    return pytest.mark.timeout(seconds)


def run(*args: str) -> str:
    """The standard output of a Python command in a fresh interpreter, outside any launch."""
    outside = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environ = {
        **outside,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=ROOT,
        env=environ,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def launch(num_ranks: int, script: str, *args: str) -> str:
    return run("-m", "whale.cli.main", "launch", "-n", str(num_ranks), f"examples/{script}", *args)


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step .*?loss (\S+)", output, re.MULTILINE)]


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", readme(), re.MULTILINE | re.DOTALL)


def changes() -> list[str]:
    """What differs between the plain example and its parallel twin, as a unified diff."""
    plain, parallel = (
        (EXAMPLES / name).read_text(encoding="utf-8").splitlines()
        for name in ("three_d_plain.py", "three_d.py")
    )
    return list(difflib.unified_diff(plain, parallel, n=1, lineterm=""))[2:]


@limit(2 * SECONDS)
def test_three_dimensions_equal_one_device():
    expected = losses(run("examples/three_d_plain.py"))
    found = losses(launch(8, "three_d.py"))
    assert len(expected) == 10
    assert expected[-1] < expected[0]
    assert found == pytest.approx(expected, abs=TOLERANCE, rel=0)


def test_three_dimensions_take_ten_lines():
    added = [line for line in changes() if line.startswith("+")]
    assert 0 < len(added) <= MAX_CHANGED_LINES


def test_readme_shows_the_diff():
    assert blocks("diff") == ["\n".join(changes()) + "\n"]


@limit(SECONDS)
def test_train_lm():
    output = launch(4, "train_lm.py", "--steps", "12")
    found = losses(output)
    assert len(found) == 3, output  # steps 1, 10 and 12, from rank 0 only
    assert found[-1] < found[0]
    assert "loss on text it has not seen" in output
    assert "The whale " in output


@limit(SECONDS)
@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_readme_code_runs(number, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(blocks("python")[number], encoding="utf-8")
    run(str(script))
