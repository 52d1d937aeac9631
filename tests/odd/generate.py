"""generate: the odd case of a seed, the same on every machine; `describe` says what is odd in it.

Place in the flow: first. Nothing here runs a model.
"""

from __future__ import annotations

import random

from tests.odd import glue as glues
from tests.odd import layouts
from tests.odd.batches import FORMS
from tests.odd.losses import LOSSES
from tests.odd.model import HEADS, OPTIMIZERS, SKELETONS, STEMS
from tests.odd.spec import Spec
from tests.odd.vocabulary import BLOCKS


def generate(seed: int, ranks: tuple[int, ...] = (1, 2, 3, 4)) -> Spec:
    """A random case; its layout is among those for so many ranks."""
    pick = random.Random(seed * 7919 + 13)
    mild = pick.random() < 0.2
    kinds = [k for k, counts in layouts.RANKS.items() if set(counts) & set(ranks)]
    layout = pick.choice([*kinds, *(k for k in ("data", "data", "split", "stages") if k in kinds)])
    count = pick.choice([n for n in layouts.RANKS[layout] if n in ranks])
    blocks = _blocks(seed, pick, mild)
    masked = any(BLOCKS[b].masked for b in blocks)
    aux = any(BLOCKS[b].aux for b in blocks)
    loss = pick.choice([name for name in LOSSES if LOSSES[name].easy or not mild])
    needs = LOSSES[loss].needs
    inside = needs == "mask" or pick.random() < 0.4
    form = pick.choice(FORMS)
    if masked or needs == "mask":
        form = pick.choice(("masked", "dict-masked"))
    if inside and form == "tuple":
        form = "dict"
    skeleton = pick.choice(SKELETONS)
    if (masked or aux) and skeleton in ("sequential", "mutating"):
        skeleton = "list"
    names = [name for name in glues.GLUES if name and (name in glues.EASY or not mild)]
    rows = pick.choice((1, 2, 3, 4, 5, 6, 6, 7, 7, 8, 8, 9))
    micro = pick.choice((1, 1, 2, 3)) if layout not in layouts.STAGED else pick.choice((1, 2, 3, 4))
    if aux and LOSSES[loss].adds:
        # A sum and a term without rows: once for a batch, or for each part? Not ours to say.
        micro = 1
    schedule = pick.choice(("gpipe", "1f1b", "zero-bubble"))
    length = pick.choice((5, 5, 5, 4, 7, rows))
    spec = Spec(
        seed=seed,
        skeleton=skeleton,
        stem=pick.choice(STEMS),
        blocks=blocks,
        choices=tuple(pick.randrange(10**6) for _ in blocks),
        glue=tuple(pick.choice(names) if pick.random() < 0.25 else "" for _ in blocks),
        head=pick.choice(HEADS),
        loss=loss,
        inside=inside,
        returns=pick.choice(("tensor", "dict", "tuple", "object")),
        batch=form,
        rows=_rows(pick, rows),
        eval_rows=pick.choice((rows, rows, max(1, rows - 1), rows + 2, 1)),
        length=length,
        eval_length=length if pick.random() < 0.8 else pick.choice((3, length + 1)),
        evaluate_at=pick.choice((1, 3)),
        optimizer=pick.choice(list(OPTIMIZERS)),
        max_norm=pick.choice((None, None, 0.5)),
        layout=layout,
        ranks=count,
        micro=micro,
        schedule="interleaved" if layout == "interleaved" else schedule,
        speeds=tuple(pick.choice((1.0, 2.0, 3.0)) for _ in range(count))
        if pick.random() < 0.3
        else (),
        autocast=pick.random() < 0.04,
        concat=not inside and not aux and pick.random() < 0.5,
        memory=_memory(seed),
    )
    if "sparse-lookup" in blocks:  # few optimizers take sparse gradients, and no clipping does
        spec = spec.but(optimizer="sgd", max_norm=None)
    if "apply-early" in spec.memory:  # the norm is known when all gradients are
        spec = spec.but(max_norm=None)
    if spec.autocast:  # rounding is large, and others divide by what it leaves of a zero
        spec = spec.but(optimizer="sgd")
    return _usual(spec) if mild else spec


def _usual(spec: Spec) -> Spec:
    """A mild case with usual shapes around its easy words."""
    return spec.but(
        skeleton="list" if spec.skeleton in _UNUSUAL else spec.skeleton,
        head="linear" if spec.head == "tied-function" else spec.head,
        batch="dict" if spec.batch not in _USUAL else spec.batch,
        rows=tuple(max(r, spec.ranks * spec.micro) for r in spec.rows),
        eval_rows=max(spec.eval_rows, spec.ranks * spec.micro),
        eval_length=spec.length,
        autocast=False,
    )


def _memory(seed: int) -> tuple[str, ...]:
    """What saves memory, in half of the cases; drawn apart, so that the rest is as without."""
    pick = random.Random(seed * 6007 + 5)
    if pick.random() < 0.5:
        return ()
    found: list[str] = []
    for kind in layouts.KINDS_OF_MEMORY:
        words = [word for word in layouts.MEMORY if word.startswith(kind)]
        if pick.random() < 0.5:
            found.append(pick.choice(words))
    if pick.random() < 0.3 and "host-activations" not in found:
        found.append("host-activations")
    return tuple(found)


_UNUSUAL = ("object", "shared", "mutating")
_USUAL = ("tuple", "masked", "dict", "dict-masked")


def _blocks(seed: int, pick: random.Random, mild: bool) -> tuple[str, ...]:
    """One block in turn, so that a run of seeds meets every word, and some at random.

    A mild case has easy ones only, so that what must work is tried too.
    """
    words = sorted(BLOCKS)
    easy = [w for w in words if BLOCKS[w].easy]
    words = easy if mild else words
    found = [words[seed % len(words)]]
    for _ in range(pick.choice((1, 1, 2, 3))):
        found.append(pick.choice(easy if pick.random() < 0.6 else words))
    pick.shuffle(found)
    return tuple(found)


def _rows(pick: random.Random, rows: int) -> tuple[int, ...]:
    if pick.random() < 0.75:
        return (rows,) * 3
    return tuple(max(1, rows + pick.choice((-2, -1, 0, 2))) for _ in range(3))


def must_work(spec: Spec) -> bool:
    """Whether a refusal would be a fault: all its words are easy, and its shapes usual."""
    smallest = min(*spec.rows, spec.eval_rows)
    return (
        all(BLOCKS[name].easy for name in spec.blocks)
        and all(name in glues.EASY for name in spec.glue)
        and LOSSES[spec.loss].easy
        and spec.batch in _USUAL
        and spec.head != "tied-function"
        and not (spec.head == "tied" and spec.layout == "head")  # the stem needs it whole
        and spec.skeleton not in _UNUSUAL
        and spec.length == spec.eval_length
        and not spec.autocast
        and smallest >= spec.ranks * spec.micro
    )


def is_random(spec: Spec) -> bool:
    """Whether it draws random numbers in training."""
    glued = spec.skeleton not in ("sequential", "wrapped", "object", "mutating")
    return any(BLOCKS[name].random for name in spec.blocks) or (
        glued and any(name in glues.RANDOM for name in spec.glue)
    )


def describe(spec: Spec) -> str:
    """The case in words, and how to run it again."""
    lines = [
        f"seed {spec.seed}: {spec.layout} on {spec.ranks} rank(s), {spec.micro} micro-batch(es)"
        + (f", {spec.schedule}" if spec.layout in layouts.STAGED else "")
        + (f", speeds {spec.speeds}" if spec.speeds else ""),
        f"  {spec.skeleton} skeleton, stem {spec.stem}, head {spec.head}; batch {spec.batch}, rows "
        f"{spec.rows}, {spec.eval_rows} in evaluation; length {spec.length}, {spec.eval_length}",
    ]
    for index, name in enumerate(spec.blocks):
        glue = spec.glue[index] if index < len(spec.glue) else ""
        lines.append(
            f"  block {index}: {name}: {BLOCKS[name].says}" + (f" Then glue: {glue}." * bool(glue))
        )
    if spec.memory:
        lines.append(f"  memory: {', '.join(spec.memory)}")
    where = "in the model" if spec.inside else "as loss="
    lines.append(f"  loss {spec.loss} {where}; optimizer {spec.optimizer}, clip {spec.max_norm}")
    if spec.autocast:
        lines.append("  autocast to bfloat16 around every step, in float32")
    lines.append(f"  python -m tests.odd.search --case '{spec.to_json()}'")
    return "\n".join(lines)
