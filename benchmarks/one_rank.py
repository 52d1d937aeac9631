"""One rank without parallelism against plain torch: time and memory of a GPT's training step.

Place in the flow: a command. Both sides train the same model on the same batches in one process and
take turns, so that their ratio is of one moment; a second torch side shows the noise. Peak memory
is measured in a process for each side alone. bf16 weights, fused AdamW.

    python -m benchmarks.one_rank --out benchmarks/results/one-rank.json
    python -m benchmarks.one_rank --device cpu --sizes tiny --steps 5
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import whale as wh
from whale.models.gpt import GPT, GPTConfig

VOCABULARY = 50_304
MEMORY_STEPS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model and its batch."""

    dim: int
    layers: int
    heads: int
    rows: int
    seq: int
    vocabulary: int = VOCABULARY


SIZES = {
    "tiny": Size(dim=32, layers=4, heads=4, rows=2, seq=16, vocabulary=97),
    "0.1B": Size(dim=768, layers=12, heads=12, rows=4, seq=512),
    "0.4B": Size(dim=1024, layers=24, heads=16, rows=8, seq=512),
    "1.4B": Size(dim=2048, layers=26, heads=16, rows=16, seq=1024),
}

Step = Callable[[int], Any]


def main() -> int:
    """Times and prints all sizes; writes JSON and markdown where asked to."""
    options = _options()
    if options.memory:
        print(json.dumps(_peak(options.memory, SIZES[options.sizes], options.device)))
        return 0
    results = [_measure(name, options) for name in options.sizes.split(",")]
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": f"{device}, torch {torch.__version__}",
        "steps": options.steps,
        "warm_up": options.warm_up,
        "results": results,
    }
    text = _page(report)
    print(text)
    if options.out:
        out = Path(options.out)
        out.write_text(json.dumps(report, indent=1) + "\n")
        out.with_suffix(".md").write_text(text)
    return 0


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def _model(size: Size, device: str) -> nn.Module:
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=size.vocabulary,
        max_seq_len=size.seq,
        dim=size.dim,
        num_layers=size.layers,
        num_heads=size.heads,
    )
    with torch.device(device):
        return GPT(config).bfloat16()


def _batches(size: Size, device: str) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = (4, size.rows, size.seq + 1)
    ids = torch.randint(size.vocabulary, shape, generator=generator).to(device)
    return [(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in ids]


_ADAMW = partial(torch.optim.AdamW, lr=1e-4, fused=True)


def _torch_side(size: Size, device: str) -> Step:
    model, batches = _model(size, device), _batches(size, device)
    optimizer = _ADAMW(model.parameters())

    def step(index: int) -> Tensor:
        x, y = batches[index % len(batches)]
        loss = _loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _whale_side(size: Size, device: str) -> Step:
    model, batches = _model(size, "cpu"), _batches(size, device)
    wh.init(device=device)
    made = wh.parallelize(model, optimizer=_ADAMW, batch=batches[0], loss=_loss)
    return lambda index: made(batches[index % len(batches)])["loss"]


SIDES = {"torch": _torch_side, "whale": _whale_side}


def _peak(side: str, size: Size, device: str) -> dict[str, float]:
    """The most memory of a step, in GiB: allocated, and taken from the device."""
    step = SIDES[side](size, device)
    for index in range(MEMORY_STEPS):
        if index == 2 and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step(index)
    if device != "cuda":
        return {"allocated": 0.0, "reserved": 0.0}
    torch.cuda.synchronize()
    return {
        "allocated": torch.cuda.max_memory_allocated() / 2**30,
        "reserved": torch.cuda.max_memory_reserved() / 2**30,
    }


def _measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    size = SIZES[name]
    sides = {
        "torch": _torch_side(size, options.device),
        "whale": _whale_side(size, options.device),
        "torch again": _torch_side(size, options.device),
    }
    parts = {}
    losses = {key: [float(step(i)) for i in range(4)] for key, step in sides.items()}
    apart = max(abs(a - b) for a, b in zip(losses["torch"], losses["whale"], strict=True))
    for when, warm_up in (("first steps", 0), ("later", options.warm_up)):
        for index in range(warm_up):
            sides["whale"](index)
        times: dict[str, list[float]] = {key: [] for key in sides}
        for repeat in range(options.repeats):
            order = list(sides)[repeat % 3 :] + list(sides)[: repeat % 3]
            for key in order:
                times[key].append(_timed(sides[key], options))
        pairs = list(zip(*times.values(), strict=True))
        parts[when] = {
            "torch_ms": statistics.median(times["torch"]),
            "whale_ms": statistics.median(times["whale"]),
            "ratio": statistics.median(w / t for t, w, _ in pairs),
            "noise": statistics.median(a / t for t, _, a in pairs),
        }
    parameters = sum(p.numel() for p in _model(size, "meta").parameters())
    sides.clear()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    memory = {side: _alone(side, name, options.device) for side in SIDES}
    found = {
        "size": name,
        "parameters": parameters,
        "loss_apart": apart,
        **parts,
        "memory": memory,
    }
    print(json.dumps(found), flush=True)
    return found


def _timed(step: Step, options: argparse.Namespace) -> float:
    """Milliseconds of a step."""
    if options.device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for index in range(options.steps):
        step(index)
    if options.device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / options.steps * 1e3


def _alone(side: str, size: str, device: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.one_rank", "--memory", side]
    done = subprocess.run(
        [*command, "--sizes", size, "--device", device],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    found: dict[str, float] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return found


def _page(report: dict[str, Any]) -> str:
    lines = [
        "# One rank against plain torch",
        "",
        f"{report['date']}, {report['hardware']}. GPT, bf16 weights, fused AdamW; medians of "
        f"stretches of {report['steps']} steps, in turn.",
        "",
        "| parameters | steps | torch ms | whale ms | whale / torch | torch / torch |"
        " memory, GiB: torch | whale | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in report["results"]:
        own, other = result["memory"]["torch"], result["memory"]["whale"]
        ratio = other["allocated"] / own["allocated"] if own["allocated"] else 0.0
        for when in ("first steps", "later"):
            part = result[when]
            lines.append(
                f"| {result['parameters'] / 1e9:.2f}B | {when} | {part['torch_ms']:.2f} | "
                f"{part['whale_ms']:.2f} | {part['ratio']:.3f} | {part['noise']:.3f} | "
                f"{own['allocated']:.2f} | {other['allocated']:.2f} | {ratio:.3f} |"
            )
    lines += [
        "",
        "In the first 256 steps Whale looks at batches and calls for something new"
        " (docs/concepts/exactness.md); `later` is after"
        f" {report['warm_up']} more. torch / torch is a second torch side: its distance from 1 is"
        " noise. Memory is the most allocated in a step, in a process of its own.",
    ]
    return "\n".join(lines) + "\n"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", default="0.1B,0.4B,1.4B")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--warm-up", type=int, default=260)
    parser.add_argument("--memory", choices=list(SIDES), help="only this side's peak")
    parser.add_argument("--out")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
