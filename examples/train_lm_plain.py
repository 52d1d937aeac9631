"""Trains a character-level language model on one device, in plain PyTorch.

python examples/train_lm_plain.py --steps 100
"""

import argparse
import math
from importlib.resources import files

import torch
import torch.nn.functional as F  # noqa: N812

from whale.models.gpt import GPT, GPTConfig

BATCH_SIZE = 16
SEQ_LEN = 128


def load_text() -> tuple[torch.Tensor, str]:
    """The text as a vector of character numbers, and the characters they stand for."""
    text = files("whale").joinpath("presets/data/moby_dick.txt").read_text(encoding="utf-8")
    characters = "".join(sorted(set(text)))
    number = {character: i for i, character in enumerate(characters)}
    return torch.tensor([number[character] for character in text]), characters


def batches(data: torch.Tensor, steps: int):
    """Random pieces of the text; the targets are the pieces one character on."""
    for _ in range(steps):
        starts = torch.randint(len(data) - SEQ_LEN - 1, (BATCH_SIZE,))
        pieces = torch.stack([data[start : start + SEQ_LEN + 1] for start in starts])
        yield pieces[:, :-1], pieces[:, 1:]


def warmup_cosine(step: int, steps: int, warmup: int = 20) -> float:
    """A factor on the learning rate: up in a line, then down to a tenth in half a cosine."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup)))


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_model(vocab_size: int) -> GPT:
    return GPT(
        GPTConfig(vocab_size=vocab_size, max_seq_len=SEQ_LEN, dim=192, num_layers=4, num_heads=6)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    data, characters = load_text()
    model = make_model(len(characters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: warmup_cosine(i, steps))

    for step, (x, y) in enumerate(batches(data, steps), start=1):
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step == 1 or step % 10 == 0 or step == steps:
            print(f"step {step:4d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
