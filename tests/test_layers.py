"""The package has layers: a module imports its own layer and the layers below it, never one above."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fewer
from tests.helpers import LAYERS

ROOT = Path(fewer.__file__).parent
BASE = ("errors", "choices", "ledger", "plugins", "privacy", "registry", "statistics")
"""Below all layers. These modules may import each other."""
FACADE = "fewer"
"""The package itself: it imports names of all layers on first use."""


def layer_of(module: str) -> str:
    """The layer of a module; `python -m fewer` belongs to the command line."""
    part = module.split(".")[1] if "." in module else ""
    return "cli" if part == "__main__" else part


def layer_rank(module: str) -> int:
    """The rank of a module's layer: higher layers have larger numbers, 0 is below all layers."""
    if module == FACADE:
        return len(LAYERS) + 1
    part = layer_of(module)
    return 0 if part in BASE else len(LAYERS) - LAYERS.index(part)


def module_name(path: Path) -> str:
    parts = ("fewer", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def defining_module(name: str) -> str | None:
    """The module that defines an attribute of the package, None if no module does."""
    return (
        f"fewer.{name}" if (ROOT / name).is_dir() or f"fewer.{name}" in MODULES else fewer._modules_by_name().get(name)
    )


def find_imports(module: str, tree: ast.AST) -> Iterator[str]:
    """Yields everything that a module imports from the package, anywhere in its code, with the imported names."""
    aliases: set[str] = set()
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == FACADE:
                    aliases.add(alias.asname or alias.name)
                elif alias.name.startswith("fewer."):
                    yield alias.name
                    if not alias.asname:
                        aliases.add(FACADE)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                base = package.split(".")[: len(package.split(".")) - node.level + 1]
                source = ".".join([*base, *([node.module] if node.module else [])])
            if source == FACADE:
                yield from filter(None, (defining_module(alias.name) for alias in node.names))
            elif source.startswith("fewer."):
                yield from (f"{source}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            text = ast.unparse(node.args[0]).lstrip("f").strip("'\"") if node.args else ""
            if text.startswith("fewer."):
                yield text
    for node in ast.walk(tree):  # `import fewer` and then `fewer.something`
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield from filter(None, [defining_module(node.attr)])


def imports_of(module: str) -> list[str]:
    return list(find_imports(module, ast.parse(MODULES[module].read_text())))


def test_every_module_belongs_to_a_layer() -> None:
    assert {layer_of(module) for module in MODULES} <= {"", *LAYERS, *BASE}
    for part in ("runs", "methods", "learning", "models", "data", "runtime", "wire"):
        assert f"fewer.{part}" in MODULES


@pytest.mark.parametrize("module", [module for module in MODULES if module != FACADE])
def test_a_module_imports_only_its_own_and_lower_layers(module: str) -> None:
    above = [other for other in imports_of(module) if layer_rank(other) > layer_rank(module)]
    assert not above, f"{module} imports {', '.join(above)}"


@pytest.mark.parametrize("layer", ["wire", "runtime"])
def test_wire_and_runtime_import_no_method(layer: str) -> None:
    modules = [module for module in MODULES if layer_of(module) == layer]
    assert modules
    for module in modules:
        assert not [other for other in imports_of(module) if layer_of(other) == "methods"]


PAPERS = re.compile("fedmk|frl|metafed|f2l|fedmeta", re.IGNORECASE)
ABOVE_AND_BELOW = [module for module in MODULES if layer_of(module) in {*LAYERS} - {"methods", "learning", "cli"}]


@pytest.mark.parametrize("module", ABOVE_AND_BELOW)
def test_only_methods_know_papers(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text())
    for node in ast.walk(tree):  # docstrings may have examples
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
    assert not PAPERS.search(ast.unparse(tree))


RUNTIMES = ("fewer.runtime.inline", "fewer.runtime.pool", "fewer.runtime.Inline", "fewer.runtime.Pool")


def test_methods_import_no_runtime() -> None:
    modules = [module for module in MODULES if layer_of(module) == "methods"]
    assert len(modules) >= 6
    for module in modules:
        runtimes = [other for other in imports_of(module) if other.startswith(RUNTIMES)]
        assert not runtimes, f"{module} imports {', '.join(runtimes)}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("import fewer.methods.method", ["fewer.methods.method"]),
        ("from fewer.runs import engine", ["fewer.runs.engine"]),
        ("from fewer import methods, FedAvg", ["fewer.methods", "fewer.methods.fedavg"]),
        ("from ..methods import method", ["fewer.methods.method"]),
        ("from . import tree", ["fewer.wire.tree"]),
        ("from .. import errors", ["fewer.errors"]),
        ("def f():\n    from fewer.cli import main", ["fewer.cli.main"]),
        ("if TYPE_CHECKING:\n    import fewer.data.samples as samples", ["fewer.data.samples"]),
        ("import fewer\nfewer.run(1)\nfewer.__version__", ["fewer.runs.engine"]),
        ("import_module('fewer.runs.engine')", ["fewer.runs.engine"]),
        ("importlib.import_module(f'fewer.runs.{name}')", ["fewer.runs.{name}"]),
        ("import torch, json\nfrom pathlib import Path", []),
    ],
)
def test_all_kinds_of_imports_are_found(line: str, expected: list[str]) -> None:
    assert list(find_imports("fewer.wire.message", ast.parse(line))) == expected
