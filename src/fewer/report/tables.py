"""The pictures that a recipe asks for: of the figures of its table, and of what its study found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fewer.experiments.recipes import Cell, Recipe
from fewer.experiments.studies import Study
from fewer.report.audit import picture
from fewer.report.charts import column_picture, curve_picture
from fewer.report.figures import Histories, Interval, curve
from fewer.report.files import write_files
from fewer.report.pictures import cloud_picture
from fewer.report.style import looks, png

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def recipe_picture(plan: Recipe, cells: Sequence[Cell]) -> Figure | None:
    """None where the recipe asks for none."""
    if plan.figure is None:
        return None
    tuned = {row.name: row.tune for row in plan.row}
    methods = {cell.row: cell.ours.method for cell in sorted(cells, key=lambda cell: not tuned[cell.row])}
    of = looks(methods)  # what is tuned has the method's own look
    columns = list(dict.fromkeys(cell.column for cell in cells))
    if plan.figure == "columns":
        rounds = plan.by_round if isinstance(plan.by_round, list) else [0]
        panels = {f"{number} rounds" if number else "": _after(cells, number) for number in rounds}
        return column_picture(plan.title, panels, of)
    histories: dict[str, Histories] = {
        column: {cell.row: cell.ours.curves for cell in cells if cell.column == column} for column in columns
    }
    return curve_picture(plan.title, histories, "round" if plan.figure == "rounds" else "megabytes", of)


def _after(cells: Sequence[Cell], number: int) -> dict[str, dict[str, Interval]]:
    """By row and column, the accuracy after so many rounds, or after the last (0)."""
    found: dict[str, dict[str, Interval]] = {}
    for cell in cells:
        by_round = {point.round: point.accuracy for point in curve(cell.ours.curves)}
        known = Interval(cell.ours.accuracy, cell.ours.ci95) if not number else by_round.get(number)
        if known:
            found.setdefault(cell.row, {})[cell.column] = known
    return found


def write_study(study: Study, stem: Path) -> None:
    """Write the pictures of a study beside its page, as STEM-NAME.png."""
    files = {sheet.name: picture(sheet).figure for sheet in study.sheets}
    files |= {one.name: cloud_picture(one.title, one.clouds) for one in study.maps}
    write_files(stem.parent, {f"{stem.name}-{name}.png": png(figure) for name, figure in files.items()})
