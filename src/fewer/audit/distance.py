"""Distances between images and between sets of images, in normalized pixel values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fewer.data import Samples

BLOCK = 1000
FEW = 1000
"""Samples that tell the range of values."""
DIRECTIONS = 200
"""Lines that sets are projected on."""


def span_of(samples: Samples) -> tuple[float, float]:
    """The least and the largest value of pixels, as the first samples show it."""
    x, _ = samples.slice(0, FEW)
    return float(x.min()), float(x.max())


def nearest(images: Tensor, real: Tensor, *, same: bool = False) -> tuple[Tensor, Tensor]:
    """For each image how far the nearest of `real` is (L2), and which; `same`: both are one set, and itself is none."""
    flat = real.flatten(1).double()
    found = []
    for start in range(0, len(images), BLOCK):
        apart = torch.cdist(images[start : start + BLOCK].flatten(1).double(), flat, compute_mode=_EXACT)
        if same:
            apart[torch.arange(len(apart)), torch.arange(start, start + len(apart))] = math.inf
        found.append(apart.min(1))
    return torch.cat([one.values for one in found]), torch.cat([one.indices for one in found])


_EXACT = "donot_use_mm_for_euclid_dist"  # the product form takes equal images for slightly different ones


def typical(real: Tensor) -> float | None:
    """The median distance from one real image to the nearest other; None where there are no two that differ."""
    if len(real) < 2:
        return None
    return float(nearest(real, real, same=True)[0].median()) or None


def earth_mover(one: Tensor, other: Tensor, stream: torch.Generator, directions: int = DIRECTIONS) -> float:
    """The earth mover's distance of two sets, each weighted evenly: sliced, the mean over random lines.

    On a line it is exact: the mean distance between equal quantiles. Where all pixels of all images are moved by r, it
    is about 0.8 r (√(2/π)), whatever the number of pixels.
    """
    lines = torch.randn(one[0].numel(), directions, generator=stream, dtype=torch.float64)
    lines = lines / lines.norm(dim=0)
    return float(on_lines(one.flatten(1).double() @ lines, other.flatten(1).double() @ lines).mean())


def on_lines(one: Tensor, other: Tensor) -> Tensor:
    """The exact earth mover's distance in each column of two sets of numbers (samples × lines), of whatever sizes."""
    steps = math.lcm(len(one), len(other))
    a, b = (each.sort(0).values.repeat_interleave(steps // len(each), 0) for each in (one, other))
    return (a - b).abs().mean(0)
