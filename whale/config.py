"""Config: every setting of Whale in one frozen tree, checked when it is made.

Place in the flow: made by the user (or `wh.init`) first; the planner and the runtime read it.
It covers EPL's 26 keys: `EPL_KEYS` says where each one went. The groups are in `config_groups`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, get_type_hints

from whale.config_groups import (
    SCHEDULES,
    AmpConfig,
    AutoConfig,
    ClusterConfig,
    CommunicationConfig,
    GradientCheckpointConfig,
    IoConfig,
    OffloadConfig,
    OptimizerConfig,
    PipelineConfig,
    SettingGroup,
    ZeroConfig,
    check,
    default,
    setting,
    types_of,
    words,
)
from whale.errors import ConfigError

ENVIRONMENT_PREFIX = "WHALE_"


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
    seed: int = setting(0, minimum=0)
    """Seed of every parameter's own generator, so that any layout starts from the same weights."""
    timeout_seconds: float = setting(600.0, above=0)
    """How long a rank waits for the others before it gives up."""
    check_parts: bool = setting(True)
    """Compare parts against the whole on a small real batch when a step is built."""
    check_splits: bool = setting(True)
    """Run each split beside the whole module on a few rows when a step is built."""
    guard: int = setting(100, minimum=0)
    """Every so many steps, compare the bits of what ranks hold in common; 0 for never."""

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
        check_splits: bool | None = None,
        guard: int | None = None,
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
            fallback = environment.get("", {}).get(name, default(Config, name))
            object.__setattr__(self, name, fallback if given[name] is None else given[name])
        check(self, prefix="", only=_PLAIN)

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
    if isinstance(kind, type) and issubclass(kind, SettingGroup)
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
    types = types_of(hint)
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
        f"{variable} = {text!r}; allowed: {words(types)}", hint=f"unset {variable} for the default"
    )
