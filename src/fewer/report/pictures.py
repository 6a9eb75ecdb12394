"""Plots of data (partition, examples), of synthetic images and of embeddings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fewer.data import Data, Samples
from fewer.experiments.studies import Cloud
from fewer.report.axes import add_legend, create_axes, create_subplots, hide_frame, shorten
from fewer.report.style import BLUE, COLORS, INK, theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_CLIENTS = 60
"""Maximum number of clients in a plot of the partition."""
MAX_CLASSES = 20
"""Maximum number of classes in a plot of examples."""
MAX_CHANNELS = 3
"""Maximum number of channels shown of a time series."""


def class_counts(data: Data, clients: int = MAX_CLIENTS) -> NDArray[np.int64]:
    """Number of training samples by client and class (clients × classes), for the first clients."""
    rows = [_labels(data.client(client).train) for client in range(min(clients, len(data)))]
    return np.stack([np.bincount(row, minlength=data.classes) for row in rows])


# --- data ------------------------------------------------------------------------------------------------------


def plot_partition(data: Data) -> Figure:
    """Plots the label distribution by client: a bubble per client and class; its area is the number of samples."""
    from matplotlib.lines import Line2D

    counts = class_counts(data)
    clients, classes = counts.shape
    width = max(0.2, 4.4 / clients)
    height = min(0.3, max(3 / classes, 0.12), 10 / classes)
    max_count = max(1, int(counts.max()))
    area = (70 * min(width, height)) ** 2 / max_count  # area of one sample; the largest bubble just fits
    names = class_names(data, range(data.classes))
    with theme():
        title = f"{shorten(data.name)}: training samples by client and class"
        if len(data) > clients:
            title += f"\n(first {clients} of {len(data):,} clients)"
        size = (clients * width + 0.6 + 0.075 * max(map(len, names)), classes * height + 1.4)
        figure, axes = create_axes(title, size)
        client, label = counts.nonzero()
        axes.scatter(client, label, s=area * counts[client, label], color=BLUE, alpha=0.8, linewidth=0)
        step = math.ceil(0.12 / height)
        axes.set_yticks(range(0, classes, step), names[::step])
        axes.set_xticks(range(0, clients, 1 if clients <= 25 else 5))
        axes.tick_params(labelsize=8)
        axes.set(xlabel="client", xlim=(-0.6, clients - 0.4), ylim=(classes - 0.4, -0.6))
        sizes = sorted({_round_down(max_count / part) for part in (10, 3, 1)})
        texts = [*(f"{count:,}" for count in sizes[:-1]), f"{sizes[-1]:,} samples"]
        marker: Any = {"linestyle": "", "marker": "o", "color": BLUE, "alpha": 0.8, "markeredgewidth": 0}
        bubbles = [Line2D([], [], markersize=math.sqrt(area * count), **marker) for count in sizes]
        add_legend(figure, dict(zip(texts, bubbles, strict=True)))
    return figure


def plot_examples(data: Data, columns: int = 10) -> Figure | None:
    """Plots examples of each class from the global test set: images or time series; None for other inputs."""
    is_image = _has_images(data)
    if data.test.is_text or not len(data.test) or not (is_image or len(data.shape) == 2):
        return None
    labels = _labels(data.test)
    by_class = _pick_examples(data, columns)
    shown, examples = list(by_class), list(by_class.values())
    width, height = (0.42, 0.42 * data.shape[1] / data.shape[2]) if is_image else (0.5, 0.4)
    names = class_names(data, shown)
    with theme():
        title = f"{shorten(data.name)}: examples by {'novel ' if data.novel else ''}class"
        if len(shown) < (classes := len(np.unique(labels)) if data.novel else data.classes):
            title += f"\n({len(shown)} of {classes:,} classes)"
        if not is_image and data.shape[0] > MAX_CHANNELS:
            title += f"\n(first {MAX_CHANNELS} of {data.shape[0]} channels)"
        size = (columns * width + 0.4 + 0.085 * max(map(len, names)), len(shown) * height + 0.6)
        figure, axes = create_axes(title, size)
        if is_image:
            centers, _ = _draw_images(axes, [list(row) for row in examples], _pixel_range(data, examples), columns)
        else:
            centers = _draw_series(axes, examples, columns)
        axes.set_yticks(centers, names, fontsize=9)
        axes.set_xticks([])
        hide_frame(axes)
    return figure


def example_rows(data: Data, columns: int = 10) -> list[tuple[str, int, str]]:
    """Returns the plotted examples as a table: class, number and all values of each."""
    by_class = _pick_examples(data, columns)
    return [
        (name, number, " ".join(f"{value:.4g}" for value in example.flatten()))
        for name, examples in zip(class_names(data, by_class), by_class.values(), strict=True)
        for number, example in enumerate(examples)
    ]


def _pick_examples(data: Data, columns: int) -> dict[int, NDArray[Any]]:
    """The first test samples of each class."""
    labels = _labels(data.test)
    return {
        int(label): _inputs(data.test, np.flatnonzero(labels == label)[:columns])
        for label in np.unique(labels)[:MAX_CLASSES]
    }


def plot_image_grid(
    data: Data, title: str, rows: Mapping[str, Mapping[int, NDArray[Any]]], max_per_class: int = 1
) -> Figure | None:
    """Plots synthetic images by row and class, up to `max_per_class` per cell; None without images.

    Images are converted from normalized inputs back to pixels and clipped to their range. If the data does not hold
    pixels, the lowest value of all images is black and the highest white.
    """
    if not _has_images(data):
        return None
    labels = range(min(data.classes, MAX_CLASSES))
    lines: list[list[NDArray[Any] | None]] = []
    for images in rows.values():
        lines.append([])
        for label in labels:
            cell = [image / data.test.scale + data.test.shift for image in images.get(label, ())[:max_per_class]]
            lines[-1] += [*cell, *[None] * (max_per_class - len(cell))]
    present = [image for line in lines for image in line if image is not None]
    if not present:
        return None
    columns = len(labels) * max_per_class
    names = class_names(data, labels)
    width, letter = 0.36, 0.07
    height = width * data.shape[1] / data.shape[2]
    rotated = max(map(len, names)) * letter > width * max_per_class
    with theme():
        if data.classes > len(labels):
            title += f"\n({len(labels)} of {data.classes:,} classes)"
        head = max(map(len, names)) * letter if rotated else 0.2
        size = (columns * width + 0.4 + letter * max(map(len, rows)), len(rows) * height + 0.5 + head)
        figure, axes = create_axes(title, size)
        limits = _pixel_range(data, present)
        row_centers, column_centers = _draw_images(axes, lines, limits, columns, max_per_class)
        axes.set_yticks(row_centers, list(rows), fontsize=9)
        centers = np.reshape(column_centers, (-1, max_per_class)).mean(1)
        axes.set_xticks(centers, names, fontsize=9, rotation=90 if rotated else 0)
        axes.xaxis.tick_top()
        hide_frame(axes)
    return figure


def plot_embeddings(title: str, clouds: Mapping[str, Cloud]) -> Figure:
    """Plots embeddings side by side: a color per class, diamonds for own samples, stars for prototypes."""
    with theme():
        figure, subplots = create_subplots(title, list(clouds), (3.6, 3.4))
        for axes, cloud in zip(subplots, clouds.values(), strict=True):
            for number, label in enumerate(np.unique(cloud.prototype_labels)):
                color = COLORS[number % len(COLORS)]
                for own, marker, size in ((False, "o", 9), (True, "D", 20)):
                    x, y = cloud.points[(cloud.labels == label) & (cloud.own == own)].T
                    look: Any = {"marker": marker, "edgecolors": INK if own else "none", "linewidths": 0.6}
                    axes.scatter(x, y, s=size, color=color, alpha=0.8, **look)
                x, y = cloud.prototypes[cloud.prototype_labels == label].T
                axes.scatter(x, y, s=190, marker="*", color=color, edgecolors=INK, linewidths=0.9, zorder=3)
            axes.set(xticks=[], yticks=[])
            hide_frame(axes)
    return figure


def plot_image_rows(
    title: str, blocks: Sequence[tuple[Mapping[str, NDArray[Any]], Sequence[str]]], limits: tuple[float, float]
) -> Figure:
    """Plots blocks of named rows of images, with notes below columns; `limits` are the values of black and white."""
    from matplotlib.figure import Figure

    columns = max(len(row) for rows, _ in blocks for row in rows.values())
    height, width = next(iter(blocks[0][0].values())).shape[2:]
    image_width, image_height = 0.5, 0.5 * height / width
    names = [name for rows, _ in blocks for name in rows]
    block_heights = [len(rows) * image_height + (0.25 if notes else 0.05) for rows, notes in blocks]
    with theme():
        size = (columns * image_width + 0.4 + 0.085 * max(map(len, names)), sum(block_heights) + 0.5)
        figure = Figure(figsize=size)
        figure.suptitle(title, x=0.08 / size[0], ha="left", color=INK, fontsize=11)
        grid = figure.add_gridspec(len(blocks), 1, height_ratios=block_heights)
        for index, (rows, notes) in enumerate(blocks):
            axes = figure.add_subplot(grid[index])
            images = [list(row) for row in rows.values()]
            row_centers, column_centers = _draw_images(axes, images, limits, columns)
            axes.set_yticks(row_centers, list(rows), fontsize=9)
            axes.set_xticks(column_centers[: len(notes)], list(notes), fontsize=8)
            hide_frame(axes)
    return figure


def _draw_images(
    axes: Axes, rows: Sequence[Sequence[NDArray[Any] | None]], limits: tuple[float, float], columns: int, group: int = 0
) -> tuple[list[float], list[float]]:
    """Draws all images on one canvas, with wider gaps between groups; returns the centers of rows and columns."""
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


def _draw_series(axes: Axes, examples: Sequence[NDArray[Any]], columns: int) -> list[float]:
    """Draws small line plots, one row per class, all on one scale; returns the centers of the rows."""
    low, high = _value_range([series[:, :MAX_CHANNELS] for series in examples])
    x = np.linspace(0, 0.9, examples[0].shape[2])
    for row, class_examples in enumerate(examples):
        for column, example in enumerate(class_examples):
            for channel, color in zip(example[:MAX_CHANNELS], COLORS, strict=False):
                y = row + 0.95 - 0.9 * (channel - low) / (high - low)
                axes.plot(column + x, y, color=color, linewidth=0.6)
    axes.set(xlim=(-0.05, columns), ylim=(len(examples), 0))
    return [row + 0.5 for row in range(len(examples))]


def _has_images(data: Data) -> bool:
    return len(data.shape) == 3 and data.shape[0] in (1, 3)


def _labels(samples: Samples) -> NDArray[np.int64]:
    return samples.labels.cpu().numpy()


def _inputs(samples: Samples, indices: NDArray[np.int64]) -> NDArray[Any]:
    """Inputs as stored, with pixels as bytes."""
    rows = torch.from_numpy(indices).to(samples.y.device)
    inputs: NDArray[Any] = samples.x[rows if samples.rows is None else samples.rows[rows]].cpu().numpy()
    return inputs


def _pixel_range(data: Data, images: Sequence[NDArray[Any]]) -> tuple[float, float]:
    """The values of black and white."""
    return (0.0, 255.0) if data.test.x.dtype == torch.uint8 else _value_range(images)


def _value_range(examples: Sequence[NDArray[Any]]) -> tuple[float, float]:
    low, high = min(float(array.min()) for array in examples), max(float(array.max()) for array in examples)
    return low, high if high > low else low + 1


def class_names(data: Data, labels: Iterable[int]) -> list[str]:
    """Names of the classes if known, else their numbers."""
    known: Sequence[str] = getattr(data, "class_names", ())
    return [shorten(known[label]) if label < len(known) else str(label) for label in labels]


def _round_down(count: float) -> int:
    """Rounds down to one significant digit, at least 1."""
    digit = 10 ** max(0, math.floor(math.log10(max(1, count))))
    return max(1, int(count // digit * digit))
