"""What results look like in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from fewer.errors import SettingError
from fewer.experiments.compare import Comparison, Row
from fewer.registry import VIEWS
from fewer.report.charts import TITLES, client_picture, curve_picture
from fewer.report.figures import Histories, History, Interval, percent
from fewer.report.html import Picture, embedded, table
from fewer.runs.result import Result
from fewer.runs.statistics import amount

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class View(ABC):
    """How a result shows itself: a table and a picture."""

    @abstractmethod
    def histories(self) -> Histories:
        """The figures of each round, by method."""

    @abstractmethod
    def title(self) -> str:
        """What it is, in a line."""

    @abstractmethod
    def table(self) -> str:
        """Its figures, as HTML."""

    def plot(self, by: str) -> Figure:
        """The picture by one of the ways there are."""
        if by not in (*TITLES, "client"):
            raise SettingError(f"by = {by!r} (allowed: {', '.join(TITLES)}, client)")
        histories = self.histories()
        if by == "client":
            figure = client_picture(histories)
        else:
            figure = next(curve_picture(title, {"": histories}, way) for way, title in TITLES.items() if way == by)
        if figure is None:
            raise SettingError(f"there is nothing to plot by {by} yet")
        return figure

    def html(self) -> str:
        """Table and picture; of what has no figures yet, only what it is."""
        title = escape(self.title())
        if not any("accuracy" in line for runs in self.histories().values() for run in runs for line in run):
            return f"<p>{title}: no round has been evaluated yet</p>"
        picture = Picture("accuracy", self.plot("round"), "", f"Line chart: accuracy by round. {self.title()}")
        return f"<p><strong>{title}</strong></p>{self.table()}{embedded(picture)}"


@VIEWS.register("run")
@dataclass(frozen=True)
class RunView(View):
    """Of one run."""

    result: Result

    def histories(self) -> Histories:
        """Of its only run."""
        return {self.result.method.name: [self.result.history]}

    def title(self) -> str:
        """Method, data and how far it has come."""
        done, planned = len(self.result.history), self.result.method.rounds
        return f"{self.result.method.name} on {self.result.data.name}, round {done} of {planned}"

    def table(self) -> str:
        """The last figures."""
        last = next(line for line in reversed(self.result.history) if "accuracy" in line)
        cells = [f"{100 * last['accuracy']:.2f}", amount(last["up"] / 1e6), amount(last["down"] / 1e6)]
        heads = ["method", "accuracy %", "MB up", "MB down", "seconds"]
        return table(heads, [[self.result.method.name, *cells, f"{last['seconds']:.1f}"]])


@VIEWS.register("comparison")
@dataclass(frozen=True)
class ComparisonView(View):
    """Of a comparison."""

    comparison: Comparison

    def histories(self) -> Histories:
        """Of all methods, the last round of each with the figures by client."""
        return {row.method: _curves(row) for row in self.comparison.rows}

    def title(self) -> str:
        """Data and clients."""
        return f"{self.comparison.settings['data']}, {self.comparison.clients} clients"

    def table(self) -> str:
        """A row for each method."""
        heads = ["method", "accuracy %", "everywhere %", "rounds", "MB up", "MB down", "seconds"]
        rows = [
            [
                row.method,
                percent(Interval(row.accuracy, row.ci95)),
                f"{100 * row.global_accuracy:.2f}",
                str(row.rounds),
                amount(row.mb_up),
                amount(row.mb_down),
                f"{row.seconds:.1f}",
            ]
            for row in self.comparison.rows
        ]
        return table(heads, rows)


def _curves(row: Row) -> Sequence[History]:
    return [
        [*curve[:-1], {**curve[-1], "clients": judged}] for curve, judged in zip(row.curves, row.judged, strict=True)
    ]
