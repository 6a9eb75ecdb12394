"""Augmentation: affine maps and crops."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fewer.learning.augment import (
    MAX_ROTATION,
    MAX_SCALE,
    MAX_SHIFT,
    apply_affine,
    cut_tiles,
    draw_affine,
    join_tiles,
    random_crop,
)
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


def test_one_map_for_all_images_is_that_map_for_each() -> None:
    images = torch.rand(5, 3, 6, 7, dtype=torch.float64, requires_grad=True)
    transform = draw_affine(1, stream("m"))
    together, separate = apply_affine(images, transform), apply_affine(images, transform.repeat(5, 1, 1))
    assert torch.allclose(together, separate, atol=1e-12)
    upstream = torch.rand(images.shape, dtype=torch.float64)
    first, second = (torch.autograd.grad(result, images, upstream)[0] for result in (together, separate))
    assert torch.allclose(first, second, atol=1e-12)


def test_maps_read_the_pixels_that_torch_would_read() -> None:
    images, maps = torch.rand(4, 2, 6, 7, dtype=torch.float64), draw_affine(4, stream("m")).double()
    grid = F.affine_grid(maps, [4, 2, 6, 7], align_corners=False)
    expected = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    assert torch.allclose(apply_affine(images, maps), expected, atol=1e-12)
    assert not torch.allclose(apply_affine(images, maps), images, atol=0.01)


def test_random_crops_are_windows_of_the_padded_image() -> None:
    images = torch.rand(300, 2, 4, 5)
    crops, padded = random_crop(images, 2, -1.0, stream("crop")), F.pad(images, (2, 2, 2, 2), value=-1.0)
    windows = {}
    for top in range(5):
        for left in range(5):
            windows[top, left] = (padded[:, :, top : top + 4, left : left + 5] == crops).flatten(1).all(1)
    counts = {place: int(matches.sum()) for place, matches in windows.items()}
    assert sum(counts.values()) == 300 and min(counts.values()) > 0  # every image has one window, and all occur
    assert torch.equal(random_crop(images, 2, -1.0, stream("crop")), crops)


def test_joined_tiles_are_small_images_in_the_order_of_cut_tiles() -> None:
    images = torch.arange(8.0)[:, None, None, None] + torch.zeros(8, 2, 4, 6)  # image i has the value i everywhere
    images[3, 1, :2, :2] = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    joined = join_tiles(images, 2)
    assert joined.shape == (2, 2, 4, 6)
    corners = joined[:, 0, ::2, ::3]
    assert corners.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert joined[0, 1, 2, 3] == 3.0 and joined[0, 1, 3, 3] == 3.0  # the mean of 1, 2, 3 and 6, and of four 3s
    plain = torch.arange(8.0)[:, None, None, None] + torch.zeros(8, 1, 4, 4)
    assert torch.equal(cut_tiles(join_tiles(plain, 2), 2), plain)
    assert join_tiles(images, 1) is images


def test_tiles_are_parts_of_the_image_at_full_size() -> None:
    image = torch.arange(16.0).view(1, 1, 4, 4)
    parts = cut_tiles(image, 2)
    # A 2×2 part has centers at ±1/4 of its width: the four new pixels are at 0, 1/4, 3/4 and 1 between these.
    between = torch.tensor([0.0, 0.25, 0.75, 1.0])
    for index, corner in enumerate((0.0, 2.0, 8.0, 10.0)):  # value of the part's first pixel
        assert torch.allclose(parts[index, 0], corner + 4 * between[:, None] + between)
    assert parts.shape == (4, 1, 4, 4)
    assert cut_tiles(image, 1) is image
    two = torch.cat([image, image + 100])
    assert torch.allclose(cut_tiles(two, 2)[4:], parts + 100)  # image by image
