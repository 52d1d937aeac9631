"""Cluster: the devices a plan is made for, equal or not, and the slices a layout cuts them into.

Place in the flow: discovered or described by the user, then read by the planner, the cost model and
the primitives (a DeviceSlice stands where they take a device count). Paper section 3.1.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from whale.errors import ClusterError
from whale.ir.device_types import DEVICE_TYPES, DeviceType, device_type, type_in, type_named
from whale.ir.text import dumps, loads

MOST_DEVICES = 100_000
GRAMMAR = "NODESxGPUSxTYPE joined by '+', such as 60x8xV100-32GB or 1x8xV100-32GB+1x8xP100-16GB"
LAYOUTS = '"all", {"average": n}, {"specific": [[0, 1], [2, 3]]}, {"aware_row": n}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator (or CPU rank); its rank is its place in the cluster."""

    rank: int
    node: int
    type: str
    memory_bytes: int
    speed: float = 1.0
    """Relative to its type."""
    pace_flops: float | None = None
    """CPU ranks only: each sleeps to the deadline flops / pace, so unequal devices can be tried."""
    power_watts: float | None = None
    """The most it draws; None: the type's TDP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How fast a node's devices talk, one direction; None leaves a figure to the type's default."""

    intra_bytes_per_s: float | None = None
    """Out of one device, to others in the node."""
    inter_bytes_per_s: float | None = None
    """Out of the whole node."""
    latency_s: float | None = None
    """Of one hop between nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullLink(Link):
    """A Link that leaves nothing open, with the latency of one hop inside the node."""

    intra_bytes_per_s: float
    inter_bytes_per_s: float
    latency_s: float
    intra_latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What the devices of one machine share; None leaves a figure to the type's default."""

    index: int
    host_memory_bytes: int | None = None
    link: Link = Link()


@dataclass(frozen=True, slots=True)
class DeviceSlice:
    """Some ranks of a cluster; `wh.split(slice)` and the other primitives place work on them."""

    ranks: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices by rank, and the nodes they stand in."""

    devices: tuple[Device, ...]
    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        ranks = [device.rank for device in self.devices]
        if not ranks or ranks != list(range(len(ranks))):
            raise ClusterError(
                f"device ranks are {ranks}; allowed: 0, 1, 2, ... in order, at least one",
                hint="number the devices by their place in the cluster",
            )
        indices = [node.index for node in self.nodes]
        used = sorted({device.node for device in self.devices})
        if indices != list(range(len(indices))) or used != indices:
            raise ClusterError(
                f"nodes are {indices} and devices stand in nodes {used}; allowed: 0, 1, 2, ... in "
                "both, each with a device",
                hint="number the nodes by their place in the cluster",
            )

    @classmethod
    def parse(cls, spec: str) -> Cluster:
        """From a short description: `1x8xV100-32GB+1x8xP100-16GB`."""
        groups = []
        for part in spec.split("+"):
            found = re.fullmatch(r"\s*(\d+)[xX](\d+)[xX](\S+)\s*", part)
            if found is None:
                raise ClusterError(
                    f"cluster {spec!r}: cannot read {part.strip()!r}", hint=f"write {GRAMMAR}"
                )
            count, gpus, name = int(found[1]), int(found[2]), found[3]
            groups.append({"count": count, "gpus": gpus, "type": name})
        return cls._of_groups(groups, where=f"cluster {spec!r}")

    @classmethod
    def from_toml(cls, path: str | Path) -> Cluster:
        """From a TOML file with one `[[node]]` table per kind of node."""
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ClusterError(
                f"cluster file {str(path)!r}: {error.strerror}", hint=f"or write {GRAMMAR}"
            ) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ClusterError(
                f"cluster file {str(path)!r} is not TOML: {error}", hint=_TOML_HINT
            ) from error
        _known(data, ("node",), where=f"cluster file {str(path)!r}")
        groups = data.get("node", [])
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise ClusterError(f"cluster file {str(path)!r}: `node` is no list", hint=_TOML_HINT)
        return cls._of_groups(groups, where=f"cluster file {str(path)!r}")

    @classmethod
    def uniform(
        cls,
        num_devices: int,
        *,
        type: str,
        per_node: int | None = None,
        memory_bytes: int | None = None,
    ) -> Cluster:
        """Equal devices, `per_node` to a node, as discovered: the last node may have fewer.

        A driver's name such as "Tesla V100-SXM2-32GB" is read as its type; a name that is no known
        type is kept when `memory_bytes` says what the table cannot.
        """
        per_node = per_node or num_devices
        if num_devices < 1 or per_node < 1:
            raise ClusterError(
                f"{num_devices} devices, {per_node} per node; allowed: 1 or more of each",
                hint=f"or describe them: {GRAMMAR}",
            )
        name = type_in(type) or (type if memory_bytes else type_named(type, where="device"))
        memory = memory_bytes or DEVICE_TYPES[name].memory_bytes
        return cls(
            devices=tuple(
                Device(rank=rank, node=rank // per_node, type=name, memory_bytes=memory)
                for rank in range(num_devices)
            ),
            nodes=tuple(Node(index=i) for i in range(math.ceil(num_devices / per_node))),
        )

    @classmethod
    def _of_groups(cls, groups: Iterable[Mapping[str, Any]], *, where: str) -> Cluster:
        devices: list[Device] = []
        nodes: list[Node] = []
        for group in groups:
            _known(group, _NODE_KEYS, where=where)
            count = _whole(group, "count", 1, where=where)
            gpus = _whole(group, "gpus", None, where=where)
            if len(devices) + count * gpus > MOST_DEVICES:
                raise ClusterError(
                    f"{where}: {len(devices) + count * gpus} devices; allowed: up to "
                    f"{MOST_DEVICES}",
                    hint=f"write {GRAMMAR}",
                )
            name = type_named(group.get("type"), where=where)
            pace = _positive(group, "pace_flops", where=where)
            if pace is not None and name != "CPU":
                raise ClusterError(
                    f"{where}: pace_flops = {pace:g} on type {name}; allowed: on CPU only",
                    hint="a GPU's speed is relative to its type: set `speed`",
                )
            memory = _positive(group, "memory_bytes", where=where)
            host = _positive(group, "host_memory_bytes", where=where)
            device = Device(
                rank=0,
                node=0,
                type=name,
                memory_bytes=int(memory or DEVICE_TYPES[name].memory_bytes),
                speed=_positive(group, "speed", where=where) or 1.0,
                pace_flops=pace,
                power_watts=_positive(group, "power_watts", where=where),
            )
            link = _link(group.get("link", {}), where=where)
            node = Node(index=0, host_memory_bytes=None if host is None else int(host), link=link)
            for index in range(len(nodes), len(nodes) + count):
                nodes.append(replace(node, index=index))
                ranks = range(len(devices), len(devices) + gpus)
                devices += [replace(device, rank=rank, node=index) for rank in ranks]
        if not devices:
            raise ClusterError(f"{where} has no devices; allowed: 1 or more", hint=_TOML_HINT)
        return cls(devices=tuple(devices), nodes=tuple(nodes))

    @property
    def num_devices(self) -> int:
        """How many devices there are; also the number of ranks."""
        return len(self.devices)

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """The ranks in one node."""
        return tuple(device.rank for device in self.devices if device.node == node)

    def type_of(self, rank: int) -> DeviceType:
        """The figures of a device's type, with its own memory and power; `speed` is not in them."""
        device = self.devices[rank]
        row = replace(device_type(device.type), name=device.type, memory_bytes=device.memory_bytes)
        watts = device.power_watts or row.tdp_watts
        return replace(row, tdp_watts=watts, idle_watts=min(row.idle_watts, watts))

    def link_of(self, node: int) -> FullLink:
        """A node's link: what is given, else the default of its type (the slowest of several)."""
        types = self._types_in(node)
        given = self.nodes[node].link
        return FullLink(
            intra_bytes_per_s=given.intra_bytes_per_s or min(t.intra_bytes_per_s for t in types),
            inter_bytes_per_s=given.inter_bytes_per_s or min(t.inter_bytes_per_s for t in types),
            latency_s=given.latency_s or max(t.inter_latency_s for t in types),
            intra_latency_s=max(t.intra_latency_s for t in types),
        )

    def host_memory_of(self, node: int) -> int:
        """A node's host memory in bytes: what is given, else the default of its type."""
        given = self.nodes[node].host_memory_bytes
        return given or min(t.host_memory_bytes for t in self._types_in(node))

    def _types_in(self, node: int) -> list[DeviceType]:
        return [device_type(name) for name in {self.devices[r].type for r in self.ranks_of(node)}]

    def describe(self) -> list[str]:
        """A line for each run of equal nodes: every figure, `(given)` or the type's `(default)`."""
        nodes = groupby(self._figures(node) for node in self.nodes)
        return [f"{len(list(same))} x {figures}" for figures, same in nodes]

    def _figures(self, node: Node) -> str:
        ranks = self.ranks_of(node.index)
        device, link, given = self.type_of(ranks[0]), self.link_of(node.index), node.link
        default, first = device_type(device.name).memory_bytes, self.devices[ranks[0]]
        figures: list[tuple[str, float, str, object]] = [
            ("memory", device.memory_bytes / 1e9, "GB", device.memory_bytes != default),
            ("power", device.tdp_watts, "W", first.power_watts),
            ("inside a node", link.intra_bytes_per_s / 1e9, "GB/s", given.intra_bytes_per_s),
            ("between nodes", link.inter_bytes_per_s / 1e9, "GB/s", given.inter_bytes_per_s),
            ("latency", link.latency_s * 1e6, "us", given.latency_s),
            ("host memory", self.host_memory_of(node.index) / 1e9, "GB", node.host_memory_bytes),
        ]
        if first.speed != 1.0:
            figures.insert(0, ("speed", first.speed, "of the type's", True))
        if first.pace_flops is not None:
            figures.insert(0, ("pace", first.pace_flops / 1e9, "GFLOP/s", True))
        told = (f"{k} {v:g} {u} ({'given' if own else 'default'})" for k, v, u, own in figures)
        return f"{len(ranks)} x {device.name}: {', '.join(told)}"

    def layout(self, layout: str | Mapping[str, Any] = "all") -> tuple[DeviceSlice, ...]:
        """Cut the devices into slices.

        Args:
            layout: `"all"` is one slice of everything; `{"average": n}` is n equal slices of
                consecutive ranks; `{"specific": [[0, 1], [2, 3]]}` names the ranks;
                `{"aware_row": n}` is n equal slices that keep the devices of a node together.

        Returns:
            The slices, in order.
        """
        everything = tuple(range(self.num_devices))
        if layout == "all":
            return (DeviceSlice(everything),)
        kind, value = _layout_kind(layout)
        if kind == "specific":
            return self._specific(value)
        if kind == "average":
            return self._equal(everything, value, kind)
        # Nodes in the order of their first rank, so that rank 0 stays first.
        by_node = sorted(
            everything, key=lambda rank: (self.ranks_of(self.devices[rank].node), rank)
        )
        slices = self._equal(by_node, value, kind)
        for part in slices:
            self._keeps_nodes_together(part, num_slices=value)
        return slices

    def _equal(self, ranks: Iterable[int], count: object, kind: str) -> tuple[DeviceSlice, ...]:
        ordered = tuple(ranks)
        if type(count) is not int or count < 1 or len(ordered) % count:
            divisors = [n for n in range(1, len(ordered) + 1) if len(ordered) % n == 0]
            raise ClusterError(
                f"layout {{{kind!r}: {count!r}}} of {len(ordered)} devices; allowed: a count that "
                f"divides them: {', '.join(map(str, divisors))}",
                hint='{"specific": [...]} makes unequal slices',
            )
        size = len(ordered) // count
        return tuple(DeviceSlice(ordered[i * size : (i + 1) * size]) for i in range(count))

    def _keeps_nodes_together(self, part: DeviceSlice, *, num_slices: int) -> None:
        touched = sorted({self.devices[rank].node for rank in part})
        if len(touched) == 1:
            return
        for node in touched:
            ranks = self.ranks_of(node)
            if not {*ranks} <= {*part}:
                raise ClusterError(
                    f"layout {{'aware_row': {num_slices}}}: slice {list(part)} spans nodes "
                    f"{touched} and cuts node {node} of {len(ranks)} devices; allowed: slices "
                    "inside a node, or of whole nodes",
                    hint=f'{{"average": {num_slices}}} may cut nodes; or choose another count',
                )

    def _specific(self, lists: object) -> tuple[DeviceSlice, ...]:
        slices = _rank_lists(lists)
        owner: dict[int, int] = {}
        for index, part in enumerate(slices):
            for rank in part:
                if rank not in range(self.num_devices):
                    raise ClusterError(
                        f"layout slice {index} names rank {rank} of {self.num_devices} devices; "
                        f"allowed: 0 to {self.num_devices - 1}",
                        hint="ranks count from 0 through all nodes in order",
                    )
                if rank in owner:
                    raise ClusterError(
                        f"rank {rank} is in layout slices {owner[rank]} and {index}; allowed: one",
                        hint="TaskGraphs that share devices take the same slice",
                    )
                owner[rank] = index
        return slices

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "devices": [asdict(device) for device in self.devices],
            "nodes": [asdict(node) for node in self.nodes],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cluster:
        """The inverse of `to_dict`."""
        return cls(
            devices=tuple(Device(**device) for device in data["devices"]),
            nodes=tuple(Node(**{**node, "link": Link(**node["link"])}) for node in data["nodes"]),
        )

    def to_text(self) -> str:
        """The text form (`ir/text.py`); `from_text` gives an equal Cluster back."""
        return dumps(self.to_dict(), title="cluster")

    @classmethod
    def from_text(cls, text: str) -> Cluster:
        """The inverse of `to_text`."""
        return cls.from_dict(loads(text, title="cluster"))

    def __str__(self) -> str:
        """The short description, where it can say it: overridden figures are not in it."""
        kinds = []
        for node in self.nodes:
            ranks = self.ranks_of(node.index)
            kinds.append(f"{len(ranks)}x{self.devices[ranks[0]].type}")
        return "+".join(f"{len(list(same))}x{kind}" for kind, same in groupby(kinds))


_NODE_KEYS = tuple(
    "count gpus type memory_bytes speed host_memory_bytes link pace_flops power_watts".split()
)
_LINK_KEYS = ("intra_gb_s", "inter_gb_s", "latency_s")
_TOML_HINT = 'a node is written [[node]], then gpus = 8 and type = "V100-32GB"'


def _known(table: Mapping[str, Any], keys: Iterable[str], *, where: str) -> None:
    for key in table:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            raise ClusterError(
                f"{where}: unknown key {key!r}; allowed: {', '.join(keys)}",
                hint=f"did you mean {near[0]!r}?" if near else _TOML_HINT,
            )


def _whole(group: Mapping[str, Any], key: str, default: int | None, *, where: str) -> int:
    value = group.get(key, default)
    if type(value) is not int or value < 1:
        raise ClusterError(
            f"{where}: {key} = {value!r}; allowed: an integer of 1 or more", hint=f"write {GRAMMAR}"
        )
    return value


def _positive(group: Mapping[str, Any], key: str, *, where: str) -> float | None:
    value = group.get(key)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ClusterError(
            f"{where}: {key} = {value!r}; allowed: a finite number above 0",
            hint=f"leave {key} out for the type's own",
        )
    return float(value)


def _link(table: Any, *, where: str) -> Link:
    if not isinstance(table, Mapping):
        raise ClusterError(
            f"{where}: link = {table!r}; allowed: a table of {', '.join(_LINK_KEYS)}",
            hint="link = { intra_gb_s = 130, inter_gb_s = 6, latency_s = 20e-6 }",
        )
    _known(table, _LINK_KEYS, where=f"{where}, link")
    intra = _positive(table, "intra_gb_s", where=where)
    inter = _positive(table, "inter_gb_s", where=where)
    return Link(
        intra_bytes_per_s=None if intra is None else intra * 1e9,
        inter_bytes_per_s=None if inter is None else inter * 1e9,
        latency_s=_positive(table, "latency_s", where=where),
    )


def _layout_kind(layout: object) -> tuple[str, Any]:
    kinds = ("average", "specific", "aware_row")
    if isinstance(layout, Mapping) and len(layout) == 1:
        kind, value = next(iter(layout.items()))
        if kind in kinds:
            return kind, value
    near = difflib.get_close_matches(str(layout), ("all", *kinds), n=1, cutoff=0.3)
    raise ClusterError(
        f"unknown layout {layout!r}; allowed: {LAYOUTS}",
        hint=f"did you mean {near[0]!r}?" if near else 'leave the layout out for "all"',
    )


def _rank_lists(lists: object) -> tuple[DeviceSlice, ...]:
    shape = isinstance(lists, (list, tuple)) and all(
        isinstance(part, (list, tuple)) and part and all(type(rank) is int for rank in part)
        for part in lists
    )
    if not shape or not lists:
        raise ClusterError(
            f"layout {{'specific': {lists!r}}}; allowed: a list of non-empty lists of ranks",
            hint='such as {"specific": [[0, 1], [2, 3]]}',
        )
    assert isinstance(lists, (list, tuple))
    return tuple(DeviceSlice(tuple(part)) for part in lists)
