"""Profile: what `whale calibrate` measured of devices and links, as a value.

Place in the flow: crosses from the torch side (`engine.calibrate` writes it) to the planner's
(`cost.compute` and `cost.comm` read it). A plan for a
cluster with a profile is priced from it; without one, from data sheets (`cost.rates`).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from whale.errors import ConfigError, PlanError
from whale.ir.codec import from_plain, to_plain

SCHEMA = 2
NOISE = 0.06
"""Two measurements of one device may differ by this much: its neighbours share caches and memory
with it, and clocks move."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size: straight lines between measured points, never falling.

    Before the first point it is that point's line to the second, but at least half of the first
    (a launch floor); after the last it goes on as the last line.
    """

    points: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, points: Mapping[float, float]) -> Curve:
        """From measurements; a point below an earlier one is noise and is lifted to it."""
        found: list[tuple[float, float]] = []
        for x in sorted(points):
            found.append((float(x), max(points[x], found[-1][1] if found else 0.0)))
        return cls(tuple(found))

    def at(self, x: float) -> float:
        """Seconds at size x."""
        if x <= 0:
            return 0.0
        points = self.points
        if len(points) == 1:
            return points[0][1] * x / points[0][0]
        index = min(max(bisect_left(points, (x, 0.0)), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[index - 1], points[index]
        value = y0 + (x - x0) * (y1 - y0) / (x1 - x0)
        return max(value, 0.5 * points[0][1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How fast a device runs one kind of operation: `calls * overhead + max(flops, bytes)`."""

    flops_per_s: float
    bytes_per_s: float
    overhead_s: float = 0.0
    """Added per call: what a kernel takes before and after its full speed."""

    def seconds(self, calls: float, flops: float, moved: float) -> float:
        """Seconds of some calls that do so much together."""
        return calls * self.overhead_s + max(flops / self.flops_per_s, moved / self.bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """One kind of Layer, measured alone: seconds by rows."""

    forward: Curve
    backward: Curve
    kept: Curve | None = None
    """Bytes that its forward leaves on the device; None where nothing counts them (CPU)."""
    alone: float = 1.0
    """Seconds while neighbours on the same card rest, over those with all of them at work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One device as measured, with all ranks of the cluster at work."""

    type: str
    memory_bytes: int
    """Truly available: under a limit it is not the card's total."""
    reserved_bytes: int = 0
    """Taken before the first tensor: the driver's context, communicators."""
    launch_s: float = 0.0
    """The host's time per operation."""
    apply_bytes_per_s: float | None = None
    """Optimizer: bytes of weights, gradients and state per second."""
    rates: Mapping[str, Mapping[str, Rate]] = field(default_factory=dict)
    """By kind of work, then dtype."""
    layers: Mapping[str, LayerTime] = field(default_factory=dict)
    """By Layer signature."""
    lost: float = 0.0
    """The share of its speed that computing loses beside a sum of gradients."""
    card: str = ""
    """The card it is a part of, where several ranks share one."""

    def is_like(self, other: DeviceProfile) -> bool:
        """Whether two devices differ by no more than measuring them twice would."""
        if self.type != other.type or not _near(self.memory_bytes, other.memory_bytes, 0.02):
            return False
        if self.layers.keys() != other.layers.keys():
            return False
        mine, others = (
            sum(t.forward.points[-1][1] + t.backward.points[-1][1] for t in p.layers.values())
            for p in (self, other)
        )
        if self.layers:
            return _near(mine, others, NOISE)
        pairs = [
            (rate.flops_per_s, other.rates[kind][dtype].flops_per_s)
            for kind, by_dtype in self.rates.items()
            for dtype, rate in by_dtype.items()
            if dtype in other.rates.get(kind, {})
        ]
        return all(_near(a, b, 2.0 * NOISE) for a, b in pairs)


Links = Mapping[tuple[str, int, int], tuple[float, float]]
"""(collective, ranks, nodes) -> (latency in seconds, bytes per second)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Links:
    """How links stand in a file: a mapping has words for keys."""

    links: tuple[tuple[str, int, int, float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Devices by rank, and the links between them."""

    devices: tuple[DeviceProfile, ...]
    links: Links = field(default_factory=dict)
    contention: float | None = None
    """The share of its speed that a sum of gradients loses while all its ranks compute."""
    about: str = ""

    def device(self, rank: int) -> DeviceProfile:
        """A rank's profile."""
        return self.devices[rank]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        parts = {name: to_plain(getattr(self, name)) for name in ("about", "devices", "contention")}
        links = [[*shape, *figures] for shape, figures in self.links.items()]
        return {"schema": SCHEMA, **parts, "links": links}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Profile:
        """The inverse of `to_dict`."""
        if data.get("schema") != SCHEMA:
            raise ConfigError(
                f"the profile has schema {data.get('schema')!r}, this Whale reads {SCHEMA}",
                hint="measure again with `whale calibrate --json F`",
            )
        fields = {key: value for key, value in data.items() if key not in ("schema", "links")}
        try:
            found = from_plain(cls, fields, "the profile")
            links = from_plain(_Links, {"links": data.get("links", [])}, "the profile").links
        except PlanError as error:
            raise ConfigError(error.message, hint="write one with `whale calibrate`") from error
        return replace(found, links={link[:3]: link[3:] for link in links})

    @classmethod
    def read(cls, path: str | Path) -> Profile:
        """From the file that `whale calibrate` wrote."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(
                f"profile {str(path)!r}: {error.strerror}",
                hint="write one with `whale calibrate --json F`",
            ) from error
        except ConfigError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"profile {str(path)!r} is not a profile: {type(error).__name__}: {error}",
                hint="write one with `whale calibrate --json F`",
            ) from error

    def write(self, path: str | Path) -> None:
        """To a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")


def _near(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(abs(a), abs(b))
