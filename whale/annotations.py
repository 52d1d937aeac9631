"""The primitives: `replicate`, `split`, `stage`, `pipeline`, `cluster`.

Place in the flow: the first thing a user touches. A primitive writes an immutable tag on each
module (`module.__dict__["_whale_tag"]`), which survives deepcopy, pickle and the meta device;
nothing else happens until `wh.parallelize`. Paper section 3, Table 1.
"""

from __future__ import annotations

import difflib
import gc
import itertools
import logging
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from whale.errors import AnnotationError, ClusterError
from whale.ir.cluster import Cluster, DeviceSlice
from whale.ir.patterns import matches
from whale.ir.strategy import Scope, Tag, check_nesting

TAG = "_whale_tag"

_LOG = logging.getLogger("whale")

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_ambient: ContextVar[Tag] = ContextVar("whale_scopes", default=())
_default: ContextVar[_Default | None] = ContextVar("whale_default_strategy", default=None)
_cluster: ContextVar[ClusterLayout | None]
_uids = itertools.count()


def _caller() -> str:
    """file:line of the nearest frame outside this package."""
    here = os.path.dirname(os.path.abspath(__file__))
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(here):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class _ModuleInit:
    """Tags modules as they are built, while a scope is open.

    `nn.Module.__init__` is wrapped only for that time and put back after: torch's own registration
    hooks miss a module that is built in a scope and attached outside it.
    """

    def __init__(self) -> None:
        self.users = 0
        self.original = nn.Module.__init__

    def acquire(self) -> None:
        self.users += 1
        if self.users == 1:
            original = self.original = nn.Module.__init__

            def tagging(module: nn.Module, *args: Any, **kwargs: Any) -> None:
                original(module, *args, **kwargs)
                if tag := _ambient.get():
                    module.__dict__[TAG] = tag

            nn.Module.__init__ = tagging  # type: ignore[method-assign,assignment]

    def release(self) -> None:
        self.users -= 1
        if self.users == 0:
            nn.Module.__init__ = self.original  # type: ignore[method-assign]


_module_init = _ModuleInit()


def tag_of(module: nn.Module) -> Tag:
    """The scopes a module was tagged with, outermost first."""
    tag: Tag = module.__dict__.get(TAG, ())
    return tag


class Primitive:
    """One primitive: a scope, a function on a module, or a value for `annotate`."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self._tokens: list[Any] = []

    def _fresh(self) -> Scope:
        return replace(self.scope, uid=next(_uids))

    def __enter__(self) -> Primitive:
        tag = (*_ambient.get(), self._fresh())
        check_nesting(tag)
        self._tokens.append(_ambient.set(tag))
        _module_init.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        _module_init.release()
        _ambient.reset(self._tokens.pop())

    def __call__(self, module: ModuleT) -> ModuleT:
        """Tags `module` and everything in it, in place.

        Scopes already inside it stay the inner ones.
        """
        if not isinstance(module, nn.Module):
            raise AnnotationError(
                f"{self.scope} was called on {type(module).__name__}, it tags an nn.Module",
                hint=f"write `with wh.{self.scope.kind}(...):` around the construction, or pass a "
                "module",
                where=self.scope.where,
            )
        outer = (*_ambient.get(), self._fresh())
        check_nesting(outer)
        for part in module.modules():
            inner = tuple(scope for scope in tag_of(part) if scope not in outer)
            for depth in range(len(inner)):
                check_nesting((*outer, *inner[: depth + 1]))
            part.__dict__[TAG] = (*outer, *inner)
        return module

    def __repr__(self) -> str:
        return f"wh.{self.scope}"


def _devices(kind: str, count: int | DeviceSlice | None, where: str) -> dict[str, Any]:
    if count is None:
        return {}
    if isinstance(count, DeviceSlice):
        return {"ranks": tuple(count.ranks)}
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise AnnotationError(
            f"{kind}(device_count={count!r}): a device count is a whole number of at least 1",
            hint="leave it out to use all devices, or pass a slice of `wh.cluster(...)`",
            where=where,
        )
    return {"device_count": count}


def _name(kind: str, name: str | int | None, where: str) -> str | None:
    """As text: stages are often numbered."""
    if name is None or isinstance(name, str):
        return name
    if isinstance(name, int) and not isinstance(name, bool):
        return str(name)
    raise AnnotationError(
        f"{kind}(name={name!r}): a name is text, this is a {type(name).__name__}",
        hint="wh.replicate and wh.split take a device count, wh.stage a name only: "
        "(wh.stage(), wh.split(2)) is a stage on two devices",
        where=where,
    )


def _on_devices(kind: str, count: int | DeviceSlice | None, name: str | None) -> Primitive:
    where = _caller()
    devices, name = _devices(kind, count, where), _name(kind, name, where)
    return Primitive(Scope(kind=kind, uid=-1, where=where, name=name, **devices))


def replicate(
    device_count: int | DeviceSlice | None = None, *, name: str | None = None
) -> Primitive:
    """A data parallel TaskGraph.

    Every device of it holds the whole and takes a share of the rows.
    """
    return _on_devices("replicate", device_count, name)


replica = replicate
"""The older name of `replicate`."""


def split(device_count: int | DeviceSlice | None = None, *, name: str | None = None) -> Primitive:
    """A sharded TaskGraph: every device of it holds a part of the weights and sees all rows."""
    return _on_devices("split", device_count, name)


def stage(name: str | int | None = None) -> Primitive:
    """A pipeline stage. Stages run on disjoint devices, in execution order."""
    where = _caller()
    return Primitive(Scope(kind="stage", uid=-1, where=where, name=_name("stage", name, where)))


def pipeline(num_micro_batch: int | None = None, schedule: str | None = None) -> Primitive:
    """Encloses stages and says how they are fed; what is left out comes from Config."""
    where = _caller()
    if num_micro_batch is not None and (
        isinstance(num_micro_batch, bool)
        or not isinstance(num_micro_batch, int)
        or num_micro_batch < 1
    ):
        raise AnnotationError(
            f"pipeline(num_micro_batch={num_micro_batch!r}): a whole number of at least 1",
            hint="at least as many micro-batches as stages keeps every device busy",
            where=where,
        )
    return Primitive(
        Scope(
            kind="pipeline",
            uid=-1,
            where=where,
            num_micro_batch=num_micro_batch,
            schedule=schedule,
        )
    )


def set_default_strategy(strategy: Primitive | None) -> None:
    """The strategy of modules built outside any scope from now on; None takes it back.

    Each call opens a new TaskGraph, so calling it in a loop over layers cuts stages there.
    """
    if strategy is not None and not isinstance(strategy, Primitive):
        raise AnnotationError(
            f"set_default_strategy({strategy!r}): it takes a primitive or None",
            hint="for example wh.set_default_strategy(wh.replicate())",
            where=_caller(),
        )
    apply_default()
    known = {id(module): weakref.ref(module) for module in _modules()}
    _default.set(_Default(strategy._fresh(), known) if strategy is not None else None)


@dataclass(frozen=True, slots=True)
class _Default:
    """A default strategy, and the modules that there were before it."""

    scope: Scope
    known: dict[int, weakref.ref[nn.Module]]


def apply_default() -> None:
    """Tags what was built since the default strategy was set, and in no scope.

    Found among all objects when it is wanted, so that nobody watches every module being built.
    """
    default = _default.get()
    if default is None:
        return
    for module in _modules():
        before = default.known.get(id(module))
        if TAG not in module.__dict__ and (before is None or before() is not module):
            module.__dict__[TAG] = (default.scope,)


def _modules() -> Iterator[nn.Module]:
    """All that are alive."""
    for found in gc.get_objects():
        # By its type: an object may answer `isinstance` with code of its own.
        if issubclass(type(found), nn.Module) and "_modules" in found.__dict__:
            yield found


class ClusterLayout:
    """A cluster cut into slices, which the primitives accept as their devices."""

    def __init__(self, devices: Cluster, slices: tuple[DeviceSlice, ...]) -> None:
        self.cluster = devices
        self.slices = slices
        self._tokens: list[Any] = []

    def __enter__(self) -> ClusterLayout:
        self._tokens.append(_cluster.set(self))
        return self

    def __exit__(self, *exc: object) -> None:
        _cluster.reset(self._tokens.pop())


_cluster = ContextVar("whale_cluster", default=None)


def ambient_cluster() -> ClusterLayout | None:
    """The cluster of the enclosing `with wh.cluster(...)`, if any."""
    return _cluster.get()


def discover() -> Cluster:
    """The devices that are there.

    One per rank of the running job, or this machine's GPUs, or one CPU.
    """
    num_ranks = int(os.environ.get("WORLD_SIZE", "0"))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks or 1))
    num_ranks = num_ranks or max(1, torch.cuda.device_count())
    kind = "CPU"
    if torch.cuda.is_available():
        per_node = min(per_node, num_ranks) if "WORLD_SIZE" in os.environ else num_ranks
        return Cluster.uniform(num_ranks, per_node=per_node, type=torch.cuda.get_device_name(0))
    return Cluster.uniform(num_ranks, per_node=min(per_node, num_ranks), type=kind)


def cluster(
    spec: str | Cluster | ClusterLayout | None = None, layout: str | Mapping[str, Any] = "all"
) -> ClusterLayout:
    """The devices, discovered or described by `spec`, cut by `layout` into `.slices`.

    Layouts: `"all"`, `{"average": n}`, `{"specific": [[0, 1], [2, 3]]}`, `{"aware_row": n}`.
    """
    if spec is None or spec == "local":
        devices = discover()
    elif isinstance(spec, Cluster):
        devices = spec
    elif isinstance(spec, ClusterLayout):
        devices = spec.cluster
    elif not isinstance(spec, str):
        raise ClusterError(
            f"a cluster of type {type(spec).__name__}; allowed: a text such as 1x8xV100-32GB, the "
            "path of a TOML file, or what wh.cluster returns",
            hint="describe the devices as NODESxGPUSxTYPE",
        )
    else:
        devices = Cluster.from_toml(spec) if spec.endswith(".toml") else Cluster.parse(spec)
    return ClusterLayout(devices, devices.layout(layout))


Entry = Primitive | Iterable[Primitive]


def annotate(model: ModuleT, entries: Mapping[str, Entry]) -> ModuleT:
    """Tags modules by path pattern, without touching the model's code; returns the model.

    Each entry is one TaskGraph of all modules its pattern matches. Patterns are globs on module
    paths in which `*` does not cross a dot and `[...]` is a set; alternatives are joined by `|`;
    `""` is the root. A tuple of primitives nests them, outermost first: `{"decoder.*": (wh.stage(),
    wh.split(2))}`. Where two entries match, the one that matched deeper in the tree is the inner
    one. `"..."` is the rest: all modules that no other entry with `replicate` or `split` reaches.
    """
    where = _caller()
    paths = {
        # What torch.compile made of a model has it inside, under this name.
        path.removeprefix("_orig_mod").removeprefix("."): module
        for path, module in model.named_modules(remove_duplicate=False)
    }
    scopes: list[tuple[str, Tag]] = []
    for pattern, entry in entries.items():
        primitives = [entry] if isinstance(entry, Primitive) else list(entry)
        if not primitives or not all(isinstance(p, Primitive) for p in primitives):
            raise AnnotationError(
                f"annotate: the entry {pattern!r} holds {entry!r}",
                hint="a value is a primitive, such as wh.replicate(), or a tuple of them",
                where=where,
            )
        scopes.append((pattern, tuple(p._fresh() for p in primitives)))
    apply_default()
    matched: dict[str, list[tuple[int, Tag]]] = {}
    reached: set[str] = set()
    for pattern, tag in sorted(scopes, key=lambda scope: scope[0] == _REST):
        rest = pattern == _REST
        hits = _rest(paths, reached) if rest else [p for p in paths if matches(pattern, p)]
        if not hits:
            nearest = ", ".join(itertools.islice((p for p in paths if p), 6))
            raise AnnotationError(
                f"annotate: the pattern {pattern!r} matches no module of {type(model).__name__}",
                hint=f"module paths look like: {nearest} ...; `*` does not cross a dot",
                where=where,
            )
        if not rest:
            _warn_idle(pattern, paths, where)
        if any(scope.shards for scope in tag):
            reached.update(hits)
        for hit in hits:
            prefix = f"{hit}." if hit else ""
            depth = hit.count(".") + 1 if hit else 0
            depth += len(paths) * rest  # inside of any stage
            for path in paths:
                if path == hit or path.startswith(prefix):
                    matched.setdefault(path, []).append((depth, tag))
    for path, found in matched.items():
        tag = _ambient.get()
        for _, scopes_found in sorted(found, key=lambda item: item[0]):
            tag = (*tag, *(s for s in scopes_found if s not in tag))
        for depth in range(len(tag)):
            check_nesting(tag[: depth + 1])
        paths[path].__dict__[TAG] = tag
    return model


_REST = "..."


def _warn_idle(pattern: str, paths: Iterable[str], where: str) -> None:
    """An alternative that matches nothing is legal, and often a typo."""
    for alternative in pattern.split("|"):
        if not any(matches(alternative, path) for path in paths):
            near = difflib.get_close_matches(alternative.strip(), [p for p in paths if p], 3, 0.0)
            _LOG.warning(
                "%s: annotate: %r in the pattern %r matches no module; nearest are: %s",
                where,
                alternative.strip(),
                pattern,
                ", ".join(near),
            )


def _rest(paths: Iterable[str], reached: set[str]) -> list[str]:
    """The uppermost modules that are neither in nor around any of `reached`."""
    around = {path[:end] for path in reached for end, c in enumerate(path) if c == "."}
    around |= reached | ({""} if reached else set())
    found: list[str] = []
    for path in paths:
        parents = {path[:end] for end, c in enumerate(path) if c == "."} | {""}
        if path not in around and parents.isdisjoint(reached) and parents.isdisjoint(found):
            found.append(path)
    return found
