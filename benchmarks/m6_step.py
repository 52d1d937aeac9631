"""The whole training step of an M6 on one GPU, with only the experts' computation exchanged.

    python -m benchmarks.m6_step --out results.jsonl
    python -m benchmarks.m6_step --page results.jsonl --to benchmarks/results/m6-step.md
    python -m benchmarks.m6_step --device cpu --size tiny --out /tmp/results.jsonl   # tries itself

One model holds all sides (see `m6_step_sides`): embeddings, attention, norms, routers and head are
the same tensors for all, experts have equal values. A step is forward, backward and a fused AdamW;
events stand before, between and behind, so one run gives forward + backward, the update, and both.

[Note: equal work] The learning rate is 0: the update reads and writes all it would, and weights
stay equal on all sides and in all rounds. The balancing bias moves in a few forwards at first, as
it would in training, then no more, and routing is kept as it was in the forward after these. Every
row has a picture and no padding: tokens of no expert are skipped by Whale and would have to be
computed, or masked, by the others. Nothing is dropped.

Before timing, loss and gradients of every side are compared with the first one's.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.m6_step_sides import SIDES, Batch, Bench, Exchange, build, exchange
from whale.models.m6.config import presets
from whale.models.m6.model import IGNORED, M6

# preset, experts per layer of each shape, rows
SIZES = {"base": ("m6-base", (32, 128), 240), "tiny": ("m6-tiny", (8, 16), 4)}

# Relative: of the loss, of gradients' norms, of the distance between gradients, of that between
# routers' gradients. Two runs in bfloat16 that round otherwise are as far apart as one is from
# float32, and a router's gradient is the furthest: 0.14 in `results/m6-noise.md`.
TOLERANCES = {torch.bfloat16: (1e-3, 2e-2, 1e-1, 2e-1), torch.float32: (1e-5, 1e-3, 1e-3, 1e-3)}


class Failures:
    """What failed, by side; the others go on."""

    def __init__(self) -> None:
        self.why: dict[str, str] = {}

    def attempt(self, name: str, what: Callable[..., Any], *args: Any) -> Any:
        """The result of `what(*args)`; None where the side fails, or has failed before."""
        if name in self.why:
            return None
        try:
            return what(*args)
        except Exception as error:  # whatever it is, the other sides are still worth measuring
            self.why[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            print(f"FAILED {name}: {self.why[name]}", flush=True)
        return None


def add_sides(model: M6, batch: Batch, names: list[str], fails: Failures) -> Bench:
    layers = exchange(model)
    for name in names:
        for layer in layers:
            made = fails.attempt(name, SIDES[name], layer.weights)
            if made is not None:
                layer.sides[name] = made
    # Of the parameters of all sides, those without a gradient are left alone.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    return Bench(model, layers, batch, optimizer)


def agree(side: dict[str, Any], dtype: torch.dtype) -> bool:
    """Whether a side is near enough to the first."""
    loss, norms, distance, router = TOLERANCES[dtype]
    near = all(
        apart <= (router if "router" in of else distance) for of, apart in side["distances"].items()
    )
    return bool(near and side["off"][0] <= loss and side["off"][1] <= norms)


def compare(bench: Bench, names: list[str], dtype: torch.dtype, fails: Failures) -> dict[str, Any]:
    """How far each side is from the first: loss, norms of gradients, distances of gradients."""

    def one(name: str) -> tuple[float, dict[str, Tensor]]:
        bench.use(name)
        out = bench.model(**bench.batch)
        logits, labels = out["logits"].detach().flatten(0, 1), bench.batch["labels"].flatten()
        # The model's own is in the dtype of the logits: too coarse to compare.
        loss = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED)
        out["loss"].backward()
        return float(loss), bench.gradients()

    found: dict[str, Any] = {}
    want: tuple[float, dict[str, Tensor]] | None = None
    for name in names:
        got = fails.attempt(name, one, name)
        if got is None:
            continue
        want = got if want is None else want
        norms, distances = {}, {}
        for of, grad in got[1].items():
            size = float(torch.linalg.vector_norm(want[1][of], dtype=torch.float32))
            norm = float(torch.linalg.vector_norm(grad, dtype=torch.float32))
            apart = float(torch.linalg.vector_norm(grad - want[1][of], dtype=torch.float32))
            norms[of], distances[of] = abs(norm / size - 1), apart / size
        off = (abs(got[0] / want[0] - 1), max(norms.values()), max(distances.values()))
        found[name] = {"loss": got[0], "off": off, "distances": distances}
        agrees = agree(found[name], dtype)
        print(
            f"{name}: loss {got[0]:.5f}; off by {off[0]:.1e} in loss, {off[1]:.1e} in norms, "
            f"{off[2]:.1e} in gradients: {'agrees' if agrees else 'DISAGREES'}",
            flush=True,
        )
    return found


def mark(device: str) -> Any:
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    return float(begin.elapsed_time(end)) / 1e3


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def timed_steps(bench: Bench, name: str, steps: int, device: str) -> list[tuple[float, float]]:
    """(forward + backward, update) of each, after one that is not timed."""
    marks = []
    bench.step(name)
    for _ in range(steps):
        bench.use(name)
        begin = mark(device)
        bench.forward_backward()
        between = mark(device)
        bench.optimizer.step()
        marks.append((begin, between, mark(device)))
    wait(device)
    return [(seconds(a, b), seconds(b, c)) for a, b, c in marks]


def timed_experts(bench: Bench, name: str, device: str) -> float:
    """Forward + backward of the experts of all layers, one layer after the other."""
    bench.use(name)
    wait(device)
    begin = mark(device)
    for layer in bench.layers:
        layer.experts_only()
    end = mark(device)
    wait(device)
    return seconds(begin, end)


def peak_bytes(bench: Bench, name: str, device: str) -> int:
    """What a step allocates above weights, optimizer states and batch; gradients are in it."""
    bench.use(name)
    if device == "cpu":
        return 0
    wait(device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    bench.step(name)
    wait(device)
    return torch.cuda.max_memory_allocated() - before


def measure(preset: str, experts: int, rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """One shape, all sides."""
    fails = Failures()
    config = replace(presets[preset], num_experts=experts, capacity_factor=None, dropout=0.0)
    model, batch = build(config, rows, args.device, args.dtype)
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    bench = add_sides(model, batch, args.sides, fails)
    sides: dict[str, Any] = compare(bench, args.sides, args.dtype, fails)
    names = [name for name in args.sides if name in sides]
    for name in names:
        # Makes the optimizer's states, and fills the allocator's cache.
        fails.attempt(name, bench.step, name)
        peak = fails.attempt(name, peak_bytes, bench, name, args.device)
        fails.attempt(name, timed_experts, bench, name, args.device)
        sides[name] |= {"peak_bytes": peak, "steps": [], "experts_s": []}
    retries = allocator_retries(args.device)
    for turn in range(args.rounds):
        at = turn % max(1, len(names))
        for name in names[at:] + names[:at]:
            timed = fails.attempt(name, timed_steps, bench, name, args.steps, args.device)
            sides[name]["steps"] += timed or []
            alone = fails.attempt(name, timed_experts, bench, name, args.device)
            sides[name]["experts_s"] += [] if alone is None else [alone]
    return {
        "preset": preset,
        "config": config.to_dict(),
        "rows": rows,
        "seq": config.seq_len,
        "tokens": rows * config.seq_len,
        "weight_bytes": weight_bytes,
        "busiest": max(busiest(layer) for layer in bench.layers),
        "allocator_retries": allocator_retries(args.device) - retries,
        "failed": fails.why,
        "sides": {name: sides[name] for name in names if name not in fails.why},
    }


def busiest(layer: Exchange) -> float:
    """The most tokens of an expert, in even parts."""
    if layer.seen is None:
        return float("nan")
    counts = torch.bincount(layer.seen[1].ids.reshape(-1), minlength=layer.moe.num_experts)
    return float(counts.max() / counts.float().mean())


def allocator_retries(device: str) -> int:
    """How often memory had to be handed back and asked for again: that costs time."""
    return 0 if device == "cpu" else int(torch.cuda.memory_stats()["num_alloc_retries"])


def environment(args: argparse.Namespace) -> dict[str, Any]:
    cuda = args.device == "cuda"
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "hardware": torch.cuda.get_device_name() if cuda else f"CPU {platform.machine()}",
        "torch": torch.__version__,
        "triton": version("triton"),
        "transformers": version("transformers"),
        "dtype": str(args.dtype).removeprefix("torch."),
        "clock": "CUDA events" if cuda else "the host's clock",
        "rounds": args.rounds,
        "steps": args.steps,
    }


def version(name: str) -> str:
    try:
        return str(__import__(name).__version__)
    except ImportError:
        return "none"


def _spread(values: list[float], digits: int, scale: float = 1.0) -> str:
    """The median, and the quartiles."""
    cuts = statistics.quantiles([scale * value for value in values], n=4, method="inclusive")
    low, middle, high = (f"{cut:.{digits}f}" for cut in cuts)
    return f"{middle} ({low} - {high})"


def _ratio(mine: list[float], whales: list[float] | None) -> str:
    """Of steps that were run in the same round."""
    if whales is None:
        return "-"
    return _spread([a / b for a, b in zip(mine, whales, strict=True)], 2)


def lines(results: list[dict[str, Any]]) -> list[str]:
    """The table, and what failed."""
    out = [
        "| experts | side | step, ms | / Whale's | tokens/s | forward + backward, ms | / Whale's | "
        "update, ms | experts alone, ms | of the step | peak, GB | gradients off |",
        "|" + "---|" * 12,
    ]
    failed = []
    dtype = getattr(torch, results[0]["dtype"])
    for result in results:
        experts, sides = result["config"]["num_experts"], result["sides"]
        whales = _times(sides["whale"]) if "whale" in sides else None
        for name, side in sides.items():
            both, update, step = _times(side)
            middle = statistics.median(step)
            alone = statistics.median(side["experts_s"])
            peak = f"{side['peak_bytes'] / 1e9:.1f}" if side["peak_bytes"] else "-"
            out.append(
                f"| {experts} | {name} | {_spread(step, 1, 1e3)} "
                f"| {_ratio(step, whales and whales[2])} | {result['tokens'] / middle:,.0f} "
                f"| {_spread(both, 1, 1e3)} | {_ratio(both, whales and whales[0])} "
                f"| {1e3 * statistics.median(update):.1f} | {1e3 * alone:.1f} "
                f"| {100 * alone / middle:.0f}% | {peak} "
                f"| {side['off'][2]:.1e}{'' if agree(side, dtype) else ', DISAGREES'} |"
            )
        failed += [f"- {experts} experts, {side}: {why}" for side, why in result["failed"].items()]
    return out + (["", "Failed:", "", *failed] if failed else [])


def _times(side: dict[str, Any]) -> tuple[list[float], list[float], list[float]]:
    """Forward + backward, update, and both, of every step."""
    both, update = ([step[i] for step in side["steps"]] for i in range(2))
    return both, update, [a + b for a, b in zip(both, update, strict=True)]


def _shape(result: dict[str, Any]) -> str:
    weights, retries = result["weight_bytes"] / 1e9, result["allocator_retries"]
    return (
        f"- {result['config']['num_experts']} experts a layer, the busiest with "
        f"{result['busiest']:.2f} times an even part of the tokens. Weights {weights:.1f} GB, "
        f"Adam's states twice that. Times the allocator ran out while timing: {retries}."
    )


def page(results: list[dict[str, Any]]) -> str:
    """All of it, with how it was measured."""
    first = results[0]
    config = first["config"]
    dtype = getattr(torch, first["dtype"])
    loss, norm, distance, router = TOLERANCES[dtype]
    alike = all(agree(side, dtype) for result in results for side in result["sides"].values())
    words = [
        "# The training step of an M6, by who computes its experts",
        "",
        f"{first['date']}, {first['hardware']}, torch {first['torch']}, Triton {first['triton']}, "
        f"transformers {first['transformers']}. {first['preset']}: {config['num_layers']} layers, "
        f"width {config['dim']}, {config['num_heads']} heads, experts of "
        f"{config['expert_dim'] or config['ffn_dim']} hidden features (gelu, not gated), top-"
        f"{config['top_k']}, nothing dropped, {first['dtype']}. {first['rows']} rows of "
        f"{first['seq']} positions: {first['tokens']:,} tokens a step.",
        "",
        *(_shape(result) for result in results),
        "",
        *lines(results),
        "",
        "A step is forward, backward and update (AdamW, fused, the same code for all sides). All "
        "sides are in one model and share every part but the experts: attention, norms, "
        "embeddings, head and Whale's router with its balancing. Whale: `wh.nn.MoE` as it is; "
        "transformers: its `grouped_mm` experts, declared not gated; plain: argsort, index_select, "
        "grouped_mm, gelu, grouped_mm, index_add; compiled: that under torch.compile (the experts "
        "alone; the rest of the model is eager on all sides). Each has its own layout of the "
        "weights, with equal values.",
        "",
        "Equal work: the learning rate is 0, so weights stay equal; every forward uses the ids of "
        "the first one (the router runs all the same), after forwards that let the bias balance "
        "the experts; every row has a picture and no padding.",
        "",
        f"Median and quartiles of {first['rounds']} rounds of {first['steps']} steps, after one "
        f"not timed, sides in turn and in rotating order, by {first['clock']}. Ratios are of steps "
        "of the same round. Experts alone: forward + backward of all such layers on the inputs of "
        "the first step, in isolation, without the router. Peak: what a step allocates above "
        "weights, states and batch; gradients are in it.",
        "",
        "Before timing, loss, norms of gradients (embedding, first q_proj, router, w_in and w_out "
        "of the first and the last layer with experts) and the gradients themselves were compared "
        f"with the first side's: relative differences within {loss:g}, {norm:g} and {distance:g} "
        f"({router:g} for routers) "
        f"{'on every side' if alike else '**except where the table says DISAGREES**'}. The last "
        "column is the largest distance of a gradient, always a router's. An M6 in bfloat16 is "
        "that far from float32 itself, without any of these kernels: `m6-noise.md`.",
        "",
        "    python -m benchmarks.m6_step --out results.jsonl",
        "    python -m benchmarks.m6_step --page results.jsonl --to benchmarks/results/m6-step.md",
    ]
    return "\n".join(words) + "\n"


def run(args: argparse.Namespace) -> None:
    preset, shapes, rows = SIZES[args.size]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("")
    for experts in shapes:
        began = time.time()
        result = environment(args) | measure(preset, experts, rows, args)
        with args.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print("\n".join(lines([result])), flush=True)
        print(f"{experts} experts: {time.time() - began:.0f} s", flush=True)
        if args.device == "cuda":
            gc.collect()  # an optimizer is part of a cycle
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--size", default="base", choices=list(SIZES))
    parser.add_argument("--sides", nargs="*", choices=list(SIDES), help="on a CPU not `compiled`")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="steps in a row in each round")
    parser.add_argument("--out", type=Path, help="measure, and write a line for each shape here")
    parser.add_argument("--page", type=Path, help="what --out wrote, to make a page of")
    parser.add_argument("--to", type=Path, help="the page")
    args = parser.parse_args()
    if args.out is None and (args.page is None or args.to is None):
        parser.error("give --out, or --page and --to")
    if args.out is not None:
        cpu = args.device == "cpu"
        args.dtype = torch.float32 if cpu else torch.bfloat16
        args.sides = args.sides or [name for name in SIDES if not cpu or name != "compiled"]
        run(args)
    if args.page is not None and args.to is not None:
        results = [json.loads(line) for line in args.page.read_text().splitlines()]
        args.to.write_text(page(results))


if __name__ == "__main__":
    main()
