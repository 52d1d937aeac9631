"""MoE: a feed-forward layer of which every token uses a few experts.

Place in the flow: a user's module, `wh.nn.MoE`. On one device it is complete; under `split` its
experts live on the devices of a group and `parallel` sends the tokens to them. Statistics (load,
capacity, balancing) are those of the global micro-batch, whoever computes which rows of it.

Losses are returned, not hidden: a layer with an auxiliary or a z-loss gives `(y, loss)`, and the
caller adds `loss` to its own, so it cannot be lost on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whale.errors import WhaleError
from whale.nn.moe import router as routing
from whale.nn.moe.experts import ACTIVATIONS, expert_ffn, moe_ffn
from whale.nn.moe.router import ROUTERS, Alone, Meeting, Routed
from whale.runtime.compat import in_backward
from whale.runtime.means import same_for_all
from whale.runtime.recompute import install, remember, rerunning

BALANCES = ("bias", "loss", "none")

_RUNNER, _RUNNING = "_runner", "_running"
_PARTS = ("run", "here", "ffn", "_route", "_few_slots", "_count", "_loss")

Compute = Callable[[Tensor, Routed], Tensor]
"""The experts' weighted sum for tokens [T, d]."""


class MoE(nn.Module):
    """A router and `num_experts` feed-forward layers.

    Args:
        dim: Width of a token.
        hidden: Width inside an expert.
        num_experts: Experts in all.
        top_k: Experts of a token. With `top-k`: 1 is Switch, 2 is GShard (gates then sum to 1).
        router: `top-k`; `prototype` (M6-T: `top_k` groups of experts, one winner in each, outputs
            added); `expert-choice` (experts choose tokens, looking at all of them: for encoders).
        balance: `bias` (loss-free: a bias in the selection, moved against the load after every
            micro-batch), `loss` (the auxiliary loss of Switch), or `none`.
        capacity_factor: Room of an expert, in even parts of the tokens' choices; what does not fit
            is dropped, later tokens first. None: nothing is dropped. With expert choice it is how
            many experts a token gets on average (None: `top_k`).
        balance_rate: Step of the bias.
        loss_weight: Weight of the auxiliary loss.
        z_loss: Weight of the squared log-sum of the router's logits.
        activation: "gelu", "relu" or "silu".
        gated: Whether an expert multiplies the activation by a linear half (SwiGLU and its kin).
        split_by: What a `split` cuts: `experts`, or the `columns` inside each; empty: experts where
            there are enough for the devices.

    Example:
        >>> moe = MoE(8, 16, 4, top_k=2)
        >>> moe(torch.randn(2, 3, 8)).shape
        torch.Size([2, 3, 8])
    """

    bias: Tensor
    tokens_seen: Tensor
    tokens_dropped: Tensor

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        *,
        top_k: int = 1,
        router: str = "top-k",
        balance: str = "bias",
        capacity_factor: float | None = None,
        balance_rate: float = 1e-3,
        loss_weight: float = 1e-2,
        z_loss: float = 0.0,
        activation: str = "gelu",
        gated: bool = False,
        split_by: str = "",
    ) -> None:
        super().__init__()
        _check_one_of("split_by", split_by, ("", "experts", "columns"))
        _check_one_of("router", router, ROUTERS)
        _check_one_of("balance", balance, BALANCES)
        _check_one_of("activation", activation, tuple(ACTIVATIONS))
        if not 1 <= top_k <= num_experts or (router == "prototype" and num_experts % top_k):
            raise WhaleError(
                f"MoE: top_k = {top_k} with {num_experts} experts and router {router!r}",
                hint="top_k is at least 1 and at most the number of experts; with `prototype` it "
                "divides it",
            )
        if capacity_factor is not None and capacity_factor <= 0:
            raise WhaleError(
                f"MoE: capacity_factor = {capacity_factor}; allowed: above 0, or None",
                hint="1.25 is usual; None drops nothing",
            )
        if router == "expert-choice" and balance == "loss":
            raise WhaleError(
                'MoE: balance = "loss" with router = "expert-choice", whose experts are balanced',
                hint='use balance = "none"',
            )
        self.dim, self.hidden, self.num_experts = dim, hidden, num_experts
        self.top_k, self.router_kind, self.balance = top_k, router, balance
        self.capacity_factor, self.balance_rate = capacity_factor, balance_rate
        self.loss_weight, self.z_loss = loss_weight, z_loss
        self.activation, self.gated, self.split_by = activation, gated, split_by
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.w_in = nn.Parameter(torch.empty(num_experts, dim, hidden * (2 if gated else 1)))
        # [E, d, f], the layout in which its products are fastest: see `experts`.
        self.w_out = nn.Parameter(torch.empty(num_experts, dim, hidden))
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float32))
        self.register_buffer(
            "tokens_seen", torch.zeros(num_experts, dtype=torch.long), persistent=False
        )
        self.register_buffer("tokens_dropped", torch.zeros((), dtype=torch.long), persistent=False)
        install()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights by fan-in; the bias and the counters at zero."""
        nn.init.normal_(self.w_in, std=self.dim**-0.5)
        nn.init.normal_(self.w_out, std=self.hidden**-0.5)
        nn.init.zeros_(self.bias)
        self.reset_counters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """As ever, but for the bias: in half precision its small steps would be lost."""
        super()._apply(fn, recurse)
        self.bias = self.bias.float()
        return self

    def extra_repr(self) -> str:
        """What `print` shows beside the router."""
        return (
            f"{self.dim} -> {self.hidden}, experts={self.num_experts}, top_k={self.top_k}, "
            f"router={self.router_kind}, balance={self.balance}, capacity={self.capacity_factor}"
        )

    @property
    def has_loss(self) -> bool:
        """Whether `forward` gives a loss beside its output."""
        return self.balance == "loss" or self.z_loss > 0

    @property
    def rows_interact(self) -> bool:
        """Whether a row's output depends on the other rows of its micro-batch."""
        chooses = self.router_kind == "expert-choice"
        return chooses or self.capacity_factor is not None or self.has_loss

    @property
    def drops_by_order(self) -> bool:
        """Whether the order of tokens decides which are dropped.

        Not with expert choice: there it decides between equal scores only, and one of two tokens
        that an expert likes as much is as good a choice as the other.
        """
        return self.capacity_factor is not None and self.router_kind != "expert-choice"

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The output for tokens [..., dim]; with a loss, `(output, loss)`.

        Tokens that are not `valid` [...] (padding) go to no expert, give zeros, and count nowhere.
        """
        runner = self.__dict__.get(_RUNNER)
        if runner is None:
            return self.run(x, valid, Alone(), self.here)
        self.__dict__[_RUNNING] = True
        try:
            found: Tensor | tuple[Tensor, Tensor] = runner(x, valid)
            return found
        finally:
            self.__dict__[_RUNNING] = False

    @property
    def runner(self) -> Any:
        """What `forward` runs instead of the experts here; None: nothing."""
        return self.__dict__.get(_RUNNER)

    def run_by(self, runner: Callable[[Tensor, Tensor | None], Any]) -> None:
        """From now on `forward` runs this; a subclass's own, which calls it, runs as it stands."""
        self.__dict__[_RUNNER] = runner

    def run(
        self, x: Tensor, valid: Tensor | None, meeting: Meeting, compute: Compute
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`forward`, with the replicas of `meeting`, the experts' part done by `compute`."""
        if _RUNNER in self.__dict__ and not self.__dict__.get(_RUNNING):
            raise WhaleError(
                f"{type(self).__name__} calls MoE.run itself, past the replicas and devices that "
                "share these experts",
                hint="call super().forward(x) in its forward",
            )
        tokens = x.reshape(-1, self.dim)
        valid = None if valid is None else valid.reshape(-1)
        # Small differences between logits decide where tokens go: half precision is too coarse.
        wide = torch.promote_types(tokens.dtype, torch.float32)
        kind = x.device.type
        with torch.autocast(kind, enabled=False) if kind != "meta" else nullcontext():
            logits = F.linear(tokens.to(wide), self.router.weight.to(wide))
        routed, scores = self._route(logits, valid, meeting)
        # Before the tokens travel: replicas meet in one place.
        loss = None
        if self.has_loss:
            loss = same_for_all(self._loss(logits, scores, valid, routed, meeting))
        out = compute(_autocast(tokens), routed).view_as(x)
        self._count(routed)
        return out if loss is None else (out, loss)

    def here(self, tokens: Tensor, routed: Routed) -> Tensor:
        """The experts' part where every expert is on this device."""
        if self.router_kind == "expert-choice":
            return self._few_slots(tokens, routed)
        return moe_ffn(
            tokens,
            routed.ids,
            routed.gates,
            _autocast(self.w_in),
            _autocast(self.w_out).transpose(1, 2),
            activation=self.activation,
            gated=self.gated,
        )

    def ffn(self, rows: Tensor, offsets: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
        """The experts of these weights, which are all or some, on rows in expert order."""
        return expert_ffn(
            rows,
            offsets,
            _autocast(w_in),
            _autocast(w_out).transpose(1, 2),
            activation=self.activation,
            gated=self.gated,
        )

    def counters(self) -> dict[str, Tensor]:
        """Since `reset_counters`: share of the choices by expert, share dropped, dead experts."""
        total = self.tokens_seen.sum().clamp(min=1)
        return {
            "load": self.tokens_seen / total,
            "dropped": self.tokens_dropped / total,
            "dead": (self.tokens_seen == 0).sum(),
        }

    def reset_counters(self) -> None:
        """Begins to count anew."""
        self.tokens_seen.zero_()
        self.tokens_dropped.zero_()

    # ---- parts -----------------------------------------------------------------------------------

    def _route(
        self, logits: Tensor, valid: Tensor | None, meeting: Meeting
    ) -> tuple[Routed, Tensor]:
        prototypes = self.router_kind == "prototype"
        scores = routing.probabilities(logits, self.top_k, prototypes=prototypes)
        if self.router_kind == "expert-choice":
            factor = self.capacity_factor or float(self.top_k)
            return routing.chosen_by_experts(scores, factor, meeting, valid), scores
        # A checkpoint's second forward chooses as the first did; the bias has moved since.
        bias = remember(self.bias.clone) if self.balance == "bias" else None
        ids, gates = routing.choose(scores, bias, self.top_k, prototypes=prototypes)
        routed = routing.with_room(
            ids, gates, self.num_experts, self.capacity_factor, meeting, valid
        )
        return routed, scores

    def _few_slots(self, tokens: Tensor, routed: Routed) -> Tensor:
        """Expert choice on one device: of the T * E slots only those that were chosen."""
        found = slots_of(routed)
        rows = self.ffn(tokens.index_select(0, found.tokens), found.offsets, self.w_in, self.w_out)
        return weighted_sum(tokens, rows, found, routed.gates)

    @torch.no_grad()
    def _count(self, routed: Routed) -> None:
        if not self.training or rerunning():
            return
        if in_backward():
            raise WhaleError(
                "MoE runs a second time inside a backward, where it would count its tokens twice",
                hint="recompute with torch.utils.checkpoint",
            )
        load = routed.wanted.sum((0, 1))
        self.tokens_seen += load
        self.tokens_dropped += load.sum() - routed.kept.sum()
        if self.balance == "bias" and self.router_kind != "expert-choice":
            even = load.sum() / self.num_experts
            self.bias += self.balance_rate * torch.sign(even - load)

    def _loss(
        self,
        logits: Tensor,
        scores: Tensor,
        valid: Tensor | None,
        routed: Routed,
        meeting: Meeting,
    ) -> Tensor:
        """Means over the tokens of the global micro-batch, the same on every replica."""
        squares = logits.logsumexp(-1, keepdim=True).square()
        parts = torch.cat([scores, squares], 1)
        if valid is not None:
            parts = torch.where(valid.unsqueeze(1), parts, 0.0)
        totals = meeting.sum(parts.sum(0))
        load = routed.wanted.sum((0, 1)).to(totals.dtype)
        num_tokens = routed.num_tokens.clamp(min=1).to(totals.dtype)
        loss = self.z_loss * totals[-1] / num_tokens
        if self.balance == "loss":
            shares = load / (num_tokens * self.top_k)
            even = (shares * totals[:-1]).sum() / num_tokens
            # With prototypes each group's scores sum to one, and so does its part of the shares.
            groups = self.top_k if self.router_kind == "prototype" else 1
            loss = loss + self.loss_weight * self.num_experts / groups * even
        return loss


def own_parts(module: MoE) -> list[str]:
    """The methods inside `forward` that a subclass has of its own: nobody else's code fits them."""
    return [
        name
        for name in _PARTS
        if getattr(type(module), name) is not getattr(MoE, name) or name in module.__dict__
    ]


def _autocast(tensor: Tensor) -> Tensor:
    """Under `torch.autocast`, in its dtype, as torch's own layers have it; float64 stays."""
    kind = tensor.device.type
    if kind == "meta" or tensor.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


class Slots:
    """Chosen slots in expert order: whose token, which gate, where experts end."""

    def __init__(self, tokens: Tensor, slots: Tensor, offsets: Tensor) -> None:
        self.tokens, self.slots, self.offsets = tokens, slots, offsets


def slots_of(routed: Routed) -> Slots:
    """The slots of `ids` that are routed, by expert, then by token."""
    ids, num_experts = routed.ids, routed.kept.shape[1]
    flat = ids.reshape(-1)
    keys = torch.where(flat < 0, num_experts, flat)
    order = torch.sort(keys, stable=True).indices
    counts = routing.count(keys, num_experts + 1)[:num_experts]
    offsets = counts.cumsum(0).to(torch.int32)
    order = order[: routed.num_slots if routed.num_slots is not None else int(offsets[-1])]
    return Slots(order // ids.shape[1], order, offsets)


def weighted_sum(like: Tensor, rows: Tensor, slots: Slots, gates: Tensor) -> Tensor:
    """[T, d]: the rows of each token's slots, times their gates, added."""
    weights = gates.reshape(-1).index_select(0, slots.slots).unsqueeze(1)
    wide = torch.promote_types(rows.dtype, weights.dtype)
    out = torch.zeros(like.shape, dtype=wide, device=like.device)
    return out.index_add(0, slots.tokens, rows.to(wide) * weights).to(like.dtype)


def _check_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise WhaleError(
            f"MoE: {name} = {value!r}; allowed: {', '.join(map(repr, allowed))}",
            hint=f"choose one of them for {name}",
        )


def expert_counters(model: nn.Module, *, reset: bool) -> dict[str, dict[str, torch.Tensor]]:
    """`counters` of every MoE in a model, by path; with `reset` they count anew from here."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, MoE):
            found[path] = {name: value.clone() for name, value in module.counters().items()}
            if reset:
                module.reset_counters()
    return found
