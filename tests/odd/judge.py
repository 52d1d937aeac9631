"""judge: runs one odd case under Whale on real ranks, and says what came of it.

Place in the flow: `search` and the tests call `judge(spec)`. Verdicts: `exact`; `refused` (an error
of Whale's with a hint, on every rank); `WRONG` (silent); `crash` (any other error, or a hang);
`void` (plain torch cannot train it either). A refusal of what must work is `false-refusal`.
"""

from __future__ import annotations

import math
import os
import time
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import whale as wh
from tests.odd import layouts, truth
from tests.odd.generate import is_random, must_work
from tests.odd.model import OPTIMIZERS, build, loss_of
from tests.odd.spec import Spec
from tests.ranks import RankFailure, run_ranks

FAILURES = ("WRONG", "crash", "false-refusal")
TOLERANCE = 1e-9
STATE_TOLERANCE = 1e-8
AUTOCAST_TOLERANCE = 0.1
ROUNDING = {"dtype"}
"""Words that round to float32: the last digit of what they read may move theirs."""
ROUNDED_TOLERANCE = 1e-6
DIVERGED = 1e4
"""A loss beyond which rounding grows without limit."""
SLOW_S = 30.0
"""A refusal that takes longer is a hang to its user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of a case.

    Attributes:
        kind: See this module's head.
        what: The largest error, the refusal or the exception, in one line.
        detail: A traceback where there is one.
        seconds: How long it took.
    """

    kind: str
    what: str
    detail: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether it breaks the promise."""
        return self.kind in FAILURES


def judge(spec: Spec, timeout: float = 75.0) -> Verdict:
    """Runs a case."""
    start = time.monotonic()
    try:
        reports = run_ranks(spec.ranks, on_rank, spec.to_json(), timeout=timeout)
    except RankFailure as failure:
        text = str(failure)
        said = [t.rstrip().rpartition("\n")[2] for t in failure.tracebacks.values()]
        found = ("crash", said[0] if said else text.partition("\n")[0], text)
        if _is_void(spec):
            found = ("void", found[1], text)
    else:
        found = _verdict(spec, reports)
    kind, what, detail = found
    seconds = time.monotonic() - start
    return Verdict(kind=kind, what=what[:400], detail=detail, seconds=seconds)


def _is_void(spec: Spec) -> bool:
    """Whether plain torch fails too, asked where the ranks were ended before they said so."""
    try:
        run_ranks(1, in_plain_torch, spec.to_json())
    except RankFailure:
        return True
    return False


def in_plain_torch(text: str) -> None:
    """The truth alone."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    truth.train(Spec.from_json(text), 0)


# ---- on a rank -----------------------------------------------------------------------------------


def on_rank(text: str) -> dict[str, Any]:
    """One rank's part: the truth on rank 0, then Whale."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    spec = Spec.from_json(text)
    report: dict[str, Any] = {"truths": [], "void": ""}
    if os.environ["RANK"] == "0":
        try:
            report["truths"] = _truths(spec)
        except Exception:  # noqa: BLE001 - whatever plain torch says of the model
            report["void"] = traceback.format_exc()
    began = time.monotonic()
    try:
        wh.init(layouts.config(spec))
        report["result"] = run(spec)
        if os.environ["RANK"] == "0" and is_random(spec):
            report["sanity"] = truth.sanity(spec, report["result"])
    except wh.WhaleError as error:
        # Any other error leaves the rank, which ends the others at once.
        report["error"] = traceback.format_exc()
        report["told"] = isinstance(error, wh.RankError)
        report["hint"] = bool(error.hint)
        report["said"] = f"{type(error).__name__}: {error}"
    report["seconds"] = time.monotonic() - began
    return report


def _truths(spec: Spec) -> list[dict[str, Any]]:
    if not is_random(spec):
        return [truth.train(spec, variant) for variant in range(truth.variants(spec))]
    kept = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
    try:
        one = run(spec.but(layout="one", ranks=1, speeds=(), schedule="1f1b"))
        one["micro"] = spec.micro
        return [one]
    except wh.WhaleError:
        return []  # Whale refuses it on one rank too: so will it here
    finally:
        os.environ.update(kept)


def run(spec: Spec) -> dict[str, Any]:
    """Trains the case with Whale on the ranks there are."""
    model = build(spec)
    layouts.annotate(spec, model)
    fed = truth.train_batches(spec)
    before = {n: t.detach().clone() for n, t in model.state_dict().items()}
    step = wh.parallelize(
        model,
        optimizer=OPTIMIZERS[spec.optimizer],
        batch=fed[0],
        loss=loss_of(spec, model),
        config=layouts.config(spec),
        cluster=layouts.cluster(spec),
        outputs={"output": wh.concat} if spec.concat else None,
    )
    result: dict[str, Any] = {"losses": [], "norms": []}
    after = model.state_dict()
    result["moved"] = [n for n, t in before.items() if not _same(after[n], t)]
    scheduler = torch.optim.lr_scheduler.StepLR(step.optimizer, 1, 0.5)
    for index, batch in enumerate(fed):
        if index == spec.evaluate_at:
            result["evaluated"] = _evaluated(spec, step)
        with truth.around(spec):
            metrics = step(batch)
        result["losses"].append(float(metrics["loss"]))
        if spec.max_norm is not None:
            result["norms"].append(float(metrics["grad_norm"]))
        if index == 0 and "apply-early" not in spec.memory:  # gone by now: the weights show them
            result["gradients"] = {
                n: g.detach().to_dense().clone()
                for n, g in step.gradients().items()
                if g is not None
            }
        if spec.optimizer == "scheduled":
            scheduler.step()
    if spec.evaluate_at >= truth.STEPS:
        result["evaluated"] = _evaluated(spec, step)
    result["state"] = {n: t.detach().clone() for n, t in step.state_dict().items()}
    step.close()
    return result


def _evaluated(spec: Spec, step: Any) -> dict[str, Any]:
    with truth.around(spec):
        metrics = step.evaluate(truth.eval_batch(spec))
    found = {"loss": float(metrics["loss"])}
    if spec.concat:
        found["output"] = metrics["output"].detach()
    return found


# ---- the verdict ---------------------------------------------------------------------------------


def _verdict(spec: Spec, reports: list[dict[str, Any]]) -> tuple[str, str, str]:
    if reports[0]["void"]:
        return "void", reports[0]["void"].rstrip().rpartition("\n")[2], reports[0]["void"]
    errors = [r for r in reports if "error" in r]
    if errors and len(errors) < len(reports):
        return "crash", f"only some ranks raised {errors[0]['said']}", errors[0]["error"]
    if errors:
        own = [r for r in errors if not r["told"]] or errors
        said, detail = own[0]["said"], own[0]["error"]
        if not own[0]["hint"]:
            return "crash", f"no hint: {said}", detail
        if own[0]["told"] and "built a model with other weights" not in said:
            return "crash", said, detail
        if max(r["seconds"] for r in errors) > SLOW_S:
            return "crash", f"slow: {said}", detail
        kind = "false-refusal" if must_work(spec) else "refused"
        return kind, said.replace("\n", " "), detail
    truths = reports[0]["truths"]
    if not truths:
        return "WRONG", "refused on one rank, accepted here", ""
    if not all(abs(x) < DIVERGED for x in truths[0]["losses"]):
        return "void", f"training diverges: {truths[0]['losses']}", ""
    best = min((_worst(spec, reports, t) for t in truths), key=lambda found: found[0])
    if best[0] > 1.0:
        return "WRONG", best[1], ""
    if reports[0].get("sanity"):
        return "WRONG", f"against plain torch: {reports[0]['sanity']}", ""
    moved = reports[0]["result"]["moved"]
    if moved:
        return "WRONG", f"parallelize moved the user's {', '.join(moved[:3])}", ""
    return "exact", best[1], ""


def _worst(spec: Spec, reports: list[dict[str, Any]], want: dict[str, Any]) -> tuple[float, str]:
    """The greatest error in units of what is allowed, and where."""
    loose, state = TOLERANCE, STATE_TOLERANCE
    if ROUNDING & {*spec.glue, *spec.blocks}:
        loose = state = ROUNDED_TOLERANCE
    if spec.autocast:
        loose = state = AUTOCAST_TOLERANCE
    found: list[tuple[float, str]] = []
    for rank, report in enumerate(reports):
        got = report["result"]
        for step, pair in enumerate(zip(got["losses"], want["losses"], strict=True)):
            found.append(_number(*pair, loose, f"loss of step {step} on rank {rank}"))
        for step, pair in enumerate(zip(got["norms"], want["norms"], strict=True)):
            found.append(_number(*pair, loose, f"gradient norm of step {step} on rank {rank}"))
        pair = got["evaluated"]["loss"], want["evaluated"]["loss"]
        found.append(_number(*pair, loose, f"evaluated loss on rank {rank}"))
        if spec.concat:
            outs = {"output": got["evaluated"]["output"]}
            found += _tensors(
                outs, {"output": want["evaluated"]["output"]}, loose, "evaluated", rank
            )
        if "gradients" in got:
            found += _tensors(got["gradients"], want["gradients"], loose, "gradient", rank)
        found += _tensors(got["state"], want["state"], state, "state", rank)
    return max(found, key=lambda item: item[0])


def _number(got: float, want: float, allowed: float, where: str) -> tuple[float, str]:
    error = abs(got - want) / max(abs(want), 1e-6)
    if math.isnan(error):
        error = 0.0 if math.isnan(got) and math.isnan(want) else math.inf
    return error / allowed, f"{where}: {got:.9g} instead of {want:.9g}"


def _tensors(
    got: dict[str, Tensor], want: dict[str, Tensor], allowed: float, kind: str, rank: int
) -> list[tuple[float, str]]:
    found = []
    sizes = [float(t.abs().max()) for t in want.values() if t.is_floating_point() and t.numel()]
    largest = max((s for s in sizes if s < 1e30), default=0.0)
    for name in sorted({*got, *want}):
        where = f"{kind} {name} on rank {rank}"
        if name not in want:
            # No gradient in plain torch: zeros are no news here, the weights show the rest.
            zero = kind == "gradient" and not got[name].any()
            found.append((0.0 if zero else math.inf, f"{where} should not be there"))
        elif name not in got:
            found.append((math.inf if want[name].any() else 0.0, f"{where} is missing"))
        else:
            found.append(_tensor(got[name], want[name], largest, allowed, where))
    return found


def _tensor(
    got: Tensor, want: Tensor, largest: float, allowed: float, where: str
) -> tuple[float, str]:
    if got.shape != want.shape or got.dtype != want.dtype:
        shapes = f"{got.dtype}{list(got.shape)} instead of {want.dtype}{list(want.shape)}"
        return math.inf, f"{where}: {shapes}"
    if not (want.is_floating_point() or want.is_complex()):
        same = torch.equal(got, want)
        return 0.0 if same else math.inf, f"{where}: {_few(got)} instead of {_few(want)}"
    if got.is_complex():
        got, want = torch.view_as_real(got), torch.view_as_real(want)
    odd = ~torch.isfinite(want)
    if not torch.equal(got[odd].nan_to_num(7.0), want[odd].nan_to_num(7.0)):
        return math.inf, f"{where}: other infinities"
    got, want = got[~odd], want[~odd]
    if not want.numel():
        return 0.0, where
    floor = 0.1 if allowed >= AUTOCAST_TOLERANCE else 1e-3
    scale = max(float(want.abs().max()), floor * largest, 1e-12)
    error = float((got - want).abs().max()) / scale
    error = math.inf if math.isnan(error) else error
    return error / allowed, f"{where}: off by {error:.3g}, {_few(got)} instead of {_few(want)}"


def _few(tensor: Tensor) -> str:
    return "[" + ", ".join(f"{x:.6g}" for x in tensor.flatten()[:3].tolist()) + "]"


def _same(a: Tensor, b: Tensor) -> bool:
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(
            a.nan_to_num(7.0) if a.is_floating_point() else a,
            b.nan_to_num(7.0) if b.is_floating_point() else b,
        )
    )
