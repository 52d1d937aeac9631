"""Which modules are Layers: the ones that stay whole, found by structure and by the user's tags.

Place in the flow: first step of `engine.capture`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from torch import nn

from whale.annotations import tag_of
from whale.ir.strategy import Tag

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Paths of the Layers in registration order.

    A module is taken apart when its inside carries different tags, when it is a container, or when
    it holds a ModuleList (repeated blocks) or a Sequential of composite modules; an element of a
    ModuleList is a block and stays whole unless tags cut it.
    """
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def look(module: nn.Module, path: str, block: bool) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        children = list(module.named_children())
        apart = bool(children) and (
            _mixed(module)
            or isinstance(module, _CONTAINERS)
            or (not block and _holds_blocks(module))
        )
        if not apart:
            if not isinstance(module, _CONTAINERS):
                found[path] = module
            return
        for name, child in children:
            look(child, f"{path}.{name}" if path else name, isinstance(module, nn.ModuleList))

    look(model, "", False)
    if list(found) == [""] and not _mixed(model) and next(model.children(), None) is not None:
        # A plain model without blocks: its children are the Layers, unless its own parameters tie
        # it together.
        found = {name: child for name, child in model.named_children()}
    return found


def open_uncalled(
    layers: dict[str, nn.Module], called: Collection[str]
) -> dict[str, nn.Module] | None:
    """The Layers with those taken apart that were passed by; None if there are none.

    A dict of modules has no forward, and a Sequential may be run member by member: what runs then
    are its children, which are Layers instead.
    """
    passed_by = {
        path
        for path in layers
        if path not in called and any(name.startswith(f"{path}.") for name in called)
    }
    if not passed_by:
        return None
    found: dict[str, nn.Module] = {}
    for path, layer in layers.items():
        if path not in passed_by:
            found[path] = layer
            continue
        known = {id(module) for module in (*layers.values(), *found.values())}
        for name, child in layer.named_children():
            if id(child) not in known:
                found[f"{path}.{name}"] = child
    return found


def close_around(
    model: nn.Module, layers: dict[str, nn.Module], stuck: Collection[str]
) -> dict[str, nn.Module] | None:
    """The Layers with the innermost of these modules as one of them; None where none can be.

    Code between Layers must run without values. Code that needs some is put inside a Layer, where
    it runs as it stands, if that is not the whole model and all of it has one tag.
    """
    modules = dict(model.named_modules())
    tags = layer_tags(model, layers)
    if not any(part.kind in ("split", "stage") for tag in tags.values() for part in tag):
        return None  # data parallelism needs no trace
    for path in stuck:
        inside = [name for name in layers if name.startswith(f"{path}.")]
        if not path or any(path == name or path.startswith(f"{name}.") for name in layers):
            return None  # a Layer that cannot be run at all
        if not inside:
            continue
        if _mixed(modules[path]) or len({tags[name] for name in inside}) > 1:
            return None
        found: dict[str, nn.Module] = {}
        for name, layer in layers.items():
            if name in inside:
                found[path] = modules[path]
            else:
                found[name] = layer
        return found
    return None


def _mixed(module: nn.Module) -> bool:
    tags = {tag_of(part) for part in module.modules()}
    return len(tags) > 1


def _holds_blocks(module: nn.Module) -> bool:
    for part in module.modules():
        if isinstance(part, nn.ModuleList) and len(part) > 0:
            return True
        if isinstance(part, nn.Sequential) and sum(1 for c in part if list(c.children())) > 1:
            return True
    return False


def layer_tags(model: nn.Module, layers: dict[str, nn.Module]) -> dict[str, Tag]:
    """The tag of every Layer: its own, or the nearest tagged ancestor's."""
    modules = dict(model.named_modules(remove_duplicate=False))
    tags: dict[str, Tag] = {}
    for path, layer in layers.items():
        tag = tag_of(layer)
        parent = path
        while not tag and parent:
            parent = parent.rpartition(".")[0]
            tag = tag_of(modules[parent])
        tags[path] = tag
    return tags


LARGE = 0.25
"""Of a model's parameters: a smaller Layer is not worth gathering the rows of all replicas for."""


def large_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> set[str]:
    """Linears and embeddings that hold much of the model, and share no weight."""
    users = Counter(id(p) for layer in layers.values() for p in layer.parameters())
    total = sum(p.numel() for p in model.parameters())
    return {
        path
        for path, layer in layers.items()
        if isinstance(layer, nn.Linear | nn.Embedding)
        and sum(p.numel() for p in layer.parameters()) >= LARGE * total
        and all(users[id(p)] == 1 for p in layer.parameters())
    }
