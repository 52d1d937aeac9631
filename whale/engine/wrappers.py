"""Wrappers: a model that another library already runs in parallel is refused.

Place in the flow: first thing in `wh.parallelize` and `wh.plan`. DistributedDataParallel averages
gradients by itself: under Whale, which sums them, they would be divided twice.
"""

from __future__ import annotations

from torch import nn

from whale.errors import AnnotationError

_LIBRARIES = {
    "torch.nn.parallel": "DistributedDataParallel and DataParallel",
    "torch.distributed.fsdp": "FSDP",
    "torch.distributed._composable": "replicate() and fully_shard()",
    "deepspeed": "DeepSpeed",
    "fairscale": "FairScale",
    "apex.parallel": "Apex",
    "megatron": "Megatron",
}


def refuse_wrapped(model: nn.Module) -> None:
    """Raises if the model, or any module in it, shards or averages by itself."""
    for path, module in model.named_modules():
        for kind in type(module).__mro__:
            found = next((lib for lib in _LIBRARIES if _within(kind.__module__, lib)), None)
            if found is None:
                continue
            raise AnnotationError(
                f"{path or 'the model'} is a {type(module).__name__} ({found}): it communicates "
                "by itself, and its gradients would be averaged twice",
                hint="pass the plain module (`model.module`); wh.replicate() is Whale's data "
                "parallelism",
            )


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")
