"""Writing and scoring: equal to what the forward says, alone and in a batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from whale.errors import WhaleError
from whale.models.m6 import generate as writing
from whale.models.m6.config import M6Config
from whale.models.m6.generate import (
    Prompt,
    Sampling,
    answer,
    caption,
    continue_text,
    draw,
    generate,
)
from whale.models.m6.image_codes import ImageCodes
from whale.models.m6.model import M6
from whale.models.m6.objectives import Example, collate
from whale.models.m6.objectives import caption as caption_example
from whale.models.m6.objectives import draw as draw_example
from whale.models.m6.score import log_likelihood, score
from whale.models.m6.tokenizer import Tokenizer

Pictures = NDArray[np.uint8]
NAMES = ["red apple", "blue ball", "dog face", "cat"]


@pytest.fixture
def model(config: M6Config) -> M6:
    return M6(replace(config, num_layers=2, dropout=0.1))


@pytest.fixture
def taught(model: M6, config: M6Config, tokenizer: Tokenizer, pictures: Pictures) -> M6:
    """Knows four pictures by heart, in words and in codes."""
    codes = ImageCodes.fit(pictures, num_codes=16, patch_size=4).encode(pictures)
    rows = [
        caption_example(tokenizer, pictures[i], name, "en", limit=24)
        for i, name in enumerate(NAMES)
    ]
    rows += [
        draw_example(tokenizer, name, codes[i].tolist(), limit=24) for i, name in enumerate(NAMES)
    ]
    batch = collate(config, tokenizer, rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.eval()
    for _ in range(160):
        loss = model(**batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    return model.train()


def test_greedy_is_the_most_likely_token_of_the_forward(
    model: M6, config: M6Config, tokenizer: Tokenizer, pictures: Pictures
) -> None:
    """Each prompt alone, by hand; then all in one batch, though of different lengths."""
    prompts = [
        Prompt(source=tokenizer.prompt("caption", "en"), image=pictures[0]),
        Prompt(source=[*tokenizer.prompt("ask"), *tokenizer.encode("red or blue")]),
        Prompt(source=[tokenizer.special("<text>")]),
    ]
    everything = [True] * config.vocab_size
    model.double().eval()
    together = generate(model, tokenizer, prompts, max_new=5, allowed=everything, stop=None)
    for prompt, written in zip(prompts, together, strict=True):
        ids: list[int] = []
        for _ in range(5):
            row = Example(source=prompt.source, target=[*ids, 0], image=prompt.image)
            batch = collate(config, tokenizer, [row])
            logits = model(**batch)["logits"][0, len(prompt.source) + len(ids)]
            ids.append(int(logits.argmax()))
        assert written == ids


def test_only_what_is_allowed_until_the_stop(model: M6, tokenizer: Tokenizer) -> None:
    prompt = Prompt(source=tokenizer.prompt("text", "en"))
    allowed = [i in (tokenizer.eos, 30, 31) for i in range(tokenizer.vocab_size)]
    sampling = Sampling(temperature=5.0, seed=1)
    rows = generate(
        model,
        tokenizer,
        [prompt] * 40,
        max_new=12,
        allowed=allowed,
        stop=tokenizer.eos,
        sampling=sampling,
    )
    assert {i for row in rows for i in row} == {30, 31}
    assert len({len(row) for row in rows}) > 3
    with pytest.raises(WhaleError, match="2 tokens and 23 new ones, in 24"):
        generate(model, tokenizer, [prompt], max_new=23, allowed=allowed, stop=None)


def test_draws_are_a_rows_own(
    model: M6, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["red", "blue ball", "red", "dog"]
    sampling = Sampling(temperature=1.0, top_k=20)
    together = continue_text(model, tokenizer, texts, sampling=sampling, max_new=6)
    assert together[0] != together[2]
    monkeypatch.setattr(writing, "ROWS_AT_ONCE", 3)
    assert continue_text(model, tokenizer, texts, sampling=sampling, max_new=6) == together


def test_sampling_follows_the_probabilities() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(2000, 3)
    draws = torch.linspace(0, 1, 2001, dtype=torch.float64)[:-1]
    counts = torch.bincount(Sampling(temperature=1.0).choose(logits, draws), minlength=3)
    assert counts.tolist() == pytest.approx([1000, 600, 400], abs=2)
    counts = torch.bincount(Sampling(temperature=1.0, top_k=2).choose(logits, draws), minlength=3)
    assert counts.tolist() == pytest.approx([1250, 750, 0], abs=2)
    assert Sampling().choose(logits, draws).max() == 0
    with pytest.raises(WhaleError, match="top_k 0"):
        Sampling(top_k=0)


def test_tasks_of_a_model_that_learned_them(
    taught: M6, config: M6Config, tokenizer: Tokenizer, pictures: Pictures
) -> None:
    assert caption(taught, tokenizer, list(pictures[:4])) == NAMES
    assert taught.training
    codes = ImageCodes.fit(pictures, num_codes=16, patch_size=4)
    wanted = codes.decode(codes.encode(pictures[:4]))
    np.testing.assert_array_equal(draw(taught, tokenizer, codes, NAMES), wanted)
    guided = draw(taught, tokenizer, codes, NAMES, guidance=2.0)
    assert guided.shape == (4, 16, 16, 3) and guided.dtype == np.uint8
    texts = answer(taught, tokenizer, [pictures[0], None], ["which?", "red or blue?"], max_new=4)
    assert len(texts) == 2
    assert draw(taught, tokenizer, codes, []).shape == (0, 16, 16, 3)
    assert continue_text(taught, tokenizer, []) == []
    long = continue_text(taught, tokenizer, ["a red apple " * 9], max_new=99)
    assert len(tokenizer.encode(long[0])) <= config.max_text_len


def test_score_is_the_loss_of_each_pair(
    taught: M6, config: M6Config, tokenizer: Tokenizer, pictures: Pictures
) -> None:
    """And finds the right name for a picture, and the right picture for a name."""
    pairs = [(i, j) for i in range(4) for j in range(4)]
    images, texts = [pictures[i] for i, _ in pairs], [NAMES[j] for _, j in pairs]
    table = score(taught, tokenizer, images, texts).view(4, 4)
    rows = caption_example(tokenizer, pictures[0], NAMES[3], "en", limit=24)
    with torch.no_grad():
        loss = taught.eval()(**collate(config, tokenizer, [rows]))["loss"]
    torch.testing.assert_close(table[0, 3], -loss, rtol=1e-4, atol=1e-4)
    assert table.argmax(0).tolist() == table.argmax(1).tolist() == [0, 1, 2, 3]
    relative = score(taught, tokenizer, images, texts, relative=True).view(4, 4)
    assert relative.argmax(0).tolist() == [0, 1, 2, 3]
    sums, counts = log_likelihood(taught, tokenizer, [])
    assert len(sums) == len(counts) == 0
