"""Spec: an odd case as a value, readable as JSON, from which every rank builds the same.

Place in the flow: `generate` draws one from a seed, `model` builds it, `shrink` makes it smaller.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One case.

    Attributes:
        seed: Of weights, batches and the choices inside the blocks.
        skeleton: How the blocks are held and called: see `model`.
        stem: What makes hidden states of the batch.
        blocks: Names of blocks, in order.
        choices: A number per block: the choices inside it.
        glue: What the model's own forward does after each block; "" for nothing.
        head: What makes the output.
        loss: A name of `losses`.
        inside: Whether the model returns its loss; else it is given as `loss=`.
        returns: What a model with a loss inside returns: tensor, dict, tuple or object.
        batch: What the batch is made of: see `batches`.
        rows: Of the global batch of each step.
        eval_rows: Of the batch that is evaluated.
        length: Tokens of a row.
        eval_length: The same in evaluation.
        evaluate_at: Step before which is evaluated; the last number is after all.
        optimizer: A name of `optimizers`.
        max_norm: Gradient clipping.
        layout: A name of `layouts`.
        ranks: How many.
        micro: Micro-batches.
        schedule: Of the pipeline.
        speeds: Of the devices, or empty for equal ones.
        autocast: Around every step, in float32; else all is float64.
        concat: Whether `evaluate` is asked for the model's outputs.
        memory: What saves memory: names of `layouts.MEMORY`.
    """

    seed: int
    skeleton: str = "list"
    stem: str = "ids"
    blocks: tuple[str, ...] = ()
    choices: tuple[int, ...] = ()
    glue: tuple[str, ...] = ()
    head: str = "linear"
    loss: str = "tokens-full"
    inside: bool = False
    returns: str = "tensor"
    batch: str = "tuple"
    rows: tuple[int, ...] = (6, 6, 6)
    eval_rows: int = 6
    length: int = 5
    eval_length: int = 5
    evaluate_at: int = 3
    optimizer: str = "sgd"
    max_norm: float | None = None
    layout: str = "one"
    ranks: int = 1
    micro: int = 1
    schedule: str = "1f1b"
    speeds: tuple[float, ...] = ()
    autocast: bool = False
    concat: bool = False
    memory: tuple[str, ...] = ()

    def to_json(self) -> str:
        """One line, without what is as by default."""
        plain = asdict(Spec(seed=self.seed))
        return json.dumps({k: v for k, v in asdict(self).items() if k == "seed" or v != plain[k]})

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """What `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

    def but(self, **changes: Any) -> Spec:
        """Itself with changes."""
        return replace(self, **changes)
