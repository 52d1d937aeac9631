"""One mixture-of-experts layer, forward + backward: Whale, transformers, plain torch, compiled.

    python -m benchmarks.moe_layer --out DIR [--page benchmarks/results/moe-layer.md]

Equal inputs and weights; sides take turns and rotate their order; a time is that of `--steps`
forward + backward passes in a row between two events, and the median over `--rounds` is reported
with the extremes. TFLOP/s counts the experts' products alone (6 * slots * d * 3 f) over the whole
layer's time. Errors are relative norms against the same layer in float32 (one product per expert).
Peak memory is what a pass allocates above inputs and weights, gradients included. Routing is
uniformly random.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.moe_layer_sides import SIDES, Side

# experts, experts per token, hidden features
SHAPES = {
    "8 x top-1": (8, 1, 2816),
    "64 x top-1": (64, 1, 2816),
    "64 x top-2": (64, 2, 2816),
    "512 x top-1": (512, 1, 2816),
    "128 x top-8": (128, 8, 768),
}


def _inputs(
    tokens: int, d: int, experts: int, k: int, f: int, device: str
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(experts + k)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return made.normal_(0, scale, generator=generator)

    scores = torch.rand(tokens, experts, device=device, generator=generator)
    given = {
        "x": normal(tokens, d),
        "ids": scores.topk(k, dim=1).indices,
        "gates": torch.rand(tokens, k, device=device, generator=generator),
        "grad": normal(tokens, d),
    }
    w_in = normal(experts, d, 2 * f, scale=d**-0.5)
    return given, w_in, normal(experts, f, d, scale=f**-0.5)


def _step(side: Side, given: dict[str, torch.Tensor]) -> torch.Tensor:
    given["x"].grad = given["gates"].grad = None
    for weight in (side.w_in, side.w_out):
        weight.grad = None
    out = side(given["x"], given["ids"], given["gates"])
    out.backward(given["grad"])
    return out.detach()


class Errors:
    """Squared distances and norms by result, summed over experts."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}

    def add(self, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        off = float((got.float() - want).square().sum(dtype=torch.float64))
        norm = float(want.square().sum(dtype=torch.float64))
        old = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (old[0] + off, old[1] + norm)

    def relative(self) -> dict[str, float]:
        return {name: math.sqrt(off / norm) for name, (off, norm) in self.sums.items()}


def _errors(
    sides: dict[str, Side],
    given: dict[str, torch.Tensor],
    w_in: torch.Tensor,
    w_out: torch.Tensor,
) -> dict[str, dict[str, float]]:
    """Of every side against float32, one expert at a time."""
    found = {name: Errors() for name in sides}
    outs = {}
    for name, side in sides.items():
        out = _step(side, given)
        outs[name] = (out, given["x"].grad, given["gates"].grad)
    flat, k = given["ids"].reshape(-1), given["ids"].shape[1]
    x, grad = given["x"].detach().float(), given["grad"].float()
    gates = given["gates"].detach().reshape(-1)
    want = [torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(gates)]
    for e in range(len(w_in)):
        slots = (flat == e).nonzero().squeeze(1)
        leaves = [
            t.detach().requires_grad_()
            for t in (x[slots // k], gates[slots], w_in[e].float(), w_out[e].float())
        ]
        left, right = (leaves[0] @ leaves[2]).chunk(2, dim=1)
        y = (torch.nn.functional.silu(left) * right) @ leaves[3] * leaves[1].unsqueeze(1)
        grads = torch.autograd.grad(y, leaves, grad[slots // k])
        want[0].index_add_(0, slots // k, y.detach())
        want[1].index_add_(0, slots // k, grads[0])
        want[2][slots] = grads[1]
        for name, side in sides.items():
            found[name].add("w_in", side.canonical("w_in")[e], grads[2])
            found[name].add("w_out", side.canonical("w_out")[e], grads[3])
    for name, (out, of_x, of_gates) in outs.items():
        found[name].add("out", out, want[0])
        found[name].add("x", of_x, want[1])
        found[name].add("gates", of_gates.reshape(-1), want[2])
    return {name: errors.relative() for name, errors in found.items()}


def _seconds(side: Side, given: dict[str, torch.Tensor], steps: int) -> float:
    if not given["x"].is_cuda:
        began = time.perf_counter()
        for _ in range(steps):
            _step(side, given)
        return (time.perf_counter() - began) / steps
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(steps):
        _step(side, given)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / steps / 1e3


def _peak(side: Side, given: dict[str, torch.Tensor]) -> int:
    given["x"].grad = given["gates"].grad = side.w_in.grad = side.w_out.grad = None
    if not given["x"].is_cuda:
        return 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _step(side, given)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(
    tokens: int, d: int, shape: tuple[int, int, int], args: argparse.Namespace
) -> dict[str, Any]:
    experts, k, f = shape
    given, w_in, w_out = _inputs(tokens, d, experts, k, f, args.device)
    sides: dict[str, Side] = {}
    failed: dict[str, str] = {}
    for name in args.sides:
        try:
            side = SIDES[name](w_in, w_out)
            for value in (given["x"], given["gates"]):
                value.requires_grad_()
            _step(side, given)
            _step(side, given)
            sides[name] = side
        except Exception as error:  # the other sides are still worth measuring
            failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
            print(f"FAIL {name}: {failed[name]}", flush=True)
    errors = _errors(sides, given, w_in, w_out)
    for side in sides.values():
        side.w_in.grad = side.w_out.grad = None
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(args.rounds):
        names = list(sides)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(_seconds(sides[name], given, args.steps))
            sides[name].w_in.grad = sides[name].w_out.grad = None
    flops = 6 * tokens * k * d * 3 * f
    result: dict[str, Any] = {"experts": experts, "top_k": k, "hidden": f, "failed": failed}
    for name, side in sides.items():
        median = statistics.median(times[name])
        result[name] = {
            "ms": 1e3 * median,
            "ms_least": 1e3 * min(times[name]),
            "ms_most": 1e3 * max(times[name]),
            "tflops": flops / median / 1e12,
            "peak_bytes": _peak(side, given),
            "errors": errors[name],
        }
        side.w_in.grad = side.w_out.grad = None
    return result


def _lines(results: dict[str, Any]) -> list[str]:
    lines = [
        "| experts | side | ms (least - most) | TFLOP/s | time / Whale's | peak GB | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for label, result in results.items():
        for name in SIDES:
            if name not in result:
                continue
            one = result[name]
            ratio = one["ms"] / result["whale"]["ms"] if "whale" in result else math.nan
            of, worst = max(one["errors"].items(), key=lambda item: item[1])
            lines.append(
                f"| {label} | {name} | {one['ms']:.2f} ({one['ms_least']:.2f} - "
                f"{one['ms_most']:.2f}) | {one['tflops']:.0f} | {ratio:.2f} | "
                f"{one['peak_bytes'] / 1e9:.2f} | {worst:.1e} ({of}) |"
            )
    return lines


def page(report: dict[str, Any]) -> str:
    words = [
        "# The mixture-of-experts layer, forward + backward",
        "",
        f"{report['date']}, {report['hardware']}, torch {report['torch']}, Triton "
        f"{report['triton']}, transformers {report['transformers']}. bfloat16, "
        f"{report['tokens']:,} tokens of {report['d']} features, gated feed-forward with 2,816 "
        "hidden features (768 for top-8), routing uniformly random. TFLOP/s: the experts' products "
        "over the whole layer's time (sort, gather, products, activation, combine; no router). "
        f"Median of {report['rounds']} rounds of {report['steps']} passes, sides in turn. Peak: "
        "what a pass allocates above inputs and weights, the weights' gradients included. Error: "
        "the largest relative norm among output and gradients, against float32. Plain: argsort, "
        "index_select, grouped_mm, silu * up, grouped_mm, index_add; compiled: that under "
        "torch.compile; transformers: Mixtral's experts with grouped_mm.",
        "",
        *_lines(report["results"]),
        "",
        "`python -m benchmarks.moe_layer --out DIR --page benchmarks/results/moe-layer.md`",
    ]
    return "\n".join(words) + "\n"


def _version(name: str) -> str:
    try:
        return str(__import__(name).__version__)
    except ImportError:
        return "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--d", type=int, default=1024)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--sides", nargs="*", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--date", default="2026-11-15")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    cuda = args.device == "cuda"
    report: dict[str, Any] = {
        "date": args.date,
        "hardware": torch.cuda.get_device_name() if cuda else platform.processor(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "tokens": args.tokens,
        "d": args.d,
        "rounds": args.rounds,
        "steps": args.steps,
        "results": {},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for label in args.shapes:
        began = time.time()
        report["results"][label] = measure(args.tokens, args.d, SHAPES[label], args)
        (args.out / "moe-layer.json").write_text(json.dumps(report, indent=1) + "\n")
        print("\n".join(_lines({label: report["results"][label]})[2:]), flush=True)
        print(f"{label}: {time.time() - began:.0f} s", flush=True)
        if cuda:
            torch.cuda.empty_cache()
    for path in (args.out / "moe-layer.md", args.page):
        if path is not None:
            path.write_text(page(report))


if __name__ == "__main__":
    main()
