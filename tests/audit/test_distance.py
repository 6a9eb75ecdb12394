"""Distances between sets by arithmetic."""

import math

import pytest
import torch

from fewer.audit.distance import earth_mover, earth_mover_1d, nearest_neighbors, typical_distance


def test_nearest_by_arithmetic() -> None:
    real = torch.tensor([[0.0, 0.0], [3.0, 4.0], [10.0, 0.0]])
    distances, indices = nearest_neighbors(torch.tensor([[3.0, 3.0], [8.0, 0.0], [0.0, 0.0]]), real)
    assert distances.tolist() == [1, 2, 0] and indices.tolist() == [1, 2, 0]
    self_distances, self_indices = nearest_neighbors(real, real, same=True)
    assert self_distances.tolist() == pytest.approx([5, 5, math.sqrt(65)]) and self_indices.tolist() == [1, 0, 1]
    assert typical_distance(real) == 5 and typical_distance(real[:1]) is None and typical_distance(real[[0, 0]]) is None


def test_a_sample_is_not_its_own_neighbor_beyond_the_first_block() -> None:
    real = 10.0 * torch.arange(1001.0)[:, None]
    assert nearest_neighbors(real, real, same=True)[0].tolist() == [10.0] * 1001


def test_earth_mover_by_arithmetic() -> None:
    # {0, 2} against {1, 1, 4, 4}: halves of {0 0 2 2} go to {1 1 4 4}: (1 + 1 + 2 + 2) / 4
    first, second = torch.tensor([[2.0], [0.0]]), torch.tensor([[4.0], [1.0], [1.0], [4.0]])
    assert earth_mover_1d(first, second).tolist() == [1.5]
    assert earth_mover_1d(torch.tensor([[0.0], [6.0]]), torch.tensor([[0.0], [3.0], [6.0]])).item() == pytest.approx(1)
    assert earth_mover_1d(torch.tensor([[0.0, 5.0]]), torch.tensor([[1.0, 1.0]])).tolist() == [1, 4]


def test_earth_mover_of_shifted_sets() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(7, 1, 2, 2, generator=generator)
    assert earth_mover(images, images[torch.randperm(7)], generator) == pytest.approx(0, abs=1e-12)
    # projected on a random line in 4 dimensions, a shift of length 2 has length 2·E|u₁| = 2 · 4/(3π)
    shift = torch.tensor([2.0, 0, 0, 0]).view(1, 2, 2)
    assert earth_mover(images, images + shift, generator, 20_000) == pytest.approx(8 / (3 * math.pi), rel=0.02)
