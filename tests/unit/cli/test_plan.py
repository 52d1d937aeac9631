"""`whale plan`: the JSON contract, exit statuses, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import whale as wh
from whale.cli import shipped
from whale.cli.main import main
from whale.cli.plan import OPTIMIZERS
from whale.ir.plan import Plan
from whale.models.registry import PRESETS, optimizer_factory
from whale.runtime.optimizer import kind_of

ROOT = Path(__file__).resolve().parents[3]
MIXED = "1x8xV100-32GB+1x8xP100-16GB"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """A command to (exit status, standard output, standard error)."""

    def started(*words: str) -> tuple[int, str, str]:
        status = main([*words])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return started


# ---- the contract --------------------------------------------------------------------------------


def test_the_json_has_every_key_of_the_contract_and_nothing_else_is_printed(run: Run) -> None:
    status, out, err = run("plan", "bert-base", "--cluster", MIXED, "--json", "-")
    assert status == 0
    assert err == ""
    plan = json.loads(out)
    assert plan["fits"] is True
    assert plan["schema"] == 1
    assert plan["model_hash"] == shipped.load("bert-base").graph.hash
    assert plan["step_seconds"] >= plan["lower_bound_seconds"] > 0
    assert plan["samples_per_second"] == pytest.approx(256 / plan["step_seconds"])
    assert plan["joules_per_step"] > 0
    assert plan["num_micro_batch"] >= 1
    assert isinstance(plan["strategy"], str)
    assert isinstance(plan["rejected"], list)
    assert [d["rank"] for d in plan["devices"]] == list(range(16))
    for device in plan["devices"]:
        assert {"rank", "type", "share", "peak_bytes", "capacity_bytes", "stage"} <= set(device)
        assert 0 < device["peak_bytes"] < device["capacity_bytes"]
    assert sum(d["share"] for d in plan["devices"]) == pytest.approx(1.0)
    assert {"V100-32GB", "P100-16GB"} == {d["type"] for d in plan["devices"]}
    for taskgraph in plan["taskgraphs"]:
        assert {"kind", "ranks", "split_share"} <= set(taskgraph)
    assert json.loads(json.dumps(Plan.from_dict(plan).to_dict())) == plan


def test_the_annotations_of_a_preset_are_kept(run: Run) -> None:
    status, out, _ = run("plan", "resnet-50-100k", "--cluster", "1x8xV100-32GB", "--json", "-")
    assert status == 0
    kinds = [t["kind"] for t in json.loads(out)["taskgraphs"]]
    assert kinds == ["replicate", "split"]


def test_the_table_names_the_cluster_and_where_figures_come_from(run: Run) -> None:
    status, out, err = run("plan", "gpt-tiny", "--cluster", "1x4xCPU")
    assert (status, err) == (0, "")
    assert "gpt-tiny, sequences of 64, fp32, AdamW" in out
    assert "memory 8 GB (default)" in out
    assert "figures are from data sheets" in out


def test_files_are_written_and_a_dry_run_writes_none(run: Run) -> None:
    files = ["--json", "p.json", "--html", "r.html", "--trace", "t.json"]
    assert run("plan", "gpt-tiny", "--cluster", "1x4xCPU", *files, "--dry-run")[0] == 0
    assert list(Path().iterdir()) == []
    status, out, _ = run("plan", "gpt-tiny", "--cluster", "1x4xCPU", *files)
    assert status == 0
    assert "written: p.json, r.html, t.json" in out
    assert json.loads(Path("p.json").read_text())["fits"] is True
    assert Path("r.html").read_text().startswith("<!DOCTYPE html>")
    assert json.loads(Path("t.json").read_text())["traceEvents"]


def test_flags_change_the_plan(run: Run) -> None:
    def plan(*flags: str) -> Any:
        status, out, err = run(
            "plan", "gpt-tiny", "--cluster", "1x4xA100-40GB", *flags, "--json", "-"
        )
        assert (status, err) == (0, "")
        return json.loads(out)

    assert plan("--batch", "64")["batch_rows"] == 64
    staged = plan("--stages", "2", "--micro-batches", "4", "--set", "pipeline.schedule=gpipe")
    assert len(staged["stages"]) == 2
    assert staged["num_micro_batch"] == 4
    assert staged["schedule"]["kind"] == "gpipe"
    assert plan("--precision", "bf16")["homes"][0]["dtype"] == "bfloat16"
    base = plan()
    assert plan("--precision", "tf32")["model_hash"] == base["model_hash"]
    assert plan("--seq", "32")["prices"]["step_flops"] < base["prices"]["step_flops"]

    def state(made: Any) -> float:
        return made["prices"]["devices"][0]["memory"]["optimizer"]

    assert (
        state(plan("--optimizer", "sgd")) * 2 == state(base) == state(plan("--optimizer", "adam"))
    )
    assert state(plan("--optimizer", "adafactor")) == 0


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_optimizers_keep_what_they_are_said_to_keep(name: str) -> None:
    known, found = OPTIMIZERS[name], kind_of(optimizer_factory(name))
    assert known.optimizer == found.name
    # Of a small weight, Adafactor's sums are still some percents.
    assert known.state_tensors == pytest.approx(found.state_tensors, abs=0.05)


def test_a_profile_takes_the_place_of_data_sheets(run: Run) -> None:
    assert run("calibrate", "gpt-nano", "-n", "1", "--rows", "1", "--json", "f.json")[0] == 0
    words = ["gpt-nano", "--cluster", "1x1xCPU", "--profile", "f.json"]
    status, out, _ = run("plan", *words)
    assert status == 0
    assert "data sheets" not in out
    status, out, _ = run("plan", *words, "--json", "-")
    assert json.loads(out)["prices"]["sources"][-1].startswith("profile: ")
    status, _, err = run("plan", "gpt-nano", "--cluster", "1x2xCPU", "--profile", "f.json")
    assert status == 2
    assert "the profile has 1 devices, the cluster 2" in err


def test_clusters_side_by_side(run: Run) -> None:
    specs = ["1x2xCPU", "1x4xV100-32GB+1x4xP100-16GB"]
    status, out, _ = run("plan", "gpt-tiny", "--compare", *specs)
    assert status == 0
    for spec in specs:
        (line,) = [x for x in out.splitlines() if x.startswith(spec)]
        assert "yes" in line
    status, out, _ = run("plan", "gpt-tiny", "--compare", *specs, "--json", "-")
    rows = json.loads(out)["clusters"]
    assert [row["cluster"] for row in rows] == specs
    assert all(row["fits"] and row["step_seconds"] > 0 for row in rows)
    small("small.toml", memory="1e9")
    assert run("plan", "t5-large", "--compare", "small.toml", "--batch", "32")[0] == 1


# ---- does not fit --------------------------------------------------------------------------------


def small(path: str, memory: str, host: str = "64e9") -> None:
    """A cluster of one device with so little memory that no choice makes a large model fit."""
    device = f'[[node]]\ngpus = 1\ntype = "T4"\nmemory_bytes = {memory}\n'
    Path(path).write_text(f"{device}host_memory_bytes = {host}\n")


def test_what_does_not_fit_is_printed_with_what_is_missing(run: Run) -> None:
    small("small.toml", memory="1e9")
    words = ("--cluster", "small.toml", "--batch", "32", "--micro-batches", "2", "--json", "-")
    status, out, err = run("plan", "t5-large", *words)
    assert status == 1
    assert json.loads(out)["fits"] is False
    first, hint = err.splitlines()
    assert first.startswith("whale plan: does not fit: rank 0 (T4) needs ")
    assert first.endswith("GB too little")
    assert hint.startswith("  hint: ")
    assert "activations" in hint
    status, out, err = run("plan", "t5-large", "--cluster", "1x1xT4", "--batch", "1")
    assert status == 0 or "OVER by" in out


def test_state_that_does_not_fit_has_another_cure(run: Run) -> None:
    small("small.toml", memory="4e9", host="1e9")
    status, out, err = run("plan", "bert-large", "--cluster", "small.toml", "--batch", "1")
    assert status == 1
    assert "does not fit" in out
    assert "optimizer state" in err


def test_as_many_micro_batches_as_it_takes(run: Run) -> None:
    status, out, _ = run(
        "plan", "bert-large", "--cluster", "1x1xT4", "--batch", "2048", "--json", "-"
    )
    plan = json.loads(out)
    assert status == 0
    assert plan["num_micro_batch"] > 64
    assert plan["devices"][0]["peak_bytes"] <= plan["devices"][0]["capacity_bytes"]


@pytest.mark.parametrize("slow", ["T4", "CPU"])
def test_a_device_that_only_slows_sums_down_is_left_out(run: Run, slow: str) -> None:
    words = ("plan", "bert-large", "--batch", "64", "--json", "-", "--cluster")
    alone = json.loads(run(*words, "1x8xV100-32GB")[1])
    mixed = json.loads(run(*words, f"1x8xV100-32GB+1x1x{slow}")[1])
    assert mixed["step_seconds"] <= alone["step_seconds"] * 1.001
    assert mixed["devices"][8]["share"] == 0.0


def test_it_fits_exactly_where_no_peak_is_above_its_capacity(run: Run) -> None:
    for memory in ("2.4e9", "2.9e9", "3.2e9"):
        Path("one.toml").write_text(
            f'[[node]]\ngpus = 1\ntype = "V100-32GB"\nmemory_bytes = {memory}\n'
        )
        words = ("--cluster", "one.toml", "--batch", "8", "--json", "-")
        plan = json.loads(run("plan", "bert-base", *words)[1])
        (device,) = plan["devices"]
        assert plan["fits"] == (device["peak_bytes"] <= device["capacity_bytes"])


def test_shares_are_those_of_the_rows(run: Run) -> None:
    words = ("--cluster", "1x4xT4", "--batch", "10", "--stages", "1", "--json", "-")
    plan = json.loads(run("plan", "bert-large", *words)[1])
    shares = sorted(device["share"] for device in plan["devices"])
    assert plan["num_micro_batch"] == 1
    assert shares == pytest.approx([0.2, 0.2, 0.3, 0.3])


def test_the_least_energy_is_another_plan_than_the_least_time(run: Run) -> None:
    words = ("plan", "bert-large", "--cluster", "1x8xV100-32GB+1x8xP100-16GB", "--batch", "64")
    fast = json.loads(run(*words, "--json", "-")[1])
    saving = json.loads(run(*words, "--json", "-", "--objective", "energy")[1])
    assert saving["joules_per_step"] < fast["joules_per_step"]
    assert saving["step_seconds"] > fast["step_seconds"]
    assert any("more energy" in text for text in saving["rejected"])


def test_a_speed_that_is_given_is_shown(run: Run) -> None:
    node = '[[node]]\ngpus = 2\ntype = "V100-32GB"\nspeed = {}\n'
    Path("two.toml").write_text(node.format(1.0) + node.format(0.5))
    _, out, _ = run("plan", "bert-base", "--cluster", "two.toml")
    assert "speed 0.5 of the type's (given)" in out


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["gpt-tiny"], "--cluster is missing", "--cluster 1x8xV100-32GB"),
        (["gpt-tny", "--cluster", "1x1xCPU"], "MODEL 'gpt-tny'", "did you mean 'gpt-tiny'?"),
        (["gpt-tiny", "--clster", "1x1xCPU"], "arguments: --clster", "did you mean --cluster?"),
        (["gpt-tiny", "--cluster", "1x1xCPUs"], "unknown device type 'CPUs'", "CPU"),
        (["gpt-tiny", "--cluster", "8xCPU"], "cannot read '8xCPU'", "NODESxGPUSxTYPE"),
        (["gpt-tiny", "--cluster", "no.toml"], "cluster file 'no.toml'", ""),
        (["gpt-tiny", "--cluster", "1x1xCPU", "--batch", "0"], "--batch 0", "raise"),
        (["gpt-tiny", "--cluster", "1x1xCPU", "--batch", "x"], "--batch: invalid int", "--help"),
        (["gpt-tiny", "--cluster", "1x1xCPU", "--seq", "4096"], "sequence length 4096", ""),
        (["resnet-tiny", "--cluster", "1x1xCPU", "--seq", "4"], "no sequences", "leave --seq"),
        (["gpt-tiny", "--cluster", "1x1xCPU", "--optimizer", "lion"], "'lion'", "--help"),
        (["gpt-tiny", "--cluster", "1x1xCPU", "--objective", "cost"], "no prices", "--compare"),
        (["gpt-tiny", "--cluster", "1x1xV100"], "device type 'V100'", "V100-16GB or V100-32GB"),
        (["gpt-tiny", "--cluster", "1x1xCPU", "--set", "x"], "--set x; allowed: KEY=VALUE", ""),
        (["gpt-tiny", "--cluster", "1x1xCPU", "--set", "zero.lvl=2"], "zero.lvl", "zero.level"),
        (
            ["gpt-tiny", "--cluster", "1x1xCPU", "--stages", "2", "--set", "pipeline.num_stages=3"],
            "pipeline.num_stages is given twice, as 3 and as 2",
            "keep one",
        ),
        (
            ["bert-base", "--cluster", MIXED, "--precision", "bf16"],
            "V100-32GB and P100-16GB cannot compute in it",
            "--precision fp16",
        ),
        (
            ["bert-base", "--cluster", "1x1xT4", "--precision", "tf32"],
            "allowed on 1x1xT4: fp32, fp16",
            "--precision fp16",
        ),
        (
            ["resnet-50-100k", "--cluster", "1x2xT4", "--stages", "2"],
            "annotations say what its stages are",
            "leave --stages",
        ),
        (["gpt-tiny", "--cluster", "1x1xCPU", "--json", "no/f"], "--json no/f: there is no", "-"),
        (["gpt-tiny", "--cluster", "1x1xCPU", "--html", "."], "--html .: is a folder", ""),
        (["gpt-tiny", "--cluster", "1x1xCPU", "--trace", "-"], "only --json can go to", ""),
        (["gpt-tiny", "--cluster", "1x1xCPU", "--profile", "f"], "profile 'f'", "calibrate"),
        (
            ["gpt-tiny", "--cluster", "1x1xCPU", "--micro-batches", "1000"],
            "1000 micro-batches of 8 rows; allowed: 1 to 8",
            "lower pipeline.num_micro_batch",
        ),
        (["gpt-tiny", "--compare", "1x1xCPU", "--html", "f"], "--html with --compare", ""),
        (["gpt-tiny", "--compare", "1x1xCPU", "--cluster", "1x1xCPU"], "--cluster with", ""),
        (["no.py:build", "--cluster", "1x1xCPU"], "file 'no.py' is not there", ""),
    ],
)
def test_bad_input_is_one_clear_message(
    words: list[str], message: str, hint: str, run: Run
) -> None:
    status, out, err = run("plan", *words)
    assert status == 2
    assert out == ""
    first, *rest = err.splitlines()
    assert first.startswith("whale: error: ")
    assert message in first
    assert len(rest) <= 1
    assert hint in "".join(rest)
    assert not list(Path().iterdir())


@pytest.mark.parametrize("text", ["[]", '{"schema": 99}', "{", '{"schema": 1}'])
def test_what_is_no_profile(run: Run, text: str) -> None:
    Path("f.json").write_text(text)
    words = ("--cluster", "1x1xCPU", "--profile", "f.json")
    status, _, err = run("plan", "gpt-nano", *words)
    assert status == 2
    first, hint = err.splitlines()
    assert "profile" in first
    assert "whale calibrate --json F" in hint


def test_a_profile_of_other_devices_is_refused_and_given_memory_counts(run: Run) -> None:
    assert run("calibrate", "gpt-nano", "--json", "f.json", "--rows", "1")[0] == 0
    words = ("plan", "gpt-nano", "--profile", "f.json", "--json", "-", "--cluster")
    status, _, err = run(*words, "1x1xT4")
    assert status == 2
    assert "rank 0 is a T4 in the cluster and a CPU in the profile" in err
    Path("small.toml").write_text('[[node]]\ngpus = 1\ntype = "CPU"\nmemory_bytes = 1e5\n')
    status, out, _ = run(*words, "small.toml")
    assert status == 1
    assert json.loads(out)["devices"][0]["capacity_bytes"] == 1e5


def test_models_that_are_one_layer_are_half_or_leave(run: Run) -> None:
    Path("net.py").write_text(
        "import sys\n"
        "import torch\n"
        "from torch import nn\n"
        "def one():\n"
        "    return nn.Linear(400, 300), (torch.randn(8, 400), torch.randn(8, 300)), (\n"
        "        nn.functional.mse_loss)\n"
        "def half():\n"
        "    model, (x, y), loss = one()\n"
        "    return nn.Sequential(model).bfloat16(), (x.bfloat16(), y.bfloat16()), loss\n"
        "def leaves():\n"
        "    sys.exit(7)\n"
        "class Odd(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        y = super().forward(x)\n"
        "        return y if y.sum() > 0 else -y\n"
        "class Drawn(Odd):\n"
        "    def forward(self, x):\n"
        "        return nn.functional.dropout(super().forward(x), 0.5)\n"
        "def odd():\n"
        "    model, batch, loss = one()\n"
        "    return nn.Sequential(Odd(400, 300)), batch, loss\n"
        "def drawn():\n"
        "    model, batch, loss = one()\n"
        "    return nn.Sequential(Drawn(400, 300)), batch, loss\n"
    )
    status, out, _ = run("plan", "net.py:one", "--cluster", "1x1xV100-32GB", "--json", "-")
    plan = json.loads(out)
    assert status == 0
    assert plan["devices"][0]["share"] == pytest.approx(1.0)
    assert plan["lower_bound_seconds"] > 0
    _, out, _ = run("plan", "net.py:half", "--cluster", "1x1xA100-80GB")
    assert "bf16" in out.splitlines()[0]
    status, _, err = run("plan", "net.py:half", "--cluster", "1x1xV100-32GB")
    assert status == 2
    assert "V100-32GB cannot compute in it" in err
    status, _, err = run("plan", "net.py:leaves", "--cluster", "1x1xCPU")
    assert status == 2
    assert "net.py:leaves failed: SystemExit: 7" in err
    # Code that needs values is counted on random rows, once; code that draws beside is not.
    bounds = []
    for model in ("one", "odd"):
        status, out, _ = run("plan", f"net.py:{model}", "--cluster", "1x1xCPU", "--json", "-")
        assert status == 0
        bounds.append(json.loads(out)["lower_bound_seconds"])
    assert bounds[1] == pytest.approx(bounds[0], rel=0.25)
    status, out, err = run("plan", "net.py:drawn", "--cluster", "1x1xCPU")
    assert status == 0
    assert "nothing was counted, so times lack all compute" in out
    assert "Traceback" not in err


def test_a_model_of_ones_own(run: Run) -> None:
    Path("net.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "import whale as wh\n"
        "def build():\n"
        "    print('hello')\n"
        "    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))\n"
        "    batch = torch.randn(4, 8), torch.randint(0, 64, (4,))\n"
        "    return model, batch, nn.functional.cross_entropy\n"
        "def annotated():\n"
        "    model, *rest = build()\n"
        "    return wh.annotate(model, {'0|1': wh.replicate(), '2': wh.split()}), *rest\n"
    )
    status, out, err = run("plan", "net.py:build", "--cluster", "1x2xCPU", "--json", "-")
    assert status == 0
    assert "hello" in err
    assert json.loads(out)["batch_rows"] == 4
    words = ["net.py:annotated", "--cluster", "1x2xCPU", "--batch", "12", "--json", "-"]
    status, out, _ = run("plan", *words)
    assert status == 0
    plan = json.loads(out)
    assert plan["batch_rows"] == 12
    assert [t["kind"] for t in plan["taskgraphs"]] == ["replicate", "split"]
    assert plan["taskgraphs"][1]["split_share"] == 1.0
    assert run("plan", "net.py:build", "--cluster", "1x2xCPU", "--seq", "4")[0] == 2


# ---- what the plan is for ------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["gpt-nano", pytest.param("gpt-tiny", marks=pytest.mark.full)])
@pytest.mark.full
def test_a_plan_for_cpus_runs_and_is_equal_to_one_device(run: Run, preset: str) -> None:
    words = [preset, "--cluster", "1x4xCPU", "--stages", "2", "--micro-batches", "2"]
    assert run("plan", *words, "--json", "p.json")[0] == 0
    status, out, err = run(
        "verify", preset, "--cluster", "1x4xCPU", "--plan", "p.json", "--steps", "1"
    )
    assert status == 0, err
    assert "on 4 ranks" in out
    assert "reduced" not in out


def test_parallelize_takes_a_plan_of_the_command(run: Run) -> None:
    assert run("plan", "gpt-nano", "--cluster", "1x1xCPU", "--json", "p.json")[0] == 0
    preset = PRESETS["gpt-nano"]
    batch = preset.batch(8, None)
    step = wh.parallelize(
        preset.build(),
        optimizer=optimizer_factory("adamw"),
        batch=batch,
        loss=preset.loss,
        plan=Plan.from_dict(json.loads(Path("p.json").read_text())),
    )
    assert step(batch)["loss"] > 0
    step.close()


def test_ten_trillion_parameters_do_not_fit_and_it_says_so(run: Run) -> None:
    words = ["m6-10t", "--cluster", "8x8xV100-32GB", "--batch", "512", "--json", "p.json"]
    status, out, err = run("plan", *words)
    assert status == 1
    assert "replicate+split on 64" in out
    assert "does not fit: rank 0 (V100-32GB) (and 63 more of 64 devices) needs" in err
    assert "hint: " in err
    plan = json.loads(Path("p.json").read_text())
    assert plan["fits"] is False


def test_experts_of_a_hundred_billion_parameters_fit(run: Run) -> None:
    status, out, err = run("plan", "m6-100b", "--cluster", "4x8xA100-80GB", "--batch", "256")
    assert status == 0, err
    assert "replicate+split on 32" in out


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    words = [sys.executable, "-m", "whale.cli.main", "plan", "gpt-tiny", "--cluster", "1x2xCPU"]
    process = subprocess.Popen(
        words,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=60) == 141
