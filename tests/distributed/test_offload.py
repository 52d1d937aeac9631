"""What waits on the host beside plain torch: state, updates, weights and activations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import whale as wh
from tests.distributed.test_zero import ADAMW, LAYOUTS, _worst, data, made, model, plain
from tests.ranks import run_ranks
from whale.runtime import moving, parking

pytestmark = pytest.mark.usefixtures("untried")

TIERS = ("state", "weights", "update", "v0")


def trained(
    tier: str, layout: str, zero: str, activations: bool, num_groups: int
) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    parking.SMALL_BYTES = 8
    wh.init()
    more = {
        "offload.level": tier,
        "offload.activations": activations,
        "optimizer.num_apply_group": num_groups,
        "optimizer.apply_in_backward": num_groups > 2,
    }
    step = made(zero, layout, None, **more)
    garage = None
    for module in step._lowered.model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, parking.ParkedForward):
            garage = forward.garage
    losses = [float(step(data(index))["loss"]) for index in range(3)]
    evaluated = float(step.evaluate(data(9))["loss"])
    want, _, state = plain(None, 1)
    store = step._lowered.store
    homes = {home.name: home for home in step.plan.homes}
    found = {
        "loss": max(abs(a - b) for a, b in zip(losses, want, strict=True)),
        "state": _worst(step.state_dict(), state),
        "evaluated": evaluated,
        "fetched": sorted(n for n, h in homes.items() if h.fetched),
        "apart": sorted(n for n, p in store.kept.items() if p is not store.params[n]),
        "absent": sorted(store.absent),
        "parked": garage.parked_bytes if garage is not None else 0,
    }
    step.close(forget=True)
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_groups", [1, 2, 3])
@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("zero", ["", "v1", "v2"])
@pytest.mark.parametrize("layout", ["one", "data", "stages"])
@pytest.mark.parametrize("tier", ["", *TIERS])
def test_equal_to_plain_torch(
    tier: str, layout: str, zero: str, activations: bool, num_groups: int
) -> None:
    ranks = {"one": 1, "data": 2, "stages": 4}[layout]
    name = "data" if layout == "one" else layout
    for found in run_ranks(ranks, trained, tier, name, zero, activations, num_groups):
        assert max(found["loss"], found["state"]) < 1e-12, found
        assert (found["parked"] > 0) == activations
        if tier in ("v0", "weights") and not zero:
            assert "blocks.0.up.weight" in found["fetched"] and "gain" not in found["fetched"]
            assert set(found["fetched"]) >= set(found["absent"])
        if tier in ("update", "v0"):
            # A number that ranks share out is kept by one of them.
            alone = {f"blocks.{i}.scale" for i in range(4)} if zero else set()
            used = set(found["absent"]) - alone - {"unused.weight", "unused.bias"}
            assert used <= set(found["apart"])
        if tier in ("", "state") and not zero:
            assert not found["apart"]


def precise(master: str, tier: str) -> tuple[list[float], list[float]]:
    """Half precision with what is kept on the host, or not: bit for bit the same."""
    torch.set_num_threads(1)
    wh.init()
    found = []
    for level in ("", tier):
        step = made(
            "",
            "data",
            None,
            **{"amp.level": "O2", "amp.master": master, "offload.level": level},
        )
        found.append([float(step(data(i))["loss"]) for i in range(3)])
        step.close(forget=True)
    return found[0], found[1]


@pytest.mark.covering(1)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("master", ["float32", "split", "stochastic", "none"])
def test_masters_on_the_host_are_the_same_bits(master: str, tier: str) -> None:
    (resident, offloaded), *_ = run_ranks(1, precise, master, tier)
    assert resident == offloaded


def resumed(folder: str) -> list[float]:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    wh.init()
    far = []
    for saved in ("", *TIERS):
        path = str(Path(folder) / f"tier{saved}")
        step = made("", "data", None, **{"offload.level": saved})
        step(data(0))
        step.save(path)
        want = [float(step(data(i))["loss"]) for i in (1, 2)]
        step.close(forget=True)
        for loaded in ("", *TIERS):
            step = made("", "data", None, **{"offload.level": loaded})
            step(data(5))
            step.load(path)
            got = [float(step(data(i))["loss"]) for i in (1, 2)]
            far += [abs(a - b) for a, b in zip(got, want, strict=True)]
            step.close(forget=True)
    return far


@pytest.mark.full
def test_a_checkpoint_of_any_tier_goes_on_on_any_other(tmp_path: Path) -> None:
    for far in run_ranks(2, resumed, str(tmp_path), timeout=120.0):
        assert max(far) < 1e-12


def some(pattern: str) -> list[str]:
    torch.set_num_threads(1)
    wh.init()
    net = wh.annotate(model(), LAYOUTS["data"]())
    try:
        step = wh.parallelize(
            net,
            optimizer=ADAMW,
            loss=F.mse_loss,
            batch=data(0),
            config={"offload.level": "v0", "offload.layers": pattern},
        )
    except wh.WhaleError as error:
        return [str(error)]
    return sorted({h.name.rpartition(".")[0] for h in step.plan.homes if h.tier == "host"})


def test_only_the_layers_of_a_pattern() -> None:
    assert run_ranks(1, some, "blocks.[01]|head")[0] == [
        *(f"blocks.{i}{part}" for i in "01" for part in ("", ".down", ".norm", ".up")),
        "head",
    ]
    ((text,),) = run_ranks(1, some, "block.*")
    assert "matches none of the model's" in text and "blocks." in text


def test_host_memory_is_dense_and_apart() -> None:
    memory = moving.HostMemory(torch.device("cpu"))
    source = torch.randn(3, 4).t()
    copy = memory.holding(source)
    assert torch.equal(copy, source) and copy.data_ptr() != source.data_ptr()


def test_parked_tensors_come_back_as_they_were() -> None:
    """Views, other strides, tensors kept twice; small ones and parameters stay."""
    torch.manual_seed(0)

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(40, 30))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = (x @ self.weight).t()[5:]
            return (h * h.sin()).t().exp().sum(1) * h.mean()

    module, x = Odd(), torch.randn(50, 40, requires_grad=True)
    module(x).square().sum().backward()
    want = x.grad, module.weight.grad
    x.grad = module.weight.grad = None
    garage = parking.Garage(torch.device("cpu"), dict(module.named_parameters()))
    before, parking.SMALL_BYTES = parking.SMALL_BYTES, 2000
    try:
        parked = parking.ParkedForward(module.forward, garage)
        out = parked(x)
        assert garage.parked_bytes > 4 * 50 * 25
        out.square().sum().backward()
    finally:
        parking.SMALL_BYTES = before
    assert torch.equal(x.grad, want[0]) and torch.equal(module.weight.grad, want[1])


def partly(tier: str) -> float:
    """Some Layers on the host, others not, in one bucket of gradients."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    wh.init()
    step = made("", "data", None, **{"offload.level": tier, "offload.layers": "blocks.1"})
    losses = [float(step(data(index))["loss"]) for index in range(3)]
    want, _, state = plain(None, 1)
    tiers = {home.tier for home in step.plan.homes}
    assert len(tiers) == 2, tiers
    far = max(abs(a - b) for a, b in zip(losses, want, strict=True))
    found = max(far, _worst(step.state_dict(), state))
    step.close(forget=True)
    return found


@pytest.mark.parametrize("tier", TIERS)
def test_a_bucket_with_and_without_what_is_on_the_host(tier: str) -> None:
    assert max(run_ranks(2, partly, tier)) < 1e-12
