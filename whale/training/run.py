"""Run: all that decides a training run, as one value, read from TOML.

Place in the flow: the first thing `whale train` makes. A preset of `whale/presets/runs` or a user's
file, with what the command line sets on top; whatever is wrong with it is an error here, before a
rank is started.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from whale.datasets.samples import LANGUAGES
from whale.errors import ConfigError
from whale.models.m6.config import M6Config
from whale.models.m6.config import presets as models
from whale.models.m6.mixture import DEFAULT_WEIGHTS
from whale.models.m6.variation import VARIATIONS

PRESETS = Path(__file__).resolve().parents[1] / "presets" / "runs"
LAYOUTS = ("expert", "data")
STYLES = ("noto", "twemoji")
OPTIMIZERS = ("adamw", "sgd")
PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """How the model is spread."""

    layout: str = "data"
    """`expert`: experts over all ranks, the rest in copies. `data`: everything in copies."""
    num_ranks: int = 1
    """Ranks that `whale train` starts unless `-n` says otherwise."""
    num_micro_batch: int = 1
    calibrate: bool = False
    """Whether the machine is measured first, all ranks at once: it takes some seconds, and makes
    the prediction one of this machine instead of data sheets."""

    def __post_init__(self) -> None:
        _one_of("parallel.layout", self.layout, LAYOUTS)
        _at_least("parallel.num_ranks", self.num_ranks, 1)
        _at_least("parallel.num_micro_batch", self.num_micro_batch, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """How weights are changed; the learning rate rises in the warm-up and falls along a cosine."""

    name: str = "adamw"
    lr: float = 1e-3
    """At its highest."""
    final_share: float = 0.1
    """Of `lr`, at the last step."""
    warmup_steps: int = 0
    weight_decay: float = 0.0
    """Of matrices; vectors (norms, biases) are not decayed."""
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0: never."""

    def __post_init__(self) -> None:
        _one_of("optimizer.name", self.name, OPTIMIZERS)
        for name in ("lr", "weight_decay", "max_grad_norm", "warmup_steps"):
            _at_least(f"optimizer.{name}", getattr(self, name), 0)
        for name in ("final_share", "beta1", "beta2"):
            _between(f"optimizer.{name}", getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What is learned from."""

    styles: tuple[str, ...] = STYLES
    """Of the shipped pictures; none of them where it is empty."""
    languages: tuple[str, ...] = LANGUAGES
    """Of captions and questions."""
    questions: bool = True
    """Whether questions about the shipped pictures' groups and tags are asked."""
    texts: tuple[str, ...] = LANGUAGES
    """Shipped running text: `zh` poems, `en` addresses."""
    folder: str = ""
    """A folder of one's own with `captions.jsonl`: pictures, captions, questions."""
    text_folder: str = ""
    """A folder of one's own with `.txt` files."""
    text_language: str = "und"
    """Of those files."""
    vary: str = "none"
    """How much pictures are moved, turned and recoloured each time: `lively` a little, `strong` so
    that another drawing style may look like it."""
    num_workers: int = 0
    """Processes of each rank that read ahead."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """By source (pictures, questions, poems, addresses, folder, text_folder), how much of the
    stream it is; default: 1 for each."""

    def __post_init__(self) -> None:
        for name, allowed in (("styles", STYLES), ("languages", LANGUAGES), ("texts", LANGUAGES)):
            for value in getattr(self, name):
                _one_of(f"data.{name}", value, allowed)
        _one_of("data.vary", self.vary, tuple(VARIATIONS))
        _at_least("data.num_workers", self.num_workers, 0)
        if not (self.styles or self.texts or self.folder or self.text_folder):
            raise ConfigError(
                "data: no styles, texts, folder or text_folder: nothing to learn from",
                hint='for example styles = ["noto"]',
            )
        if self.styles and not self.languages:
            raise ConfigError(
                "data.languages is empty: the pictures would have no captions",
                hint=f"allowed: {', '.join(LANGUAGES)}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What is told, tried and kept while it trains; 0 steps: never before the end."""

    print_every: int = 10
    """Steps between lines where the output is no terminal, and between writes of metrics."""
    sample_every: int = 0
    """Steps between captions for a picture it has not seen."""
    evaluate_every: int = 0
    """Steps between losses on held-out data."""
    save_every: int = 0
    """Steps between checkpoints; there is always one at the end."""
    num_evaluated: int = 48
    """Held-out samples of each kind in an evaluation."""
    num_ranked: int = 24
    """Held-out pictures and captions ranked against each other; 0: none."""
    num_drawn: int = 0
    """Names drawn at the end, to see which real picture is nearest."""

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            minimum = 1 if name in ("print_every", "num_evaluated") else 0
            _at_least(f"watch.{name}", getattr(self, name), minimum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run. `model` is the preset's name with what is changed about it."""

    name: str
    """What its folder is called."""
    model: Mapping[str, Any]
    steps: int
    batch_rows: int
    """Rows of the global batch, whatever the number of ranks."""
    seed: int = 0
    pseudo_steps: int = 0
    """First so many steps with all layers sharing one layer's weights (pseudo-to-real)."""
    precision: str = "float32"
    """Of products: `float32`, or `bfloat16` (torch's autocast: weights, norms and updates stay
    float32)."""
    timeout_seconds: float = 600.0
    """How long ranks wait for each other."""
    parallel: Parallel = field(default_factory=Parallel)
    optimizer: Optimizer = field(default_factory=Optimizer)
    data: Data = field(default_factory=Data)
    objectives: Mapping[str, float] = field(default_factory=dict)
    """By objective, how often a sample that allows several is used for it."""
    watch: Watch = field(default_factory=Watch)

    def __post_init__(self) -> None:
        _at_least("steps", self.steps, 1)
        _at_least("batch_rows", self.batch_rows, 1)
        _at_least("seed", self.seed, 0)
        _one_of("precision", self.precision, PRECISIONS)
        _at_least("pseudo_steps", self.pseudo_steps, 0)
        _at_least("timeout_seconds", self.timeout_seconds, 1)
        if self.pseudo_steps >= self.steps:
            raise ConfigError(
                f"pseudo_steps {self.pseudo_steps} of {self.steps} steps; allowed: less",
                hint="the layers get weights of their own after pseudo_steps, and train on",
            )
        for name, weight in self.objectives.items():
            _known(name, DEFAULT_WEIGHTS, "objectives")
            _at_least(f"objectives.{name}", weight, 0)
        config = self.config()
        if self.parallel.layout == "expert" and not config.moe_layers:
            raise ConfigError(
                'parallel.layout "expert" with a model that has no experts',
                hint='layout = "data", or num_experts above 0',
            )

    def config(self) -> M6Config:
        """Of the model, all layers with weights of their own."""
        changed = dict(self.model)
        preset = changed.pop("preset", None)
        if preset is None:
            raise ConfigError(
                "model.preset is missing", hint=f'such as preset = "{next(iter(models))}"'
            )
        if preset not in models:
            raise ConfigError(f"model.preset {preset!r}", hint=nearest(str(preset), models))
        known = [f.name for f in fields(M6Config) if f.name != "share_layers"]
        for key in changed:
            _known(key, known, "model")
        return replace(models[preset], **changed)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def find_run(text: str, settings: Iterable[str] = (), **values: Any) -> Run:
    """The run that a preset's name or a TOML file describes.

    Args:
        text: `m6-tiny`, or a path.
        settings: `key=value` on top of it, dotted: `optimizer.lr=1e-4`.
        values: Whole keys on top of it; None leaves one as it is.
    """
    path = PRESETS / f"{text}.toml"
    if not path.is_file():
        path = Path(text)
        if not path.is_file():
            names = preset_names()
            raise ConfigError(
                f"RUN {text!r} is neither a preset nor a file; presets: {', '.join(names)}",
                hint=nearest(text, names),
            )
    table = _read(path)
    for setting in settings:
        _set(table, setting)
    table |= {key: value for key, value in values.items() if value is not None}
    return run_of({"name": path.stem, **table})


def preset_names() -> list[str]:
    """The runs that come with Whale."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def run_of(table: Mapping[str, Any]) -> Run:
    """A Run from what TOML or `to_dict` gives."""
    made = _make(Run, table, "")
    assert isinstance(made, Run)
    return made


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a name that does not exist."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(names)}"


# ---- reading -------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", hint="a run is a TOML file in UTF-8"
        ) from error


def _set(table: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {setting!r}; allowed: key=value", hint="--set optimizer.lr=1e-4")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        # A bare word is a text: quotes would have to be hidden from the shell.
        value = text.strip()
    *groups, last = key.strip().split(".")
    for group in groups:
        inner = table.setdefault(group, {})
        if not isinstance(inner, dict):
            raise ConfigError(
                f"--set {setting!r}: {group!r} has no keys of its own",
                hint="such as --set optimizer.lr=1e-4",
            )
        table = inner
    table[last] = value


def _make(cls: type[Any], table: Any, where: str) -> Any:
    """A dataclass from a table: unknown, missing and wrong keys are errors."""
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"{where} is {table!r}; it has keys of its own", hint=f"such as [{where}] in TOML"
        )
    hints = get_type_hints(cls)
    values = {}
    for key, value in table.items():
        _known(key, hints, where)
        name = f"{where}.{key}" if where else key
        kind = hints[key]
        is_group = isinstance(kind, type) and is_dataclass(kind)
        values[key] = _make(kind, value, name) if is_group else _as(kind, value, name)
    missing = [
        f.name
        for f in fields(cls)
        if f.name not in values and f.default is f.default_factory  # both are MISSING
    ]
    if missing:
        raise ConfigError(
            f"{missing[0]!r} is missing{f' in [{where}]' if where else ''}",
            hint=f"a run needs {', '.join(missing)}",
        )
    return cls(**values)


def _as(kind: Any, value: Any, name: str) -> Any:
    """`value` if it is of a field's kind; whole numbers are also floats, lists are tuples."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_as(inner[0], item, name) for item in value)
    if origin is Mapping and isinstance(value, Mapping):
        return {key: _as(inner[1], item, f"{name}.{key}") for key, item in value.items()}
    plain = kind is Any or (isinstance(origin, type) and isinstance(value, origin))
    if not plain or (isinstance(value, bool) and kind not in (bool, Any)):
        expected = getattr(origin, "__name__", str(kind)).lower()
        raise ConfigError(f"{name} is {value!r}", hint=f"it must be of the kind {expected}")
    return value


def _known(key: str, known: Iterable[str], where: str) -> None:
    names = list(known)
    if key not in names:
        raise ConfigError(
            f"unknown key {key!r}{f' in [{where}]' if where else ''}", hint=nearest(key, names)
        )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} {value!r}", hint=nearest(value, allowed))


def _at_least(name: str, value: float, minimum: float) -> None:
    if not value >= minimum:
        raise ConfigError(f"{name} {value}", hint=f"allowed: {minimum} or more")


def _between(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} {value}", hint="allowed: 0 to 1")
