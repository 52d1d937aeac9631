"""The sides of `moe_layer.py`: one mixture-of-experts layer, each with its own weights and layout.

A side takes tokens, expert ids and gates, returns the layer's output, and names its two weights;
the gated feed-forward is `(silu(x @ gate) * (x @ up)) @ down`. It is made of weights [E, d, 2 f]
(gate, then up) and [E, f, d], which it stores as it wants them; `canonical` undoes that for the
gradients, so that all can be compared.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from whale.nn.moe.experts import moe_ffn


class Side(nn.Module):
    def canonical(self, name: str) -> torch.Tensor:
        """The gradient of w_in as [E, d, 2 f] or of w_out as [E, f, d]."""
        grad = getattr(self, name).grad
        assert grad is not None
        return grad


class Whale(Side):
    """w_in as [E, d, 2 f], w_out as [E, d, f]."""

    def __init__(self, w_in: torch.Tensor, w_out: torch.Tensor, backend: str | None = None) -> None:
        super().__init__()
        self.w_in = nn.Parameter(w_in.clone())
        self.w_out = nn.Parameter(w_out.transpose(1, 2).contiguous())
        self.backend = backend

    def forward(self, x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return moe_ffn(
            x, ids, gates, self.w_in, self.w_out.transpose(1, 2),
            activation="silu", gated=True, backend=self.backend,
        )  # fmt: skip

    def canonical(self, name: str) -> torch.Tensor:
        grad = super().canonical(name)
        return grad.transpose(1, 2) if name == "w_out" else grad


class Plain(Side):
    """Sort, gather, two grouped products, weighted scatter-add, in plain torch."""

    def __init__(self, w_in: torch.Tensor, w_out: torch.Tensor) -> None:
        super().__init__()
        self.w_in = nn.Parameter(w_in.clone())
        self.w_out = nn.Parameter(w_out.clone())

    def forward(self, x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return plain(x, ids, gates, self.w_in, self.w_out)


def silu_gated(h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def plain(
    x: torch.Tensor,
    ids: torch.Tensor,
    gates: torch.Tensor,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    act: Callable[[torch.Tensor], torch.Tensor] = silu_gated,
) -> torch.Tensor:
    flat, experts = ids.reshape(-1), w_in.shape[0]
    order = flat.argsort(stable=True)
    counted = flat.int() if flat.is_cuda else flat.float()
    counts = torch.histc(counted, bins=experts, min=0, max=experts - 1)
    offsets = counts.cumsum(0, dtype=torch.int32)
    tokens = order // ids.shape[1]
    h = F.grouped_mm(x.index_select(0, tokens), w_in, offs=offsets)
    y = F.grouped_mm(act(h), w_out, offs=offsets)
    y = y * gates.reshape(-1).index_select(0, order).unsqueeze(1).to(y.dtype)
    return torch.zeros_like(x).index_add(0, tokens, y)


class Compiled(Plain):
    """The plain layer under torch.compile."""

    def __init__(self, w_in: torch.Tensor, w_out: torch.Tensor) -> None:
        super().__init__(w_in, w_out)
        torch.compiler.reset()
        self.compiled = torch.compile(plain, dynamic=False)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return self.compiled(x, ids, gates, self.w_in, self.w_out)


class Transformers(Side):
    """The experts of transformers' Mixtral with `experts_implementation="grouped_mm"`."""

    def __init__(self, w_in: torch.Tensor, w_out: torch.Tensor) -> None:
        super().__init__()
        from transformers import MixtralConfig  # noqa: PLC0415 - slow to load, one side only
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts  # noqa: PLC0415

        experts, d, wide = w_in.shape
        config = MixtralConfig(
            hidden_size=d, intermediate_size=wide // 2, num_local_experts=experts, hidden_act="silu"
        )
        config._experts_implementation = "grouped_mm"
        with torch.device("meta"):
            self.experts = MixtralExperts(config)
        self.experts.gate_up_proj = nn.Parameter(w_in.transpose(1, 2).contiguous())
        self.experts.down_proj = nn.Parameter(w_out.transpose(1, 2).contiguous())

    @property
    def w_in(self) -> nn.Parameter:
        return self.experts.gate_up_proj

    @property
    def w_out(self) -> nn.Parameter:
        return self.experts.down_proj

    def forward(self, x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return self.experts(x, ids, gates)

    def canonical(self, name: str) -> torch.Tensor:
        return super().canonical(name).transpose(1, 2)


SIDES = {
    "whale": Whale,
    "transformers": Transformers,
    "plain": Plain,
    "compiled": Compiled,
}
