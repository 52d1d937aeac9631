"""How an M6 is parallel: experts over all devices, everything else in copies.

Place in the flow: said from outside, as a user would; the model knows nothing of it.
"""

from __future__ import annotations

from whale.annotations import annotate, replicate, split
from whale.errors import AnnotationError
from whale.models.m6.model import M6


def expert_parallel(model: M6) -> M6:
    """Tags the model in place: mixtures of experts split over all devices, the rest replicated.

    Written by hand, for a model with experts in every layer:

        wh.annotate(model, {"blocks.*.ffn": wh.split(), "...": wh.replicate()})
    """
    if not model.config.moe_layers:
        raise AnnotationError(
            "expert_parallel: num_experts is 0, this M6 has no experts to spread",
            hint="a dense model is data parallel with wh.replicate()(model)",
        )
    experts = "|".join(f"blocks.{i}.ffn" for i in model.config.moe_layers)
    return annotate(model, {experts: split(), "...": replicate()})
