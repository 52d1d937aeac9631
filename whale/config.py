"""Config: every setting of Whale in one frozen tree, checked when it is made.

Place in the flow: made by the user (or `wh.init`) first; the planner and the runtime read it.
It covers EPL's 26 keys: `EPL_KEYS` says where each one went. A setting whose feature is not there
yet is refused, never ignored.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType
from typing import Any, get_args, get_type_hints

from whale.errors import ConfigError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
ENVIRONMENT_PREFIX = "WHALE_"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """What a field's value must satisfy beyond its type."""

    minimum: float | None = None
    above: float | None = None
    choices: tuple[object, ...] | None = None
    device_list: bool = False
    missing: str | None = None
    """The feature it belongs to, when that is not available yet: only the default passes."""
    why: str | None = None
    """The reason behind the rule, printed as the hint."""


def _setting(default: Any, **rule: Any) -> Any:
    return field(default=default, metadata={"rule": _Rule(**rule)})


class _Group:
    """A group of settings: checks each of its fields when it is made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        # GradientCheckpointConfig holds the keys gradient_checkpoint.*
        words = re.findall("[A-Z][a-z]+", type(self).__name__.removesuffix("Config"))
        _check(self, prefix="_".join(words).lower() + ".")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig(_Group):
    """Micro-batches and the order in which stages run them."""

    num_micro_batch: int = _setting(1, minimum=1)
    """Micro-batches of one step: a pipeline with several stages, gradient accumulation with one."""
    schedule: str = _setting("1f1b", choices=SCHEDULES)
    """Order of forwards and backwards: gpipe, 1f1b, interleaved or zero-bubble."""
    num_stages: int | None = _setting(None, minimum=1)
    """Stages the planner cuts in auto mode; None lets it choose."""
    num_chunks: int | None = _setting(None, minimum=1)
    """Stages per device group for the interleaved schedule; None lets the planner choose."""

    def __post_init__(self) -> None:
        _Group.__post_init__(self)
        if self.num_chunks not in (None, 1) and self.schedule in ("gpipe", "1f1b"):
            raise ConfigError(
                f"pipeline.num_chunks = {self.num_chunks} with pipeline.schedule = "
                f"{self.schedule!r}: that schedule runs one stage per device group",
                hint='set pipeline.schedule to "interleaved", or leave pipeline.num_chunks out',
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoConfig(_Group):
    """What the planner may decide by itself."""

    auto_parallel: bool = _setting(False)
    """Let the planner choose what no annotation fixes; annotations stay constraints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCheckpointConfig(_Group):
    """Recompute of activations. Not available yet."""

    type: str = _setting("", missing="recompute")
    """What is recomputed in the backward pass; empty for nothing."""
    end_taskgraph: int = _setting(-1, missing="recompute")
    """Last TaskGraph that is recomputed; -1 for all."""
    check_gradients: bool = _setting(False, missing="recompute")
    """Compare the gradients with those computed without recompute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroConfig(_Group):
    """Sharded optimizer state, gradients and weights. Not available yet."""

    level: str = _setting("", missing="ZeRO")
    """What is sharded over the replicas; empty for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig(_Group):
    """Weights and optimizer state in host memory. Not available yet."""

    level: str = _setting("", missing="offload")
    """What lives in host memory; empty for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AmpConfig(_Group):
    """Mixed precision. Not available yet."""

    level: str = _setting("", missing="mixed precision")
    """Which operations run in low precision; empty for none."""
    loss_scale: str | float = _setting("dynamic", missing="mixed precision")
    """Factor on the loss against underflow: "dynamic" or a number."""
    debug_log: bool = _setting(False, missing="mixed precision")
    """Log every cast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig(_Group):
    """Clipping and the update."""

    max_grad_norm: float | None = _setting(None, above=0)
    """Clip the global gradient norm of the whole model to this; None for no clipping."""
    num_apply_group: int = _setting(1, minimum=1, missing="group-wise apply")
    """Groups in which the update is applied one after another, to save memory."""
    elementwise: bool | None = _setting(None)
    """Whether the optimizer updates each element from that element alone; None: by its class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig(_Group):
    """How TaskGraphs are placed on devices."""

    device_place_prefer_intra_node: bool = _setting(True)
    """Keep a model replica inside a node; False keeps the replicas of a stage inside a node."""
    colocate_split_and_replicate: bool = _setting(False)
    """TaskGraphs with a device count share devices instead of taking disjoint ones."""
    run_visible_devices: str = _setting("", device_list=True)
    """Local device indices this process may use, such as "0,1"; empty for all."""
    balance: str = _setting("time", choices=("time", "speed", "equal"))
    """Shares of unequal devices: by predicted time and memory, by peak FLOPs, or none."""
    profile: str = _setting("")
    """The file `whale calibrate` wrote for these devices; empty: figures from data sheets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationConfig(_Group):
    """How gradients are reduced."""

    num_communicators: int = _setting(1, minimum=1)
    """Process groups over which gradient buckets are dealt; with NCCL a second one blocks hosts."""
    bucket_bytes: int = _setting(25_000_000, minimum=1)
    """Size of a fused gradient buffer."""
    max_splits: int | None = _setting(None, minimum=1)
    """At most this many buckets per group of ranks, besides a small first one; None: no limit."""
    sparse_as_dense: bool = _setting(False)
    """EPL's key: Whale always accumulates and reduces dense gradients, with either value."""
    clip_after_allreduce: bool = _setting(
        True,
        choices=(True,),
        why="a clipped part depends on the layout, so Whale always clips reduced gradients",
    )
    """Clip reduced gradients. Always so in Whale; EPL's default was False."""
    gradients_reduce_method: str = _setting("mean", choices=("mean", "sum"))
    """Divide the summed gradients by the global count of samples or valid tokens, or do not."""
    batch_norm: str = _setting("global", choices=("global", "local"))
    """Normalise by all replicas' rows, as one device does, or each by its own, as DDP does."""
    symmetric_memory: bool = _setting(False)
    """Sum through memory the GPUs of a node share, where NCCL's latency counts; NVLink only."""
    fp16: bool = _setting(False, missing="low precision communication")
    """Reduce and exchange in half precision."""
    fp16_scale: int = _setting(128, missing="low precision communication")
    """Factor before the cast to half precision, divided out after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IoConfig(_Group):
    """How a loader is read."""

    drop_last: bool = _setting(False)
    """Drop a last global batch that is smaller than the others instead of training on it."""


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class Config:
    """All settings. Each group is given as a mapping, or whole as its dataclass.

    A value given here goes before `WHALE_<GROUP>_<KEY>` in the environment, and that before the
    default. A group given as a dataclass is explicit in all of its keys.

    Example:
        >>> Config(pipeline={"num_micro_batch": 8}).pipeline.num_micro_batch
        8
    """

    pipeline: PipelineConfig
    """Micro-batches and schedule."""
    auto: AutoConfig
    """What the planner may decide."""
    gradient_checkpoint: GradientCheckpointConfig
    """Recompute."""
    zero: ZeroConfig
    """Sharded training state."""
    offload: OffloadConfig
    """Training state in host memory."""
    amp: AmpConfig
    """Mixed precision."""
    optimizer: OptimizerConfig
    """Clipping and update."""
    cluster: ClusterConfig
    """Placement."""
    communication: CommunicationConfig
    """Gradient reduction."""
    io: IoConfig
    """Loaders."""
    seed: int = _setting(0, minimum=0)
    """Seed of every parameter's own generator, so that any layout starts from the same weights."""
    timeout_seconds: float = _setting(600.0, above=0)
    """How long a rank waits for the others before it gives up."""
    check_parts: bool = _setting(True)
    """Compare parts against the whole on a small real batch when a step is built."""

    def __init__(
        self,
        *,
        pipeline: PipelineConfig | Mapping[str, Any] | None = None,
        auto: AutoConfig | Mapping[str, Any] | None = None,
        gradient_checkpoint: GradientCheckpointConfig | Mapping[str, Any] | None = None,
        zero: ZeroConfig | Mapping[str, Any] | None = None,
        offload: OffloadConfig | Mapping[str, Any] | None = None,
        amp: AmpConfig | Mapping[str, Any] | None = None,
        optimizer: OptimizerConfig | Mapping[str, Any] | None = None,
        cluster: ClusterConfig | Mapping[str, Any] | None = None,
        communication: CommunicationConfig | Mapping[str, Any] | None = None,
        io: IoConfig | Mapping[str, Any] | None = None,
        seed: int | None = None,
        timeout_seconds: float | None = None,
        check_parts: bool | None = None,
        **unknown: object,
    ) -> None:
        if unknown:
            raise _unknown_key(next(iter(unknown)), [f.name for f in fields(Config)])
        given = {name: value for name, value in locals().items() if name in _TOP_LEVEL}
        environment = _from_environment(os.environ)
        for name, group in _GROUPS.items():
            value = given[name]
            if not isinstance(value, group):
                value = group(**{**environment.get(name, {}), **_group_values(name, value)})
            object.__setattr__(self, name, value)
        for name in _PLAIN:
            fallback = environment.get("", {}).get(name, _default(Config, name))
            object.__setattr__(self, name, fallback if given[name] is None else given[name])
        _check(self, prefix="", only=_PLAIN)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """From dotted keys, nested mappings, or both: `{"pipeline.num_micro_batch": 8}`."""
        nested: dict[str, Any] = {}
        for key, value in values.items():
            name, dot, rest = key.partition(".")
            if not dot and name not in _GROUPS:
                _put(nested, name, value, key)
            elif not dot:
                for inner, inner_value in _mapping_of(name, value).items():
                    _put(nested.setdefault(name, {}), inner, inner_value, f"{key}.{inner}")
            elif name in _GROUPS:
                _put(nested.setdefault(name, {}), rest, value, key)
            else:
                raise _unknown_key(key, _all_keys())
        return cls(**nested)

    def to_dict(self) -> dict[str, Any]:
        """Every key, dotted, with its value; `from_dict` reads it back."""
        values = {
            f"{name}.{f.name}": getattr(getattr(self, name), f.name)
            for name, group in _GROUPS.items()
            for f in fields(group)
        }
        return values | {name: getattr(self, name) for name in _PLAIN}


_GROUPS: Mapping[str, type[Any]] = {
    name: kind
    for name, kind in get_type_hints(Config).items()
    if isinstance(kind, type) and issubclass(kind, _Group)
}
_TOP_LEVEL = frozenset(f.name for f in fields(Config))
_PLAIN = tuple(f.name for f in fields(Config) if f.name not in _GROUPS)

EPL_KEYS: Mapping[str, str] = {
    "auto.auto_parallel": "auto.auto_parallel",
    "pipeline.num_stages": "pipeline.num_stages",
    "pipeline.num_micro_batch": "pipeline.num_micro_batch",
    "pipeline.strategy": "pipeline.schedule",
    "gradient_checkpoint.type": "gradient_checkpoint.type",
    "gradient_checkpoint.end_taskgraph": "gradient_checkpoint.end_taskgraph",
    "gradient_checkpoint.check_gradients": "gradient_checkpoint.check_gradients",
    "zero.level": "zero.level",
    "offload.level": "offload.level",
    "amp.level": "amp.level",
    "amp.loss_scale": "amp.loss_scale",
    "amp.debug_log": "amp.debug_log",
    "optimizer.num_apply_group": "optimizer.num_apply_group",
    "cluster.device_place_prefer_intra_node": "cluster.device_place_prefer_intra_node",
    "cluster.run_visible_devices": "cluster.run_visible_devices",
    "cluster.colocate_split_and_replicate": "cluster.colocate_split_and_replicate",
    "communication.num_communicators": "communication.num_communicators",
    "communication.max_splits": "communication.max_splits",
    "communication.sparse_as_dense": "communication.sparse_as_dense",
    "communication.fp16": "communication.fp16",
    "communication.fp16_scale": "communication.fp16_scale",
    "communication.clip_after_allreduce": "communication.clip_after_allreduce",
    "communication.gradients_reduce_method": "communication.gradients_reduce_method",
    "io.slicing": "wh.shard(loader) reads only the rows this rank needs, for any loader.",
    "io.unbalanced_io_slicing": "The plan's shares say how many rows a rank reads; uneven is fine.",
    "io.drop_last_files": "io.drop_last drops an incomplete last batch; no file is ever dropped.",
}
"""Each of EPL's 26 keys: the key here, or the sentence that says what replaces it."""

_STRATEGIES = {"preferforward": "gpipe", "preferbackward": "1f1b"}


def _group_values(group: str, values: object) -> dict[str, Any]:
    """The values given for a group, with EPL's spelling of the schedule translated."""
    given = dict(_mapping_of(group, values))
    names = [f.name for f in fields(_GROUPS[group])]
    if group == "pipeline" and "strategy" in given:
        strategy = given.pop("strategy")
        if "schedule" in given:
            raise ConfigError(
                f"pipeline.strategy = {strategy!r} and pipeline.schedule = {given['schedule']!r} "
                "are the same setting",
                hint="keep pipeline.schedule",
            )
        given["schedule"] = _schedule_of(strategy)
    for name in given:
        if name not in names:
            raise _unknown_key(f"{group}.{name}", _all_keys())
    return given


def _schedule_of(strategy: object) -> str:
    schedule = _STRATEGIES.get(strategy.lower()) if isinstance(strategy, str) else None
    if schedule is None:
        raise ConfigError(
            f"pipeline.strategy = {strategy!r}; allowed: 'PreferForward', 'PreferBackward'",
            hint=f"pipeline.schedule takes {', '.join(SCHEDULES)}",
        )
    return schedule


def _mapping_of(group: str, values: object) -> Mapping[str, Any]:
    if values is None:
        return {}
    if isinstance(values, _GROUPS[group]):
        return {f.name: getattr(values, f.name) for f in fields(_GROUPS[group])}
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{group} = {values!r} is a {type(values).__name__}; allowed: a mapping or "
            f"{_GROUPS[group].__name__}",
            hint=f"one key of it is written {group}={{{fields(_GROUPS[group])[0].name!r}: ...}}",
        )
    return values


def _put(target: dict[str, Any], name: str, value: object, key: str) -> None:
    if name in target:
        raise ConfigError(
            f"{key} is given twice, as {target[name]!r} and as {value!r}",
            hint="keep either the dotted key or the nested one",
        )
    target[name] = value


def _all_keys() -> list[str]:
    groups = [f"{name}.{f.name}" for name, group in _GROUPS.items() for f in fields(group)]
    return [*groups, *_PLAIN]


def _unknown_key(key: str, known: Iterable[str], *, spelled: str | None = None) -> ConfigError:
    """The error for `key`; `spelled` is how the user wrote it, when not like that."""
    shown = spelled or key
    if key in EPL_KEYS:
        return ConfigError(f"{shown} is a key of EPL that Whale replaced", hint=EPL_KEYS[key])
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    suggestion = near[0] if near else None
    if suggestion and spelled:
        suggestion = ENVIRONMENT_PREFIX + suggestion.replace(".", "_").upper()
    return ConfigError(
        f"unknown setting {shown!r}",
        hint=f"did you mean {suggestion!r}?" if suggestion else f"settings: {', '.join(known)}",
    )


def _from_environment(environ: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """{group: {name: value}} of the WHALE_* variables, "" holding the settings outside any group.

    A variable that begins like a group must be one of its keys; others may mean something else.
    """
    found: dict[str, dict[str, Any]] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        key = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if key in _PLAIN:
            found.setdefault("", {})[key] = _parse(variable, text, get_type_hints(Config)[key])
            continue
        group = next((name for name in _GROUPS if key.startswith(f"{name}_")), None)
        if group is None:
            continue
        name = key.removeprefix(f"{group}_")
        hints = get_type_hints(_GROUPS[group]) | {"strategy": str}
        if name not in (*(f.name for f in fields(_GROUPS[group])), "strategy"):
            raise _unknown_key(f"{group}.{name}", _all_keys(), spelled=variable)
        found.setdefault(group, {})[name] = _parse(variable, text, hints[name])
    return {g: _group_values(g, values) if g else values for g, values in found.items()}


def _parse(variable: str, text: str, hint: Any) -> object:
    """The value of an environment variable, read as the type of its setting."""
    types = _types_of(hint)
    if NoneType in types and text.lower() in ("", "none"):
        return None
    truth = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if bool in types and text.lower() in truth:
        return truth[text.lower()]
    for number in (int, float):
        if number in types:
            try:
                return number(text)
            except ValueError:
                continue
    if str in types:
        return text
    raise ConfigError(
        f"{variable} = {text!r}; allowed: {_words(types)}", hint=f"unset {variable} for the default"
    )


def _types_of(hint: Any) -> tuple[type, ...]:
    return get_args(hint) or (hint,)


def _words(types: Iterable[type]) -> str:
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    return " or ".join("None" if t is NoneType else words[t] for t in types)


def _default(owner: Any, name: str) -> Any:
    return next(f.default for f in fields(owner) if f.name == name)


def _check(values: Any, *, prefix: str, only: Iterable[str] | None = None) -> None:
    """Raise for the first field whose value breaks its type or its rule."""
    hints = get_type_hints(type(values))
    for f in fields(values):
        if only is not None and f.name not in only:
            continue
        assert f.default is not MISSING, f.name
        key, value, types = prefix + f.name, getattr(values, f.name), _types_of(hints[f.name])
        rule: _Rule = f.metadata["rule"]
        # bool is an int to Python, but `num_stages = True` is a mistake.
        fits = type(value) in types or (float in types and type(value) is int)
        problem = None if fits else _words(types)
        if fits and value is not None:
            problem = _broken(rule, value)
        if problem:
            raise ConfigError(
                f"{key} = {value!r}; allowed: {problem}; the default is {f.default!r}",
                hint=rule.why,
            )
        if rule.missing and value != f.default:
            raise ConfigError(
                f"{key} = {value!r}: {rule.missing} is not available yet; allowed: the default, "
                f"{f.default!r}",
                hint=f"leave {key} out",
            )


def _broken(rule: _Rule, value: Any) -> str | None:
    """What is allowed, when the value is not."""
    # Written as `not >=` so that NaN fails too.
    if rule.minimum is not None and not value >= rule.minimum:
        return f"{rule.minimum} or more"
    if rule.above is not None and not rule.above < value < float("inf"):
        return f"a finite number above {rule.above}"
    if rule.choices is not None and value not in rule.choices:
        return ", ".join(repr(choice) for choice in rule.choices)
    if rule.device_list and value:
        indices = [part.strip() for part in value.split(",")]
        if not all(part.isdecimal() for part in indices) or len({*indices}) < len(indices):
            return 'different device indices joined by commas, such as "0,1"'
    return None
