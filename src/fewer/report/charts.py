"""Pictures of runs: accuracy by round, by megabyte, by second and by client, variants side by side, traffic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from fewer.report.axes import bare, chart, charts, legend, limits, short
from fewer.report.figures import MB, Histories, Interval, Point, by_client, curve
from fewer.report.style import BLUE, INK, ORANGE, Look, look, on_fill, style

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

By = Literal["round", "megabytes", "seconds"]
_AXES = {"round": "round", "megabytes": "MB sent so far, up and down", "seconds": "seconds so far, measuring included"}
TITLES: dict[By, str] = {
    "round": "Accuracy by round",
    "megabytes": "Accuracy by traffic",
    "seconds": "Accuracy by time",
}
MEANS = 4
"""Of at most so many methods the mean over clients is drawn too."""
BARS = 40
"""At most so many bars stand in a picture."""


def curve_picture(
    title: str,
    panels: Mapping[str, Histories],
    x: By,
    looks: Mapping[str, Look] | None = None,
) -> Figure | None:
    """Accuracy with 95 % confidence bands over seeds; None where nothing was evaluated yet.

    One panel for each of several histories, side by side; `looks` are those of labels that are not methods.
    """
    curves = {
        name: {label: points for label, runs in histories.items() if (points := curve(runs))}
        for name, histories in panels.items()
    }
    every = [points for eval_cohort in curves.values() for points in eval_cohort.values()]
    if not every:
        return None
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    ends = [getattr(points[-1], x) for points in every]
    wide = x != "round" and max(ends) > 20 * min(ends) > 0
    with style():
        figure, drawn = charts(title, list(curves))
        handles: dict[str, Artist] = {}
        for axes, eval_cohort in zip(drawn, curves.values(), strict=True):
            for label, points in eval_cohort.items():
                handles[label] = _draw_curve(axes, points, x, looks[label] if looks else look(label))
            if wide:
                axes.set_xscale("log")
                axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            else:
                axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=x == "round", min_n_ticks=1))
            axes.set(xlabel=_AXES[x])
        drawn[0].set(ylabel="accuracy %", ylim=limits(point.accuracy for points in every for point in points))
        legend(figure, handles)
    return figure


def _draw_curve(axes: Axes, points: Sequence[Point], x: str, look: Look) -> Artist:
    """A line with its band, or with a bar where there is only one point."""
    at = [getattr(point, x) for point in points]
    mean = np.array([100 * point.accuracy.mean for point in points])
    half = np.array([100 * (point.accuracy.half or 0) for point in points])
    often = max(1, len(at) // 12)
    (line,) = axes.plot(at, mean, look.dash, color=look.color, marker=look.marker, markevery=often)
    if points[0].accuracy.half is not None:
        if len(at) == 1:
            axes.errorbar(at, mean, half, color=look.color, capsize=4)
        else:
            axes.fill_between(at, mean - half, mean + half, color=look.color, alpha=0.15, linewidth=0)
    return line


def column_picture(
    title: str, panels: Mapping[str, Mapping[str, Mapping[str, Interval]]], looks: Mapping[str, Look]
) -> Figure:
    """Accuracy over the columns of a table: in each panel a line for each row, with 95 % confidence bars."""
    columns = list(
        dict.fromkeys(name for eval_cohort in panels.values() for row in eval_cohort.values() for name in row)
    )
    with style():
        figure, drawn = charts(title, list(panels))
        handles: dict[str, Artist] = {}
        for axes, eval_cohort in zip(drawn, panels.values(), strict=True):
            for place, (label, cells) in enumerate(eval_cohort.items()):
                aside = 0.06 * (place - (len(eval_cohort) - 1) / 2)  # so that bars do not cover each other
                at = [columns.index(name) + aside for name in cells]
                mean = [100 * cell.mean for cell in cells.values()]
                half = [100 * (cell.half or 0) for cell in cells.values()]
                color, marker, dash = looks[label]
                (handles[label],) = axes.plot(at, mean, dash, color=color, marker=marker)
                if any(half):
                    axes.errorbar(at, mean, half, color=color, linestyle="", capsize=3, linewidth=1.2)
            wide = max(8, 48 // (len(columns) * len(panels)))
            axes.set_xticks(range(len(columns)), [fill(short(name), wide) for name in columns])
            axes.set_xlim(-0.5, len(columns) - 0.5)
            axes.grid(False, axis="x")
        every = (cell for eval_cohort in panels.values() for row in eval_cohort.values() for cell in row.values())
        drawn[0].set(ylabel="accuracy %", ylim=limits(every))
        legend(figure, handles)
    return figure


def client_picture(histories: Histories, looks: Mapping[str, Look] | None = None) -> Figure | None:
    """Clients from the worst to the best by their last accuracy, and the mean; None without figures by client."""
    found = {method: values for method, runs in histories.items() if (values := by_client(runs))}
    if not found:
        return None
    with style():
        figure, axes = chart("Accuracy by client")
        handles: dict[str, Artist] = {}
        for place, (method, values) in enumerate(found.items()):
            color, marker, _ = looks[method] if looks else look(method)
            at = 100 * (np.arange(len(values)) + 0.5) / len(values)
            shown = 100 * np.array(values)
            label = f"{method}, mean {shown.mean():.1f}"
            often = max(1, len(at) // 40)
            (handles[label],) = axes.plot(at, shown, color=color, marker=marker, markersize=4, markevery=often, lw=0.6)
            if len(found) <= MEANS:
                gap = 8 * min(len(found) - 1, 2)
                axes.axhline(shown.mean(), color=color, linestyle=(8 * place, (8, gap)), linewidth=1.2)
        axes.set(xlabel="clients, worst to best, %", ylabel="accuracy %", xlim=(0, 100))
        legend(figure, handles)
    return figure


def density_picture(histories: Histories, looks: Mapping[str, Look] | None = None) -> Figure | None:
    """How clients' accuracies are spread (kernel density, Scott's width); None where too few clients were measured."""
    found = {method: values for method, runs in histories.items() if len(set(values := by_client(runs))) >= 3}
    if not found:
        return None
    from scipy.stats import gaussian_kde

    with style():
        figure, axes = chart("Spread of accuracy over clients")
        handles: dict[str, Artist] = {}
        at = np.linspace(0, 1, 201)
        for method, values in found.items():
            color, marker, dash = looks[method] if looks else look(method)
            height = gaussian_kde(values)(at) / 100
            (handles[method],) = axes.plot(100 * at, height, dash, color=color, marker=marker, markevery=20)
        axes.set(xlabel="accuracy %", ylabel="density", xlim=(0, 100), ylim=(0, None))
        legend(figure, handles)
    return figure


def bar_picture(results: Mapping[str, Interval], looks: Mapping[str, Look]) -> Figure:
    """Methods and variants side by side: a bar each, with its 95 % confidence interval and its figure."""
    shown = dict(list(results.items())[:BARS])
    mean = [100 * each.mean for each in shown.values()]
    half = [100 * (each.half or 0) for each in shown.values()]
    with style():
        more = f"\n(the first {BARS} of {len(results)})" if len(results) > BARS else ""
        figure, axes = chart(f"Accuracy at the end{more}", (4.8, 0.9 + 0.27 * len(shown)))
        at = np.arange(len(shown))
        axes.barh(at, mean, color=[looks[label].color for label in shown], height=0.7)
        if any(half):
            whiskers = [np.minimum(half, mean), np.minimum(half, 100 - np.array(mean))]  # accuracy has no more room
            axes.errorbar(mean, at, xerr=whiskers, color=INK, linestyle="", capsize=3, linewidth=1.2)
        for place, (value, wide) in enumerate(zip(mean, half, strict=True)):
            text = f"{value:.1f}" + (f" ± {wide:.1f}" if wide else "")
            axes.annotate(
                text, (min(100, value + wide), place), (4, 0), textcoords="offset points", va="center", size=8
            )
        axes.set_yticks(at, [short(label, 32) for label in shown])
        axes.tick_params(axis="y", length=0)
        axes.grid(False, axis="y")
        most = min(100.0, max(m + h for m, h in zip(mean, half, strict=True)))
        axes.set(xlabel="accuracy %", xlim=(0, 1.35 * most or 1.0))
        axes.set_xticks([tick for tick in axes.get_xticks() if tick <= 100])
        axes.invert_yaxis()
    return figure


class Grid(NamedTuple):
    """Accuracies of a method by two of its settings; None where there is no run."""

    across: str
    down: str
    columns: Sequence[Any]
    rows: Sequence[Any]
    cells: Sequence[Sequence[Interval | None]]


def heat_picture(title: str, grid: Grid) -> Figure:
    """Accuracy by two settings: the lighter, the better; each cell with its figure."""
    from matplotlib import colormaps

    known = [cell.mean for row in grid.cells for cell in row if cell]
    low, high = min(known), max(known)
    colors = colormaps["viridis"]
    with style():
        size = (1.6 + 0.75 * len(grid.columns), 1.2 + 0.42 * len(grid.rows))
        figure, axes = chart(title, (max(3.6, size[0]), size[1]))
        for down, row in enumerate(grid.cells):
            for across, cell in enumerate(row):
                if cell is None:
                    continue
                share = (cell.mean - low) / (high - low) if high > low else 0.5
                box = [across - 0.5, across + 0.5], [down - 0.5] * 2, [down + 0.5] * 2
                axes.fill_between(*box, color=colors(share), linewidth=0)
                text = f"{100 * cell.mean:.1f}" + (f"\n± {100 * cell.half:.1f}" if cell.half is not None else "")
                ink = on_fill(share)
                axes.text(across, down, text, ha="center", va="center", color=ink, fontsize=8, linespacing=1.1)
        axes.set_xticks(range(len(grid.columns)), [short(str(each), 10) for each in grid.columns])
        axes.set_yticks(range(len(grid.rows)), [short(str(each), 16) for each in grid.rows])
        axes.set(xlabel=grid.across, ylabel=grid.down, xlim=(-0.5, len(grid.columns) - 0.5))
        axes.set_ylim(len(grid.rows) - 0.5, -0.5)
        axes.grid(False)
        axes.tick_params(length=0)
    return figure


Traffic = Mapping[tuple[str, str], float]
"""Bytes by direction (up, down) and kind."""


def traffic_picture(traffic: Mapping[str, Traffic]) -> Figure | None:
    """Bytes by direction and kind: for each method a bar up and a bar down, a piece for each kind; None without any."""
    from matplotlib.patches import Patch

    shown = dict(list(traffic.items())[:BARS])
    most = max((sum(of.values()) for each in shown.values() for of in _ways(each).values()), default=0)
    if not most:
        return None
    with style():
        figure, axes = chart("What was sent, by direction and kind", (4.8, 1.1 + 0.5 * len(shown)))
        for place, each in enumerate(shown.values()):
            for (way, kinds), color, aside in zip(_ways(each).items(), (BLUE, ORANGE), (-0.2, 0.2), strict=True):
                left = 0.0
                for number, (kind, size) in enumerate(kinds.items()):
                    strength = (0.85, 0.55, 0.7, 0.4)[number % 4]
                    axes.barh(place + aside, size / MB, left=left / MB, height=0.36, color=color, alpha=strength)
                    if size > 0.026 * len(kind) * most:
                        at = (left + size / 2) / MB
                        axes.text(at, place + aside, kind, ha="center", va="center", size=8, color="black")
                    left += size
                text = f"{way} {left / MB:,.3g}" if left < 1000 * MB else f"{way} {left / MB:,.0f}"
                where = (left / MB, place + aside)
                axes.annotate(text, where, (4, 0), textcoords="offset points", va="center", size=8)
        axes.set_yticks(range(len(shown)), [short(label, 32) for label in shown])
        axes.tick_params(axis="y", length=0)
        axes.grid(False, axis="y")
        axes.set(xlabel="MB in all", xlim=(0, 1.25 * most / MB), ylim=(len(shown) - 0.5, -0.5))
        legend(figure, {"to the server (up)": Patch(color=BLUE), "to clients (down)": Patch(color=ORANGE)})
    return figure


def _ways(traffic: Traffic) -> dict[str, dict[str, float]]:
    """By direction, the kinds from the largest to the smallest."""
    ranked = sorted(traffic.items(), key=lambda item: -item[1])
    return {way: {kind: size for (there, kind), size in ranked if there == way} for way in ("up", "down")}


class Ring(NamedTuple):
    """A ring as the carrier saw it."""

    hops: Mapping[tuple[int, int], int]
    """How often a message went from one to another."""
    passed_over: Mapping[int, int]
    """How often a client did not take it."""
    weights: Mapping[int, float]
    """λ of each client in the end."""
    taken: Mapping[int, int]
    """How often it took a model over."""

    @property
    def members(self) -> list[int]:
        """All clients of the ring."""
        return sorted({*self.weights, *self.passed_over, *(client for hop in self.hops for client in hop)})


def ring_picture(ring: Ring) -> Figure:
    """Clients in a circle, the lighter the larger their λ, and the ways that messages took, the thicker the oftener."""
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    members = ring.members
    angle = {client: math.pi / 2 - 2 * math.pi * place / len(members) for place, client in enumerate(members)}
    at = {client: (math.cos(a), math.sin(a)) for client, a in angle.items()}
    top = max(ring.weights.values(), default=0) or 1.0
    often = max(ring.hops.values(), default=1)
    size = 9 if len(members) <= 24 else 6
    with style():
        figure, axes = chart("The ring", (4.8, 4.6))
        for (one, other), count in ring.hops.items():
            color = INK if _beside((one, other), members) else ORANGE
            bend = "arc3,rad=-0.1" if len(members) > 2 else "arc3,rad=-0.3"
            way = {"arrowstyle": "-|>", "color": color, "linewidth": 0.6 + 2 * count / often, "connectionstyle": bend}
            way |= {"shrinkA": 1.4 * size, "shrinkB": 1.4 * size, "alpha": 0.8}
            axes.annotate("", at[other], at[one], arrowprops=way)
        for client, (x, y) in at.items():
            share = ring.weights.get(client, 0.0) / top
            missed = ring.passed_over.get(client, 0)
            edge = ORANGE if missed else INK
            axes.plot(x, y, "o", markersize=2 * size, color=colormaps["viridis"](share), mec=edge, mew=1 + bool(missed))
            ink = on_fill(share)
            axes.text(x, y, str(client), ha="center", va="center", color=ink, fontsize=size - 1)
            if len(members) <= 40:
                text = f"λ {ring.weights[client]:.2g}" if client in ring.weights else ""
                text += f"\n−{missed}" if missed else ""
                side = "center" if abs(x) < 0.3 else "left" if x > 0 else "right"
                axes.text(1.14 * x, 1.18 * y, text.strip(), ha=side, va="center", fontsize=size - 1)
        drawn: Any = {"linestyle": "", "marker": "o", "markersize": 8, "markeredgecolor": INK}
        marks: dict[str, Artist] = {
            "λ 0": Line2D([], [], color=colormaps["viridis"](0.0), **drawn),
            f"λ {top:.2g}": Line2D([], [], color=colormaps["viridis"](1.0), **drawn),
            "to the next": Line2D([], [], color=INK),
        }
        if ring.passed_over or any(not _beside(hop, members) for hop in ring.hops):
            marks["past someone"] = Line2D([], [], color=ORANGE)
        axes.set(xlim=(-1.45, 1.45), ylim=(-1.35, 1.35), xticks=[], yticks=[], aspect="equal")
        bare(axes)
        legend(figure, marks)
    return figure


def _beside(hop: tuple[int, int], members: Sequence[int]) -> bool:
    one, other = hop
    return (members.index(other) - members.index(one)) % len(members) == 1
