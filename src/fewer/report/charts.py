"""Plots of runs: the primary metric by round, megabyte, second and client; bars, heat maps, traffic and rings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from fewer.report.axes import add_legend, create_axes, create_subplots, hide_frame, label_rows, shorten, value_limits
from fewer.report.metrics import MB, Histories, Point, client_values, metric_curve
from fewer.report.style import BLUE, INK, ORANGE, LineStyle, assign_styles, text_color, theme
from fewer.runs.metric import ACCURACY, PrimaryMetric
from fewer.statistics import Interval, format_number

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

By = Literal["round", "megabytes", "gflop", "seconds"]
Styles = Mapping[str, LineStyle]
_X_LABELS = {
    "round": "round",
    "megabytes": "MB sent, up and down",
    "gflop": "GFLOP of all clients",
    "seconds": "seconds, including evaluation",
}
TITLES: dict[By, str] = {
    "round": "by round",
    "megabytes": "by traffic",
    "gflop": "by operations of clients",
    "seconds": "by time",
}
"""Titles of curves, after the name of the metric."""
MAX_MEANS = 4
"""Maximum number of methods for which the mean over clients is drawn."""
MAX_GAP = 10.0
"""Distance below all curves, in percentage points, in which a baseline is always drawn."""
MAX_BARS = 40
"""Maximum number of bars in a picture."""


def plot_curves(
    title: str,
    subplots: Mapping[str, Histories],
    by: By,
    styles: Styles | None = None,
    metric: PrimaryMetric = ACCURACY,
    baselines: Mapping[str, float] | None = None,
) -> Figure | None:
    """Plots a metric with 95 % confidence bands over seeds, a subplot per set of histories; None without points.

    `baselines` are horizontal lines by label, at most two. Those far below all curves are left out.
    """
    curves = {
        name: {label: points for label, runs in histories.items() if (points := metric_curve(runs, metric))}
        for name, histories in subplots.items()
    }
    all_points = [points for subplot in curves.values() for points in subplot.values()]
    if not all_points:
        return None
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    styles = styles or assign_styles(label for histories in subplots.values() for label in histories)
    ends = [getattr(points[-1], by) for points in all_points]
    logarithmic = by != "round" and max(ends) > 20 * min(ends) > 0
    with theme():
        figure, drawn = create_subplots(title, list(curves))
        handles: dict[str, Artist] = {}
        for axes, subplot in zip(drawn, curves.values(), strict=True):
            shifts = _spread(list(subplot.values()), by)
            for (label, points), shift in zip(subplot.items(), shifts, strict=True):
                band = min(0.15, 0.6 / len(subplot))
                handles[label] = _draw_curve(axes, points, by, styles[label], metric.scale, band, shift)
            if logarithmic:
                axes.set_xscale("log")
                axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axes.xaxis.set_minor_formatter(FuncFormatter(partial(_label_minor_tick, axes)))
            else:
                axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=by == "round", min_n_ticks=1))
            if any(shifts):
                axes.set_xticks([next(iter(subplot.values()))[0].round])
            axes.set(xlabel=_X_LABELS[by])
        values = [point.value for points in all_points for point in points]
        low, high = value_limits(values, metric)
        for (label, baseline), dash in zip((baselines or {}).items(), ("--", ":"), strict=False):
            if metric.scale * baseline > low - max((high - low) / 4, MAX_GAP):
                values.append(Interval(baseline, None))
                for axes in drawn:
                    handles[label] = axes.axhline(metric.scale * baseline, color=INK, linestyle=dash, linewidth=1)
        drawn[0].set(ylabel=metric.label, ylim=value_limits(values, metric))
        add_legend(figure, handles)
    return figure


def _label_minor_tick(axes: Axes, value: float, _: int) -> str:
    """Labels 2, 3, 5 and 7 of each power of ten if the logarithmic axis has no two powers of ten."""
    low, high = axes.get_xlim()
    return f"{value:g}" if high < 10 * low and f"{value:e}"[0] in "2357" else ""


def _spread(curves: Sequence[Sequence[Point]], by: By) -> list[float]:
    """Shifts on the x-axis that put the points of curves next to each other if all have only the same round."""
    count = len(curves)
    if by != "round" or any(len(points) > 1 for points in curves) or len({points[0].round for points in curves}) > 1:
        return [0.0] * count
    return [(index + 0.5) / count - 0.5 for index in range(count)]


def _draw_curve(
    axes: Axes, points: Sequence[Point], by: str, style: LineStyle, scale: float, band: float, shift: float
) -> Artist:
    """Draws a line with its band, whose opacity is `band`, or with an error bar if there is only one point."""
    x = [getattr(point, by) + shift for point in points]
    mean = np.array([scale * point.value.mean for point in points])
    half = np.array([scale * (point.value.half or 0) for point in points])
    marker_step = max(1, len(x) // 12)
    (line,) = axes.plot(x, mean, style.dash, color=style.color, marker=style.marker, markevery=marker_step)
    if points[0].value.half is not None:
        if len(x) == 1:
            axes.errorbar(x, mean, half, color=style.color, capsize=4)
        else:
            axes.fill_between(x, mean - half, mean + half, color=style.color, alpha=band, linewidth=0)
    return line


def plot_columns(title: str, subplots: Mapping[str, Mapping[str, Mapping[str, Interval]]], styles: Styles) -> Figure:
    """Plots accuracy over the columns of a table: a line for each row, with 95 % confidence bars."""
    columns = list(dict.fromkeys(name for subplot in subplots.values() for row in subplot.values() for name in row))
    with theme():
        figure, drawn = create_subplots(title, list(subplots))
        handles: dict[str, Artist] = {}
        for axes, subplot in zip(drawn, subplots.values(), strict=True):
            for index, (label, cells) in enumerate(subplot.items()):
                offset = 0.06 * (index - (len(subplot) - 1) / 2)  # keeps error bars apart
                x = [columns.index(name) + offset for name in cells]
                mean = [100 * cell.mean for cell in cells.values()]
                half = [100 * (cell.half or 0) for cell in cells.values()]
                color, marker, dash = styles[label]
                (handles[label],) = axes.plot(x, mean, dash, color=color, marker=marker)
                if any(half):
                    axes.errorbar(x, mean, half, color=color, linestyle="", capsize=3, linewidth=1.2)
            width = max(8, 48 // (len(columns) * len(subplots)))
            axes.set_xticks(range(len(columns)), [fill(shorten(name), width) for name in columns])
            axes.set_xlim(-0.5, len(columns) - 0.5)
            axes.grid(False, axis="x")
        all_cells = (cell for subplot in subplots.values() for row in subplot.values() for cell in row.values())
        drawn[0].set(ylabel="accuracy %", ylim=value_limits(all_cells))
        add_legend(figure, handles)
    return figure


def plot_clients(histories: Histories, styles: Styles | None = None, metric: PrimaryMetric = ACCURACY) -> Figure | None:
    """Plots clients from worst to best by their last value, and the mean; None without per-client metrics."""
    by_method = {method: values for method, runs in histories.items() if (values := client_values(runs, metric))}
    if not by_method:
        return None
    styles = styles or assign_styles(histories)
    with theme():
        figure, axes = create_axes(f"{metric.title} by client")
        handles: dict[str, Artist] = {}
        for index, (method, values) in enumerate(by_method.items()):
            color, marker, _ = styles[method]
            x = 100 * (np.arange(len(values)) + 0.5) / len(values)
            y = metric.scale * np.array(values)
            label = f"{shorten(method, 44)}, mean {metric.format_interval(Interval(float(np.mean(values)), None), 1)}"
            marker_step = max(1, len(x) // 40)
            (handles[label],) = axes.plot(x, y, color=color, marker=marker, markersize=4, markevery=marker_step, lw=0.6)
            if len(by_method) <= MAX_MEANS:
                gap = 8 * min(len(by_method) - 1, 2)
                axes.axhline(y.mean(), color=color, linestyle=(8 * index, (8, gap)), linewidth=1.2)
        axes.set(xlabel="clients, worst to best, %", ylabel=metric.label, xlim=(0, 100))
        add_legend(figure, handles)
    return figure


def plot_density(histories: Histories, styles: Styles | None = None, metric: PrimaryMetric = ACCURACY) -> Figure | None:
    """Plots the distribution over clients (kernel density, Scott's bandwidth); None below three values."""
    by_method = {
        method: values for method, runs in histories.items() if len(set(values := client_values(runs, metric))) >= 3
    }
    if not by_method:
        return None
    from scipy.stats import gaussian_kde

    styles = styles or assign_styles(histories)
    with theme():
        figure, axes = create_axes(f"Distribution of {metric.name} over clients")
        handles: dict[str, Artist] = {}
        every_value = [Interval(value, None) for values in by_method.values() for value in values]
        low, high = (0.0, 100.0) if metric.percent else value_limits(every_value, metric)
        x = np.linspace(low, high, 201)
        for method, values in by_method.items():
            color, marker, dash = styles[method]
            density = gaussian_kde(values)(x / metric.scale) / metric.scale
            (handles[method],) = axes.plot(x, density, dash, color=color, marker=marker, markevery=20)
        axes.set(xlabel=metric.label, ylabel="density", xlim=(low, high), ylim=(0, None))
        add_legend(figure, handles)
    return figure


def plot_bars(results: Mapping[str, Interval], styles: Styles, metric: PrimaryMetric = ACCURACY) -> Figure:
    """Plots one bar per method or variant, with its 95 % confidence interval and its value."""
    shown = dict(list(results.items())[:MAX_BARS])
    mean = metric.scale * np.array([value.mean for value in shown.values()])
    half = metric.scale * np.array([value.half or 0 for value in shown.values()])
    limit = 100.0 if metric.percent else math.inf
    with theme():
        note = f"\n(first {MAX_BARS} of {len(results)})" if len(results) > MAX_BARS else ""
        figure, axes = create_axes(f"Final {metric.name}{note}", (4.8, 0.9 + 0.27 * len(shown)))
        y = np.arange(len(shown))
        axes.barh(y, mean, color=[styles[label].color for label in shown], height=0.7)
        if half.any():
            whiskers = [np.minimum(half, mean), np.minimum(half, 100 - mean)] if metric.percent else [half, half]
            axes.errorbar(mean, y, xerr=whiskers, color=INK, linestyle="", capsize=3, linewidth=1.2)
        ends = np.minimum(limit, np.maximum(0, mean) + half)
        for end, result in zip(zip(ends, y, strict=True), shown.values(), strict=True):
            text = metric.format_interval(result, 1)
            axes.annotate(text, end, (4, 0), textcoords="offset points", va="center", size=8)
        label_rows(axes, list(shown))
        top = min(limit, max(0.0, *(mean + half)))
        bottom = 0.0 if metric.percent else 1.2 * min(0.0, *(mean - half))
        axes.set(xlabel=metric.label, xlim=(bottom, 1.35 * top or 1.0))
        axes.set_xticks([tick for tick in axes.get_xticks() if tick <= limit])
        axes.invert_yaxis()
    return figure


MAX_COLUMN_LABEL = 14
"""Letters of a column's label in a heat map."""
TITLE_LETTERS = 11
"""Letters of a title that fit into an inch."""


class Grid(NamedTuple):
    """The primary metric of a method by two of its settings; None if a cell has no run."""

    x_name: str
    y_name: str
    columns: Sequence[Any]
    rows: Sequence[Any]
    cells: Sequence[Sequence[Interval | None]]


def plot_heatmap(title: str, grid: Grid, metric: PrimaryMetric = ACCURACY) -> Figure:
    """Plots the primary metric by two settings; lighter is better, and each cell shows its value."""
    from matplotlib import colormaps

    means = [metric.rank(cell.mean) for row in grid.cells for cell in row if cell]
    low, high = min(means), max(means)
    colors = colormaps["viridis"]
    with theme():
        longest = min(MAX_COLUMN_LABEL, max(len(str(value)) for value in grid.columns))
        width = max(3.6, 1.6 + max(0.75, 0.09 * longest) * len(grid.columns))
        lines = fill(title, int(TITLE_LETTERS * width))
        figure, axes = create_axes(lines, (width, 1.2 + 0.42 * len(grid.rows)))
        for y, row in enumerate(grid.cells):
            for x, cell in enumerate(row):
                if cell is None:
                    continue
                value = (metric.rank(cell.mean) - low) / (high - low) if high > low else 0.5
                box = [x - 0.5, x + 0.5], [y - 0.5] * 2, [y + 0.5] * 2
                axes.fill_between(*box, color=colors(value), linewidth=0)
                text = metric.format_interval(cell, 1).replace(" ±", "\n±")
                color = text_color(value)
                axes.text(x, y, text, ha="center", va="center", color=color, fontsize=8, linespacing=1.1)
        axes.set_xticks(range(len(grid.columns)), [shorten(str(value), MAX_COLUMN_LABEL) for value in grid.columns])
        axes.set_yticks(range(len(grid.rows)), [fill(shorten(str(value), 52), 26) for value in grid.rows])
        axes.set(xlabel=grid.x_name, ylabel=grid.y_name, xlim=(-0.5, len(grid.columns) - 0.5))
        axes.set_ylim(len(grid.rows) - 0.5, -0.5)
        axes.grid(False)
        axes.tick_params(length=0)
    return figure


TrafficBytes = Mapping[tuple[str, str], float]
"""Bytes by direction (up, down) and kind."""


def plot_traffic(traffic: Mapping[str, TrafficBytes]) -> Figure | None:
    """Plots bytes by method: a bar up and a bar down, split by kind; None if nothing was sent."""
    from matplotlib.patches import Patch

    shown = dict(list(traffic.items())[:MAX_BARS])
    bars = [_by_direction(sizes) for sizes in shown.values()]
    longest = max((sum(kinds.values()) for directions in bars for kinds in directions.values()), default=0)
    if not longest:
        return None
    with theme():
        figure, axes = create_axes("Traffic by direction and kind", (4.8, 1.1 + 0.5 * len(shown)))
        for index, directions in enumerate(bars):
            looks = zip(directions.items(), (BLUE, ORANGE), (-0.2, 0.2), strict=True)
            for (direction, kinds), color, offset in looks:
                left, y = 0.0, index + offset
                for number, (kind, size) in enumerate(kinds.items()):
                    alpha = (0.85, 0.55, 0.7, 0.4)[number % 4]
                    axes.barh(y, size / MB, left=left / MB, height=0.36, color=color, alpha=alpha)
                    if size > 0.026 * len(kind) * longest:
                        center = (left + size / 2) / MB
                        axes.text(center, y, kind, ha="center", va="center", size=8, color="black")
                    left += size
                text = f"{direction} {format_number(left / MB)}"
                axes.annotate(text, (left / MB, y), (4, 0), textcoords="offset points", va="center", size=8)
        label_rows(axes, list(shown))
        axes.set(xlabel="MB", xlim=(0, 1.25 * longest / MB), ylim=(len(shown) - 0.5, -0.5))
        add_legend(figure, {"to the server (up)": Patch(color=BLUE), "to clients (down)": Patch(color=ORANGE)})
    return figure


def _by_direction(traffic: TrafficBytes) -> dict[str, dict[str, float]]:
    """Bytes by direction and kind, the largest kind first."""
    ranked = sorted(traffic.items(), key=lambda item: -item[1])
    return {
        direction: {kind: size for (other, kind), size in ranked if other == direction} for direction in ("up", "down")
    }


class Ring(NamedTuple):
    """A ring of clients and the messages that went around it."""

    hops: Mapping[tuple[int, int], int]
    """Number of messages from one client to another."""
    skipped: Mapping[int, int]
    """Number of times a client was skipped."""
    weights: Mapping[int, float]
    """Final λ of each client."""
    adopted: Mapping[int, int]
    """Number of times a client adopted the received model."""

    @property
    def members(self) -> list[int]:
        """All clients of the ring."""
        return sorted({*self.weights, *self.skipped, *(client for hop in self.hops for client in hop)})


def plot_ring(ring: Ring) -> Figure:
    """Plots clients in a circle: lighter for a larger λ, with an arrow per hop, thicker for more messages."""
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    members = ring.members
    angles = {client: math.pi / 2 - 2 * math.pi * index / len(members) for index, client in enumerate(members)}
    positions = {client: (math.cos(angle), math.sin(angle)) for client, angle in angles.items()}
    max_weight = max(ring.weights.values(), default=0) or 1.0
    max_count = max(ring.hops.values(), default=1)
    size = 9 if len(members) <= 24 else 6
    with theme():
        figure, axes = create_axes("Ring", (4.8, 4.6))
        for (source, target), count in ring.hops.items():
            color = INK if _is_next((source, target), members) else ORANGE
            bend = "arc3,rad=-0.1" if len(members) > 2 else "arc3,rad=-0.3"
            arrow = {"arrowstyle": "-|>", "color": color, "linewidth": 0.6 + 2 * count / max_count}
            arrow |= {"connectionstyle": bend, "shrinkA": 1.4 * size, "shrinkB": 1.4 * size, "alpha": 0.8}
            axes.annotate("", positions[target], positions[source], arrowprops=arrow)
        for client, (x, y) in positions.items():
            value = ring.weights.get(client, 0.0) / max_weight
            skips = ring.skipped.get(client, 0)
            edge = ORANGE if skips else INK
            axes.plot(x, y, "o", markersize=2 * size, color=colormaps["viridis"](value), mec=edge, mew=1 + bool(skips))
            axes.text(x, y, str(client), ha="center", va="center", color=text_color(value), fontsize=size - 1)
            if len(members) <= 40:
                text = f"λ {ring.weights[client]:.2g}" if client in ring.weights else ""
                text += f"\n−{skips}" if skips else ""
                side = "center" if abs(x) < 0.3 else "left" if x > 0 else "right"
                axes.text(1.14 * x, 1.18 * y, text.strip(), ha=side, va="center", fontsize=size - 1)
        marker: Any = {"linestyle": "", "marker": "o", "markersize": 8, "markeredgecolor": INK}
        handles: dict[str, Artist] = {
            "λ 0": Line2D([], [], color=colormaps["viridis"](0.0), **marker),
            f"λ {max_weight:.2g}": Line2D([], [], color=colormaps["viridis"](1.0), **marker),
            "next client": Line2D([], [], color=INK),
        }
        if ring.skipped or any(not _is_next(hop, members) for hop in ring.hops):
            handles["skips a client"] = Line2D([], [], color=ORANGE)
        axes.set(xlim=(-1.45, 1.45), ylim=(-1.35, 1.35), xticks=[], yticks=[], aspect="equal")
        hide_frame(axes)
        add_legend(figure, handles)
    return figure


def _is_next(hop: tuple[int, int], members: Sequence[int]) -> bool:
    source, target = hop
    return (members.index(target) - members.index(source)) % len(members) == 1
