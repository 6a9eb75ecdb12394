"""Pictures of runs (accuracy by round, by megabyte, by party) and of data (its division, examples)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fewer.data import Data, Samples
from fewer.experiments.studies import Cloud
from fewer.report.style import BLUE, COLOURS, INK, SIZE, Look, look, style
from fewer.runs.statistics import half_width

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MB = 1e6
PARTIES = 60
"""At most so many parties are shown in the picture of a division."""
ROWS = 20
"""At most so many classes are shown on a sheet of examples."""
ACROSS = 3
"""At most so many panels stand side by side."""
CHANNELS = 3
"""At most so many channels of a window of readings are shown."""

Line = Mapping[str, Any]
History = Sequence[Line]
"""The figures of a run, one line a round, as metrics.jsonl has them."""
Histories = Mapping[str, Sequence[History]]
"""For each method the histories of its runs, one for each seed."""


# --- figures --------------------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """A mean, and half the width of its 95 % confidence interval (Student's t); None from a single value."""

    mean: float
    half: float | None


def interval(values: Sequence[float]) -> Interval:
    """The mean of the values, and how sure it is."""
    return Interval(statistics.fmean(values), half_width(values))


class Point(NamedTuple):
    """One evaluated round of a method over its seeds."""

    round: int
    megabytes: float
    """Sent by then, up and down together, mean over seeds."""
    accuracy: Interval


def curve(histories: Sequence[History]) -> list[Point]:
    """A method's points: the rounds in which all its runs were evaluated."""
    runs = [{int(line["round"]): line for line in history if "accuracy" in line} for history in histories]
    points = []
    for number in sorted(set.intersection(*(set(run) for run in runs))) if runs else []:
        lines = [run[number] for run in runs]
        sent = statistics.fmean((line["up"] + line["down"]) / MB for line in lines)
        points.append(Point(number, sent, interval([line["accuracy"] for line in lines])))
    return points


def by_party(histories: Sequence[History]) -> list[float]:
    """The last accuracies of all parties of all runs, from the worst to the best."""
    return sorted(value for history in histories if history for value in history[-1].get("parties", {}).values())


def class_counts(data: Data, parties: int = PARTIES) -> NDArray[np.int64]:
    """How many training samples each of the first parties has of each class (parties × classes)."""
    rows = [_labels(data.party(party).train) for party in range(min(parties, len(data)))]
    return np.stack([np.bincount(row, minlength=data.classes) for row in rows])


# --- pictures of runs -----------------------------------------------------------------------------------------


def round_picture(histories: Histories) -> Figure | None:
    """Accuracy by round, with 95 % confidence bands over seeds; None where nothing was evaluated yet."""
    return curve_picture("Accuracy by round", {"": histories}, "round")


def megabyte_picture(histories: Histories) -> Figure | None:
    """Accuracy by what was sent so far, up and down together; None where nothing was evaluated yet."""
    return curve_picture("Accuracy by traffic", {"": histories}, "megabytes")


def curve_picture(
    title: str,
    panels: Mapping[str, Histories],
    x: Literal["round", "megabytes"],
    looks: Mapping[str, Look] | None = None,
) -> Figure | None:
    """One panel for each of several histories, side by side; `looks` are those of labels that are not methods."""
    curves = {
        name: {label: points for label, runs in histories.items() if (points := curve(runs))}
        for name, histories in panels.items()
    }
    every = [points for panel in curves.values() for points in panel.values()]
    if not every:
        return None
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    ends = [getattr(points[-1], x) for points in every]
    wide = x == "megabytes" and max(ends) > 20 * min(ends) > 0
    with style():
        figure, charts = _charts(title, list(curves))
        handles: dict[str, Artist] = {}
        for axes, panel in zip(charts, curves.values(), strict=True):
            for label, points in panel.items():
                handles[label] = _draw_curve(axes, points, x, looks[label] if looks else look(label))
            if wide:
                axes.set_xscale("log")
                axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            else:
                axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=x == "round", min_n_ticks=1))
            axes.set(xlabel="round" if x == "round" else "MB sent so far, up and down")
        charts[0].set(ylabel="accuracy %", ylim=_limits(point.accuracy for points in every for point in points))
        _legend(figure, handles)
    return figure


def _draw_curve(axes: Axes, points: Sequence[Point], x: str, look: Look) -> Artist:
    """A line with its band, or with a bar where there is only one point."""
    at = [getattr(point, x) for point in points]
    mean = np.array([100 * point.accuracy.mean for point in points])
    half = np.array([100 * (point.accuracy.half or 0) for point in points])
    often = max(1, len(at) // 12)
    (line,) = axes.plot(at, mean, look.dash, color=look.colour, marker=look.marker, markevery=often)
    if points[0].accuracy.half is not None:
        if len(at) == 1:
            axes.errorbar(at, mean, half, color=look.colour, capsize=4)
        else:
            axes.fill_between(at, mean - half, mean + half, color=look.colour, alpha=0.15, linewidth=0)
    return line


def column_picture(
    title: str, panels: Mapping[str, Mapping[str, Mapping[str, Interval]]], looks: Mapping[str, Look]
) -> Figure:
    """Accuracy over the columns of a table: in each panel a line for each row, with 95 % confidence bars."""
    columns = list(dict.fromkeys(name for panel in panels.values() for row in panel.values() for name in row))
    with style():
        figure, charts = _charts(title, list(panels))
        handles: dict[str, Artist] = {}
        for axes, panel in zip(charts, panels.values(), strict=True):
            for place, (label, cells) in enumerate(panel.items()):
                aside = 0.06 * (place - (len(panel) - 1) / 2)  # so that bars do not cover each other
                at = [columns.index(name) + aside for name in cells]
                mean = [100 * cell.mean for cell in cells.values()]
                half = [100 * (cell.half or 0) for cell in cells.values()]
                colour, marker, dash = looks[label]
                (handles[label],) = axes.plot(at, mean, dash, color=colour, marker=marker)
                if any(half):
                    axes.errorbar(at, mean, half, color=colour, linestyle="", capsize=3, linewidth=1.2)
            axes.set_xticks(range(len(columns)), [_short(name) for name in columns])
            axes.set_xlim(-0.5, len(columns) - 0.5)
            axes.grid(False, axis="x")
        every = (cell for panel in panels.values() for row in panel.values() for cell in row.values())
        charts[0].set(ylabel="accuracy %", ylim=_limits(every))
        _legend(figure, handles)
    return figure


def party_picture(histories: Histories) -> Figure | None:
    """Parties from the worst to the best by their last accuracy, and the mean; None without figures by party."""
    found = {method: values for method, runs in histories.items() if (values := by_party(runs))}
    if not found:
        return None
    with style():
        figure, axes = _chart("Accuracy by party")
        handles: dict[str, Artist] = {}
        for place, (method, values) in enumerate(found.items()):
            colour, marker, _ = look(method)
            at = 100 * (np.arange(len(values)) + 0.5) / len(values)
            shown = 100 * np.array(values)
            label = f"{method}, mean {shown.mean():.1f}"
            often = max(1, len(at) // 40)
            (handles[label],) = axes.plot(at, shown, color=colour, marker=marker, markersize=4, markevery=often, lw=0.6)
            gap = 8 * min(len(found) - 1, 2)
            axes.axhline(shown.mean(), color=colour, linestyle=(8 * place, (8, gap)), linewidth=1.2)
        axes.set(xlabel="parties, worst to best, %", ylabel="accuracy %", xlim=(0, 100))
        _legend(figure, handles)
    return figure


def density_picture(histories: Histories) -> Figure | None:
    """How parties' accuracies are spread (kernel density, Scott's width); None where too few parties were measured."""
    found = {method: values for method, runs in histories.items() if len(set(values := by_party(runs))) >= 3}
    if not found:
        return None
    from scipy.stats import gaussian_kde

    with style():
        figure, axes = _chart("Spread of accuracy over parties")
        handles: dict[str, Artist] = {}
        at = np.linspace(0, 1, 201)
        for method, values in found.items():
            colour, marker, dash = look(method)
            height = gaussian_kde(values)(at) / 100
            (handles[method],) = axes.plot(100 * at, height, dash, color=colour, marker=marker, markevery=20)
        axes.set(xlabel="accuracy %", ylabel="density", xlim=(0, 100), ylim=(0, None))
        _legend(figure, handles)
    return figure


# --- pictures of data -----------------------------------------------------------------------------------------


def partition_picture(data: Data) -> Figure:
    """Who holds what: a bubble for each party and class, as large in area as the number of training samples."""
    from matplotlib.lines import Line2D

    counts = class_counts(data)
    parties, classes = counts.shape
    width = max(0.2, 4.4 / parties)
    height = min(0.3, max(3 / classes, 0.12), 10 / classes)
    most = max(1, int(counts.max()))
    area = (70 * min(width, height)) ** 2 / most  # of one sample, so that the largest bubble just fits
    names = _names(data, range(data.classes))
    with style():
        title = f"{_short(data.name)}: training samples by party and class"
        if len(data) > parties:
            title += f"\n(the first {parties} of {len(data):,} parties)"
        size = (parties * width + 0.6 + 0.075 * max(map(len, names)), classes * height + 1.4)
        figure, axes = _chart(title, size)
        party, held = counts.nonzero()
        axes.scatter(party, held, s=area * counts[party, held], color=BLUE, alpha=0.8, linewidth=0)
        step = math.ceil(0.12 / height)
        axes.set_yticks(range(0, classes, step), names[::step])
        axes.set_xticks(range(0, parties, 1 if parties <= 25 else 5))
        axes.tick_params(labelsize=8)
        axes.set(xlabel="party", xlim=(-0.6, parties - 0.4), ylim=(classes - 0.4, -0.6))
        sizes = sorted({_rounded(most / part) for part in (10, 3, 1)})
        texts = [*(f"{count:,}" for count in sizes[:-1]), f"{sizes[-1]:,} samples"]
        drawn: Any = {"linestyle": "", "marker": "o", "color": BLUE, "alpha": 0.8, "markeredgewidth": 0}
        bubbles = [Line2D([], [], markersize=math.sqrt(area * count), **drawn) for count in sizes]
        _legend(figure, dict(zip(texts, bubbles, strict=True)))
    return figure


def sheet_picture(data: Data, columns: int = 10) -> Figure | None:
    """Examples of each class from the common test set: images, or windows of readings; None for other inputs."""
    image = _pictorial(data)
    if data.test.tokens or not len(data.test) or not (image or len(data.shape) == 2):
        return None
    labels = _labels(data.test)
    shown = np.unique(labels)[:ROWS]
    picked = [np.flatnonzero(labels == label)[:columns] for label in shown]
    examples = [_inputs(data.test, row) for row in picked]
    across, down = (0.42, 0.42 * data.shape[1] / data.shape[2]) if image else (0.5, 0.4)
    names = _names(data, shown)
    with style():
        title = f"{_short(data.name)}: examples by {'novel ' if data.novel else ''}class"
        if len(shown) < (classes := len(np.unique(labels)) if data.novel else data.classes):
            title += f"\n({len(shown)} of {classes:,} classes)"
        if not image and data.shape[0] > CHANNELS:
            title += f"\n(the first {CHANNELS} of {data.shape[0]} channels)"
        size = (columns * across + 0.4 + 0.085 * max(map(len, names)), len(shown) * down + 0.6)
        figure, axes = _chart(title, size)
        if image:
            limits = (0.0, 255.0) if data.test.x.dtype == torch.uint8 else _range(examples)
            centres, _ = _show_images(axes, [list(row) for row in examples], limits, columns)
        else:
            centres = _show_windows(axes, examples, columns)
        axes.set_yticks(centres, names, fontsize=9)
        axes.set_xticks([])
        _bare(axes)
    return figure


def made_picture(
    data: Data, title: str, rows: Mapping[str, Mapping[int, NDArray[Any]]], each: int = 1
) -> Figure | None:
    """Images that a method made for this data, by row and class, `each` of them; blank where a row has none.

    None where there are none, or where they are no images.

    They are brought back from what nets see to the range of pixels, and cut off at its ends; where the data is no
    pixels, the lowest value of all is black and the highest white.
    """
    labels = range(min(data.classes, ROWS))
    cells = [
        [image / data.test.scale + data.test.shift for image in images.get(label, ())[:each]]
        for images in rows.values()
        for label in labels
    ]
    if not _pictorial(data) or not any(cells):
        return None
    limits = (0.0, 255.0) if data.test.x.dtype == torch.uint8 else _range([image for cell in cells for image in cell])
    padded: list[NDArray[Any] | None] = [image for cell in cells for image in [*cell, *[None] * (each - len(cell))]]
    columns = len(labels) * each
    names = _names(data, labels)
    across, letter = 0.36, 0.07
    down = across * data.shape[1] / data.shape[2]
    upright = max(map(len, names)) * letter > across * each
    with style():
        if data.classes > len(labels):
            title += f"\n({len(labels)} of {data.classes:,} classes)"
        head = max(map(len, names)) * letter if upright else 0.2
        size = (columns * across + 0.4 + letter * max(map(len, rows)), len(rows) * down + 0.5 + head)
        figure, axes = _chart(title, size)
        lines = [padded[start : start + columns] for start in range(0, len(padded), columns)]
        heights, places = _show_images(axes, lines, limits, columns, each)
        axes.set_yticks(heights, list(rows), fontsize=9)
        centres = [float(np.mean(places[start : start + each])) for start in range(0, columns, each)]
        axes.set_xticks(centres, names, fontsize=9, rotation=90 if upright else 0)
        axes.xaxis.tick_top()
        _bare(axes)
    return figure


def cloud_picture(title: str, clouds: Mapping[str, Cloud]) -> Figure:
    """Clouds side by side: a colour for each class, diamonds for own samples, stars for prototypes."""
    figure, charts = _charts(title, list(clouds), (3.6, 3.4))
    for axes, cloud in zip(charts, clouds.values(), strict=True):
        for number, label in enumerate(np.unique(cloud.star_labels)):
            colour = COLOURS[number % len(COLOURS)]
            for own, marker, size in ((False, "o", 9), (True, "D", 20)):
                here = cloud.points[(cloud.labels == label) & (cloud.own == own)]
                edge = INK if own else "none"
                axes.scatter(
                    here[:, 0],
                    here[:, 1],
                    s=size,
                    marker=marker,
                    color=colour,
                    edgecolors=edge,
                    linewidths=0.6,
                    alpha=0.8,
                )
            star = cloud.stars[cloud.star_labels == label]
            axes.scatter(
                star[:, 0], star[:, 1], s=190, marker="*", color=colour, edgecolors=INK, linewidths=0.9, zorder=3
            )
        axes.set(xticks=[], yticks=[])
        _bare(axes)
    return figure


def rows_picture(
    title: str, blocks: Sequence[tuple[Mapping[str, NDArray[Any]], Sequence[str]]], span: tuple[float, float]
) -> Figure:
    """Blocks of named rows of images, each block with a word under every column; `span` is what black and white are."""
    from matplotlib.figure import Figure

    columns = max(len(row) for rows, _ in blocks for row in rows.values())
    height, width = next(iter(blocks[0][0].values())).shape[2:]
    across, down = 0.5, 0.5 * height / width
    names = [name for rows, _ in blocks for name in rows]
    tall = [len(rows) * down + (0.25 if notes else 0.05) for rows, notes in blocks]
    with style():
        size = (columns * across + 0.4 + 0.085 * max(map(len, names)), sum(tall) + 0.5)
        figure = Figure(figsize=size)
        figure.suptitle(title, x=0.08 / size[0], ha="left", color=INK, fontsize=11)
        grid = figure.add_gridspec(len(blocks), 1, height_ratios=tall)
        for place, (rows, notes) in enumerate(blocks):
            axes = figure.add_subplot(grid[place])
            heights, places = _show_images(axes, [list(row) for row in rows.values()], span, columns)
            axes.set_yticks(heights, list(rows), fontsize=9)
            axes.set_xticks(places[: len(notes)], list(notes), fontsize=8)
            _bare(axes)
    return figure


def _show_images(
    axes: Axes,
    rows: Sequence[Sequence[NDArray[Any] | None]],
    limits: tuple[float, float],
    columns: int,
    group: int = 0,
) -> tuple[list[float], list[float]]:
    """One image made of all of them, with white between, more of it between groups; the centres of rows and columns."""
    channels, height, width = next(image.shape for row in rows for image in row if image is not None)
    low, high = limits
    gap = max(1, width // 12)
    tops = [row * (height + gap) for row in range(len(rows))]
    lefts = [column * (width + gap) + (column // group * 2 * gap if group > 1 else 0) for column in range(columns)]
    canvas = np.ones((tops[-1] + height, lefts[-1] + width, channels))
    for top, row in zip(tops, rows, strict=True):
        for left, image in zip(lefts, row, strict=False):
            if image is not None:
                shown = np.clip((image - low) / (high - low), 0, 1)
                canvas[top : top + height, left : left + width] = shown.transpose(1, 2, 0)
    axes.imshow(np.repeat(canvas, 3, axis=2) if channels == 1 else canvas, aspect="auto")
    return [top + (height - 1) / 2 for top in tops], [left + (width - 1) / 2 for left in lefts]


def _show_windows(axes: Axes, examples: Sequence[NDArray[Any]], columns: int) -> list[float]:
    """Small line plots, a row for each class, all on one scale; where the rows' centres are."""
    low, high = _range([windows[:, :CHANNELS] for windows in examples])
    steps = np.linspace(0, 0.9, examples[0].shape[2])
    for row, windows in enumerate(examples):
        for column, window in enumerate(windows):
            for channel, colour in zip(window[:CHANNELS], COLOURS, strict=False):
                height = row + 0.95 - 0.9 * (channel - low) / (high - low)
                axes.plot(column + steps, height, color=colour, linewidth=0.6)
    axes.set(xlim=(-0.05, columns), ylim=(len(examples), 0))
    return [row + 0.5 for row in range(len(examples))]


def _pictorial(data: Data) -> bool:
    return len(data.shape) == 3 and data.shape[0] in (1, 3)


def _bare(axes: Axes) -> None:
    """Nothing but what is shown and its names."""
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)


# --- pieces ---------------------------------------------------------------------------------------------------


def _chart(title: str, size: tuple[float, float] = SIZE) -> tuple[Figure, Axes]:
    figure, (axes,) = _charts(title, [""], size)
    return figure, axes


def _charts(title: str, names: Sequence[str], size: tuple[float, float] = SIZE) -> tuple[Figure, list[Axes]]:
    """A chart for each name, in rows, all with the same vertical axis."""
    from matplotlib.figure import Figure

    across = min(len(names), ACROSS)
    down = math.ceil(len(names) / across)
    width, height = (size[0] * (1 + 0.7 * (across - 1)), size[1] * (1 + 0.85 * (down - 1)))
    figure = Figure(figsize=(width, height))
    charts = figure.subplots(down, across, sharey=True, squeeze=False).flatten().tolist()
    for unused in charts[len(names) :]:
        unused.remove()
    for axes, name in zip(charts, names, strict=False):
        axes.set_title(name, fontsize=10)
    figure.suptitle(title, x=0.08 / width, ha="left", color=INK, fontsize=11)
    return figure, charts[: len(names)]


def _limits(accuracies: Iterable[Interval]) -> tuple[float, float]:
    """From a little below the lowest bar to a little above the highest, in %."""
    known = list(accuracies)
    low = min(100 * (each.mean - (each.half or 0)) for each in known)
    high = max(100 * (each.mean + (each.half or 0)) for each in known)
    return max(0.0, low - 3), min(100.0, high + 3)


def _legend(figure: Figure, handles: Mapping[str, Artist]) -> None:
    """Below the chart, in as many columns as there is room for."""
    texts = [_short(text, 50) for text in handles]
    columns = min(len(texts), max(1, int(14 * figure.get_figwidth() / (max(map(len, texts)) + 7))))
    figure.legend(handles.values(), texts, loc="outside lower center", ncols=columns)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.2 * (math.ceil(len(texts) / columns) - 1))


def _labels(samples: Samples) -> NDArray[np.int64]:
    labels = samples.y if samples.rows is None else samples.y[samples.rows]
    return labels.cpu().numpy()


def _inputs(samples: Samples, numbers: NDArray[np.int64]) -> NDArray[Any]:
    """Inputs as they are stored, pixels as bytes."""
    rows = torch.from_numpy(numbers).to(samples.y.device)
    inputs: NDArray[Any] = samples.x[rows if samples.rows is None else samples.rows[rows]].cpu().numpy()
    return inputs


def _range(examples: Sequence[NDArray[Any]]) -> tuple[float, float]:
    low, high = min(float(each.min()) for each in examples), max(float(each.max()) for each in examples)
    return low, high if high > low else low + 1


def _names(data: Data, labels: Iterable[int]) -> list[str]:
    """What to call the classes: their names where those are known, or else their numbers."""
    known: Sequence[str] = getattr(data, "names", ())
    return [_short(known[label]) if label < len(known) else str(label) for label in labels]


def _short(name: str, most: int = 24) -> str:
    name = name if name.strip() == name and name.isprintable() else repr(name)
    return name if len(name) <= most else name[: most - 1] + "…"


def _rounded(count: float) -> int:
    """Down to one digit that counts; 1 at least."""
    digit = 10 ** max(0, math.floor(math.log10(max(1, count))))
    return max(1, int(count // digit * digit))
