"""A trained model as a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from whale.errors import CheckpointError, WhaleError
from whale.models.m6.config import M6Config
from whale.models.m6.image_codes import ImageCodes
from whale.models.m6.model import M6
from whale.models.m6.objectives import example_batch
from whale.models.m6.tokenizer import Tokenizer
from whale.models.m6.trained import WEIGHTS, Trained


@pytest.mark.parametrize("share", [False, True])
def test_round_trip(
    config: M6Config,
    tokenizer: Tokenizer,
    pictures: NDArray[np.uint8],
    tmp_path: Path,
    share: bool,
) -> None:
    codes = ImageCodes.fit(pictures, num_codes=16, patch_size=4)
    model = M6(replace(config, share_layers=share))
    Trained(model=model, tokenizer=tokenizer, codes=codes).save(tmp_path / "new")
    assert "lm_head.weight" not in load_file(tmp_path / "new" / WEIGHTS)
    found = Trained.load(tmp_path / "new")
    assert found.model.config == model.config and found.tokenizer == tokenizer
    assert found.codes is not None and torch.equal(found.codes.codebook, codes.codebook)
    batch = example_batch(config, 2)
    assert torch.equal(found.model(**batch)["loss"], model.eval()(**batch)["loss"])
    assert all(torch.equal(x, found.model.state_dict()[n]) for n, x in model.state_dict().items())


def test_weights_of_a_run(config: M6Config, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The model on the meta device, its weights from elsewhere, no codebook."""
    trained = M6(config)
    with torch.device("meta"):
        shape = M6(config)
    Trained(model=shape, tokenizer=tokenizer).save(tmp_path, trained.state_dict())
    found = Trained.load(tmp_path)
    assert found.codes is None
    assert torch.equal(found.model.norm.weight, trained.norm.weight)


def test_refused(config: M6Config, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        Trained.load(tmp_path)
    Trained(model=M6(config), tokenizer=tokenizer).save(tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    del weights["norm.weight"]
    save_file(weights, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"lacks \['norm\.weight'\]"):
        Trained.load(tmp_path)
    with pytest.raises(WhaleError, match="a tokenizer of 400 ids"):
        Trained(model=M6(replace(config, vocab_size=500)), tokenizer=tokenizer)
