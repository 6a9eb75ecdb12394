"""Pictures of data (its division, examples), of images that methods made, and of embeddings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fewer.data import Data, Samples
from fewer.experiments.studies import Cloud
from fewer.report.axes import bare, chart, charts, legend, short
from fewer.report.style import BLUE, COLORS, INK, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CLIENTS = 60
"""At most so many clients are shown in the picture of a division."""
ROWS = 20
"""At most so many classes are shown on a sheet of examples."""
CHANNELS = 3
"""At most so many channels of a window of readings are shown."""


def class_counts(data: Data, clients: int = CLIENTS) -> NDArray[np.int64]:
    """How many training samples each of the first clients has of each class (clients × classes)."""
    rows = [_labels(data.client(client).train) for client in range(min(clients, len(data)))]
    return np.stack([np.bincount(row, minlength=data.classes) for row in rows])


# --- pictures of data -----------------------------------------------------------------------------------------


def partition_picture(data: Data) -> Figure:
    """Who holds what: a bubble for each client and class, as large in area as the number of training samples."""
    from matplotlib.lines import Line2D

    counts = class_counts(data)
    clients, classes = counts.shape
    width = max(0.2, 4.4 / clients)
    height = min(0.3, max(3 / classes, 0.12), 10 / classes)
    most = max(1, int(counts.max()))
    area = (70 * min(width, height)) ** 2 / most  # of one sample, so that the largest bubble just fits
    names = class_names(data, range(data.classes))
    with style():
        title = f"{short(data.name)}: training samples by client and class"
        if len(data) > clients:
            title += f"\n(the first {clients} of {len(data):,} clients)"
        size = (clients * width + 0.6 + 0.075 * max(map(len, names)), classes * height + 1.4)
        figure, axes = chart(title, size)
        client, held = counts.nonzero()
        axes.scatter(client, held, s=area * counts[client, held], color=BLUE, alpha=0.8, linewidth=0)
        step = math.ceil(0.12 / height)
        axes.set_yticks(range(0, classes, step), names[::step])
        axes.set_xticks(range(0, clients, 1 if clients <= 25 else 5))
        axes.tick_params(labelsize=8)
        axes.set(xlabel="client", xlim=(-0.6, clients - 0.4), ylim=(classes - 0.4, -0.6))
        sizes = sorted({_rounded(most / part) for part in (10, 3, 1)})
        texts = [*(f"{count:,}" for count in sizes[:-1]), f"{sizes[-1]:,} samples"]
        drawn: Any = {"linestyle": "", "marker": "o", "color": BLUE, "alpha": 0.8, "markeredgewidth": 0}
        bubbles = [Line2D([], [], markersize=math.sqrt(area * count), **drawn) for count in sizes]
        legend(figure, dict(zip(texts, bubbles, strict=True)))
    return figure


def sheet_picture(data: Data, columns: int = 10) -> Figure | None:
    """Examples of each class from the common test set: images, or windows of readings; None for other inputs."""
    image = _pictorial(data)
    if data.test.tokens or not len(data.test) or not (image or len(data.shape) == 2):
        return None
    labels = _labels(data.test)
    picked = _examples(data, columns)
    shown, examples = list(picked), list(picked.values())
    across, down = (0.42, 0.42 * data.shape[1] / data.shape[2]) if image else (0.5, 0.4)
    names = class_names(data, shown)
    with style():
        title = f"{short(data.name)}: examples by {'novel ' if data.novel else ''}class"
        if len(shown) < (classes := len(np.unique(labels)) if data.novel else data.classes):
            title += f"\n({len(shown)} of {classes:,} classes)"
        if not image and data.shape[0] > CHANNELS:
            title += f"\n(the first {CHANNELS} of {data.shape[0]} channels)"
        size = (columns * across + 0.4 + 0.085 * max(map(len, names)), len(shown) * down + 0.6)
        figure, axes = chart(title, size)
        if image:
            limits = (0.0, 255.0) if data.test.x.dtype == torch.uint8 else _range(examples)
            centers, _ = _show_images(axes, [list(row) for row in examples], limits, columns)
        else:
            centers = _show_windows(axes, examples, columns)
        axes.set_yticks(centers, names, fontsize=9)
        axes.set_xticks([])
        bare(axes)
    return figure


def sheet_rows(data: Data, columns: int = 10) -> list[tuple[str, int, str]]:
    """The same as figures: class, number and all values of each example."""
    picked = _examples(data, columns)
    return [
        (name, number, " ".join(f"{value:.4g}" for value in example.flatten()))
        for name, examples in zip(class_names(data, picked), picked.values(), strict=True)
        for number, example in enumerate(examples)
    ]


def _examples(data: Data, columns: int) -> dict[int, NDArray[Any]]:
    """The first test samples of each class."""
    labels = _labels(data.test)
    return {
        int(label): _inputs(data.test, np.flatnonzero(labels == label)[:columns]) for label in np.unique(labels)[:ROWS]
    }


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
    names = class_names(data, labels)
    across, letter = 0.36, 0.07
    down = across * data.shape[1] / data.shape[2]
    upright = max(map(len, names)) * letter > across * each
    with style():
        if data.classes > len(labels):
            title += f"\n({len(labels)} of {data.classes:,} classes)"
        head = max(map(len, names)) * letter if upright else 0.2
        size = (columns * across + 0.4 + letter * max(map(len, rows)), len(rows) * down + 0.5 + head)
        figure, axes = chart(title, size)
        lines = [padded[start : start + columns] for start in range(0, len(padded), columns)]
        heights, places = _show_images(axes, lines, limits, columns, each)
        axes.set_yticks(heights, list(rows), fontsize=9)
        centers = [float(np.mean(places[start : start + each])) for start in range(0, columns, each)]
        axes.set_xticks(centers, names, fontsize=9, rotation=90 if upright else 0)
        axes.xaxis.tick_top()
        bare(axes)
    return figure


def cloud_picture(title: str, clouds: Mapping[str, Cloud]) -> Figure:
    """Clouds side by side: a color for each class, diamonds for own samples, stars for prototypes."""
    with style():
        figure, panels = charts(title, list(clouds), (3.6, 3.4))
        for axes, cloud in zip(panels, clouds.values(), strict=True):
            for number, label in enumerate(np.unique(cloud.star_labels)):
                color = COLORS[number % len(COLORS)]
                for own, marker, size in ((False, "o", 9), (True, "D", 20)):
                    here = cloud.points[(cloud.labels == label) & (cloud.own == own)]
                    edge = INK if own else "none"
                    axes.scatter(
                        here[:, 0],
                        here[:, 1],
                        s=size,
                        marker=marker,
                        color=color,
                        edgecolors=edge,
                        linewidths=0.6,
                        alpha=0.8,
                    )
                star = cloud.stars[cloud.star_labels == label]
                axes.scatter(
                    star[:, 0], star[:, 1], s=190, marker="*", color=color, edgecolors=INK, linewidths=0.9, zorder=3
                )
            axes.set(xticks=[], yticks=[])
            bare(axes)
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
            bare(axes)
    return figure


def _show_images(
    axes: Axes,
    rows: Sequence[Sequence[NDArray[Any] | None]],
    limits: tuple[float, float],
    columns: int,
    group: int = 0,
) -> tuple[list[float], list[float]]:
    """One image made of all of them, with white between, more of it between groups; the centers of rows and columns."""
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
    """Small line plots, a row for each class, all on one scale; where the rows' centers are."""
    low, high = _range([windows[:, :CHANNELS] for windows in examples])
    steps = np.linspace(0, 0.9, examples[0].shape[2])
    for row, windows in enumerate(examples):
        for column, window in enumerate(windows):
            for channel, color in zip(window[:CHANNELS], COLORS, strict=False):
                height = row + 0.95 - 0.9 * (channel - low) / (high - low)
                axes.plot(column + steps, height, color=color, linewidth=0.6)
    axes.set(xlim=(-0.05, columns), ylim=(len(examples), 0))
    return [row + 0.5 for row in range(len(examples))]


def _pictorial(data: Data) -> bool:
    return len(data.shape) == 3 and data.shape[0] in (1, 3)


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


def class_names(data: Data, labels: Iterable[int]) -> list[str]:
    """What to call the classes: their names where those are known, or else their numbers."""
    known: Sequence[str] = getattr(data, "names", ())
    return [short(known[label]) if label < len(known) else str(label) for label in labels]


def _rounded(count: float) -> int:
    """Down to one digit that counts; 1 at least."""
    digit = 10 ** max(0, math.floor(math.log10(max(1, count))))
    return max(1, int(count // digit * digit))
