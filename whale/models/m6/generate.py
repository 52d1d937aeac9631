"""Writing with a trained model: captions, answers, text that goes on, pictures.

Place in the flow: after training; on one device, with the plain model. Rows of different tasks and
lengths can be in one batch. Each new token runs the whole sequence again: a source that may look at
itself in both directions is computed as in training, by the very same forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from whale.errors import WhaleError
from whale.models.m6.image_codes import ImageCodes
from whale.models.m6.mixture import check_belong
from whale.models.m6.model import M6
from whale.models.m6.objectives import Example, collate
from whale.models.m6.pictures import Pixels
from whale.models.m6.tokenizer import Tokenizer

ROWS_AT_ONCE = 128
"""Rows of one forward: bounds the memory of their logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen from its probabilities.

    Attributes:
        temperature: 0 takes the most likely token; 1 draws by probability; less is safer.
        top_k: draw among so many of the most likely; None: among all.
        seed: of the draws. Each row has draws of its own, whatever it is batched with.
    """

    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or (self.top_k is not None and self.top_k < 1):
            raise WhaleError(
                f"temperature {self.temperature}, top_k {self.top_k}",
                hint="a temperature is 0 (most likely) or more, a top_k 1 or more",
            )

    def choose(self, logits_bv: Tensor, draws_b: Tensor) -> Tensor:
        """One token of each row; `draws_b` are uniform in [0, 1)."""
        if self.temperature == 0:
            return logits_bv.argmax(-1)
        logits_bv = logits_bv.double() / self.temperature
        if self.top_k is not None and self.top_k < logits_bv.shape[-1]:
            least = logits_bv.topk(self.top_k, dim=-1).values[:, -1:]
            logits_bv = logits_bv.masked_fill(logits_bv < least, -torch.inf)
        reached = logits_bv.softmax(-1).cumsum(-1)
        # Scaled by the total, which rounding leaves a little off 1.
        draws_b = draws_b.to(reached.device) * reached[:, -1]
        return torch.searchsorted(reached, draws_b[:, None], right=True).squeeze(-1)


GREEDY = Sampling()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a target is to be written for: token ids, and a picture if there is one."""

    source: Sequence[int]
    image: Pixels | None = None


@contextmanager
def evaluating(model: M6) -> Iterator[None]:
    """Without dropout and gradients; the model's mode is put back after."""
    was = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was)


def generate(
    model: M6,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    *,
    max_new: int,
    allowed: Sequence[bool],
    stop: int | None,
    sampling: Sampling = GREEDY,
    against: Sequence[Prompt] | None = None,
    guidance: float = 1.0,
) -> list[list[int]]:
    """What the model writes for each prompt: at most `max_new` ids, without the stop.

    Args:
        model: a plain M6, on any device.
        tokenizer: of the same model.
        prompts: the sources.
        max_new: tokens to write, at most.
        allowed: by id, whether it may be written.
        stop: the id that ends a target; None: all have `max_new` tokens.
        sampling: how tokens are chosen.
        against: for each prompt, one that says nothing; with it `guidance` moves away from what
            would be written anyway.
        guidance: 1 is none.
    """
    check_belong(model.config, tokenizer, None)
    written: list[list[int]] = []
    guided = against is not None and guidance != 1.0
    for first in range(0, len(prompts), ROWS_AT_ONCE):
        chosen = slice(first, first + ROWS_AT_ONCE)
        rows = list(prompts[chosen])
        draws = np.stack(
            [
                np.random.default_rng([sampling.seed, first + i]).random(max_new)
                for i in range(len(rows))
            ]
        )
        beside = list(against[chosen]) if against is not None and guided else []
        with evaluating(model):
            tokens = _write(
                model,
                tokenizer,
                [*rows, *beside],
                guidance=guidance if guided else None,
                allowed=torch.tensor(allowed),
                stop=stop,
                sampling=sampling,
                draws=torch.from_numpy(draws),
            )
        for ids in tokens.tolist():
            end = ids.index(stop) if stop is not None and stop in ids else len(ids)
            written.append(ids[:end])
    return written


def _write(
    model: M6,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    *,
    guidance: float | None,
    allowed: Tensor,
    stop: int | None,
    sampling: Sampling,
    draws: Tensor,
) -> Tensor:
    """The tokens [rows, steps] written; with guidance, the prompts' second half is compared with.

    A row goes on until all have stopped; what it writes after its own stop is not read.
    """
    device = next(model.parameters()).device
    rows, max_new = draws.shape
    length = max(len(prompt.source) for prompt in prompts) + max_new
    if length > model.config.max_text_len:
        raise WhaleError(
            f"a prompt of {length - max_new} tokens and {max_new} new ones, in "
            f"{model.config.max_text_len} text positions",
            hint="a shorter prompt, or fewer new tokens",
        )
    # Targets stand in for what is to be written, so that rows are laid out as in training.
    room = [tokenizer.pad] * max_new
    examples = [Example(source=p.source, target=room, image=p.image) for p in prompts]
    batch = {name: x.to(device) for name, x in collate(model.config, tokenizer, examples).items()}
    tokens, num_source = batch["tokens"], batch["num_source"]
    begins = num_source - model.config.num_patches
    every = torch.arange(len(prompts), device=device)
    forbidden = ~allowed.to(device)
    stopped = torch.zeros(rows, dtype=torch.bool, device=device)
    made: list[Tensor] = []
    for step in range(max_new):
        seen = length - max_new + step + 1
        out = model(tokens[:, :seen], batch["patches"], num_source, batch["has_image"])
        logits_bv = out["logits"][every, begins + step].float()
        if guidance is not None:
            given, anyway = logits_bv.log_softmax(-1).chunk(2)
            logits_bv = anyway + guidance * (given - anyway)
        chosen = sampling.choose(logits_bv.masked_fill(forbidden, -torch.inf), draws[:, step])
        made.append(chosen)
        stopped |= chosen == (-1 if stop is None else stop)
        if step + 1 == max_new or bool(stopped.all()):
            break
        both = chosen if guidance is None else chosen.repeat(2)
        tokens[every, begins + step + 1] = both
    return torch.stack(made, dim=1)


# ---- tasks ---------------------------------------------------------------------------------------


def caption(
    model: M6,
    tokenizer: Tokenizer,
    images: Sequence[Pixels],
    lang: str = "en",
    *,
    max_new: int = 48,
    sampling: Sampling = GREEDY,
) -> list[str]:
    """What each picture shows, in a language."""
    source = tokenizer.prompt("caption", lang)
    prompts = [Prompt(source=source, image=image) for image in images]
    return _texts(model, tokenizer, prompts, max_new, sampling)


def answer(
    model: M6,
    tokenizer: Tokenizer,
    images: Sequence[Pixels | None],
    questions: Sequence[str],
    *,
    max_new: int = 32,
    sampling: Sampling = GREEDY,
) -> list[str]:
    """The answer to each question about the picture beside it."""
    begin = tokenizer.prompt("ask")
    prompts = [
        Prompt(source=[*begin, *tokenizer.encode(question)], image=image)
        for image, question in zip(images, questions, strict=True)
    ]
    return _texts(model, tokenizer, prompts, max_new, sampling)


def continue_text(
    model: M6,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    lang: str = "en",
    *,
    max_new: int = 128,
    sampling: Sampling = GREEDY,
) -> list[str]:
    """How each text goes on; of a long one, the model reads the end."""
    begin = tokenizer.prompt("text", lang)
    room = model.config.max_text_len - len(begin)
    prompts = [Prompt(source=[*begin, *tokenizer.encode(text)[-(room // 2) :]]) for text in texts]
    return _texts(model, tokenizer, prompts, max_new, sampling)


def draw(
    model: M6,
    tokenizer: Tokenizer,
    codes: ImageCodes,
    texts: Sequence[str],
    *,
    sampling: Sampling = GREEDY,
    guidance: float = 1.0,
) -> Pixels:
    """A picture for each text: uint8 [count, height, width, 3]."""
    check_belong(model.config, tokenizer, codes)
    begin = tokenizer.prompt("draw")
    count = codes.codes_per_image
    room = model.config.max_text_len - count - len(begin)
    prompts = [Prompt(source=[*begin, *tokenizer.encode(text)[:room]]) for text in texts]
    last = tokenizer.first_code + codes.num_codes
    allowed = [tokenizer.first_code <= i < last for i in range(tokenizer.vocab_size)]
    written = generate(
        model,
        tokenizer,
        prompts,
        max_new=count,
        allowed=allowed,
        stop=None,
        sampling=sampling,
        against=[Prompt(source=begin)] * len(prompts),
        guidance=guidance,
    )
    drawn = [tokenizer.decode_codes(ids) for ids in written]
    return codes.decode(np.array(drawn, dtype=np.int64).reshape(len(drawn), count))


def _texts(
    model: M6,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    max_new: int,
    sampling: Sampling,
) -> list[str]:
    longest = max((len(prompt.source) for prompt in prompts), default=0)
    written = generate(
        model,
        tokenizer,
        prompts,
        max_new=max(1, min(max_new, model.config.max_text_len - longest)),
        allowed=tokenizer.is_written(),
        stop=tokenizer.eos,
        sampling=sampling,
    )
    return [tokenizer.decode(ids) for ids in written]
