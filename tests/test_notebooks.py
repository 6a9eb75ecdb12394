"""The notebooks run from top to bottom, and are stored without outputs."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_five_and_the_readme_lists_them() -> None:
    assert len(NOTEBOOKS) == 5
    assert all(f"({file.name})" in (FOLDER / "README.md").read_text() for file in NOTEBOOKS)


def first_cell() -> str:
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)  # type: ignore[no-untyped-call]
    return str(next(cell.source for cell in notebook.cells if cell.cell_type == "code"))


def find_source() -> str:
    """What the first cell would install in the current directory, if Fewer were missing."""
    start, body = first_cell().split("except ImportError:\n")
    assert start == "try:\n    import fewer\n"
    lines = [line for line in textwrap.dedent(body).splitlines() if line != "import fewer"]
    assert lines.pop() == "%pip install -q {source}"
    names: dict[str, str] = {}
    exec("\n".join(lines), names)
    return names["source"]


def test_the_first_cell_finds_a_wheel_or_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEWER_SOURCE", raising=False)
    monkeypatch.chdir(FOLDER)
    assert find_source() == ".."
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="put a wheel of it next to this notebook"):
        find_source()
    Path("fewer-0.1.0-py3-none-any.whl").touch()
    assert find_source() == "fewer-0.1.0-py3-none-any.whl"
    monkeypatch.setenv("FEWER_SOURCE", "other.whl")
    assert find_source() == "other.whl"


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(file, as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code), "clear all outputs"
    assert code[0].source == first_cell()
    NotebookClient(notebook, timeout=150, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert all(cell.execution_count for cell in code)


def test_the_method_of_the_notebook_is_that_of_the_docs() -> None:
    example = (FOLDER.parent / "docs/examples/fedmedian.py").read_text()
    notebook = nbformat.read(FOLDER / "3-write-a-method.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    source = next(cell.source for cell in notebook.cells if "class FedMedian" in cell.source)
    parsed = ast.parse(example)
    parsed.body = parsed.body[1:]  # without the docstring of the file
    assert ast.dump(ast.parse(source)) == ast.dump(parsed)
