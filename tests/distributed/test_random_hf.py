"""Models of transformers with dropout and checkpoints in every layer, against plain torch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import whale as wh
from tests.distributed import random_zoo_hf
from tests.distributed.test_randomness import ROWS, SEED, Result, worst
from tests.parity.layouts import LAYOUTS, LayerPaths
from tests.ranks import run_ranks
from whale.config import Config
from whale.engine.capture.captured import capture
from whale.nn.randomness import PlainDraws

HF_CASES = [("gpt2", "accumulate-uneven", True), ("gpt2", "gpipe", False), ("opt", "gpipe", False)]
MORE_HF_CASES = [
    (name, layout, reentrant)
    for name in ("t5", "vit", "phi", "bart", "gpt2", "opt")
    for layout, reentrant in (("accumulate-uneven", False), ("tensor", True), ("gpipe", True))
]


def hf_model(name: str, reentrant: bool) -> nn.Module:
    torch.manual_seed(3)
    model = random_zoo_hf.MODELS[name]().double().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def hf_truth(name: str, micro: int, reentrant: bool) -> Result:
    model, batches = hf_model(name, reentrant), random_zoo_hf.batches_of(name, ROWS)
    draws = PlainDraws(model, capture(model, batches[0], None).random.dims, SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        rows, total, first = len(batch["labels"]), 0.0, 0
        for m, part in enumerate(torch.arange(rows).tensor_split(micro)):
            with draws.at(step=step, micro_batch=m, first_row=first, rows=len(part)):
                value = model(**{key: tensor[part] for key, tensor in batch.items()}).loss
            (value * len(part) / rows).backward()
            total += float(value.detach()) * len(part) / rows
            first += len(part)
        optimizer.step()
        losses.append(total)
    return losses, model.state_dict()


def hf_on_rank(cases: list[tuple[str, str, bool]]) -> list[Result]:
    wh.init(device="cpu")
    found = []
    for name, layout_name, reentrant in cases:
        layout = LAYOUTS[layout_name]
        model, batches = hf_model(name, reentrant), random_zoo_hf.batches_of(name, ROWS)
        step = wh.parallelize(
            layout.annotate(model, LayerPaths(model, batches[0], None)),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            batch=batches[0],
            config=Config.from_dict({"seed": SEED, **layout.config}),
            cluster=layout.cluster(),
        )
        found.append(([float(step(batch)["loss"]) for batch in batches], step.state_dict()))
        step.close()
    return found


def check_hf(cases: list[tuple[str, str, bool]]) -> None:
    results = run_ranks(2, hf_on_rank, cases, timeout=200)
    for index, (name, layout, reentrant) in enumerate(cases):
        micro = LAYOUTS[layout].config.get("pipeline.num_micro_batch", 1)
        want = hf_truth(name, micro, reentrant)
        # Their losses are computed in float32, whatever the model's dtype.
        assert worst(results[0][index], want) < 2e-6, (name, layout)


def test_hugging_face_with_checkpoints_and_dropout() -> None:
    check_hf(HF_CASES[:1])


@pytest.mark.full
def test_more_of_hugging_face() -> None:
    check_hf([*HF_CASES[1:], *MORE_HF_CASES])
