"""The notebooks run from top to bottom, and are stored without outputs."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_five_and_the_readme_lists_them() -> None:
    assert len(NOTEBOOKS) == 5
    assert all(f"({file.name})" in (FOLDER / "README.md").read_text() for file in NOTEBOOKS)


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(file, as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code), "clear all outputs"
    assert code[0].source.startswith("try:\n    import fewer\nexcept ImportError:")
    NotebookClient(notebook, timeout=150, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert all(cell.execution_count for cell in code)


def test_the_method_of_the_notebook_is_that_of_the_docs() -> None:
    example = (FOLDER.parent / "docs/examples/fedmedian.py").read_text()
    notebook = nbformat.read(FOLDER / "3-write-a-method.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    source = next(cell.source for cell in notebook.cells if "class FedMedian" in cell.source)
    parsed = ast.parse(example)
    parsed.body = parsed.body[1:]  # without the docstring of the file
    assert ast.dump(ast.parse(source)) == ast.dump(parsed)
