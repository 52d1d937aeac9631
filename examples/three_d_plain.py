"""A small language model: `three_d_plain.py` trains it on one device, `three_d.py` on eight.

python examples/three_d_plain.py
whale launch -n 8 examples/three_d.py
"""

import torch
import torch.nn.functional as F  # noqa: N812

from whale.models.gpt import GPT, GPTConfig


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


torch.manual_seed(0)
model = GPT(GPTConfig(vocab_size=64, max_seq_len=32, dim=64, num_layers=4, num_heads=4))
tokens = torch.randint(64, (8, 33))
x, y = tokens[:, :-1], tokens[:, 1:]
optimizer = adamw(model.parameters())

for i in range(10):
    loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {i}  loss {loss.item():.7f}")
