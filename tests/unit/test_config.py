"""Config: precedence, spelling, ranges, and what happened to EPL's keys."""

import ast
import os
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest

import whale.config
import whale.config_groups
from scripts.settings_page import table
from whale.config import EPL_KEYS, Config, PipelineConfig
from whale.errors import ConfigError

DEFAULTS = {
    "pipeline.num_micro_batch": 1,
    "pipeline.schedule": "1f1b",
    "pipeline.num_stages": None,
    "pipeline.num_chunks": None,
    "auto.auto_parallel": False,
    "auto.fit": True,
    "auto.objective": "time",
    "gradient_checkpoint.type": "",
    "gradient_checkpoint.layers": "*",
    "gradient_checkpoint.keep": "inputs",
    "gradient_checkpoint.end_taskgraph": -1,
    "gradient_checkpoint.check_gradients": False,
    "zero.level": "",
    "offload.level": "",
    "offload.activations": False,
    "offload.layers": "*",
    "amp.level": "",
    "amp.dtype": "bfloat16",
    "amp.master": "float32",
    "amp.gradients": "float32",
    "amp.loss_scale": "dynamic",
    "amp.debug_log": False,
    "optimizer.max_grad_norm": None,
    "optimizer.num_apply_group": 1,
    "optimizer.apply_in_backward": False,
    "optimizer.elementwise": None,
    "cluster.device_place_prefer_intra_node": True,
    "cluster.colocate_split_and_replicate": False,
    "cluster.run_visible_devices": "",
    "cluster.balance": "time",
    "cluster.profile": "",
    "communication.num_communicators": 1,
    "communication.bucket_bytes": 25_000_000,
    "communication.max_splits": None,
    "communication.sparse_as_dense": False,
    "communication.clip_after_allreduce": True,
    "communication.gradients_reduce_method": "mean",
    "communication.batch_norm": "global",
    "communication.symmetric_memory": False,
    "communication.fp16": False,
    "communication.fp16_scale": 128,
    "communication.bf16": False,
    "communication.token_dtype": "",
    "communication.token_chunks": 1,
    "communication.all_to_all": "auto",
    "io.drop_last": False,
    "seed": 0,
    "timeout_seconds": 600.0,
    "check_parts": True,
    "check_splits": True,
    "guard": 100,
}
# Enumerated from EPL 0.6.0, not from our own table.
EPL = [
    "auto.auto_parallel",
    "pipeline.num_stages",
    "pipeline.num_micro_batch",
    "pipeline.strategy",
    "gradient_checkpoint.type",
    "gradient_checkpoint.end_taskgraph",
    "gradient_checkpoint.check_gradients",
    "zero.level",
    "offload.level",
    "amp.level",
    "amp.loss_scale",
    "amp.debug_log",
    "optimizer.num_apply_group",
    "cluster.device_place_prefer_intra_node",
    "cluster.run_visible_devices",
    "cluster.colocate_split_and_replicate",
    "communication.num_communicators",
    "communication.max_splits",
    "communication.sparse_as_dense",
    "communication.fp16",
    "communication.fp16_scale",
    "communication.clip_after_allreduce",
    "communication.gradients_reduce_method",
    "io.slicing",
    "io.unbalanced_io_slicing",
    "io.drop_last_files",
]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for variable in [name for name in os.environ if name.startswith("WHALE_")]:
        monkeypatch.delenv(variable)


def test_defaults():
    assert Config().to_dict() == DEFAULTS


def test_epl_keys_all_have_a_place():
    assert len(EPL) == 26
    assert set(EPL_KEYS) == set(EPL)
    for key, place in EPL_KEYS.items():
        assert place in DEFAULTS or (" " in place and place.endswith(".")), key


@pytest.mark.parametrize("key", ["io.slicing", "io.unbalanced_io_slicing", "io.drop_last_files"])
def test_a_replaced_epl_key_is_refused_with_its_replacement(key):
    with pytest.raises(ConfigError, match="replaced") as caught:
        Config.from_dict({key: True})
    assert caught.value.hint == EPL_KEYS[key]


@pytest.mark.parametrize(
    "config",
    [
        lambda: Config(pipeline={"num_micro_batch": 8}, seed=3),
        lambda: Config(pipeline=PipelineConfig(num_micro_batch=8), seed=3),
        lambda: Config.from_dict({"pipeline.num_micro_batch": 8, "seed": 3}),
        lambda: Config.from_dict({"pipeline": {"num_micro_batch": 8}, "seed": 3}),
        lambda: replace(Config(seed=3), pipeline={"num_micro_batch": 8}),
    ],
)
def test_every_way_to_write_it_is_equal(config):
    made = config()
    assert made.to_dict() == DEFAULTS | {"pipeline.num_micro_batch": 8, "seed": 3}
    assert made == Config.from_dict(made.to_dict())
    assert made != Config()
    assert pickle.loads(pickle.dumps(made)) == made
    assert hash(made) == hash(Config.from_dict(made.to_dict()))


def test_dotted_and_nested_together():
    made = Config.from_dict({"pipeline": {"num_stages": 2}, "pipeline.num_micro_batch": 4})
    assert (made.pipeline.num_stages, made.pipeline.num_micro_batch) == (2, 4)
    with pytest.raises(ConfigError, match="given twice, as 2 and as 3"):
        Config.from_dict({"pipeline": {"num_stages": 2}, "pipeline.num_stages": 3})


def test_frozen():
    config = Config()
    with pytest.raises(FrozenInstanceError):
        config.seed = 1
    with pytest.raises(FrozenInstanceError):
        config.pipeline.num_micro_batch = 2


def test_precedence_default_environment_explicit(monkeypatch):
    monkeypatch.setenv("WHALE_PIPELINE_NUM_MICRO_BATCH", "8")
    monkeypatch.setenv("WHALE_PIPELINE_NUM_STAGES", "2")
    monkeypatch.setenv("WHALE_SEED", "7")
    assert Config().pipeline == PipelineConfig(num_micro_batch=8, num_stages=2)
    assert Config().seed == 7
    explicit = Config(pipeline={"num_micro_batch": 4}, seed=1)
    assert explicit.pipeline == PipelineConfig(num_micro_batch=4, num_stages=2)
    assert explicit.seed == 1
    # A whole group is explicit in all its keys, also those left at their defaults.
    assert Config(pipeline=PipelineConfig(num_stages=3)).pipeline.num_micro_batch == 1


@pytest.mark.parametrize(
    ("variable", "text", "key", "value"),
    [
        ("WHALE_AUTO_AUTO_PARALLEL", "true", "auto.auto_parallel", True),
        ("WHALE_CHECK_PARTS", "0", "check_parts", False),
        ("WHALE_TIMEOUT_SECONDS", "2.5", "timeout_seconds", 2.5),
        ("WHALE_OPTIMIZER_MAX_GRAD_NORM", "1", "optimizer.max_grad_norm", 1.0),
        ("WHALE_PIPELINE_NUM_STAGES", "none", "pipeline.num_stages", None),
        ("WHALE_OPTIMIZER_ELEMENTWISE", "no", "optimizer.elementwise", False),
        ("WHALE_CLUSTER_RUN_VISIBLE_DEVICES", "0,1", "cluster.run_visible_devices", "0,1"),
        ("WHALE_PIPELINE_STRATEGY", "PreferForward", "pipeline.schedule", "gpipe"),
    ],
)
def test_environment_values_take_the_type_of_the_key(monkeypatch, variable, text, key, value):
    monkeypatch.setenv(variable, text)
    assert Config().to_dict()[key] == value


@pytest.mark.parametrize(
    ("variable", "text"),
    [("WHALE_PIPELINE_NUM_MICRO_BATCH", "many"), ("WHALE_AUTO_AUTO_PARALLEL", "perhaps")],
)
def test_environment_values_of_another_type_are_refused(monkeypatch, variable, text):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=f"{variable} = '{text}'; allowed: "):
        Config()


def test_unknown_environment_keys_of_a_group_are_refused(monkeypatch):
    monkeypatch.setenv("WHALE_ALLOW_SHARED_DEVICE", "1")
    assert Config() == Config()
    monkeypatch.setenv("WHALE_PIPELINE_NUM_MICROBATCH", "8")
    with pytest.raises(ConfigError, match="WHALE_PIPELINE_NUM_MICROBATCH") as caught:
        Config(pipeline={"num_micro_batch": 2})
    assert "WHALE_PIPELINE_NUM_MICRO_BATCH" in caught.value.hint


@pytest.mark.parametrize(
    ("make", "nearest"),
    [
        (lambda: Config(pipelin={}), "pipeline"),
        (lambda: Config(sead=1), "seed"),
        (lambda: Config(pipeline={"num_microbatch": 2}), "pipeline.num_micro_batch"),
        (lambda: Config.from_dict({"pipeline.num_microbatch": 2}), "pipeline.num_micro_batch"),
        (lambda: Config.from_dict({"pipline.num_stages": 2}), "pipeline.num_stages"),
        (lambda: Config.from_dict({"time_out_seconds": 2}), "timeout_seconds"),
        (lambda: Config.from_dict({"zero": {"levl": "v1"}}), "zero.level"),
    ],
)
def test_unknown_keys_suggest_the_nearest(make, nearest):
    with pytest.raises(ConfigError, match="unknown setting") as caught:
        make()
    assert f"{nearest!r}" in caught.value.hint


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("pipeline.num_micro_batch", 0, "1 or more"),
        ("pipeline.num_micro_batch", 2.0, "an integer"),
        ("pipeline.num_micro_batch", True, "an integer"),
        ("pipeline.num_micro_batch", "8", "an integer"),
        ("pipeline.num_micro_batch", None, "an integer"),
        ("pipeline.num_stages", -1, "1 or more"),
        ("pipeline.schedule", "1f2b", "'gpipe', '1f1b', 'interleaved', 'zero-bubble'"),
        ("auto.auto_parallel", 1, "true or false"),
        ("optimizer.max_grad_norm", 0.0, "above 0"),
        ("optimizer.max_grad_norm", float("nan"), "above 0"),
        ("communication.num_communicators", 0, "1 or more"),
        ("communication.bucket_bytes", 0, "1 or more"),
        ("communication.max_splits", 0, "1 or more"),
        ("communication.gradients_reduce_method", "max", "'mean', 'sum'"),
        ("communication.clip_after_allreduce", False, "True"),
        ("cluster.run_visible_devices", "0,a", "device indices"),
        ("cluster.run_visible_devices", "0,0", "device indices"),
        ("timeout_seconds", -1.0, "above 0"),
        ("timeout_seconds", float("inf"), "above 0"),
        ("seed", -1, "0 or more"),
    ],
)
def test_values_out_of_range_are_refused_with_both_values(key, value, allowed):
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({key: value})
    message = caught.value.message
    assert message.startswith(f"{key} = {value!r}; allowed: ")
    assert allowed in message
    assert message.endswith(f"the default is {DEFAULTS[key]!r}")


@pytest.mark.parametrize(
    ("strategy", "schedule"), [("PreferForward", "gpipe"), ("preferbackward", "1f1b")]
)
def test_epl_strategy_is_the_schedule(strategy, schedule):
    assert Config.from_dict({"pipeline.strategy": strategy}).pipeline.schedule == schedule


def test_epl_strategy_that_is_unknown_or_doubled():
    with pytest.raises(ConfigError, match="'PreferBackwardOptimizer'; allowed: 'PreferForward'"):
        Config(pipeline={"strategy": "PreferBackwardOptimizer"})
    with pytest.raises(ConfigError, match="the same setting"):
        Config(pipeline={"strategy": "PreferForward", "schedule": "gpipe"})


def test_chunks_need_a_schedule_that_runs_them():
    assert Config(pipeline={"num_chunks": 2, "schedule": "interleaved"}).pipeline.num_chunks == 2
    with pytest.raises(ConfigError, match="num_chunks = 2 with pipeline.schedule = '1f1b'"):
        Config(pipeline={"num_chunks": 2})


def test_a_group_that_is_no_mapping():
    with pytest.raises(ConfigError, match="pipeline = 8 is a int; allowed: a mapping"):
        Config(pipeline=8)


def test_a_group_alone_is_checked_too():
    with pytest.raises(ConfigError, match="pipeline.num_micro_batch = 0"):
        PipelineConfig(num_micro_batch=0)


def test_every_field_has_one_line_below_it():
    sources = [Path(module.__file__) for module in (whale.config, whale.config_groups)]
    nodes = [node for path in sources for node in ast.parse(path.read_text()).body]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    groups = [type(getattr(Config(), f.name)) for f in fields(Config)]
    checked = 0
    for owner in [Config, *(g for g in groups if g.__module__ == "whale.config_groups")]:
        body = classes[owner.__name__].body
        for node, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign):
                assert isinstance(after, ast.Expr), (owner, ast.unparse(node))
                assert "\n" not in after.value.value
                checked += 1
    assert checked == len(DEFAULTS) + 10


def test_the_reference_page_has_every_key():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "config.md").read_text()
    missing = [key for key in (*DEFAULTS, *EPL_KEYS) if f"`{key}`" not in page]
    assert missing == []
    assert table() in page, "run scripts/settings_page.py"
