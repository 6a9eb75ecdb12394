"""Distances between images and between sets of images, in normalized pixel values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fewer.data import Samples

BLOCK = 1000
RANGE_SAMPLES = 1000
"""Samples used to estimate the range of pixel values."""
DIRECTIONS = 200
"""Random directions that sets are projected onto."""


def value_range(samples: Samples) -> tuple[float, float]:
    """Smallest and largest pixel value among the first samples."""
    x, _ = samples.slice(0, RANGE_SAMPLES)
    return float(x.min()), float(x.max())


def nearest_neighbors(images: Tensor, real: Tensor, *, same: bool = False) -> tuple[Tensor, Tensor]:
    """L2 distance from each image to its nearest neighbor in `real`, and that neighbor's index.

    With `same`, both arguments are one set, and an image is not its own neighbor.
    """
    flat = real.flatten(1).double()
    minima = []
    for start in range(0, len(images), BLOCK):
        distances = torch.cdist(images[start : start + BLOCK].flatten(1).double(), flat, compute_mode=_EXACT)
        if same:
            distances[torch.arange(len(distances)), torch.arange(start, start + len(distances))] = math.inf
        minima.append(distances.min(1))
    return torch.cat([block.values for block in minima]), torch.cat([block.indices for block in minima])


_EXACT = "donot_use_mm_for_euclid_dist"  # the matrix-product form gives equal images a small nonzero distance


def typical_distance(real: Tensor) -> float | None:
    """Median distance from a real image to its nearest neighbor; None if no two images differ."""
    if len(real) < 2:
        return None
    return float(nearest_neighbors(real, real, same=True)[0].median()) or None


def earth_mover(first: Tensor, second: Tensor, stream: torch.Generator, directions: int = DIRECTIONS) -> float:
    """Sliced earth mover's distance between two sets of images with equal weights: the mean over random directions.

    In each direction the distance is exact: the mean difference between equal quantiles. If every pixel shifts by r,
    the distance is about 0.8 r (√(2/π)), whatever the number of pixels.
    """
    lines = torch.randn(first[0].numel(), directions, generator=stream, dtype=torch.float64)
    lines = lines / lines.norm(dim=0)
    return float(earth_mover_1d(first.flatten(1).double() @ lines, second.flatten(1).double() @ lines).mean())


def earth_mover_1d(first: Tensor, second: Tensor) -> Tensor:
    """Exact earth mover's distance for each column of two sets of numbers (samples × columns) of any size."""
    steps = math.lcm(len(first), len(second))
    a, b = (values.sort(0).values.repeat_interleave(steps // len(values), 0) for values in (first, second))
    return (a - b).abs().mean(0)
