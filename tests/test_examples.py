"""The examples run and give what one device gives; README and guides show them as they are."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import whale as wh
from whale.models.m6.config import presets
from whale.models.m6.model import M6
from whale.models.m6.objectives import example_batch

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
MAX_CHANGED_LINES = 10
# Of which two are the import and the loop's own: four say how the model is parallel.
EXPERT_LINES = [
    "wh.init()",
    "wh.set_default_strategy(wh.replicate())",
    'wh.annotate(model, {"blocks.*.ffn": wh.split()})',
    "step = wh.parallelize(model, optimizer=adamw, batch=batch)",
]
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


def blocks(language: str, page: str = "README.md") -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


CODE = [
    (page, number)
    for page in ("README.md", "docs/guides/experts.md")
    for number in range(len(blocks("python", page)))
]


def changes(name: str) -> list[str]:
    """What differs between the plain example and its parallel twin, as a unified diff."""
    plain, parallel = (
        (EXAMPLES / file).read_text(encoding="utf-8").splitlines()
        for file in (f"{name}_plain.py", f"{name}.py")
    )
    return list(difflib.unified_diff(plain, parallel, n=1, lineterm=""))[2:]


@limit(2 * SECONDS)
@pytest.mark.parametrize(
    ("name", "num_ranks"), [pytest.param("three_d", 8, marks=pytest.mark.full), ("experts", 2)]
)
def test_a_parallel_twin_equals_one_device(name: str, num_ranks: int):
    expected = losses(run(f"examples/{name}_plain.py"))
    found = losses(launch(num_ranks, f"{name}.py"))
    assert len(expected) == 10
    assert expected[-1] < expected[0]
    assert found == pytest.approx(expected, abs=TOLERANCE, rel=0)


def test_three_dimensions_take_ten_lines():
    added = [line for line in changes("three_d") if line.startswith("+")]
    assert 0 < len(added) <= MAX_CHANGED_LINES


def test_experts_take_four_lines():
    added = [line.removeprefix("+") for line in changes("experts") if line.startswith("+")]
    loop = ['    loss = step(batch)["loss"]', "    if step.rank == 0:"]
    printed = [line for line in added if line.startswith("        print(")]
    assert added == ["import whale as wh", *EXPERT_LINES, *loop, *printed]


def test_the_four_lines_spread_the_experts_and_nothing_else():
    config = replace(presets["m6-tiny"], moe_every=1)
    wh.set_default_strategy(wh.replicate())
    try:
        with torch.device("meta"):
            model = M6(config)
            batch = example_batch(config, rows=8)
        wh.annotate(model, {"blocks.*.ffn": wh.split()})
    finally:
        wh.set_default_strategy(None)
    plan = wh.plan(model, cluster="1x2xCPU", batch=batch)
    split = {s.path: s.rule for t in plan.taskgraphs for s in t.splits}
    assert split == {f"blocks.{i}.ffn": "experts" for i in range(config.num_layers)}
    cut = {home.name for home in plan.homes if home.splits}
    assert cut == {f"{path}.{weight}" for path in split for weight in ("w_in", "w_out")}


def test_pages_show_the_diffs():
    three_d, experts = ("\n".join(changes(name)) + "\n" for name in ("three_d", "experts"))
    assert blocks("diff") == [three_d, experts]
    assert blocks("diff", "docs/guides/experts.md") == [experts]


@pytest.mark.full
@limit(SECONDS)
def test_train_lm():
    output = launch(4, "train_lm.py", "--steps", "12")
    found = losses(output)
    assert len(found) == 3, output  # steps 1, 10 and 12, from rank 0 only
    assert found[-1] < found[0]
    assert "loss on text it has not seen" in output
    assert "The whale " in output


@limit(SECONDS)
@pytest.mark.parametrize(("page", "number"), CODE)
def test_code_of_pages_runs(page, number, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(blocks("python", page)[number], encoding="utf-8")
    run(str(script))
