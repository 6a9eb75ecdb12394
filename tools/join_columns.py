"""Joins results that were made column by column: python -m tools.join_columns privacy/mnist.

`fewer reproduce NAME --column C` writes a page of its own. Once all columns are there, this writes the page of the
whole recipe, and removes theirs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fewer.experiments import pages
from fewer.experiments.recipes import Cell, load_recipe, read_results
from fewer.report.style import png
from fewer.report.tables import plot_recipe

RESULTS = Path(__file__).parents[1] / "docs/results"


def join_columns(name: str, page: Path) -> list[Path]:
    """Writes the page of a recipe from the pages of its columns. All must have been made with the same recipe.

    `page` is the path of the page without its ending.
    """
    recipe = load_recipe(name)
    parts = [path for path in page.parent.glob(f"{page.name}-*.json") if _recipe_name(path) == name]
    found: dict[tuple[str, str], Cell] = {}
    for path in parts:
        made_with, cells = read_results(json.loads(path.read_text()))
        if made_with != recipe:
            raise SystemExit(f"{path} was made with another version of {name}")
        found |= {(cell.row, cell.column): cell for cell in cells}
    planned = [(row.name, column.name) for column in recipe.column for row in recipe.row if row.runs_in(column.name)]
    if missing := [place for place in planned if place not in found]:
        raise SystemExit(f"{name} lacks {len(missing)} cells, such as {' in '.join(missing[0])}")
    cells = [found[place] for place in planned]
    pictures = {kind: png(figure) for kind, figure in plot_recipe(recipe, cells).items()}
    written = pages.write_results(page.name, recipe, cells, page.parent, f"fewer reproduce {name}", False, pictures)
    for path in parts:
        for old in path.parent.glob(f"{path.stem}*"):
            old.unlink()
    return written


def _recipe_name(path: Path) -> str:
    """The name of the recipe in the command that made a result."""
    return str(json.loads(path.read_text())["command"]).split()[2]


if __name__ == "__main__":
    print(*join_columns(sys.argv[1], RESULTS / sys.argv[1]), sep="\n")
