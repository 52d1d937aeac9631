"""The architecture as a test: import direction, cycles, a core without torch, small files."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import whale

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "whale"
MAX_LINES = 500
VAGUE_NAMES = {"utils", "util", "common", "base", "helpers", "misc"}

# What each unit (a folder or a file directly under whale/) may import besides itself.
# errors < ir < cost < sim < planner, viz beside them; ir < runtime < nn < engine. `config` and
# `annotations` are leaves that may be read; the sides meet in `parallel`, `verification` and `cli`.
ALLOWED: Mapping[str, frozenset[str]] = {
    "errors": frozenset(),
    "config_groups": frozenset({"errors"}),
    "config": frozenset({"errors", "config_groups"}),
    "ir": frozenset({"errors"}),
    "cost": frozenset({"errors", "ir"}),
    "sim": frozenset({"errors", "ir", "cost"}),
    "planner": frozenset({"errors", "config", "ir", "cost", "sim"}),
    "viz": frozenset({"errors", "ir", "cost", "sim"}),
    "annotations": frozenset({"errors", "ir"}),
    "runtime": frozenset({"errors", "config", "ir"}),
    "nn": frozenset({"errors", "ir", "runtime"}),
    "optim": frozenset({"errors", "runtime"}),
    "engine": frozenset(
        {"errors", "config", "config_groups", "ir", "annotations", "runtime", "nn"}
    ),
    "models": frozenset({"errors", "annotations", "nn", "optim"}),
    "datasets": frozenset({"errors"}),
}
# The rooms of the engine, each with what it may import besides itself: the user's objects, their
# trace, ways to cut it, the graph of it all; then a Plan's program, its trials, and what
# looks on while it runs. `step` and `recorder` are the door.
ROOMS: Mapping[str, frozenset[str]] = {
    "state": frozenset(),
    "trace": frozenset({"state"}),
    "split": frozenset({"state", "trace"}),
    "capture": frozenset({"state", "trace", "split"}),
    "lower": frozenset({"state", "trace", "split", "capture"}),
    "trials": frozenset({"state", "trace", "capture", "lower"}),
    "watch": frozenset({"state", "trace", "capture", "lower", "trials"}),
    "checkpoint": frozenset({"state", "lower"}),
    "calibrate": frozenset({"state", "trace", "capture"}),
    "updating": frozenset({"lower"}),
    "step": frozenset({"state", "lower", "watch", "checkpoint", "updating"}),
    "recorder": frozenset({"trace", "step"}),
}
MAY_IMPORT_ANYTHING = frozenset({"parallel", "verification", "training", "cli", "__main__"})
TORCH_FREE = frozenset(
    {"errors", "config_groups", "config", "ir", "cost", "sim", "planner", "viz", "datasets"}
)

Imports = dict[str, frozenset[str]]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source_files() -> dict[str, Path]:
    return {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def unit_of(module: str) -> str:
    """`whale.ir.plan` belongs to `ir`; the package itself to ``."""
    return module.split(".")[1] if "." in module else ""


def imported(module: str, is_package: bool, tree: ast.AST) -> Iterator[str]:
    """Every absolute name a module imports, `from a import b` as a.b, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                origin = ".".join([*parts, *([origin] if origin else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def whale_module(name: str, modules: set[str]) -> str | None:
    """The module of ours that a name comes from; a lazy public name counts as its own module."""
    top, _, rest = name.partition(".")
    if top != "whale" or rest == "__version__":
        return None
    if rest in whale._MODULE_OF:
        return whale._MODULE_OF[rest]
    while name not in modules:
        name = name.rpartition(".")[0]
    return name


def import_graph(sources: Mapping[str, tuple[bool, str]]) -> Imports:
    """Module -> the modules of whale it imports, from {module: (is_package, source)}."""
    modules = {"whale", *sources}
    return {
        module: frozenset(
            target
            for name in imported(module, is_package, ast.parse(source))
            if (target := whale_module(name, modules)) not in (None, module)
        )
        for module, (is_package, source) in sources.items()
    }


def tree_graph() -> Imports:
    return import_graph(
        {
            module: (path.name == "__init__.py", path.read_text(encoding="utf-8"))
            for module, path in source_files().items()
            # The root only names the public things; it imports them on first use.
            if module != "whale"
        }
    )


def wrong_way(graph: Imports) -> list[str]:
    found = []
    for module, targets in graph.items():
        unit = unit_of(module)
        if unit in MAY_IMPORT_ANYTHING:
            continue
        allowed = ALLOWED.get(unit, frozenset()) | {unit}
        found += [f"{module} imports {t}" for t in sorted(targets) if unit_of(t) not in allowed]
    return found


def wrong_room(graph: Imports) -> list[str]:
    def room(module: str) -> str:
        return module.removeprefix("whale.engine").strip(".").split(".")[0]

    return [
        f"{module} imports {target}"
        for module, targets in graph.items()
        if unit_of(module) == "engine"
        for target in sorted(targets)
        if unit_of(target) == "engine" and room(target) not in {room(module), *ROOMS[room(module)]}
    ]


def cycle_in(graph: Imports) -> list[str]:
    """One import cycle, as its modules in order; empty when there is none."""
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done:
            return []
        for target in sorted(graph.get(module, ())):
            if found := visit(target, [*trail, module]):
                return found
        done.add(module)
        return []

    for module in sorted(graph):
        if found := visit(module, []):
            return found
    return []


def test_imports_point_one_way():
    assert wrong_way(tree_graph()) == []


def test_rooms_of_the_engine_point_one_way():
    graph = {
        module: targets for module, targets in tree_graph().items() if module != "whale.engine"
    }
    assert wrong_room(graph) == []
    assert cycle_in(ROOMS) == []
    bad = {"whale.engine.trace.a": frozenset({"whale.engine.lower.b", "whale.engine.trace.c"})}
    assert wrong_room(bad) == ["whale.engine.trace.a imports whale.engine.lower.b"]


def test_no_import_cycles():
    assert cycle_in(tree_graph()) == []


def test_every_unit_is_in_the_table():
    units = {unit_of(module) for module in source_files()} - {""}
    assert units - set(ALLOWED) - MAY_IMPORT_ANYTHING == set()


def test_the_table_itself_points_one_way():
    table = {unit: frozenset(targets) for unit, targets in ALLOWED.items()}
    assert cycle_in(table) == []
    for unit in TORCH_FREE:
        assert ALLOWED[unit] <= TORCH_FREE, unit


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("whale.ir.a", "from whale.engine import lower", ["whale.ir.a imports whale.engine.lower"]),
        ("whale.ir.a", "from ..engine import lower", ["whale.ir.a imports whale.engine.lower"]),
        ("whale.ir.a", "import whale.engine.lower", ["whale.ir.a imports whale.engine.lower"]),
        ("whale.ir.a", "def f():\n    import whale.engine", ["whale.ir.a imports whale.engine"]),
        ("whale.ir.a", "from whale import parallelize", ["whale.ir.a imports whale.parallel"]),
        ("whale.ir.a", "import whale", ["whale.ir.a imports whale"]),
        ("whale.nn.a", "from whale import planner", ["whale.nn.a imports whale.planner"]),
        ("whale.ir.a", "from whale.errors import PlanError\nfrom . import b", []),
        ("whale.cli.a", "from whale.engine import lower\nimport whale.planner", []),
    ],
)
def test_the_checker_sees_each_form_of_import(module, source, expected):
    others = ["ir", "ir.b", "errors", "engine", "engine.lower", "planner", "parallel"]
    sources = {f"whale.{other}": (False, "") for other in others} | {module: (False, source)}
    assert wrong_way(import_graph(sources)) == expected


def test_the_checker_sees_a_cycle():
    sources = {
        "whale.ir.a": (False, "from whale.ir.b import x"),
        "whale.ir.b": (False, "def f():\n    from whale.ir import a"),
    }
    assert cycle_in(import_graph(sources)) == ["whale.ir.a", "whale.ir.b", "whale.ir.a"]


def test_torch_free_units_do_not_name_torch():
    found = [
        f"{module} imports {name}"
        for module, path in source_files().items()
        if unit_of(module) in TORCH_FREE or module in ("whale", "whale.cli", "whale.cli.main")
        for name in imported(module, path.name == "__init__.py", ast.parse(path.read_text()))
        if name.split(".")[0] == "torch"
    ]
    assert found == []


def test_torch_free_units_load_without_torch():
    """What the ast cannot see: a third-party package that brings torch along."""
    modules = [module for module in source_files() if unit_of(module) in TORCH_FREE]
    assert {"whale.ir", "whale.planner"} <= {*modules, *(m.rpartition(".")[0] for m in modules)}
    code = (
        f"import sys, {', '.join([*modules, 'whale.cli.main'])}\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_files_are_short_and_named_for_what_they_are():
    files = source_files()
    lines = {module: len(path.read_text().splitlines()) for module, path in files.items()}
    assert {module: n for module, n in lines.items() if n > MAX_LINES} == {}
    assert [module for module in files if VAGUE_NAMES & set(module.split("."))] == []


def test_every_file_opens_with_a_docstring():
    files = source_files()
    assert [
        m for m, path in files.items() if not ast.get_docstring(ast.parse(path.read_text()))
    ] == []


def test_public_names_agree_for_readers_and_tools():
    """The lazy table, `__all__` and the imports that only type checkers read are one list."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    for_tools = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("whale.")
        for alias in node.names
    }
    assert for_tools == whale._MODULE_OF
    assert set(whale.__all__) == set(for_tools)
    assert set(whale.__all__) <= set(dir(whale))


def test_no_module_shadows_a_public_name():
    """Importing whale/x.py sets whale.x, which would hide a lazy public name x."""
    submodules = {module.split(".")[1] for module in source_files() if module.count(".") == 1}
    assert submodules & set(whale.__all__) == set()


def test_public_names_resolve_lazily_and_suggest():
    assert whale.ConfigError.__module__ == "whale.errors"
    with pytest.raises(AttributeError, match=r"no attribute 'replicat'; did you mean 'whale.repli"):
        _ = whale.replicat
