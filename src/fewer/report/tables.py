"""The pictures of a recipe: its table as a plot, and the images of its study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from fewer.experiments.compare import Row
from fewer.experiments.recipes import Cell, Recipe
from fewer.experiments.studies import Study
from fewer.report.audit import draw_images
from fewer.report.charts import By, Grid, plot_columns, plot_curves, plot_heatmap
from fewer.report.files import write_files
from fewer.report.metrics import Histories, History, metric_curve
from fewer.report.pictures import plot_embeddings
from fewer.report.style import assign_label_styles, png
from fewer.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_recipe(recipe: Recipe, cells: Sequence[Cell]) -> dict[str, Figure]:
    """Draws the plots of a recipe: its `figure`, if it has one, and accuracy by operations, if they were counted."""
    tuned = {row.name: row.tune for row in recipe.row}
    tuned_first = sorted(cells, key=lambda cell: not tuned[cell.row])  # a tuned row has the method's own style
    styles = assign_label_styles({cell.row: cell.ours.method for cell in tuned_first})
    columns = list(dict.fromkeys(cell.column for cell in cells))
    figures: dict[str, Figure | None] = {}
    if recipe.figure == "columns":
        rounds = recipe.by_round if isinstance(recipe.by_round, list) else [0]
        subplots = {f"{number} rounds" if number else "": _accuracies_after(cells, number) for number in rounds}
        figures["columns"] = plot_columns(recipe.title, subplots, styles)
    if recipe.figure == "heatmap":
        accuracies = _accuracies_after(cells, 0)
        rows = [[row.get(column) for column in columns] for row in accuracies.values()]
        figures["heatmap"] = plot_heatmap(recipe.title, Grid("", "", columns, list(accuracies), rows))
    histories: dict[str, Histories] = {
        column: {cell.row: _plotted_curves(cell.ours) for cell in cells if cell.column == column} for column in columns
    }
    axes: dict[str, By] = {"rounds": "round", "megabytes": "megabytes"}
    for kind, by in axes.items():
        if kind in (recipe.figure or ""):
            figures[kind] = plot_curves(recipe.title, histories, by, styles)
    if all(cell.ours.gflop is not None for cell in cells):
        spent = {(cell.row, cell.column) for cell in cells if cell.ours.gflop}  # none without training
        trained = {
            column: {row: curves for row, curves in rows.items() if (row, column) in spent}
            for column, rows in histories.items()
        }
        figures["gflop"] = plot_curves(recipe.title, trained, "gflop", styles)
    return {kind: figure for kind, figure in figures.items() if figure is not None}


def _plotted_curves(row: Row) -> Sequence[History]:
    """The curve of each seed; their mean alone if intervals are over groups, because a few seeds say much less."""
    if not row.groups:
        return row.curves
    by_round = zip(*row.curves, strict=True)
    return [[{**points[0], "accuracy": fmean(point["accuracy"] for point in points)} for points in by_round]]


def _accuracies_after(cells: Sequence[Cell], rounds: int) -> dict[str, dict[str, Interval]]:
    """Accuracy by row and column after this many rounds; 0 means after the last."""
    accuracies: dict[str, dict[str, Interval]] = {}
    for cell in cells:
        by_round = {point.round: point.value for point in metric_curve(cell.ours.curves)}
        accuracy = by_round.get(rounds) if rounds else Interval(cell.ours.accuracy, cell.ours.ci95)
        if accuracy:
            accuracies.setdefault(cell.row, {})[cell.column] = accuracy
    return accuracies


def write_study(study: Study, stem: Path) -> None:
    """Writes the pictures of a study next to its page, as STEM-NAME.png."""
    figures = {images.name: draw_images(images).figure for images in study.images}
    figures |= {plot.name: plot_embeddings(plot.title, plot.clouds) for plot in study.cloud_plots}
    write_files(stem.parent, {f"{stem.name}-{name}.png": png(figure) for name, figure in figures.items()})
