"""Wrappers: a model that is not plain Python modules with weights is refused.

Place in the flow: first thing in `wh.parallelize` and `wh.plan`. DistributedDataParallel averages
gradients by itself: under Whale, which sums them, they would be divided twice. TorchScript runs
beside Python, where nothing can be followed. A lazy module has no weights yet. Sparse tensors have
no elements that could be followed.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

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
    """Raises if the model, or any module in it, shards or averages by itself, or is not ready."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise AnnotationError(
                f"{path or 'the model'} is a {type(module).__name__}, TorchScript that runs beside "
                "Python: what it computes can be neither split nor cut nor followed",
                hint="pass the module as it was before torch.jit.script or torch.jit.trace",
            )
        for name, tensor in {**vars(module), **module._parameters, **module._buffers}.items():
            if isinstance(tensor, torch.Tensor) and tensor.layout != torch.strided:
                layout = str(tensor.layout).removeprefix("torch.")
                raise AnnotationError(
                    f"{name} of {path or 'the model'} ({type(module).__name__}) is a {layout} "
                    "tensor, which can be neither traced nor compared over ranks",
                    hint="keep its indices and values as two dense buffers, and make the sparse "
                    "tensor of them in the forward",
                )
            if is_lazy(tensor):
                raise AnnotationError(
                    f"{name} of {path or 'the model'} ({type(module).__name__}) has no shape yet",
                    hint="call the model once on a batch before wh.parallelize, as lazy modules "
                    "want it",
                )
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
