"""Figures by class: confusion matrices, reliability, and tables by class and by client. Seeds are added up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fewer.report.axes import add_legend, create_axes, shorten
from fewer.report.groups import RunGroup
from fewer.report.html import Picture, Table
from fewer.report.style import INK, LineStyle, text_color, theme
from fewer.runs.figures import PERCENT, client_rows

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

MAX_MATRICES = 3
"""With more methods, a report shows the confusion matrix of the best one only."""
MAX_COUNTS = 12
"""Maximum number of classes for which a confusion matrix shows its counts."""
MAX_CLIENT_ROWS = 300
"""Maximum number of rows of the table by client."""


class ClassFigures(NamedTuple):
    """The last evaluation of a method by class, summed over seeds."""

    names: list[str]
    confusion: NDArray[np.int64]
    """Samples by label (row) and predicted class (column)."""
    samples: NDArray[np.float64]
    """Samples by confidence."""
    accuracy: NDArray[np.float64]
    """Accuracy by confidence; NaN without samples."""
    confidence: NDArray[np.float64]
    """Mean confidence by confidence; NaN without samples."""

    def by_class(self) -> list[tuple[str, int, float | None, float | None, float | None]]:
        """Name, support, recall, precision and F1 of each class."""
        support, predicted, correct = self.confusion.sum(1), self.confusion.sum(0), self.confusion.diagonal()
        rows = zip(self.names, support.tolist(), predicted.tolist(), correct.tolist(), strict=True)
        return [(name, n, _divide(c, n), _divide(c, p), _divide(2 * c, n + p)) for name, n, p, c in rows]


def _divide(part: float, total: float) -> float | None:
    return part / total if total else None


def add_seeds(group: RunGroup) -> ClassFigures | None:
    """The figures of a group; None if a run did not record them."""
    classes = [metrics.get("classes") or {"names": None} for metrics in group.last_metrics]
    names = classes[0]["names"]
    if names is None or any(other["names"] != names for other in classes):
        return None
    bins = [{key: np.array(values, float) for key, values in one["reliability"].items()} for one in classes]
    samples = np.sum([one["samples"] for one in bins], 0)
    sums = [np.sum([np.nan_to_num(one[key]) * one["samples"] for one in bins], 0) for key in ("accuracy", "confidence")]
    means = (part / np.where(samples > 0, samples, np.nan) for part in sums)
    return ClassFigures(names, np.sum([one["confusion"] for one in classes], 0), samples, *means)


# --- pictures -------------------------------------------------------------------------------------------------


def draw_classes(groups: Sequence[RunGroup], styles: Mapping[str, LineStyle]) -> Iterator[Picture]:
    """Confusion matrices and the reliability of all methods that recorded them."""
    figures = {group.label: found for group in groups if (found := add_seeds(group))}
    shown = list(figures)
    if len(figures) > MAX_MATRICES:
        best = max((group for group in groups if group.label in figures and group.value), key=_accuracy)
        shown = [best.label]
    for index, label in enumerate(shown):
        names, confusion = figures[label].names, figures[label].confusion
        rows = [(names[y], names[x], int(confusion[y, x])) for y, x in zip(*confusion.nonzero(), strict=True)]
        only = f" Only the best of {len(figures)} methods is shown." if len(shown) < len(figures) else ""
        yield Picture(
            f"confusion{f'-{index + 1}' if index else ''}",
            plot_confusion(f"{shorten(label, 32)}: confusion matrix", figures[label]),
            f"{label}: test samples by label and prediction after the last round, all seeds. The color is the fraction "
            f"of the label's samples, so the diagonal is the recall.{only}",
            f"Confusion matrix of {label} with {len(names)} classes; {int(confusion.trace()):,} of "
            f"{int(confusion.sum()):,} test samples are on the diagonal.",
            Table(("label", "predicted", "samples"), rows),
        )
    if figures:
        errors = {group.label: group.mean_if_known("ece") for group in groups if group.label in figures}
        text = ", ".join(f"{label} {100 * error:.1f} %" for label, error in errors.items() if error is not None)
        points = [
            (label, *map(float, point))
            for label, found in figures.items()
            for point in zip(found.confidence, found.accuracy, found.samples, strict=True)
            if point[2]
        ]
        yield Picture(
            "reliability",
            plot_reliability(figures, styles),
            "Accuracy by confidence. On the diagonal, confidence is right; below it, the model is too sure. Larger "
            f"points have more samples. Expected calibration error (ECE): {text}.",
            f"Reliability diagram. ECE: {text}.",
            Table(("method", "confidence", "accuracy", "samples"), points),
        )


def _accuracy(group: RunGroup) -> float:
    return group.value.mean if group.value else 0.0


def plot_confusion(title: str, figures: ClassFigures) -> Figure:
    """Plots a confusion matrix: lighter cells hold more of a label's samples; few classes also show counts."""
    from matplotlib import colormaps

    count = len(figures.names)
    cell = 0.44 if count <= MAX_COUNTS else max(0.075, min(0.3, 6 / count))
    names = [shorten(name, 16) for name in figures.names]
    margin = 0.085 * max(map(len, names)) + 0.5
    rotated = max(map(len, names)) * 0.09 > cell
    fractions = figures.confusion / figures.confusion.sum(1, keepdims=True).clip(min=1)
    with theme():
        below = margin if rotated else 0.6
        figure, axes = create_axes(title, (max(3.2, count * cell + margin + 0.2), count * cell + below + 0.4))
        edges = np.arange(count + 1) - 0.5
        axes.pcolormesh(edges, edges, fractions, cmap=colormaps["viridis"], vmin=0, vmax=1, linewidth=0)
        if count <= MAX_COUNTS:
            for y, x in zip(*figures.confusion.nonzero(), strict=True):
                text, color = f"{figures.confusion[y, x]:,}", text_color(fractions[y, x])
                axes.text(x, y, text, ha="center", va="center", color=color, fontsize=8 if len(text) < 5 else 6.5)
        step = max(1, round(0.13 / cell + 0.4))
        axes.set_xticks(range(0, count, step), names[::step], rotation=90 if rotated else 0)
        axes.set_yticks(range(0, count, step), names[::step])
        axes.tick_params(labelsize=8, length=0)
        axes.grid(False)
        axes.set(xlabel="predicted", ylabel="label", ylim=(count - 0.5, -0.5), aspect="equal")
    return figure


def plot_reliability(figures: Mapping[str, ClassFigures], styles: Mapping[str, LineStyle]) -> Figure:
    """Plots accuracy by confidence, with the diagonal of a calibrated model."""
    with theme():
        figure, axes = create_axes("Reliability", (3.6, 3.6))
        axes.plot([0, 100], [0, 100], "--", color=INK, linewidth=1)
        handles: dict[str, Artist] = {}
        for label, found in figures.items():
            color, marker, dash = styles[label]
            used = found.samples > 0
            x, y, share = 100 * found.confidence[used], 100 * found.accuracy[used], found.samples[used]
            axes.scatter(x, y, s=10 + 110 * share / share.sum(), color=color, marker=marker, alpha=0.9, zorder=3)
            axes.plot(x, y, dash, color=color, linewidth=1.2)
            (handles[label],) = axes.plot([], [], dash, color=color, marker=marker, linewidth=1.2)
        axes.set(xlabel="confidence %", ylabel="accuracy %", xlim=(0, 102), ylim=(0, 102), aspect="equal")
        add_legend(figure, handles)
    return figure


# --- tables ---------------------------------------------------------------------------------------------------


def tabulate_classes(groups: Sequence[RunGroup]) -> Table:
    """Support, recall, precision and F1 of each class; the recall of each class if there are several methods."""
    figures = {group.label: found for group in groups if (found := add_seeds(group))}
    if len(figures) == 1:
        (only,) = figures.values()
        rows: list[tuple[Any, ...]] = [
            (shorten(name, 40), f"{support:,}", *(format_metric(value, "%") for value in values))
            for name, support, *values in only.by_class()
        ]
        return Table(("class", "support", "recall %", "precision %", "F1 %"), rows, "By class")
    columns = {label: {name: recall for name, _, recall, *_ in found.by_class()} for label, found in figures.items()}
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    rows = [
        (shorten(name, 40), *(format_metric(column.get(name), "%") for column in columns.values())) for name in names
    ]
    return Table(("recall % of class", *columns), rows, "Recall by class")


def tabulate_clients(groups: Sequence[RunGroup]) -> Table:
    """Test samples and metrics of each client, the worst first; empty if there are too many rows."""
    metric = groups[0].metric
    rows = [
        (group.label, run.seed, client)
        for group in groups
        for run in group.runs
        for client in client_rows(run.history[-1])
        if metric.name in client
    ]
    rows.sort(key=lambda row: metric.rank(row[2][metric.name]))
    columns = {metric.name: metric.label, "majority_baseline": "majority %"}
    columns |= {name: f"{name} %" if name in PERCENT else name for name in other_metrics(groups)}
    columns = {name: head for name, head in columns.items() if any(name in client for *_, client in rows)}
    first = ("method", "seed") if sum(len(group.runs) for group in groups) > 1 else ()
    cells = [
        (
            *((label, seed) if first else ()),
            client["client"],
            f"{client['samples']:,}",
            *(format_metric(client.get(name), head) for name, head in columns.items()),
        )
        for label, seed, client in rows
    ]
    heads = (*first, "client", "test samples", *columns.values())
    return Table(heads, cells if len(cells) <= MAX_CLIENT_ROWS else [], "All clients")


def other_metrics(groups: Sequence[RunGroup]) -> list[str]:
    """Names of all metrics that were asked for, without the primary one."""
    return list(dict.fromkeys(name for group in groups for run in group.runs for name in run.other_metrics))


def format_metric(value: float | None, head: str) -> str:
    """A value for a column with this head: in percent if the head says so; a dash for None."""
    if value is None:
        return "–"
    return f"{100 * value:.1f}" if head.endswith("%") else f"{value:.4g}"
