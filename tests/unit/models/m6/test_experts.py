"""M6 with the library's own mixture of experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from whale.models.m6.config import M6Config, presets
from whale.models.m6.model import M6, delink
from whale.models.m6.objectives import example_batch


@pytest.mark.parametrize("name", presets)
def test_expert_parameters(name: str) -> None:
    with torch.device("meta"):
        model = M6(presets[name])
    experts = [p for n, p in model.named_parameters() if n.endswith((".w_in", ".w_out"))]
    assert sum(p.numel() for p in experts) == presets[name].num_expert_params


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 2},
        {"top_k": 2, "router": "prototype"},
        {"capacity_factor": 1.0},
        {"balance": "loss"},
        {"z_loss": 1e-3},
    ],
)
def test_trains(config: M6Config, settings: dict[str, object]) -> None:
    config = replace(config, num_experts=4, moe_every=2, share_layers=True, **settings)
    model = M6(config)
    batch = example_batch(config, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = model(**batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.85 * losses[0]
    model.eval()
    real = delink(model)
    torch.testing.assert_close(real(**batch)["loss"], model(**batch)["loss"], rtol=0, atol=0)
    assert len(list(real.parameters())) > len(list(model.parameters()))


def test_losses_of_the_experts_reach_the_loss(config: M6Config) -> None:
    settings = {"num_experts": 4, "moe_every": 2, "balance": "loss", "z_loss": 1e-3}
    model = M6(replace(config, **settings))
    batch = example_batch(config, 4)
    parts: list[torch.Tensor] = []
    for block in model.blocks:
        block.ffn.register_forward_hook(
            lambda module, _, out: parts.append(out[1]) if isinstance(out, tuple) else None
        )
    training = model(**batch)["loss"]
    assert len(parts) == 2 and all(part > 0 for part in parts)
    torch.testing.assert_close(training - sum(parts), model.eval()(**batch)["loss"])
    (router,) = torch.autograd.grad(sum(parts), [model.blocks[1].ffn.router.weight])
    assert router.abs().max() > 0
