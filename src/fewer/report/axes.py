"""Helpers that all plots share: axes, limits, legends and labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from textwrap import fill, wrap
from typing import TYPE_CHECKING, Any

from fewer.report.style import INK, SIZE
from fewer.runs.metric import ACCURACY, PrimaryMetric
from fewer.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_COLUMNS = 3
"""Maximum number of subplots side by side."""
MAX_TEXT = 60
"""Maximum number of characters of a text in a legend."""


def create_axes(title: str, size: tuple[float, float] = SIZE) -> tuple[Figure, Axes]:
    """Creates a figure with a single subplot."""
    figure, (axes,) = create_subplots(title, [""], size)
    return figure, axes


def create_subplots(title: str, names: Sequence[str], size: tuple[float, float] = SIZE) -> tuple[Figure, list[Axes]]:
    """Creates a figure with one subplot per name, in rows, all with the same vertical axis."""
    from matplotlib.figure import Figure

    columns = min(len(names), MAX_COLUMNS)
    rows = math.ceil(len(names) / columns)
    width, height = (size[0] * (1 + 0.7 * (columns - 1)), size[1] * (1 + 0.85 * (rows - 1)))
    figure = Figure(figsize=(width, height))
    subplots = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten().tolist()
    for unused in subplots[len(names) :]:
        unused.remove()
    for axes, name in zip(subplots, names, strict=False):
        axes.set_title(name, fontsize=10)
    figure.suptitle(title, x=0.08 / width, ha="left", color=INK, fontsize=11)
    return figure, subplots[: len(names)]


def value_limits(values: Iterable[Interval], metric: PrimaryMetric = ACCURACY) -> tuple[float, float]:
    """Axis limits slightly below the lowest and above the highest interval."""
    intervals = list(values)
    low = min(metric.scale * (value.mean - (value.half or 0)) for value in intervals)
    high = max(metric.scale * (value.mean + (value.half or 0)) for value in intervals)
    if metric.percent:
        return max(0.0, low - 3), min(100.0, high + 3)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def add_legend(figure: Figure, handles: Mapping[str, Artist]) -> None:
    """Adds a legend below the chart, in as many columns as make it shortest; long texts wrap."""
    texts = [shorten(text, MAX_TEXT) for text in handles]
    room = int(14 * figure.get_figwidth())
    columns = min(range(1, len(texts) + 1), key=lambda number: _count_lines(texts, number, room))
    wrapped = [fill(text, _text_width(columns, room)) for text in texts]
    figure.legend(handles.values(), wrapped, loc="outside lower center", ncols=columns)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.2 * (_count_lines(texts, columns, room) - 1))


def _text_width(columns: int, room: int) -> int:
    """Characters of a line next to the symbol, in a legend with this number of columns."""
    return room // columns - 7


def _count_lines(texts: Sequence[str], columns: int, room: int) -> float:
    """Height of a legend in lines; infinite if the longest word does not fit."""
    width = _text_width(columns, room)
    if columns > 1 and width < max(len(word) for text in texts for word in text.split(" ")):
        return math.inf
    lines = [len(wrap(text, max(1, width))) for text in texts]
    rest = len(lines) % columns
    sizes = [len(lines) // columns + (column < rest) for column in range(columns)]
    ends = [sum(sizes[: column + 1]) for column in range(columns)]
    return max(sum(lines[end - size : end]) for size, end in zip(sizes, ends, strict=True))


def label_rows(axes: Axes, names: Sequence[str]) -> None:
    """Names the rows of a bar chart, from 0 on. Long names take two lines; then all names are small."""
    texts = [fill(shorten(name, MAX_TEXT), 32) for name in names]
    small: dict[str, Any] = {"fontsize": 7.5, "linespacing": 1.0} if any("\n" in text for text in texts) else {}
    axes.set_yticks(range(len(texts)), texts, **small)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")


def shorten(name: str, max_length: int = 24) -> str:
    """Makes a name printable, with at most `max_length` characters."""
    name = name if name.strip() == name and name.isprintable() else repr(name)
    return name if len(name) <= max_length else name[: max_length - 1] + "…"


def hide_frame(axes: Axes) -> None:
    """Removes ticks, grid and frame, but keeps the labels."""
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)
