"""Trains a character-level language model on four ranks, or a multiple: what `make train` runs.

whale launch -n 4 examples/train_lm.py

Two pipeline stages of two devices each. The first stage is data parallel: each device takes half of
the rows. The second is sharded: each device holds half of the heads, of the hidden units and of the
vocabulary. On eight ranks, the other four train a second copy on the other half of the batch.
"""

import argparse
import sys
import time
from functools import partial

import torch
from train_lm_plain import (
    BATCH_SIZE,
    SEQ_LEN,
    batches,
    cross_entropy,
    load_text,
    make_model,
    warmup_cosine,
)

import whale as wh

STAGES = {
    "*_embedding|blocks.[01]": (wh.stage(), wh.replicate(2)),
    "blocks.[23]|norm|lm_head": (wh.stage(), wh.split(2)),
}
NUM_MICRO_BATCH = 4


class Progress:
    """A line updated in place on a terminal, a line every ten steps elsewhere; rank 0 only."""

    def __init__(self, rank: int, steps: int) -> None:
        self.silent = rank != 0
        self.live = sys.stdout.isatty()
        self.steps = steps
        self.began = time.monotonic()

    def show(self, step: int, loss: torch.Tensor) -> None:
        last = step == self.steps
        if self.silent or not (self.live or last or step == 1 or step % 10 == 0):
            return
        speed = step * BATCH_SIZE * SEQ_LEN / (time.monotonic() - self.began)
        text = f"step {step:4d}/{self.steps}  loss {loss.item():.4f}  {speed:6,.0f} tokens/s"
        print(
            f"\r{text}" if self.live else text,
            end="" if self.live and not last else "\n",
            flush=True,
        )

    def say(self, text: str) -> None:
        if not self.silent:
            print(text, flush=True)


@torch.no_grad()
def write(state: dict[str, torch.Tensor], characters: str, start: str, length: int) -> str:
    """Lets the plain model, with the trained weights, go on from `start`."""
    model = make_model(len(characters)).eval()
    model.load_state_dict(state)
    numbers = [characters.index(character) for character in start]
    for _ in range(length):
        logits = model(torch.tensor([numbers[-SEQ_LEN:]]))[0, -1]
        numbers.append(int(torch.multinomial(torch.softmax(logits / 0.8, 0), 1)))
    return "".join(characters[number] for number in numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    wh.init({"pipeline.num_micro_batch": NUM_MICRO_BATCH, "optimizer.max_grad_norm": 1.0})
    torch.manual_seed(0)
    data, characters = load_text()
    train, held_out = data[: -len(data) // 10], data[-len(data) // 10 :]
    model = wh.annotate(make_model(len(characters)), STAGES)
    adamw = partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.1)
    (example,) = batches(train, 1)
    step = wh.parallelize(model, optimizer=adamw, loss=cross_entropy, batch=example)
    schedule = torch.optim.lr_scheduler.LambdaLR(step.optimizer, lambda i: warmup_cosine(i, steps))

    progress = Progress(step.rank, steps)
    progress.say(f"{step.plan.num_ranks} ranks: {step.plan.strategy}")
    for i, batch in enumerate(batches(train, steps), start=1):
        metrics = step(batch)
        schedule.step()
        progress.show(i, metrics["loss"])
    losses = [step.evaluate(batch)["loss"] for batch in batches(held_out, 4)]
    progress.say(f"loss on text it has not seen: {sum(losses).item() / len(losses):.4f}")

    state = step.state_dict()  # every rank takes part; each then has the whole model
    report = step.report()
    step.close()
    if step.rank == 0:
        print(report)
        print(write(state, characters, "The whale ", 200))


if __name__ == "__main__":
    main()
