"""Seen: what runs on fake tensors look at, and which modules they called.

Place in the flow: shared by the runs of one `engine.capture`.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from whale.runtime.compat import about_fakes


@dataclass(slots=True)
class Seen:
    """What runs on fakes look at.

    Attributes:
        layers: Paths of the Layers.
        grad: Whether gradients are on around the model's code.
        called: Paths of all modules that were called.
        stuck: Paths of the modules that were running where values were needed, the inner one first.
    """

    layers: Collection[str]
    grad: bool = True
    called: set[str] = field(default_factory=set)
    stuck: list[str] = field(default_factory=list)

    @contextmanager
    def stuck_in(self, model: nn.Module) -> Iterator[None]:
        """Inside, an error that says that values are needed is told where it was."""
        paths = {id(module): path for path, module in model.named_modules()}
        try:
            yield
        except Exception as error:
            if about_fakes(error):
                owners = [
                    frame.f_locals.get("self")
                    for frame, _ in traceback.walk_tb(error.__traceback__)
                ]
                found = [paths[id(x)] for x in reversed(owners) if id(x) in paths]
                self.stuck = list(dict.fromkeys(found))
            raise

    @contextmanager
    def calls(self, model: nn.Module) -> Iterator[None]:
        """Inside, calls of the model's modules are noted."""
        paths: dict[int, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            paths.setdefault(id(module), []).append(path)

        def note(module: nn.Module, args: Any) -> None:
            self.called.update(paths.get(id(module), ()))

        handle = register_module_forward_pre_hook(note)
        try:
            with warnings.catch_warnings():
                # Of compiled modules, whose calls would be noted twice.
                warnings.filterwarnings("ignore", message=".*there are global hooks on modules")
                yield
        finally:
            handle.remove()
