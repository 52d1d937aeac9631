"""nn.TransformerEncoder without nested tensors, and with what those do to padding.

Place in the flow: installed on every copy that Whale runs or traces. In evaluation torch may pack
the valid tokens into a nested tensor; when it unpacks them, padded places are zeros, where its
ordinary path has numbers. Shards and traces know no nested tensors, and under a function mode torch
does not make any. So the ordinary path runs, and the zeros are put where one device has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from whale.errors import WhaleError
from whale.nn.forwards import replace_forward, runs
from whale.runtime.compat import is_fake, nested_tensors_made_by, without_functions


class PaddedEncoder:
    """The forward of an nn.TransformerEncoder, by its ordinary path."""

    def __init__(self, module: Any, in_parts: bool) -> None:
        self.module, self.in_parts = module, in_parts

    def __call__(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """The replaced forward."""
        module, padded = self.module, src_key_padding_mask
        if padded is None or mask is not None or not self._packs(src, padded):
            return self._ordinary(src, mask, padded, is_causal)
        norm = module.norm
        if norm is not None:  # it comes after the zeros
            module._modules["norm"] = None
        try:
            out = self._ordinary(src, mask, padded, is_causal)
        finally:
            if norm is not None:
                module._modules["norm"] = norm
        hidden = padded if padded.dtype == torch.bool else padded != 0
        if getattr(module, "mask_check", True):  # only where all padding is at the end
            last = (hidden[:, :-1] <= hidden[:, 1:]).all()
            if self.in_parts and not is_fake(last) and not bool(last):
                raise WhaleError(
                    "rows with padding that is not at their end are evaluated by an "
                    "nn.TransformerEncoder of several replicas: torch leaves zeros in padding only "
                    "where all rows of a batch have it at their end, and a replica sees its own",
                    hint="make the encoder with enable_nested_tensor=False, or pad at the end",
                )
            hidden = hidden & last
        out = out.masked_fill(hidden.unsqueeze(-1), 0.0)
        return out if norm is None else norm(out)  # type: ignore[no-any-return]

    def _ordinary(self, *args: Any) -> Tensor:
        module = self.module
        packs = module.use_nested_tensor
        module.use_nested_tensor = False
        try:
            return type(module).forward(module, *args)  # type: ignore[no-any-return]
        finally:
            module.use_nested_tensor = packs

    def _packs(self, src: Tensor, padded: Tensor) -> bool:
        """Whether torch's own code would make a nested tensor here, whatever the mask's values."""
        module = self.module
        # All that it reads of the module before it calls the first layer.
        looks = SimpleNamespace(
            layers=_Layers(module.layers[0]),
            use_nested_tensor=module.use_nested_tensor,
            mask_check=False,
            norm=None,
        )
        try:
            with nested_tensors_made_by(_packed), without_functions():
                nn.TransformerEncoder.forward(looks, src, None, padded)  # type: ignore[arg-type]
        except _PackedError:
            return True
        except _CalledError:
            return False
        return False


class _PackedError(Exception):
    """Torch makes a nested tensor."""


class _CalledError(Exception):
    """Torch calls a layer, and has made none."""


def _packed(*args: Any, **kwargs: Any) -> Any:
    raise _PackedError


class _Layers:
    def __init__(self, first: nn.Module) -> None:
        self.first = first

    def __getitem__(self, index: int) -> nn.Module:
        return self.first

    def __iter__(self) -> Iterator[nn.Module]:
        raise _CalledError


def install_padding(model: nn.Module, *, in_parts: bool = False) -> None:
    """Encoders of a copy compute by their ordinary path; a forward of the user's own stays.

    `in_parts`: several replicas each have some of the rows.
    """
    for module in model.modules():
        if runs(module, nn.TransformerEncoder) and getattr(module, "use_nested_tensor", False):
            replace_forward(module, PaddedEncoder(module, in_parts))
