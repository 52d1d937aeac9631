"""Why modules of a split TaskGraph stay whole: the engine's reasons, and the planner's own.

Place in the flow: called by `planner.make_plan` for every split TaskGraph; `ir.plan` prints them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from whale.ir.model_graph import Layer
from whale.ir.virtual_device import VirtualDevice

Reasons = tuple[tuple[str, str], ...]


def reasons_of(layers: Sequence[Layer], whole: Iterable[str], device: VirtualDevice) -> Reasons:
    """(module, why) of the modules that stay whole, and of attention that is not split by heads."""
    width = max(len(replica.ranks) for replica in device.replicas)
    told = dict(pair for layer in layers for pair in layer.reasons)
    options = [option for layer in layers for option in layer.splits]
    found: dict[str, str] = {}
    for path in whole:
        offered = [option for option in options if path in option.modules]
        few = [option for option in offered if option.units < width]
        if few and len(few) == len(offered):
            found[path] = f"{few[0].units} {few[0].unit} for {width} devices"
        elif offered:
            found[path] = "its weight is read whole elsewhere, or its input has no rows to gather"
        else:
            found[path] = told.get(path, "a parameter of its own")
    found.update((path, why) for path, why in told.items() if why.startswith("not by heads"))
    return tuple(found.items())
