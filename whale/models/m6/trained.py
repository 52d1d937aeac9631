"""A trained model with all it takes to use it, in one folder.

Place in the flow: what training leaves behind and what writing, drawing and searching begin with:
`config.json`, `tokenizer.json`, `model.safetensors` and, if it draws, `image_codes.safetensors`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from whale.errors import CheckpointError
from whale.models.m6.config import M6Config
from whale.models.m6.image_codes import ImageCodes
from whale.models.m6.mixture import check_belong
from whale.models.m6.model import M6
from whale.models.m6.tokenizer import Tokenizer

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
WEIGHTS = "model.safetensors"
CODES = "image_codes.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A model, its vocabulary, and its codebook if it draws."""

    model: M6
    tokenizer: Tokenizer
    codes: ImageCodes | None = None

    def __post_init__(self) -> None:
        check_belong(self.model.config, self.tokenizer, self.codes)

    def save(self, folder: str | Path, state: Mapping[str, Tensor] | None = None) -> None:
        """Writes the folder.

        Args:
            folder: made if it is not there.
            state: weights in place of the model's own, such as `step.state_dict()` gives; the model
                may then be on the meta device.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = json.dumps(self.model.config.to_dict(), indent=1)
        (folder / CONFIG).write_text(config + "\n", encoding="utf-8")
        self.tokenizer.save(folder / TOKENIZER)
        if self.codes is not None:
            self.codes.save(folder / CODES)
        whole = self.model.state_dict() if state is None else state
        aliases = _aliases(self.model)
        # A tensor that has two names is written once.
        own = {k: v.detach().cpu().contiguous() for k, v in whole.items() if k not in aliases}
        save_file(own, str(folder / WEIGHTS))

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu") -> Trained:
        """Reads what `save` wrote; the model comes in evaluation mode."""
        folder = Path(folder)
        for name in (CONFIG, TOKENIZER, WEIGHTS):
            if not (folder / name).is_file():
                raise CheckpointError(
                    f"{folder} has no {name}",
                    hint=f"a trained M6 is a folder with {CONFIG}, {TOKENIZER} and {WEIGHTS}",
                )
        config = M6Config.from_dict(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
        with torch.device(device):
            model = M6(config)
        missing, unexpected = model.load_state_dict(
            load_file(str(folder / WEIGHTS), device=str(device)), strict=False
        )
        lost = set(missing) - _aliases(model)
        if lost or unexpected:
            raise CheckpointError(
                f"{folder / WEIGHTS} lacks {sorted(lost)[:3]} and has {sorted(unexpected)[:3]}, "
                "which the model does not",
                hint=f"was {CONFIG} written with it?",
            )
        codes = ImageCodes.load(folder / CODES) if (folder / CODES).is_file() else None
        return cls(model=model.eval(), tokenizer=Tokenizer.load(folder / TOKENIZER), codes=codes)


def _aliases(model: M6) -> set[str]:
    """Further names of parameters that have an earlier one: tied heads, shared layers."""
    first = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - first
