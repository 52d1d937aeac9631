"""M6 with experts in every layer: `experts_plain.py` on one device, `experts.py` on several.

python examples/experts_plain.py
whale launch -n 4 examples/experts.py
"""

from dataclasses import replace

import torch

import whale as wh
from whale.models.m6.config import presets
from whale.models.m6.model import M6
from whale.models.m6.objectives import example_batch


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


config = replace(presets["m6-tiny"], moe_every=1, capacity_factor=1.25, balance="loss")
batch = example_batch(config, rows=8)
torch.manual_seed(0)
wh.init()
wh.set_default_strategy(wh.replicate())
model = M6(config)
wh.annotate(model, {"blocks.*.ffn": wh.split()})
step = wh.parallelize(model, optimizer=adamw, batch=batch)

for i in range(10):
    loss = step(batch)["loss"]
    if step.rank == 0:
        print(f"step {i}  loss {loss.item():.7f}")
