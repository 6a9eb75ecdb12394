"""How results display themselves: in a notebook, as a figure, and as a page."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fewer.errors import SettingError
from fewer.experiments.compare import Comparison, Row
from fewer.registry import VIEWS
from fewer.report.charts import TITLES, plot_clients, plot_curves
from fewer.report.files import write_files
from fewer.report.html import Picture, Table, render
from fewer.report.metrics import Histories, History
from fewer.report.page import PAGE, write_report
from fewer.runs.metric import PrimaryMetric
from fewer.runs.result import Result
from fewer.statistics import Interval, format_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ALL_TITLES = {**{str(by): title for by, title in TITLES.items()}, "client": "by client"}


class View(ABC):
    """The display of a result: a title, a table and plots."""

    @property
    @abstractmethod
    def metric(self) -> PrimaryMetric:
        """The metric that is shown."""

    @abstractmethod
    def histories(self) -> Histories:
        """The metrics of each round, by method."""

    @abstractmethod
    def title(self) -> str:
        """One line that describes the result."""

    @abstractmethod
    def table(self) -> Table:
        """The metrics as a table."""

    @abstractmethod
    def run_directories(self) -> list[Path]:
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
        histories = self.histories()
        if by == "client":
            return plot_clients(histories, metric=self.metric)
        (curve,) = (
            plot_curves(f"{self.metric.title} {title}", {"": histories}, axis, metric=self.metric)
            for axis, title in TITLES.items()
            if axis == by
        )
        return curve

    def html(self) -> str:
        """Table and plot; only the title before the first evaluation."""
        title = self.title()
        if not self._is_evaluated():
            return render("notebook.html", title=title, picture=None)
        name = self.metric.name
        picture = Picture(name, self.plot("round"), "", f"Line chart: {name} by round. {title}")
        return render("notebook.html", title=title, table=self.table(), picture=picture)

    def report(self, out: Path) -> Path:
        """Writes the report of the kept runs, or a page with the table and all plots, into `out`; returns its path."""
        if runs := self.run_directories():
            return write_report(runs, out)[0]
        if not self._is_evaluated():
            raise SettingError(f"nothing to report yet: no round of {self.title()} has been evaluated")
        pictures = [
            Picture(f"{self.metric.name}-by-{by}", figure, title, f"Chart: {title}. {self.title()}")
            for by, title in ((by, f"{self.metric.title} {title}") for by, title in _ALL_TITLES.items())
            if (figure := self._plot(by))
        ]
        page = render("result.html", title=self.title(), table=self.table(), pictures=pictures)
        return write_files(out, {PAGE: page.encode()})[0]

    def _is_evaluated(self) -> bool:
        return any(self.metric.name in entry for runs in self.histories().values() for run in runs for entry in run)


@VIEWS.register("run")
@dataclass(frozen=True)
class RunView(View):
    """The view of one run."""

    result: Result

    @property
    def metric(self) -> PrimaryMetric:
        """The metric of the run."""
        return self.result.metric

    def histories(self) -> Histories:
        """The history of the run."""
        return {self.result.method.name: [self.result.history]}

    def run_directories(self) -> list[Path]:
        """The run directory."""
        return [] if self.result.folder is None else [self.result.folder.parent]

    def title(self) -> str:
        """Method, data and progress."""
        done, planned = len(self.result.history), self.result.method.rounds
        return f"{self.result.method.name} on {self.result.data.name}, round {done} of {planned}"

    def table(self) -> Table:
        """The metrics of the last evaluated round."""
        metric = self.metric
        last = next(entry for entry in reversed(self.result.history) if metric.name in entry)
        value = metric.format_interval(Interval(last[metric.name], None))
        cells = [value, format_number(last["up"] / 1e6), format_number(last["down"] / 1e6)]
        heads = ("method", metric.label, "MB up", "MB down", "seconds")
        return Table(heads, [(self.result.method.name, *cells, f"{last['seconds']:.1f}")])


@VIEWS.register("comparison")
@dataclass(frozen=True)
class ComparisonView(View):
    """The view of a comparison."""

    comparison: Comparison

    @property
    def metric(self) -> PrimaryMetric:
        """The metric that ranks the methods."""
        return self.comparison.metric

    def histories(self) -> Histories:
        """The histories of all methods; the last round includes metrics by client."""
        labeled = zip(self.comparison.labels, self.comparison.rows, strict=True)
        return {label: _add_client_accuracies(row) for label, row in labeled}

    def run_directories(self) -> list[Path]:
        """The run directories of all methods and seeds."""
        return self.comparison.runs

    def title(self) -> str:
        """Data and number of clients."""
        return f"{self.comparison.settings['data']}, {self.comparison.clients} clients"

    def table(self) -> Table:
        """One row per method."""
        metric = self.metric
        heads = ("method", metric.label, f"global {metric.label}", "rounds", "MB up", "MB down", "seconds")
        labeled = zip(self.comparison.labels, self.comparison.rows, strict=True)
        return Table(heads, [(label, *row.format_cells()) for label, row in labeled])


def _add_client_accuracies(row: Row) -> Sequence[History]:
    return [
        [*curve[:-1], {**curve[-1], "clients": accuracies}]
        for curve, accuracies in zip(row.curves, row.unit_accuracies, strict=True)
    ]
