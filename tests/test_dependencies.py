"""Every package that the sources or the tests import is declared in pyproject.toml."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OWN = {"fewer", "tests", "tools", "benchmarks"}
DISTRIBUTIONS = packages_distributions()


def imported(folder: str) -> Iterator[tuple[str, str]]:
    """Names of the third-party packages that the files of a folder import, with the file."""
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("pytest.importorskip", "find_spec"):
                names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            for name in names:
                package = name.partition(".")[0]
                if package not in {*sys.stdlib_module_names, *OWN}:
                    yield package, str(file.relative_to(ROOT))


def declared(*without: str) -> set[str]:
    """Names of the distributions in pyproject.toml, without those of some extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [lines for name, lines in project["optional-dependencies"].items() if name not in without]
    lines = [line for group in (project["dependencies"], *extras) for line in group]
    return {normalize(re.split(r"[\[<>=!~; ]", line)[0]) for line in lines}


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions(package: str) -> set[str]:
    """The distributions that provide a package; itself if it is not installed."""
    return {normalize(name) for name in DISTRIBUTIONS.get(package, [package])}


@pytest.mark.parametrize(("folder", "without"), [("src", ("dev", "docs")), ("tests", ())])
def test_every_imported_package_is_declared(folder: str, without: tuple[str, ...]) -> None:
    packages = dict(imported(folder))
    assert {"torch", "httpx"} <= packages.keys()
    names = declared(*without)
    assert {package: file for package, file in packages.items() if not distributions(package) & names} == {}


def test_every_dependency_has_a_locked_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    locked = {normalize(line.partition("==")[0]) for line in lines if "==" in line}
    assert declared() - locked == set()


def test_typer_has_an_upper_bound_that_keeps_the_command_line_working() -> None:
    """The options of settings use `typer.main.get_click_param`, which 0.26 removed. `make wheel-newest` shows it."""
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [line for line in lines if line.startswith("typer") and re.search(r"<0\.(2[0-6]|1?\d)$", line)]
