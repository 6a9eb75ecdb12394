"""Data-free distillation: the image generator, the KL divergence and the distance of batch norm statistics."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fewer.learning.aggregate import stack_models, unstack_models
from fewer.learning.synthesis import NOISE, ImageGenerator, batch_norm_distances, kl_divergence


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8), (2, 9, 7)])
def test_generated_images_are_standardized(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    images = ImageGenerator(shape, 4)(torch.randn(64, NOISE))
    assert images.shape == (64, *shape)
    assert torch.allclose(images.mean((0, 2, 3)), torch.zeros(shape[0]), atol=1e-4)
    assert torch.allclose(images.var((0, 2, 3), correction=0), torch.ones(shape[0]), atol=1e-2)


def test_kl_divergence_of_each_sample() -> None:
    teacher = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0]])  # 3/4 and 1/4; 1/2 and 1/2
    student = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert kl_divergence(teacher, student).tolist() == pytest.approx([expected, 0.0], abs=1e-6)
    assert float(kl_divergence(student, teacher)[0]) == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2))
    warm = kl_divergence(torch.tensor([[2 * math.log(3.0), 0.0]]), student[:1], temperature=2.0)
    assert warm.tolist() == pytest.approx([4 * expected])


def test_batch_norm_distances() -> None:
    first, second = nn.BatchNorm2d(2).eval(), nn.BatchNorm1d(1).eval()
    first.running_mean = torch.tensor([1.0, 2.0])
    first.running_var = torch.tensor([0.5, 4.0])
    x = torch.stack([torch.full((1, 2), 4.0), torch.tensor([[1.0, 3.0]])])[None]  # channels 4, 4 and 1, 3
    with batch_norm_distances([nn.Sequential(first, nn.ReLU()), second, nn.GroupNorm(1, 1)]) as distances:
        first(x)
        second(torch.tensor([[3.0], [5.0]]))  # mean 4 and variance 1; running: 0 and 1
    # means 4, 2 against 1, 2; variances 0, 1 against 0.5, 4
    assert [float(value) for value in distances] == pytest.approx([3 + math.hypot(0.5, 3), 4.0])
    first(x)
    assert len(distances) == 2  # only inside


def test_models_are_stacked_and_unstacked() -> None:
    models = [{"a": torch.tensor([number, 2.0]), "b": torch.tensor(number)} for number in (1.0, 5.0)]
    stacked = stack_models(models)
    assert stacked["a"].tolist() == [[1, 2], [5, 2]] and stacked["b"].tolist() == [1, 5]
    assert [model["b"].item() for model in unstack_models(stacked)] == [1, 5]
