"""Pieces that pictures are made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from fewer.report.figures import Interval
from fewer.report.style import INK, SIZE

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 3
"""At most so many panels stand side by side."""


def chart(title: str, size: tuple[float, float] = SIZE) -> tuple[Figure, Axes]:
    """One chart."""
    figure, (axes,) = charts(title, [""], size)
    return figure, axes


def charts(title: str, names: Sequence[str], size: tuple[float, float] = SIZE) -> tuple[Figure, list[Axes]]:
    """A chart for each name, in rows, all with the same vertical axis."""
    from matplotlib.figure import Figure

    across = min(len(names), ACROSS)
    down = math.ceil(len(names) / across)
    width, height = (size[0] * (1 + 0.7 * (across - 1)), size[1] * (1 + 0.85 * (down - 1)))
    figure = Figure(figsize=(width, height))
    every = figure.subplots(down, across, sharey=True, squeeze=False).flatten().tolist()
    for unused in every[len(names) :]:
        unused.remove()
    for axes, name in zip(every, names, strict=False):
        axes.set_title(name, fontsize=10)
    figure.suptitle(title, x=0.08 / width, ha="left", color=INK, fontsize=11)
    return figure, every[: len(names)]


def limits(accuracies: Iterable[Interval]) -> tuple[float, float]:
    """From a little below the lowest bar to a little above the highest, in %."""
    known = list(accuracies)
    low = min(100 * (each.mean - (each.half or 0)) for each in known)
    high = max(100 * (each.mean + (each.half or 0)) for each in known)
    return max(0.0, low - 3), min(100.0, high + 3)


def legend(figure: Figure, handles: Mapping[str, Artist]) -> None:
    """Below the chart, in as many columns as there is room for."""
    texts = [short(text, 50) for text in handles]
    columns = min(len(texts), max(1, int(14 * figure.get_figwidth() / (max(map(len, texts)) + 7))))
    figure.legend(handles.values(), texts, loc="outside lower center", ncols=columns)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.2 * (math.ceil(len(texts) / columns) - 1))


def short(name: str, most: int = 24) -> str:
    """A name that can be shown and is not too long."""
    name = name if name.strip() == name and name.isprintable() else repr(name)
    return name if len(name) <= most else name[: most - 1] + "…"


def bare(axes: Axes) -> None:
    """Nothing but what is shown and its names."""
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)
