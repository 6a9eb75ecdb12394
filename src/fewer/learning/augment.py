"""Small turns, stretches and shifts of images, differentiable in the image."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

TURN, STRETCH, SHIFT = math.radians(15), 0.15, 0.1
"""At most so far either way: radians, share of the size, share of half the width."""


def draw_moves(count: int, stream: torch.Generator) -> Tensor:
    """`count` random moves, as 2×3 matrices of (output → input) coordinates."""
    turn, stretch, right, down = (2 * torch.rand(4, count, generator=stream) - 1).unbind()
    turn, size = TURN * turn, 1 / (1 + STRETCH * stretch)
    cos, sin = size * turn.cos(), size * turn.sin()
    return torch.stack([cos, -sin, SHIFT * right, sin, cos, SHIFT * down], dim=1).view(count, 2, 3)


def move(images: Tensor, moves: Tensor) -> Tensor:
    """The images moved, each by its own or all by the one; what comes in from outside repeats the border."""
    grid = F.affine_grid(moves.to(images).expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)
