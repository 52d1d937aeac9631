"""Models with code of their own where splits replace, skip or cannot see code.

Place in the flow: trained by `test_own_code` under several layouts beside plain torch. Each is a
small network `net(x [rows, 3, 8]) -> logits [rows, 3, 10]`, and must train exactly or be refused.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

import whale as wh

WIDTH, HIDDEN, CLASSES, LENGTH = 8, 12, 10, 3


class Swish(torch.autograd.Function):
    """x * sigmoid(x), with a backward that torch cannot see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grads[0] * (s + x * s * (1 - s))


class Sign(torch.autograd.Function):
    """A straight-through estimator; `setup_context` style."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.sign(x) + 0.1 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * (ctx.saved_tensors[0].abs() < 1)


class Reversal(torch.autograd.Function):
    """Gives its input back, and half of minus its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -0.5 * grads[0]


class RowNorm(torch.autograd.Function):
    """Rows divided by their norm: not elementwise, and its gradient is its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        size = x.norm(dim=-1, keepdim=True) + 1
        ctx.save_for_backward(size)
        return x / size

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / ctx.saved_tensors[0]


class OwnCrossEntropy(torch.autograd.Function):
    """The mean cross-entropy, written by hand."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        logs = logits.log_softmax(-1)
        ctx.save_for_backward(logs, target)
        return -logs.gather(-1, target.unsqueeze(-1)).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logs, target = ctx.saved_tensors
        picked = F.one_hot(target, logs.shape[-1]).to(logs)
        return grads[0] * (logs.exp() - picked) / len(target), None


swish, straight, reverse, by_row = Swish.apply, Sign.apply, Reversal.apply, RowNorm.apply


def ones_below(h: Tensor) -> Tensor:
    """A mask by place in the width."""
    return (torch.arange(h.shape[-1]) < h.shape[-1] // 2).to(h)


INSIDE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "function": lambda b, h: swish(h),
    "estimator": lambda b, h: straight(h),
    "reversal": lambda b, h: reverse(F.gelu(h)),
    "row-function": lambda b, h: by_row(h),
    "width-shape": lambda b, h: F.gelu(h) / math.sqrt(h.shape[-1]),
    "width-size": lambda b, h: F.silu(h) * h.size(-1) ** -0.5,
    "width-numel": lambda b, h: torch.tanh(h) * (len(h) / h.numel()),
    "width-tensor": lambda b, h: torch.relu(h) / torch.tensor(float(h.shape[-1]), dtype=h.dtype),
    "width-mask": lambda b, h: torch.tanh(h) * ones_below(h),
    "width-noise": lambda b, h: F.gelu(h) + h.new_full(h.shape, 0.1).cumsum(-1),
    "width-weight": lambda b, h: F.gelu(h) / b.up.weight.shape[0],
    "width-features": lambda b, h: F.gelu(h) / b.up.out_features,
    "layer-norm": lambda b, h: F.gelu(F.layer_norm(h, h.shape[-1:])),
    "width-norm": lambda b, h: F.gelu(h) * h.detach().norm(dim=-1, keepdim=True),
    "hook": lambda b, h: _hooked(F.gelu(h)),
    "in-place": lambda b, h: F.gelu(h).mul_(0.5).add_(1.0),
    "set-item": lambda b, h: _edited(F.gelu(h)),
    "weight-norm-read": lambda b, h: F.gelu(h) * b.up.weight.norm(),
    "bias-read": lambda b, h: F.gelu(h) + b.up.bias.mean(),
    "gram": lambda b, h: F.gelu(h) @ (b.up.weight @ b.up.weight.t()),
    "all-parameters": lambda b, h: F.gelu(h) * sum(p.square().sum() for p in b.parameters()).sqrt(),
    "second-use": lambda b, h: F.gelu(h) + F.linear(b.down(h), b.up.weight),
    "data-read": lambda b, h: F.gelu(h) * b.down.weight.data.abs().max(),
    "weight-function": lambda b, h: F.gelu(h) * swish(b.up.bias.sum()),
}
"""What a block does between its two Linears."""


def _hooked(h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda g: 0.5 * g - g.mean(-1, keepdim=True))
    return h


def _edited(h: Tensor) -> Tensor:
    h[..., 1] = 0.5
    h[..., -1:] *= 2
    return h


def _masked(logits: Tensor) -> Tensor:
    return logits.masked_fill_(torch.arange(CLASSES) == 3, -5.0)


LOGITS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "set-logits": lambda n, y: _edited(y),
    "mask-logits": lambda n, y: _masked(y),
    "hook-logits": lambda n, y: _hooked(y),
    "function-logits": lambda n, y: by_row(y) * 3,
    "reverse-logits": lambda n, y: reverse(y),
    "view-edit": lambda n, y: _masked(y.view(-1, CLASSES)).view(y.shape),
    "penalty": lambda n, y: y * n.head.weight.norm(),
    "scaled-logits": lambda n, y: y / math.sqrt(y.shape[-1]),
    "soft-cap": lambda n, y: 3 * torch.tanh(y / 3),
    "plain": lambda n, y: y,
}
"""What a network does with its logits."""


class Block(nn.Module):
    """A residual pair of Linears with something in between."""

    def __init__(self, inside: str = "", linear: Callable[..., nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.norm, self.inside = nn.LayerNorm(WIDTH), inside
        self.up, self.down = linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH)
        self.act: nn.Module = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        h = INSIDE[self.inside](self, h) if self.inside else self.act(h)
        return x + self.down(h)


SWITCH = {"late": ""}
"""What code does that no capture has seen."""


class Flat(nn.Module):
    """A head that sees tokens, not rows; evaluation edits its logits."""

    def __init__(self, edits: bool = False) -> None:
        super().__init__()
        self.block, self.head, self.edits = Block(), nn.Linear(WIDTH, CLASSES), edits

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.block(x).flatten(0, 1))
        if self.edits and not self.training:
            y[:, 0] = -5.0
        if SWITCH["late"] == "edit":
            y[:, 1] = 2.0
        return by_row(y) if SWITCH["late"] == "function" else y


class Detached(Block):
    """Its output needs no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self, inside: str = "", logits: str = "plain", **more: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(inside, **more), Block(inside, **more)])
        self.head, self.logits = nn.Linear(WIDTH, CLASSES), logits

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return LOGITS[self.logits](self, self.head(x))


# ---- subclasses, hooks and the like --------------------------------------------------------------


class ScaledLinear(nn.Linear):
    """A forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.weight.shape[0] ** -0.5


class NamedLinear(nn.Linear):
    """A subclass without a forward of its own."""


class CalledLinear(nn.Linear):
    """Another way to be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        return out - out.mean(-1, keepdim=True)


class Slope(nn.Module):
    """An activation with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, self.slope * x)


class Gated(nn.GELU):
    """A subclass of an elementwise module that is not."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * input.softmax(-1)


class SharedExperts(wh.nn.MoE):
    """A mixture with an expert that all tokens use."""

    def __init__(self, **more: Any) -> None:
        super().__init__(WIDTH, HIDDEN, 4, top_k=2, balance="none", **more)
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Any:
        out = super().forward(x * 0.5, valid)
        return torch.tanh(self.shared(x)) + (out if isinstance(out, Tensor) else out[0])


class ReadingExperts(SharedExperts):
    """Reads the experts' weights in code of its own."""

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Any:
        return super().forward(x, valid) * self.w_in.square().mean()


class MoEBlock(nn.Module):
    """A mixture in a residual block."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(WIDTH), experts

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(self.norm(x))


class ScaledNorm(nn.BatchNorm1d):
    """A batch norm that does more."""

    def forward(self, input: Tensor) -> Tensor:
        return 0.5 * super().forward(input.transpose(1, 2)).transpose(1, 2) + 0.1 * input


class PastNorm(nn.BatchNorm1d):
    """A batch norm that calls its base by name, past whatever stands between."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.BatchNorm1d.forward(self, input.transpose(1, 2)).transpose(1, 2)


class OwnAttention(nn.MultiheadAttention):
    """Takes one tensor, and does more."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        out, _ = super().forward(x, x, x, need_weights=False)
        return out * self.out_proj.out_features**-0.5


class NamedAttention(nn.MultiheadAttention):
    """A subclass without a forward of its own."""


class AttentionBlock(nn.Module):
    """Self-attention in a residual block."""

    def __init__(self, attention: nn.Module, simple: bool) -> None:
        super().__init__()
        self.norm, self.attention, self.simple = nn.LayerNorm(WIDTH), attention, simple

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + (self.attention(y) if self.simple else self.attention(y, y, y)[0])


class Heads(nn.Module):
    """Attention whose scale is taken from a width, or goes through something of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.how, self.num_heads = nn.LayerNorm(WIDTH), how, 4
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v_proj, self.out_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = self.q_proj(y), self.k_proj(y), self.v_proj(y)
        if self.how == "width":
            q = q * q.shape[-1] ** -0.5
        elif self.how == "tensor":
            q = q * torch.full((), float(q.shape[-1])).rsqrt().to(q)
        elif self.how == "function":
            v = swish(v)
        elif self.how == "hook":
            v = _hooked(v)
        q, k, v = (t.view(*t.shape[:2], self.num_heads, -1).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.out_proj(mixed.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    """Stacked experts as transformers writes them, with something the looks do not show."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.num_experts, self.how = 4, how
        self.gate_up_proj = nn.Parameter(torch.randn(4, 2 * HIDDEN, WIDTH) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(4, WIDTH, HIDDEN) * 0.3)
        if how == "buffer":
            self.register_buffer("scales", torch.arange(1.0, 5.0))
        self.factors = [1.0, 2.0, 3.0, 4.0]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, slot = torch.where(top_k_index == expert)
            weight = top_k_weights[token, slot, None]
            rows = hidden_states[token]
            if self.how == "input":
                rows = rows * weight
            gate, up = F.linear(rows, self.gate_up_proj[expert]).chunk(2, -1)
            rows = F.linear(F.silu(gate) * up, self.down_proj[expert])
            if self.how == "buffer":
                rows = rows * self.scales[expert]
            elif self.how == "list":
                rows = rows * self.factors[expert]
            elif self.how == "index":
                rows = rows * (1.0 + expert)
            rows = rows if self.how == "input" else rows * weight
            out = out.index_add(0, token, rows)
        return out


class StackBlock(nn.Module):
    """A router and stacked experts."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4), Stack(how)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).view(-1, WIDTH)
        weights, ids = self.router(y).softmax(-1).topk(2, -1)
        return x + self.experts(y, ids, weights).view(x.shape)


class Counting(nn.Module):
    """A block that counts its own calls in training."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.calls = Block(), 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.block(x) / (1 + self.calls)


def _with(change: Callable[[Net], Any], **more: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        net = Net(**more)
        change(net)
        return net

    return build


def _blocks(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return _with(lambda net: net.blocks.__setitem__(1, make()))


def _each(change: Callable[[Block], Any]) -> Callable[[], nn.Module]:
    return _with(lambda net: [change(block) for block in net.blocks])  # type: ignore[arg-type]


def _by_size(_: Any, args: Any, out: Tensor) -> Tensor:
    return out / (1 + out.detach().norm(dim=-1, keepdim=True))


def _own_forward(block: Block) -> None:
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        return out - out.mean(-1, keepdim=True)

    block.up.forward = types.MethodType(forward, block.up)  # type: ignore[method-assign]


def _half_gradient(_: Any, grad_input: Any, grad_output: Any) -> Any:
    return (0.5 * grad_input[0] - grad_input[0].mean(-1, keepdim=True),)


HEADS = ("", "width", "tensor", "function", "hook")
STACKS = ("buffer", "list", "index", "input")
SAMPLES: dict[str, Callable[[], nn.Module]] = {
    **{name: (lambda n=name: Net(n)) for name in INSIDE},
    **{name: (lambda n=name: Net("", n)) for name in LOGITS},
    "own-linear": lambda: Net(linear=ScaledLinear),
    "named-linear": lambda: Net(linear=NamedLinear),
    "called-linear": lambda: Net(linear=CalledLinear),
    "weight-norm": _each(lambda b: nn.utils.parametrizations.weight_norm(b.up)),
    "parametrized": _each(lambda b: register_parametrization(b.up, "weight", Half())),
    "slope": _each(lambda b: setattr(b, "act", Slope())),
    "own-gelu": _each(lambda b: setattr(b, "act", Gated())),
    "forward-hook": _each(lambda b: b.up.register_forward_hook(_by_size)),
    "act-hook": _each(lambda b: b.act.register_forward_hook(_by_size)),
    "head-hook": _with(lambda net: net.head.register_forward_hook(_by_size)),
    "pre-hook": _each(
        lambda b: b.down.register_forward_pre_hook(lambda m, a: (_by_size(m, a, a[0]),))
    ),
    "backward-hook": _each(lambda b: b.down.register_full_backward_hook(_half_gradient)),
    "given-forward": _each(_own_forward),
    "shared-experts": _blocks(lambda: MoEBlock(SharedExperts())),
    "shared-experts-loss": _blocks(lambda: MoEBlock(SharedExperts(z_loss=0.1))),
    "reading-experts": _blocks(lambda: MoEBlock(ReadingExperts())),
    "own-batch-norm": _blocks(lambda: ScaledNorm(WIDTH)),
    "own-attention": _blocks(
        lambda: AttentionBlock(OwnAttention(WIDTH, 4, batch_first=True), True)
    ),
    "named-attention": _blocks(
        lambda: AttentionBlock(NamedAttention(WIDTH, 4, batch_first=True), False)
    ),
    **{f"heads-{h}": _blocks(lambda h=h: Heads(h)) for h in HEADS},
    "counting": _blocks(Counting),
    "stack": _blocks(lambda: StackBlock("")),
}  # fmt: skip
REFUSED: dict[str, Callable[[], nn.Module]] = {
    "past-batch-norm": _blocks(lambda: PastNorm(WIDTH)),
    **{f"stack-{h}": _blocks(lambda h=h: StackBlock(h)) for h in STACKS},
}  # fmt: skip
"""Exact where it runs; what cannot be exact says so."""


class Half(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + x.norm())


def build(name: str) -> nn.Module:
    """A sample in float64, the same on every rank."""
    torch.manual_seed(7)
    return {**SAMPLES, **REFUSED}[name]().double()


def batch(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (rows, LENGTH), generator=generator)


def loss(out: Tensor, target: Tensor) -> Tensor:
    """Flattens, as losses do."""
    return F.cross_entropy(out.view(-1, out.shape[-1]), target.flatten())


def own_loss(out: Tensor, target: Tensor) -> Tensor:
    """The same by hand."""
    return OwnCrossEntropy.apply(out.flatten(0, -2), target.flatten())  # type: ignore[no-any-return]
