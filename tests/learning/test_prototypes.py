"""Prototypes and the distance loss against formulas."""

from __future__ import annotations

import torch

from fewer.learning.prototypes import (
    class_positions,
    class_prototypes,
    distance_loss,
    merge_prototypes,
    nearest_centroid,
    nearest_mean,
    prototype_logits,
)
from tests.methods.frl_harness import eq2_loss


def test_prototypes_are_differentiable_means_by_class() -> None:
    features = torch.tensor([[1.0, 2.0], [3.0, 6.0], [5.0, 5.0]], dtype=torch.float64, requires_grad=True)
    prototypes = class_prototypes(features, torch.tensor([7, 2, 7]))
    assert prototypes.classes.tolist() == [2, 7] and prototypes.counts.tolist() == [1, 2]
    assert prototypes.means.tolist() == [[3.0, 6.0], [3.0, 3.5]]
    (gradient,) = torch.autograd.grad(prototypes.means[1, 0], features)
    assert gradient.tolist() == [[0.5, 0.0], [0.0, 0.0], [0.5, 0.0]]


def test_global_prototypes_are_means_over_the_holders_of_a_class() -> None:
    first = class_prototypes(torch.tensor([[1.0], [3.0], [10.0]]), torch.tensor([0, 0, 4]))
    second = class_prototypes(torch.tensor([[8.0], [5.0]]), torch.tensor([0, 1]))
    merged = merge_prototypes([first, second])
    assert merged.classes.tolist() == [0, 1, 4] and merged.counts.tolist() == [3, 1, 1]
    assert merged.means[:, 0].tolist() == [4.0, 5.0, 10.0]  # (1 + 3 + 8) / 3; clients without a class do not count


def test_the_distance_loss_is_eq_2_with_the_true_class_in_the_sum() -> None:
    draw = torch.Generator().manual_seed(0)
    features, means = (torch.randn(n, 3, generator=draw, dtype=torch.float64) for n in (9, 4))
    classes = torch.tensor([1, 3, 5, 8])
    labels = classes[torch.randint(4, (9,), generator=draw)]
    assert torch.allclose(
        distance_loss(features, labels, classes, means), eq2_loss(features, labels, [1, 3, 5, 8], means)
    )
    scores = prototype_logits(features, means)
    exact = -(features[:, None] - means).square().sum(2)
    assert torch.allclose(scores - scores[:, :1], exact - exact[:, :1])


def test_one_class_or_no_prototype_gives_zero_loss() -> None:
    features = torch.tensor([[1.0], [2.0]], requires_grad=True)
    one_class = distance_loss(features, torch.tensor([3, 3]), torch.tensor([3]), torch.tensor([[0.5]]))
    assert float(one_class.detach()) == 0
    no_prototype = distance_loss(features, torch.tensor([3, 3]), torch.tensor([1, 2]), torch.tensor([[0.5], [0.7]]))
    assert float(no_prototype.detach()) == 0 and torch.autograd.grad(no_prototype, features)[0].abs().sum() == 0
    half_known = distance_loss(features, torch.tensor([3, 1]), torch.tensor([1, 2]), torch.tensor([[0.5], [0.7]]))
    assert torch.allclose(
        half_known, eq2_loss(features[1:], torch.tensor([1]), [1, 2], torch.tensor([[0.5], [0.7]])) / 2
    )
    assert not class_positions(torch.zeros(0, dtype=torch.int64), torch.tensor([2]))[1].any()


def test_the_nearest_centroid_ignores_the_length_of_features() -> None:
    support = torch.tensor([[3.0, 0.0], [1.0, 0.2], [0.0, 1.0], [0.1, 9.0]])
    queries = torch.tensor([[9.0, 1.0], [0.1, 0.2], [1.0, 0.9]])
    labels = torch.tensor([0, 0, 1, 1])
    unit = support / support.norm(dim=1, keepdim=True)
    means = torch.stack([unit[:2].mean(0), unit[2:].mean(0)])
    distances = torch.cdist(queries / queries.norm(dim=1, keepdim=True), means)
    assert nearest_centroid(support, labels, queries).tolist() == distances.argmin(1).tolist() == [0, 1, 0]
    plain = torch.cdist(queries, torch.stack([support[:2].mean(0), support[2:].mean(0)])).argmin(1)
    assert nearest_mean(support, labels, queries).tolist() == plain.tolist() == [0, 0, 0]
