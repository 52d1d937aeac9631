"""The groups of settings of `Config`, each a frozen dataclass that checks itself.

Place in the flow: below `config`, which puts them together and reads keys and the environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType
from typing import Any, get_args, get_type_hints

from whale.errors import ConfigError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a field's value must satisfy beyond its type."""

    minimum: float | None = None
    above: float | None = None
    choices: tuple[object, ...] | None = None
    device_list: bool = False
    scale: bool = False
    why: str | None = None
    """The reason behind the rule, printed as the hint."""


def setting(default: Any, **rule: Any) -> Any:
    """A field with its default and what its value must satisfy."""
    return field(default=default, metadata={"rule": Rule(**rule)})


class SettingGroup:
    """A group of settings: checks each of its fields when it is made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        # GradientCheckpointConfig holds the keys gradient_checkpoint.*
        words = re.findall("[A-Z][a-z]+", type(self).__name__.removesuffix("Config"))
        check(self, prefix="_".join(words).lower() + ".")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig(SettingGroup):
    """Micro-batches and the order in which stages run them."""

    num_micro_batch: int = setting(1, minimum=1)
    """Micro-batches of one step: a pipeline with several stages, gradient accumulation with one."""
    schedule: str = setting("1f1b", choices=SCHEDULES)
    """Order of forwards and backwards: gpipe, 1f1b, interleaved or zero-bubble."""
    num_stages: int | None = setting(None, minimum=1)
    """Stages the planner cuts in auto mode; None lets it choose."""
    num_chunks: int | None = setting(None, minimum=1)
    """Stages per device group for the interleaved schedule; None lets the planner choose."""

    def __post_init__(self) -> None:
        SettingGroup.__post_init__(self)
        if self.num_chunks not in (None, 1) and self.schedule in ("gpipe", "1f1b"):
            raise ConfigError(
                f"pipeline.num_chunks = {self.num_chunks} with pipeline.schedule = "
                f"{self.schedule!r}: that schedule runs one stage per device group",
                hint='set pipeline.schedule to "interleaved", or leave pipeline.num_chunks out',
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoConfig(SettingGroup):
    """What the planner may decide by itself."""

    auto_parallel: bool = setting(False)
    """Let the planner choose what no annotation fixes; annotations stay constraints."""
    fit: bool = setting(True)
    """Let the planner recompute, share out and offload to make it fit, where no setting says so."""
    objective: str = setting("time", choices=("time", "energy"))
    """What the plan that is chosen has least of, per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCheckpointConfig(SettingGroup):
    """Recompute: Layers whose forward runs again in the backward, to keep less in between."""

    type: str = setting("", choices=("", "auto", "collection"))
    """Layers by the memory there is (auto), those of `layers` (collection), or none."""
    layers: str = setting("*")
    """The Layers of a collection, as a pattern of `wh.annotate`."""
    keep: str = setting("inputs", choices=("inputs", "products"))
    """What of them stays: their inputs, or the outputs of products and attention beside them."""
    end_taskgraph: int = setting(-1, minimum=-1)
    """Last TaskGraph that is recomputed; -1 for all."""
    check_gradients: bool = setting(
        False,
        choices=(False,),
        why="the stages are tried beside the model at build; `whale verify` compares all gradients",
    )
    """EPL's key: Whale always tries recompute at build."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroConfig(SettingGroup):
    """Training state that ranks with copies of it share out."""

    level: str = setting("", choices=("", "v0", "v1", "v2"))
    """What is shared out: the update (v0), gradients too (v1), parameters too (v2); or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig(SettingGroup):
    """Training state and activations in host memory."""

    level: str = setting("", choices=("", "state", "weights", "update", "v0"))
    """On the host: `state`, `weights` (updated on the device), the `update`, or all of it (v0)."""
    activations: bool = setting(False)
    """Whether what Layers keep for their backward waits on the host."""
    layers: str = setting("*")
    """The Layers this is for, as a pattern of `wh.annotate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AmpConfig(SettingGroup):
    """Mixed precision."""

    level: str = setting("", choices=("", "O1", "O2"))
    """Half precision as torch's autocast has it (O1), in all but batch norms (O2), or none."""
    dtype: str = setting("bfloat16", choices=("bfloat16", "float16"))
    """Which half precision."""
    master: str = setting("float32", choices=("float32", "split", "stochastic", "none"))
    """With O2, how what is updated is kept: see `whale.ir.precision`."""
    gradients: str = setting("float32", choices=("float32", ""))
    """With O2, what gradients are added up and summed in; empty: in half precision."""
    loss_scale: str | float = setting("dynamic", scale=True)
    """With float16, the factor on the loss against underflow: "dynamic" or a number."""
    debug_log: bool = setting(False)
    """Log every change of the loss scale."""

    def __post_init__(self) -> None:
        SettingGroup.__post_init__(self)
        if self.level == "O2" and self.master == "split" and self.dtype != "bfloat16":
            raise ConfigError(
                f"amp.master = 'split' with amp.dtype = {self.dtype!r}: only a bfloat16 is the "
                "upper half of a float32",
                hint="choose amp.master float32, stochastic or none, or amp.dtype bfloat16",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig(SettingGroup):
    """Clipping and the update."""

    max_grad_norm: float | None = setting(None, above=0)
    """Clip the global gradient norm of the whole model to this; None for no clipping."""
    num_apply_group: int = setting(1, minimum=1)
    """Groups in which the update is applied one after another, to save memory."""
    apply_in_backward: bool = setting(False)
    """Update a group as soon as its gradients are complete, and let them go."""
    elementwise: bool | None = setting(None)
    """Whether the optimizer updates each element from that element alone; None: by its class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig(SettingGroup):
    """How TaskGraphs are placed on devices."""

    device_place_prefer_intra_node: bool = setting(True)
    """Keep a model replica inside a node; False keeps the replicas of a stage inside a node."""
    colocate_split_and_replicate: bool = setting(False)
    """TaskGraphs with a device count share devices instead of taking disjoint ones."""
    run_visible_devices: str = setting("", device_list=True)
    """Local device indices this process may use, such as "0,1"; empty for all."""
    balance: str = setting("time", choices=("time", "speed", "equal"))
    """Shares of unequal devices: by predicted time and memory, by peak FLOPs, or none."""
    profile: str = setting("")
    """The file `whale calibrate` wrote for these devices; empty: figures from data sheets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationConfig(SettingGroup):
    """How gradients are reduced."""

    num_communicators: int = setting(1, minimum=1)
    """Process groups over which gradient buckets are dealt; with NCCL a second one blocks hosts."""
    bucket_bytes: int = setting(25_000_000, minimum=1)
    """Size of a fused gradient buffer."""
    max_splits: int | None = setting(None, minimum=1)
    """At most this many buckets per group of ranks, besides a small first one; None: no limit."""
    sparse_as_dense: bool = setting(False)
    """EPL's key: Whale always accumulates and reduces dense gradients, with either value."""
    clip_after_allreduce: bool = setting(
        True,
        choices=(True,),
        why="a clipped part depends on the layout, so Whale always clips reduced gradients",
    )
    """Clip reduced gradients. Always so in Whale; EPL's default was False."""
    gradients_reduce_method: str = setting("mean", choices=("mean", "sum"))
    """Divide the summed gradients by the global count of samples or valid tokens, or do not."""
    batch_norm: str = setting("global", choices=("global", "local"))
    """Normalise by all replicas' rows, as one device does, or each by its own, as DDP does."""
    symmetric_memory: bool = setting(False)
    """Sum and gather through memory the GPUs of a node share (NVLink); all-to-all stays NCCL's."""
    fp16: bool = setting(False)
    """Reduce gradients in float16, scaled so that no sum can overflow."""
    fp16_scale: int = setting(128, minimum=1)
    """Room above the largest gradient of a bucket: float16 holds 65504 / fp16_scale of it."""
    bf16: bool = setting(False)
    """Reduce gradients in bfloat16."""
    token_dtype: str = setting("", choices=("", "bf16", "fp16"))
    """What tokens travel to their experts in; empty: the dtype they have."""
    token_chunks: int = setting(1, minimum=1)
    """Parts in which tokens travel, so that experts compute on one while the next arrives."""
    all_to_all: str = setting("auto", choices=("auto", "flat", "two-level"))
    """Tokens go to everyone at once, or inside nodes first and then between them; auto: by cost."""

    def __post_init__(self) -> None:
        SettingGroup.__post_init__(self)
        if self.fp16 and self.bf16:
            raise ConfigError(
                "communication.fp16 and communication.bf16 are both true: gradients travel in one",
                hint="choose one of them",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class IoConfig(SettingGroup):
    """How a loader is read."""

    drop_last: bool = setting(False)
    """Drop a last global batch that is smaller than the others instead of training on it."""


def types_of(hint: Any) -> tuple[type, ...]:
    """The types a field's annotation allows."""
    return get_args(hint) or (hint,)


def words(types: Iterable[type]) -> str:
    """Types as an error message names them."""
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    return " or ".join("None" if t is NoneType else words[t] for t in types)


def default(owner: Any, name: str) -> Any:
    """The default of a field."""
    return next(f.default for f in fields(owner) if f.name == name)


def check(values: Any, *, prefix: str, only: Iterable[str] | None = None) -> None:
    """Raise for the first field whose value breaks its type or its rule."""
    hints = get_type_hints(type(values))
    for f in fields(values):
        if only is not None and f.name not in only:
            continue
        assert f.default is not MISSING, f.name
        key, value, types = prefix + f.name, getattr(values, f.name), types_of(hints[f.name])
        rule: Rule = f.metadata["rule"]
        # bool is an int to Python, but `num_stages = True` is a mistake.
        fits = type(value) in types or (float in types and type(value) is int)
        problem = None if fits else words(types)
        if fits and value is not None:
            problem = _broken(rule, value)
        if problem:
            raise ConfigError(
                f"{key} = {value!r}; allowed: {problem}; the default is {f.default!r}",
                hint=rule.why,
            )


def _broken(rule: Rule, value: Any) -> str | None:
    """What is allowed, when the value is not."""
    # Written as `not >=` so that NaN fails too.
    if rule.minimum is not None and not value >= rule.minimum:
        return f"{rule.minimum} or more"
    if rule.above is not None and not rule.above < value < float("inf"):
        return f"a finite number above {rule.above}"
    if rule.choices is not None and value not in rule.choices:
        return ", ".join(repr(choice) for choice in rule.choices)
    number = not isinstance(value, str) and 0 < value < float("inf")
    if rule.scale and value != "dynamic" and not number:
        return '"dynamic" or a finite number above 0'
    if rule.device_list and value:
        indices = [part.strip() for part in value.split(",")]
        if not all(part.isdecimal() for part in indices) or len({*indices}) < len(indices):
            return 'different device indices joined by commas, such as "0,1"'
    return None
