"""How far the gradients of an M6 in bfloat16 are from those in float32: the noise under `m6_step`.

`python -m benchmarks.m6_noise --out benchmarks/results/m6-noise.md` (seconds, on the CPU). Both
have the same weights and send every token to the same experts, so that only rounding differs. No
kernel of Whale's is involved.
"""

from __future__ import annotations

import argparse
import copy
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from whale.models.m6.config import presets
from whale.models.m6.model import M6
from whale.models.m6.objectives import example_batch
from whale.nn.moe.layer import MoE
from whale.nn.moe.router import Alone, Routed

CONFIG = replace(
    presets["m6-base"], dim=256, num_heads=4, ffn_dim=512, num_experts=8, vocab_size=2048,
    num_codes=16, max_text_len=64, capacity_factor=None, balance="none",
)  # fmt: skip
ROWS = 32
SHOWN = ("q_proj.weight", "router.weight", "w_in", "w_out")


def gradients(model: M6, chosen: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of the parameters shown, in the first and the last block; `chosen` fixes the experts."""
    for path, moe in model.named_modules():
        if isinstance(moe, MoE):

            def forward(x: Tensor, valid: Tensor, moe: MoE = moe, path: str = path) -> Tensor:
                def compute(tokens: Tensor, routed: Routed) -> Tensor:
                    ids = chosen.setdefault(path, routed.ids)
                    return moe.here(tokens, routed._replace(ids=ids))

                out = moe.run(x, valid, Alone(), compute)
                assert isinstance(out, Tensor)
                return out

            moe.forward = forward  # type: ignore[method-assign, assignment]
    model(**example_batch(CONFIG, ROWS))["loss"].backward()
    ends = ("blocks.0.", f"blocks.{CONFIG.num_layers - 1}.")
    return {
        name: p.grad.double()
        for name, p in model.named_parameters()
        if name.startswith(ends) and name.endswith(SHOWN) and p.grad is not None
    }


def main() -> int:
    """Compares and writes the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    # oneDNN's bfloat16 products end the process on some virtual machines.
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    torch.manual_seed(0)
    half = M6(CONFIG).bfloat16()
    chosen: dict[str, Tensor] = {}
    truth = gradients(copy.deepcopy(half).float(), chosen)
    found = gradients(half, chosen)
    lines = [
        "# An M6 in bfloat16 beside float32",
        "",
        f"`python -m benchmarks.m6_noise --out` this file. {datetime.now(UTC):%Y-%m-%d}, CPU, "
        f"torch {torch.__version__}. {CONFIG.num_layers} layers, width {CONFIG.dim}, "
        f"{CONFIG.num_experts} experts each, {ROWS} rows; the same weights and the same choice of "
        "experts, no kernel of Whale's.",
        "",
        "| gradient | distance, relative |",
        "|---|---|",
    ]
    for name, exact in truth.items():
        apart = float((found[name] - exact).norm() / exact.norm())
        lines.append(f"| `{name}` | {apart:.3f} |")
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(options.out.read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
