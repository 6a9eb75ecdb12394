"""Class prototypes: mean features, distances to them as scores, and their mean over clients.

Snell, Swersky, Zemel: Prototypical Networks for Few-shot Learning, NeurIPS 2017: a sample's score for a class is minus
the squared distance of its features to the class's prototype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Prototypes(NamedTuple):
    """Prototypes of some classes."""

    classes: Tensor
    """Class numbers, rising (n)."""
    means: Tensor
    """Their prototypes (n × features)."""
    counts: Tensor
    """How many samples each is the mean of (n)."""


def prototypes(features: Tensor, labels: Tensor) -> Prototypes:
    """The mean features of each class that there is, with their gradient."""
    classes, place, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    sums = features.new_zeros(len(classes), features.shape[1]).index_add(0, place, features)
    return Prototypes(classes, sums / counts[:, None], counts)


def nearness(features: Tensor, means: Tensor) -> Tensor:
    """−‖features − prototype‖² for each prototype, without −‖features‖², which is the same for all of them."""
    return 2 * features @ means.T - means.square().sum(1)


def places(classes: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Where each label stands among `classes`, which rise, and whether it stands there at all."""
    if not len(classes):
        return torch.zeros_like(labels), torch.zeros_like(labels, dtype=torch.bool)
    place = torch.searchsorted(classes, labels).clamp(max=len(classes) - 1)
    return place, classes[place] == labels


def distance_loss(features: Tensor, labels: Tensor, classes: Tensor, means: Tensor) -> Tensor:
    """Cross-entropy of the softmax over −distance², mean over the samples; one whose class has no prototype adds 0."""
    place, there = places(classes, labels)
    return F.cross_entropy(nearness(features[there], means), place[there], reduction="sum") / len(labels)


def merged(found: Sequence[Prototypes]) -> Prototypes:
    """Of each class the mean over those who hold it, by their number of samples; summed in float64 in this order."""
    labels = torch.cat([each.classes for each in found])
    classes, place = torch.unique(labels, return_inverse=True)
    counts = torch.cat([each.counts for each in found])
    means = torch.cat([each.means for each in found])
    totals = torch.zeros(len(classes), dtype=counts.dtype, device=counts.device).index_add_(0, place, counts)
    sums = torch.zeros(len(classes), means.shape[1], dtype=torch.float64, device=means.device)
    sums.index_add_(0, place, means.double() * counts[:, None])
    return Prototypes(classes, (sums / totals[:, None]).to(means.dtype), totals)
