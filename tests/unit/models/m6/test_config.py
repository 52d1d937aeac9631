"""The ladder's sizes, and what a config refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from whale.errors import ConfigError
from whale.models.m6.config import M6Config, presets
from whale.models.m6.model import M6
from whale.models.m6.objectives import example_batch

LADDER = {
    "m6-base": ("1.34e9", 5, 32),
    "m6-10b": ("10.7e9", 10, 128),
    "m6-100b": ("103.1e9", 24, 512),
    "m6-1t": ("1.003e12", 24, 960),
    "m6-10t": ("10.05e12", 48, 10240),
}


def test_the_family() -> None:
    assert list(presets) == ["m6-tiny", "m6-small", *LADDER]


@pytest.mark.parametrize("name", LADDER)
def test_expert_parameters_by_arithmetic(name: str) -> None:
    published, num_layers, num_experts = LADDER[name]
    config = presets[name]
    digits, power = published.split("e")
    num_decimals = len(digits.partition(".")[2])
    assert f"{config.num_expert_params / 10 ** int(power):.{num_decimals}f}" == digits
    assert (config.num_layers, config.num_experts, config.dim) == (num_layers, num_experts, 1024)
    assert (config.num_patches, config.patch_dim, config.num_heads) == (16, 192, 16)


@pytest.mark.parametrize("name", presets)
def test_expert_parameters_of_the_modules(name: str) -> None:
    config = presets[name]
    with torch.device("meta"):
        model = M6(config)
    experts = [p for n, p in model.named_parameters() if n.endswith((".w_in", ".w_out"))]
    assert sum(p.numel() for p in experts) == config.num_expert_params
    assert len(experts) == 2 * len(config.moe_layers)
    rest = sum(p.numel() for p in model.parameters()) - config.num_expert_params
    routers = len(config.moe_layers) * config.dim * config.num_experts
    block = 4 * config.dim * (config.dim + 1) + 4 * config.dim
    dense = (config.num_layers - len(config.moe_layers)) * (
        2 * config.dim * config.ffn_dim + config.dim + config.ffn_dim
    )
    stems = config.dim * (config.vocab_size + 2 * config.max_text_len + config.num_patches)
    if config.stem == "patch":
        stems += config.dim * (config.patch_dim + 1) + config.dim * (config.dim + 1)
    else:
        # 3 -> 64 -> 128 -> 256 channels, a product and two scales each; the whole; each patch.
        pairs = [(3, 64), (64, 64), (64, 128), (128, 128), (128, 256), *[(256, 256)] * 3]
        stems += sum(9 * a * b + 2 * b for a, b in pairs)
        stems += config.dim * (4 * 256 + 1) + config.dim * (256 + 1)
    assert rest == routers + config.num_layers * block + dense + stems + 2 * config.dim


def test_a_shape_run_costs_nothing() -> None:
    with torch.device("meta"):
        model = M6(replace(presets["m6-1t"], num_experts=0))
        out = model(**example_batch(model.config, 64))
    assert out["logits"].shape == (64, 256, 22_528)
    assert out["loss"].shape == ()


def test_experts_are_in_the_last_layer_of_each_group(config: M6Config) -> None:
    assert replace(config, num_experts=8, moe_every=2).moe_layers == (1, 3)
    assert replace(config, num_experts=8).moe_layers == (0, 1, 2, 3)
    assert config.moe_layers == ()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_heads": 5}, "dim 32 is not a multiple of num_heads 5"),
        ({"patch_size": 5}, "image_size 16 is not a multiple of patch_size 5"),
        ({"router": "expert-choice"}, "allowed: top-k, prototype"),
        ({"balance": "luck"}, "allowed: bias, loss, none"),
        ({"num_experts": 4, "top_k": 5}, "top_k 5 of 4 experts"),
        ({"num_experts": 4, "top_k": 3, "router": "prototype"}, "num_experts 4 is not a multiple"),
        ({"num_experts": 4, "moe_every": 5}, "none would have experts"),
        ({"num_codes": 400}, "num_codes 400 in a vocabulary of 400"),
    ],
)
def test_refused(config: M6Config, change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(config, **change)


def test_json_round_trip() -> None:
    for config in presets.values():
        assert M6Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ConfigError, match="did you mean 'num_heads'"):
        M6Config.from_dict({"num_head": 4})
