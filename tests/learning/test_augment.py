"""Augmentation is affine and differentiable."""

from __future__ import annotations

import torch

from fewer.learning.augment import MAX_ROTATION, MAX_SCALE, MAX_SHIFT, apply_affine, draw_affine
from fewer.runtime import stream


def test_augmentation_is_affine_and_differentiable() -> None:
    image = torch.rand(2, 1, 9, 9, dtype=torch.float64)
    identity = torch.tensor([[[1.0, 0, 0], [0, 1, 0]]], dtype=torch.float64)
    assert torch.allclose(apply_affine(image, identity), image)
    shift = torch.tensor([[[1.0, 0, 2 / 9], [0, 1, 0]]], dtype=torch.float64)  # reads one pixel further right
    assert torch.allclose(apply_affine(image, shift)[..., :-1], image[..., 1:])
    assert torch.allclose(apply_affine(image, shift)[..., -1], image[..., -1])
    moves = draw_affine(400, stream("m"))
    scale = moves[:, :, :2].double().det().sqrt()
    assert 1 / (1 + MAX_SCALE) <= scale.min() < 0.9 < 1.1 < scale.max() <= 1 / (1 - MAX_SCALE) + 1e-6
    assert moves[:, :, 2].abs().max() <= MAX_SHIFT
    assert torch.atan2(moves[:, 1, 0], moves[:, 0, 0]).abs().max() <= MAX_ROTATION + 1e-6
    image.requires_grad_()
    assert torch.autograd.gradcheck(lambda i: apply_affine(i, moves[:2]), (image,))
