"""M6 with experts in every layer: `experts_plain.py` on one device, `experts.py` on several.

python examples/experts_plain.py
whale launch -n 4 examples/experts.py
"""

from dataclasses import replace

import torch

from whale.models.m6.config import presets
from whale.models.m6.model import M6
from whale.models.m6.objectives import example_batch


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


config = replace(presets["m6-tiny"], moe_every=1, capacity_factor=1.25, balance="loss")
batch = example_batch(config, rows=8)
torch.manual_seed(0)
model = M6(config)
optimizer = adamw(model.parameters())

for i in range(10):
    loss = model(**batch)["loss"]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {i}  loss {loss.item():.7f}")
