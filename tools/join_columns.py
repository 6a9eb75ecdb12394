"""Joins results that were made column by column: python -m tools.join_columns privacy/mnist.

`fewer reproduce NAME --column C` writes a page of its own. Once all columns are there, this writes the page of the
whole recipe, and removes theirs. Columns that an earlier page of the whole recipe has stay, unless they were run again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fewer.experiments import pages
from fewer.experiments.recipes import Cell, load_recipe, read_results, slugify
from fewer.experiments.studies import join_studies
from fewer.report.style import png
from fewer.report.tables import plot_recipe

RESULTS = Path(__file__).parents[1] / "docs/results"


def join_columns(name: str, page: Path) -> list[Path]:
    """Writes the page of a recipe from the pages of its columns and an earlier page of it, all of the same recipe.

    `page` is the path of the page without its ending.
    """
    recipe = load_recipe(name)
    slugs = [slugify(column.name) for column in recipe.column]
    earlier = page.with_name(f"{page.name}.json")
    new = [path for slug in slugs if (path := page.parent / f"{page.name}-{slug}.json").exists()]
    parts = [earlier, *new] if earlier.exists() and len(new) < len(slugs) else new
    contents = [json.loads(path.read_text()) for path in parts]
    found: dict[tuple[str, str], Cell] = {}
    for path, content in zip(parts, contents, strict=True):
        made_with, cells = read_results(content)
        if made_with != recipe:
            raise SystemExit(f"{path} was made with another version of {name}")
        found |= {(cell.row, cell.column): cell for cell in cells}
    planned = [(row.name, column.name) for column in recipe.column for row in recipe.row if row.runs_in(column.name)]
    if missing := [place for place in planned if place not in found]:
        raise SystemExit(f"{name} lacks {len(missing)} cells, such as {' in '.join(missing[0])}")
    cells = [found[place] for place in planned]
    pictures = {kind: png(figure) for kind, figure in plot_recipe(recipe, cells).items()}
    study = join_studies(contents)
    command = f"fewer reproduce {name}"
    later = list(dict.fromkeys(row for content in contents for row in content.get("later", ())))
    notes = join_notes(contents)
    written = pages.write_results(page.name, recipe, cells, page.parent, command, False, pictures, study, later, notes)
    for path in new:
        for old in path.parent.glob(f"{path.stem}*"):
            old.unlink()
    return written


def join_notes(contents: Sequence[Mapping[str, Any]]) -> list[str]:
    """The notes of all parts, each with the columns that it is about."""
    notes = []
    for content in contents:
        columns = ", ".join(dict.fromkeys(cell["column"] for cell in content["cells"]))
        notes += [f"{note} (columns: {columns})" for note in content.get("notes", ())]
    return notes


if __name__ == "__main__":
    print(*join_columns(sys.argv[1], RESULTS / sys.argv[1]), sep="\n")
