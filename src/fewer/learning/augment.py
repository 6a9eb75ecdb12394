"""Image augmentation: small random affine maps, differentiable in the image, random crops, and tiles."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_ROTATION = math.radians(15)
"""Radians."""
MAX_SCALE = 0.15
"""Fraction of the size."""
MAX_SHIFT = 0.1
"""Fraction of half the width."""


def draw_affine(count: int, stream: torch.Generator) -> Tensor:
    """Draws `count` random affine maps, as 2×3 matrices from output to input coordinates."""
    rotation, scale, right, down = (2 * torch.rand(4, count, generator=stream) - 1).unbind()
    rotation, size = MAX_ROTATION * rotation, 1 / (1 + MAX_SCALE * scale)
    cos, sin = size * rotation.cos(), size * rotation.sin()
    return torch.stack([cos, -sin, MAX_SHIFT * right, sin, cos, MAX_SHIFT * down], dim=1).view(count, 2, 3)


def apply_affine(images: Tensor, maps: Tensor) -> Tensor:
    """Transforms each image by its own map, or all by a single one. Pixels outside the image repeat its border."""
    stacked = images.reshape(1, -1, *images.shape[2:]) if len(maps) == 1 else images  # all as channels of one image
    grid = _sampling_grid(maps.to(images), *images.shape[2:])
    return F.grid_sample(stacked, grid, padding_mode="border", align_corners=False).view_as(images)


def _sampling_grid(maps: Tensor, height: int, width: int) -> Tensor:
    """What `F.affine_grid` returns (maps × height × width × 2), by one matrix product instead of one per map."""
    identity = torch.eye(2, 3).to(maps)[None]
    pixels = F.affine_grid(identity, [1, 1, height, width], align_corners=False).view(-1, 2)
    coordinates = maps.reshape(-1, 3) @ F.pad(pixels, (0, 1), value=1.0).T
    return coordinates.view(-1, 2, height, width).permute(0, 2, 3, 1)


def random_crop(images: Tensor, pad: int, fill: float, stream: torch.Generator) -> Tensor:
    """Adds a border of `pad` pixels with value `fill`, and crops each image to its size at a random position."""
    count, channels, height, width = images.shape
    top, left = torch.randint(2 * pad + 1, (2, count, 1), generator=stream).to(images.device)
    rows, columns = (start + torch.arange(size).to(images.device) for start, size in ((top, height), (left, width)))
    image, channel = torch.arange(count), torch.arange(channels)
    padded = F.pad(images, (pad,) * 4, value=fill)
    return padded[image[:, None, None, None], channel[:, None, None], rows[:, None, :, None], columns[:, None, None]]


def cut_tiles(images: Tensor, tiles: int) -> Tensor:
    """Cuts each image into `tiles` × `tiles` parts and resizes each part to the size of the image (bilinear).

    The parts of an image follow each other, row by row. One tile is the image itself.
    """
    if tiles == 1:
        return images
    count, channels, height, width = images.shape
    parts = images.view(count, channels, tiles, height // tiles, tiles, width // tiles).permute(0, 2, 4, 1, 3, 5)
    small = parts.reshape(-1, channels, height // tiles, width // tiles)
    return F.interpolate(small, (height, width), mode="bilinear", align_corners=False)


def join_tiles(images: Tensor, tiles: int) -> Tensor:
    """Shrinks images by `tiles` and puts `tiles` × `tiles` of them into one: what `cut_tiles` takes apart."""
    if tiles == 1:
        return images
    small = F.avg_pool2d(images, tiles)
    channels, height, width = small.shape[1:]
    parts = small.view(-1, tiles, tiles, channels, height, width).permute(0, 3, 1, 4, 2, 5)
    return parts.reshape(-1, channels, tiles * height, tiles * width)
