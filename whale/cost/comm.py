"""Communication: seconds of a collective or a message among ranks of a cluster.

Place in the flow: asked by the planner and the simulator for every action that moves bytes. The
answer depends on the shape of the group (how many ranks in how many nodes of which kind), so lines
`latency + bytes * seconds_per_byte`, one per algorithm, are kept by shape and the cheapest counts.

Inside a node: rings, as fitted to measured NCCL times. Over several nodes: a hierarchy (inside,
across, inside; across by ring or tree) or one flat ring over the slowest link. A mixed group runs
at its slowest member. What was measured on the cluster itself (`links`) replaces all of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from whale.errors import ClusterError
from whale.ir.cluster import Cluster, FullLink
from whale.ir.device_types import DeviceType, device_type

# (latency_s, bytes_per_s) of an all-reduce inside a node by group size: benchmarks/fit_nccl.py on
# vTrain's NCCL tables (KAIST, MIT licence), 1 MB to 1 GB; mean error 0.5 to 6.5 % (V100) and 2.7 to
# 5.4 % (A100). How many NVLinks a ring of V100 finds depends on their number: 2 have the least.
FITS: Mapping[str, Mapping[int, tuple[float, float]]] = {
    "V100": {
        2: (23.5e-6, 22.5e9),
        3: (35.1e-6, 45.9e9),
        4: (52.5e-6, 87.7e9),
        5: (41.8e-6, 37.2e9),
        6: (58.7e-6, 47.0e9),
        7: (69.3e-6, 88.6e9),
        8: (80.4e-6, 135.7e9),
    },
    "A100": {
        2: (40.9e-6, 186.5e9),
        3: (54.0e-6, 209.3e9),
        4: (45.6e-6, 208.0e9),
        5: (50.8e-6, 213.5e9),
        6: (58.7e-6, 217.9e9),
        7: (60.9e-6, 217.4e9),
        8: (70.6e-6, 221.0e9),
    },
}
FITTED = {"V100-16GB": "V100", "V100-32GB": "V100", "A100-40GB": "A100", "A100-80GB": "A100"}
LARGEST = 8

# What a collective takes before its first hop: the same fits' latencies against 2 (n - 1) hops.
# Parts that were not measured take the family next to them in age; Gloo has no kernel to launch.
LAUNCH_S: Mapping[str, float] = {"V100": 16.6e-6, "A100": 37.9e-6, "CPU": 0.0}
FAMILY = {**FITTED, "P100-16GB": "V100", "T4": "V100", "CPU": "CPU"}
NEWER = "A100"

EFFICIENCY = 0.75
"""Bus bandwidth over the link's peak where nothing was measured: 8 A100 reach 221 of 300 GB/s
(0.74), 8 V100 136 of 150 (0.90); the lower, since protocol and kernel cost does not go away with
faster links. The network counts at its line rate, and so does a CPU's, which is no peak."""

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""How often every byte goes around the ring."""

Line = tuple[float, float]
"""latency_s and seconds_per_byte."""

Links = Mapping[tuple[str, int, int], tuple[float, float]]
"""Measured: (kind, num_ranks, num_nodes) -> (latency_s, bytes_per_s), the latter of the bus: for an
all-reduce of S bytes over n ranks, 2 (n - 1) / n * S cross it (nccl-tests' busbw)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The members of a group in one node: the slowest of their figures."""

    num_ranks: int
    launch_s: float
    ring_s: float
    """The hops of an all-reduce among them, without the launch."""
    bytes_per_s: float
    """Of the bus of a ring among them; infinite for one rank."""
    hop_s: float
    memory_bytes_per_s: float
    inter_bytes_per_s: float
    inter_hop_s: float
    num_adapters: int

    def across(self, num_sharing: int) -> float:
        """Bytes/s out of the node for this group, when `num_sharing` like it send at once."""
        used = min(self.num_ranks * num_sharing, self.num_adapters)
        return self.inter_bytes_per_s * used / self.num_adapters / num_sharing

    @property
    def inside(self) -> float:
        """Seconds per byte of a reduce-scatter, or of an all-gather, among them."""
        return (self.num_ranks - 1) / self.num_ranks / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The shape of a group: what its collectives' times depend on."""

    num_ranks: int
    num_nodes: int
    parts: frozenset[Part]
    """The kinds of parts; how many there are of each does not matter."""
    launch_s: float
    hop_s: float
    inter_hop_s: float

    def across(self, num_sharing: int) -> float:
        """Bytes/s of the slowest node."""
        return min(part.across(num_sharing) for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fabric:
    """What communication costs on one cluster. A group of one rank costs nothing.

    Every method takes `num_sharing`: how many groups of the same shape use the same nodes' network
    at the same time, such as the 8 data parallel groups of a node whose devices split a model.

    Example:
        >>> fabric = Fabric.of(Cluster.parse("2x8xV100-32GB"))
        >>> round(fabric.all_reduce(range(8), 256e6), 4)
        0.0034
    """

    cluster: Cluster
    links: Links = field(default_factory=dict)
    _lines: dict[tuple[str, tuple[int, ...] | range, int], Mapping[str, Line]] = field(
        default_factory=dict, init=False, repr=False
    )
    _by_shape: dict[tuple[str, Group, int], Mapping[str, Line]] = field(
        default_factory=dict, init=False, repr=False
    )
    _node_links: dict[int, FullLink] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, cluster: Cluster, links: Links | None = None) -> Fabric:
        """The model for a cluster; `links` are figures measured on it, used in its place."""
        for (kind, num_ranks, num_nodes), (latency, rate) in (links or {}).items():
            if kind not in KINDS or num_ranks < 2 or num_nodes < 1 or latency < 0 or rate <= 0:
                raise ClusterError(
                    f"measured {kind!r} of {num_ranks} ranks in {num_nodes} nodes: {latency} s, "
                    f"{rate} bytes/s; allowed: {', '.join(KINDS)} of 2 or more ranks, rates over 0",
                    hint="measure again with whale calibrate",
                )
        return cls(cluster=cluster, links=dict(links or {}))

    def all_reduce(self, ranks: Iterable[int], nbytes: float, *, num_sharing: int = 1) -> float:
        """Seconds to sum `nbytes` on every rank."""
        return self._seconds("all_reduce", ranks, nbytes, num_sharing)

    def all_gather(
        self, ranks: Iterable[int], total_bytes: float, *, num_sharing: int = 1
    ) -> float:
        """Seconds until every rank has all `total_bytes`, of which each had its part."""
        return self._seconds("all_gather", ranks, total_bytes, num_sharing)

    def reduce_scatter(
        self, ranks: Iterable[int], total_bytes: float, *, num_sharing: int = 1
    ) -> float:
        """Seconds until every rank has its part of the sum of `total_bytes` from each."""
        return self._seconds("reduce_scatter", ranks, total_bytes, num_sharing)

    def broadcast(self, ranks: Iterable[int], nbytes: float, *, num_sharing: int = 1) -> float:
        """Seconds to copy `nbytes` from one rank to the others."""
        return self._seconds("broadcast", ranks, nbytes, num_sharing)

    def all_to_all(
        self,
        ranks: Iterable[int],
        bytes_per_rank: float,
        *,
        two_level: bool | None = None,
        skew: float = 1.0,
        num_sharing: int = 1,
    ) -> float:
        """Seconds until every rank sent `bytes_per_rank`, spread over all of them.

        Args:
            ranks: The group.
            bytes_per_rank: What one rank sends, its own share included.
            two_level: True: first inside the nodes, then between them in fewer and larger messages;
                False: everyone to everyone; None: the cheaper, or what was measured.
            skew: The busiest rank's bytes over the mean (a capacity factor, or measured).
            num_sharing: Groups that use the network at once.
        """
        lines = self._lines_of("all_to_all", ranks, num_sharing)
        if two_level is not None:
            name = "two-level" if two_level else "flat"
            lines = {name: lines[name]} if name in lines else lines
        return _cheapest(lines, bytes_per_rank * skew)

    def collective(self, name: str, ranks: Iterable[int], total_bytes: float) -> float:
        """Seconds of the collective of this name, by all the bytes that its group has together.

        For an all-reduce those are the bytes of one rank, which all of them have.
        """
        if name == "all_to_all":
            members = tuple(ranks)
            return self.all_to_all(members, total_bytes / len(members))
        return self._seconds(name, ranks, total_bytes, 1)

    def send(self, source: int, target: int, nbytes: float, *, num_sharing: int = 1) -> float:
        """Seconds of a message from one rank to another."""
        ranks = (source,) if source == target else (source, target)
        return self._seconds("send", ranks, nbytes, num_sharing)

    def options(
        self, kind: str, ranks: Iterable[int], nbytes: float, *, num_sharing: int = 1
    ) -> dict[str, float]:
        """Seconds by algorithm, for a report; the methods above give the least of them."""
        lines = self._lines_of(kind, ranks, num_sharing)
        return {name: latency + nbytes * per_byte for name, (latency, per_byte) in lines.items()}

    def _seconds(self, kind: str, ranks: Iterable[int], nbytes: float, num_sharing: int) -> float:
        return _cheapest(self._lines_of(kind, ranks, num_sharing), nbytes)

    def _lines_of(self, kind: str, ranks: Iterable[int], num_sharing: int) -> Mapping[str, Line]:
        members = ranks if isinstance(ranks, tuple | range) else tuple(ranks)
        key = (kind, members, num_sharing)
        lines = self._lines.get(key)
        if lines is None:
            group = self.group(members)
            shape = (kind, group, num_sharing)
            if shape not in self._by_shape:
                self._by_shape[shape] = self._lines_for(kind, group, num_sharing)
            lines = self._lines[key] = self._by_shape[shape]
        return lines

    def _lines_for(self, kind: str, group: Group, num_sharing: int) -> Mapping[str, Line]:
        if group.num_ranks == 1:
            return {}
        measured = self._measured(kind, group, num_sharing)
        if measured is not None:
            return {"measured": measured}
        if kind in ROUNDS:
            return _ring_lines(group, ROUNDS[kind], num_sharing)
        return _MESSAGES[kind](group, num_sharing)

    def group(self, ranks: Iterable[int]) -> Group:
        """The shape of a group of ranks."""
        by_node: defaultdict[int, set[int]] = defaultdict(set)
        for rank in ranks:
            by_node[self.cluster.devices[rank].node].add(rank)
        parts = frozenset(self._part(node, members) for node, members in by_node.items())
        return Group(
            num_ranks=sum(map(len, by_node.values())),
            num_nodes=len(by_node),
            parts=parts,
            launch_s=max(part.launch_s for part in parts),
            hop_s=max(part.hop_s for part in parts),
            inter_hop_s=max(part.inter_hop_s for part in parts),
        )

    def _part(self, node: int, ranks: set[int]) -> Part:
        if node not in self._node_links:
            self._node_links[node] = self.cluster.link_of(node)
        link = self._node_links[node]
        types = [device_type(t) for t in {self.cluster.devices[rank].type for rank in ranks}]
        slowest = min(types, key=lambda kind: (kind.intra_bytes_per_s, kind.name))
        ring_s, bytes_per_s = _ring(slowest, link, len(ranks))
        return Part(
            num_ranks=len(ranks),
            launch_s=max(_launch(kind) for kind in types),
            ring_s=ring_s,
            bytes_per_s=bytes_per_s,
            hop_s=link.intra_latency_s,
            memory_bytes_per_s=min(kind.memory_bytes_per_s for kind in types),
            inter_bytes_per_s=link.inter_bytes_per_s,
            inter_hop_s=link.latency_s,
            num_adapters=max(kind.num_adapters for kind in types),
        )

    def _measured(self, kind: str, group: Group, num_sharing: int) -> Line | None:
        """The figures of the nearest measured shape, taken as they are; never across levels.

        A kind that was not measured takes the all-reduce's, with the latency of half its hops.
        """
        for name in dict.fromkeys((kind, "all_reduce") if kind != "send" else (kind,)):
            found = [
                (_distance(group, num_ranks, num_nodes), num_ranks, num_nodes)
                for known, num_ranks, num_nodes in self.links
                if known == name and (num_nodes > 1) == (group.num_nodes > 1)
            ]
            if found:
                latency, rate = self.links[(name, *min(found)[1:])]
                rate *= group.across(num_sharing) / group.across(1) if group.num_nodes > 1 else 1
                latency = latency if name == kind else latency / 2
                return latency, _volume(kind, group.num_ranks) / rate
        return None


def _cheapest(lines: Mapping[str, Line], nbytes: float) -> float:
    best = math.inf
    for latency, per_byte in lines.values():
        seconds = latency + nbytes * per_byte
        if seconds < best:
            best = seconds
    return best if lines else 0.0


def _distance(group: Group, num_ranks: int, num_nodes: int) -> float:
    ranks = abs(math.log(num_ranks / group.num_ranks))
    return ranks + abs(math.log(num_nodes / group.num_nodes))


def _volume(kind: str, num_ranks: int) -> float:
    """Bytes over a rank's bus per byte of the collective."""
    if kind in ("broadcast", "send"):
        return 1.0
    return ROUNDS.get(kind, 1) * (num_ranks - 1) / num_ranks


def _launch(kind: DeviceType) -> float:
    return LAUNCH_S[FAMILY.get(kind.name, NEWER)]


def _ring(kind: DeviceType, link: FullLink, num_ranks: int) -> tuple[float, float]:
    """Seconds of the hops of an all-reduce inside a node, and the bus bandwidth, in bytes/s."""
    if num_ranks == 1:
        return 0.0, math.inf
    hops = 2 * (num_ranks - 1) * link.intra_latency_s
    if kind.name not in FITTED:
        efficiency = 1.0 if kind.name == "CPU" else EFFICIENCY
        return hops, efficiency * link.intra_bytes_per_s
    latency, rate = FITS[FITTED[kind.name]][min(num_ranks, LARGEST)]
    # A given link moves the measured bandwidth in proportion.
    rate *= link.intra_bytes_per_s / kind.intra_bytes_per_s
    return latency - _launch(kind) if num_ranks <= LARGEST else hops, rate


def _ring_lines(group: Group, rounds: int, num_sharing: int) -> Mapping[str, Line]:
    """All-reduce (2 rounds: reduce-scatter, all-gather), or one of its halves (1 round)."""
    inside_s = rounds / 2 * max(part.ring_s for part in group.parts)
    inside = rounds * max(part.inside for part in group.parts)
    if group.num_nodes == 1:
        return {"ring": (group.launch_s + inside_s, inside)}
    across = group.across(num_sharing)
    n, num_ranks = group.num_nodes, group.num_ranks
    # Inside, each rank is left with its part of the bytes; between nodes one ring per such part
    # runs at the same time, so that the node's network carries all of them.
    start = group.launch_s + inside_s
    lines = {
        "hierarchical": (
            start + rounds * (n - 1) * group.inter_hop_s,
            inside + rounds * (n - 1) / n / across,
        )
    }
    if rounds == 2:
        # Up and down a double binary tree: fewer hops, and every node passes on all bytes.
        hops = 2 * math.ceil(math.log2(n))
        lines["tree"] = (start + hops * group.inter_hop_s, inside + 2 / across)
    # Once around, n hops leave a node; the slowest link sets the pace.
    around = (num_ranks - n) * group.hop_s + n * group.inter_hop_s
    share = rounds * (num_ranks - 1) / num_ranks
    slowest = min(across, *(part.bytes_per_s for part in group.parts))
    lines["ring"] = (group.launch_s + share * around, share / slowest)
    return lines


def _all_to_all_lines(group: Group, num_sharing: int) -> Mapping[str, Line]:
    """Everyone to everyone, or inside the nodes first (DeepSpeed-MoE; Tutel, 2DH)."""
    num_ranks, n = group.num_ranks, group.num_nodes
    most = max(part.num_ranks for part in group.parts)
    fewest = min(part.num_ranks for part in group.parts)
    inside_s = group.launch_s + (most - 1) * group.hop_s
    if n == 1:
        return {"flat": (inside_s, max(part.inside for part in group.parts))}
    out = {
        part: part.num_ranks * (num_ranks - part.num_ranks) / num_ranks / part.across(num_sharing)
        for part in group.parts
    }
    flat = max(
        max((part.num_ranks - 1) / num_ranks / part.bytes_per_s, out[part]) for part in group.parts
    )
    # Between the two levels the bytes are put in order in device memory: read and written once.
    sorted_ = max(part.inside + 2 / part.memory_bytes_per_s for part in group.parts)
    return {
        "flat": (inside_s + (num_ranks - fewest) * group.inter_hop_s, flat),
        "two-level": (inside_s + (n - 1) * group.inter_hop_s, sorted_ + max(out.values())),
    }


def _broadcast_lines(group: Group, num_sharing: int) -> Mapping[str, Line]:
    """Down a tree of nodes, then around each, as a pipeline: the slowest link sets the pace."""
    most = max(part.num_ranks for part in group.parts)
    latency = group.launch_s + (most - 1) * group.hop_s
    slowest = min(part.bytes_per_s for part in group.parts)
    if group.num_nodes > 1:
        latency += math.ceil(math.log2(group.num_nodes)) * group.inter_hop_s
        slowest = min(slowest, group.across(num_sharing))
    return {"pipeline": (latency, 1 / slowest)}


def _send_lines(group: Group, num_sharing: int) -> Mapping[str, Line]:
    if group.num_nodes > 1:
        return {"message": (group.launch_s + group.inter_hop_s, 1 / group.across(num_sharing))}
    pair = min(part.bytes_per_s for part in group.parts)
    return {"message": (group.launch_s + group.hop_s, 1 / pair)}


_MESSAGES: Mapping[str, Callable[[Group, int], Mapping[str, Line]]] = {
    "all_to_all": _all_to_all_lines,
    "broadcast": _broadcast_lines,
    "send": _send_lines,
}
