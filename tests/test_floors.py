"""The house has floors: a module imports its own floor and those below it, never one above."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fewer

ROOT = Path(fewer.__file__).parent
FLOORS = (
    "cli",
    "dash",
    "report",
    "experiments",
    "audit",
    "runs",
    "methods",
    "learning",
    "models",
    "data",
    "runtime",
    "wire",
)
"""Top to bottom."""
GROUND = ("errors", "choices", "plugins", "registry")
"""Below all floors, and each free to import the others."""
FACADE = "fewer"
"""The package itself: it hands out names of all floors when they are asked for."""


def floor(module: str) -> str:
    """The part of the house that a module lies in; `python -m fewer` is a door to the command line."""
    part = module.split(".")[1] if "." in module else ""
    return "cli" if part == "__main__" else part


def height(module: str) -> int:
    """The larger, the higher: 0 is the ground."""
    if module == FACADE:
        return len(FLOORS) + 1
    part = floor(module)
    return 0 if part in GROUND else len(FLOORS) - FLOORS.index(part)


def name_of(path: Path) -> str:
    parts = ("fewer", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def home(name: str) -> str | None:
    """The module behind an attribute of the package; None for those that are no module's."""
    return f"fewer.{name}" if (ROOT / name).is_dir() or f"fewer.{name}" in MODULES else fewer._homes().get(name)


def imports(module: str, tree: ast.AST) -> Iterator[str]:
    """Everything of the package that a module imports, anywhere in its text, with the names taken from it."""
    bare: set[str] = set()
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == FACADE:
                    bare.add(alias.asname or alias.name)
                elif alias.name.startswith("fewer."):
                    yield alias.name
                    if not alias.asname:
                        bare.add(FACADE)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                base = package.split(".")[: len(package.split(".")) - node.level + 1]
                source = ".".join([*base, *([node.module] if node.module else [])])
            if source == FACADE:
                yield from filter(None, (home(alias.name) for alias in node.names))
            elif source.startswith("fewer."):
                yield from (f"{source}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            text = ast.unparse(node.args[0]).lstrip("f").strip("'\"") if node.args else ""
            if text.startswith("fewer."):
                yield text
    for node in ast.walk(tree):  # `import fewer` and then `fewer.something`
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bare:
            yield from filter(None, [home(node.attr)])


def imported(module: str) -> list[str]:
    return list(imports(module, ast.parse(MODULES[module].read_text())))


def test_every_module_lies_on_a_floor() -> None:
    assert {floor(module) for module in MODULES} <= {"", *FLOORS, *GROUND}
    for part in ("runs", "methods", "learning", "models", "data", "runtime", "wire"):
        assert f"fewer.{part}" in MODULES


@pytest.mark.parametrize("module", [module for module in MODULES if module != FACADE])
def test_imports_only_its_own_floor_and_lower_ones(module: str) -> None:
    above = [other for other in imported(module) if height(other) > height(module)]
    assert not above, f"{module} imports {', '.join(above)}"


@pytest.mark.parametrize("low", ["wire", "runtime"])
def test_wire_and_runtime_know_no_method(low: str) -> None:
    modules = [module for module in MODULES if floor(module) == low]
    assert modules
    for module in modules:
        assert not [other for other in imported(module) if floor(other) == "methods"]


CARRIERS = ("fewer.runtime.inline", "fewer.runtime.pool", "fewer.runtime.Inline", "fewer.runtime.Pool")


def test_methods_know_no_carrier() -> None:
    modules = [module for module in MODULES if floor(module) == "methods" and module != "fewer.methods.base"]
    assert len(modules) >= 6
    for module in modules:
        known = [other for other in imported(module) if other.startswith(CARRIERS)]
        assert not known, f"{module} imports {', '.join(known)}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("import fewer.methods.base", ["fewer.methods.base"]),
        ("from fewer.runs import run", ["fewer.runs.run"]),
        ("from fewer import methods, FedAvg", ["fewer.methods", "fewer.methods.fedavg"]),
        ("from ..methods import base", ["fewer.methods.base"]),
        ("from . import ledger", ["fewer.wire.ledger"]),
        ("from .. import errors", ["fewer.errors"]),
        ("def f():\n    from fewer.cli import main", ["fewer.cli.main"]),
        ("if TYPE_CHECKING:\n    import fewer.data.samples as samples", ["fewer.data.samples"]),
        ("import fewer\nfewer.run(1)\nfewer.__version__", ["fewer.runs"]),
        ("import_module('fewer.runs.engine')", ["fewer.runs.engine"]),
        ("importlib.import_module(f'fewer.runs.{name}')", ["fewer.runs.{name}"]),
        ("import torch, json\nfrom pathlib import Path", []),
    ],
)
def test_imports_are_found_however_they_are_written(line: str, expected: list[str]) -> None:
    assert list(imports("fewer.wire.message", ast.parse(line))) == expected
