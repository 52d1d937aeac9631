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

        wh.set_default_strategy(wh.replicate())
        model = M6(config)
        wh.set_default_strategy(None)
        wh.annotate(model, {"blocks.*.ffn": wh.split()})
    """
    config = model.config
    if not config.moe_layers:
        raise AnnotationError(
            "expert_parallel: num_experts is 0, this M6 has no experts to spread",
            hint="a dense model is data parallel with wh.replicate()(model)",
        )
    experts = [f"blocks.{i}.ffn" for i in config.moe_layers]
    dense = [f"blocks.{i}.ffn" for i in range(config.num_layers) if not config.has_experts(i)]
    # Part by part: "" would enclose the experts too, whose split would be nested in the copies
    # instead of going across them.
    parts = ["patch_stem", "text_stem", "dropout", "norm", "lm_head"]
    parts += [
        f"blocks.*.{name}" for name in ("norm1", "attention", "dropout1", "norm2", "dropout2")
    ]
    return annotate(model, {"|".join([*parts, *dense]): replicate(), "|".join(experts): split()})
