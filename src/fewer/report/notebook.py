"""How results display themselves: in a notebook, as a figure, and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fewer.errors import SettingError
from fewer.experiments.compare import Comparison
from fewer.registry import VIEWS
from fewer.report.charts import TITLES, plot_clients, plot_curves
from fewer.report.files import write_files
from fewer.report.html import Picture, Table, render
from fewer.report.metrics import MB, Histories
from fewer.report.page import PAGE, write_report
from fewer.runs.metric import PrimaryMetric
from fewer.runs.result import Result
from fewer.statistics import Interval, format_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ALL_TITLES = {**{str(by): title for by, title in TITLES.items()}, "client": "by client"}


@dataclass(frozen=True)
class View:
    """The display of a result: a title, a table and plots."""

    metric: PrimaryMetric
    histories: Histories
    """The metrics of each round, by method."""
    title: str
    """One line that describes the result."""
    table: Table
    """The metrics, if a round has been evaluated."""
    runs: Sequence[Path]
    """The directories of the runs, if they were kept."""

    def plot(self, by: str) -> Figure:
        """Plots the primary metric by round, megabytes, seconds or client."""
        if by not in _ALL_TITLES:
            raise SettingError(f"by must be one of {', '.join(_ALL_TITLES)}, got {by!r}")
        figure = self._plot(by)
        if figure is None:
            raise SettingError(f"nothing to plot by {by} yet: no round has these metrics")
        return figure

    def _plot(self, by: str) -> Figure | None:
        if by == "client":
            return plot_clients(self.histories, metric=self.metric)
        axis, title = next((axis, title) for axis, title in TITLES.items() if axis == by)
        return plot_curves(f"{self.metric.title} {title}", {"": self.histories}, axis, metric=self.metric)

    def html(self) -> str:
        """Table and plot; only the title before the first evaluation."""
        if not self._is_evaluated:
            return render("notebook.html", title=self.title, picture=None)
        name = self.metric.name
        picture = Picture(name, self.plot("round"), "", f"Line chart: {name} by round. {self.title}")
        return render("notebook.html", title=self.title, table=self.table, picture=picture)

    def report(self, out: Path) -> Path:
        """Writes the report of the kept runs, or a page with the table and all plots, into `out`; returns its path."""
        if self.runs:
            return write_report(self.runs, out)[0]
        if not self._is_evaluated:
            raise SettingError(f"nothing to report yet: no round of {self.title} has been evaluated")
        pictures = [
            Picture(f"{self.metric.name}-by-{by}", figure, title, f"Chart: {title}. {self.title}")
            for by, title in ((by, f"{self.metric.title} {title}") for by, title in _ALL_TITLES.items())
            if (figure := self._plot(by))
        ]
        page = render("result.html", title=self.title, table=self.table, pictures=pictures)
        return write_files(out, {PAGE: page.encode()})[0]

    @property
    def _is_evaluated(self) -> bool:
        return any(self.metric.name in entry for runs in self.histories.values() for run in runs for entry in run)


@VIEWS.register("run")
def view_run(result: Result) -> View:
    """The view of one run, with the metrics of its last evaluated round."""
    name, metric = result.method.name, result.metric
    rows = [
        (
            name,
            metric.format_interval(Interval(entry[metric.name], None)),
            *(format_number(entry[direction] / MB) for direction in ("up", "down")),
            f"{entry['seconds']:.1f}",
        )
        for entry in result.history
        if metric.name in entry
    ]
    title = f"{name} on {result.data.name}, round {len(result.history)} of {result.method.rounds}"
    table = Table(("method", metric.label, "MB up", "MB down", "seconds"), rows[-1:])
    runs = [] if result.folder is None else [result.folder.parent]
    return View(metric, {name: [result.history]}, title, table, runs)


@VIEWS.register("comparison")
def view_comparison(comparison: Comparison) -> View:
    """The view of a comparison, with one row per method. The last round includes metrics by client."""
    metric = comparison.metric
    labeled = dict(zip(comparison.labels, comparison.rows, strict=True))
    heads = ("method", metric.label, f"global {metric.label}", "rounds", "MB up", "MB down", "seconds")
    histories = {
        label: [
            [*curve[:-1], {**curve[-1], "clients": values}]
            for curve, values in zip(row.curves, row.unit_accuracies, strict=True)
        ]
        for label, row in labeled.items()
    }
    title = f"{comparison.settings['data']}, {comparison.clients} clients"
    table = Table(heads, [(label, *row.format_cells()) for label, row in labeled.items()])
    return View(metric, histories, title, table, comparison.runs)
