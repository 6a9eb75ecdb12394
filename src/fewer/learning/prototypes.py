"""Class prototypes: the mean features of each class, logits from distances to them, and their mean over clients.

Snell, Swersky, Zemel: Prototypical Networks for Few-shot Learning, NeurIPS 2017. The logit of a class is minus the
squared distance from a sample's features to the class prototype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fewer.learning.aggregate import MAX_NORM_RATIO, MAX_SIZE_RATIO, MIN_COHORT, max_plausible, reject_outliers
from fewer.runtime import Aggregation


class Prototypes(NamedTuple):
    """Prototypes of n classes."""

    classes: Tensor
    """Class labels, ascending (n)."""
    means: Tensor
    """Their prototypes (n × features)."""
    counts: Tensor
    """Number of samples behind each prototype (n)."""


def class_prototypes(features: Tensor, labels: Tensor) -> Prototypes:
    """The mean features of every class in `labels`, differentiable."""
    classes, positions, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    sums = features.new_zeros(len(classes), features.shape[1]).index_add(0, positions, features)
    return Prototypes(classes, sums / counts[:, None], counts)


def prototype_logits(features: Tensor, means: Tensor) -> Tensor:
    """−‖features − prototype‖² for each prototype, without −‖features‖², which is the same for all of them."""
    return 2 * features @ means.T - means.square().sum(1)


def nearest_mean(support: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
    """The class of each query: that of the nearest mean of support features. Labels are 0, 1, …"""
    return prototype_logits(queries, class_prototypes(support, labels).means).argmax(1)


def nearest_centroid(support: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
    """The class of each query: that of the nearest mean of L2-normalized features."""
    return nearest_mean(F.normalize(support), labels, F.normalize(queries))


def class_positions(classes: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The position of each label in the ascending `classes`, and whether the label is among them."""
    if not len(classes):
        return torch.zeros_like(labels), torch.zeros_like(labels, dtype=torch.bool)
    positions = torch.searchsorted(classes, labels).clamp(max=len(classes) - 1)
    return positions, classes[positions] == labels


def distance_loss(features: Tensor, labels: Tensor, classes: Tensor, means: Tensor, temperature: float = 1.0) -> Tensor:
    """Mean cross-entropy of `prototype_logits` / temperature; a sample whose class has no prototype adds 0."""
    positions, known = class_positions(classes, labels)
    logits = prototype_logits(features[known], means) / temperature
    return F.cross_entropy(logits, positions[known], reduction="sum") / len(labels)


def merge_prototypes(
    prototypes: Sequence[Prototypes],
    aggregation: Aggregation = Aggregation(),  # noqa: B008
) -> Prototypes:
    """The mean prototype of each class, weighted by number of samples; summed in float64 in the given order.

    Implausible prototypes and numbers are bounded, as in `bound_updates`. A robust rule first rejects outliers.
    """
    prototypes = reject_prototypes(prototypes, aggregation)
    labels = torch.cat([part.classes for part in prototypes])
    classes, positions = torch.unique(labels, return_inverse=True)
    counts = torch.cat([part.counts for part in prototypes])
    means = torch.cat([part.means for part in prototypes])
    if len(prototypes) >= MIN_COHORT:
        means, counts = bound_rows(means), counts.clamp(max=int(MAX_SIZE_RATIO * counts.double().quantile(0.5)))
    totals = torch.zeros(len(classes), dtype=counts.dtype, device=counts.device).index_add_(0, positions, counts)
    sums = torch.zeros(len(classes), means.shape[1], dtype=torch.float64, device=means.device)
    sums.index_add_(0, positions, means.double() * counts[:, None])
    return Prototypes(classes, (sums / totals[:, None]).to(means.dtype), totals)


def reject_prototypes(prototypes: Sequence[Prototypes], aggregation: Aggregation) -> list[Prototypes]:
    """The prototypes of each client without the outliers of their classes."""
    means = torch.cat([part.means for part in prototypes])
    kept = reject_outliers(means, torch.cat([part.classes for part in prototypes]), aggregation)
    masks = torch.split(kept, [len(part.classes) for part in prototypes])
    return [Prototypes(*(rows[mask] for rows in part)) for part, mask in zip(prototypes, masks, strict=True)]


def bound_rows(rows: Tensor) -> Tensor:
    """Scales rows that are implausibly long, compared with the median row, down to the longest plausible one."""
    norms = rows.double().norm(dim=1)
    longest = max_plausible(norms.tolist(), MAX_NORM_RATIO)
    if not bool((norms > longest).any()):
        return rows
    factors: Tensor = (longest / norms).clamp(max=1)
    return (rows.double() * factors[:, None]).to(rows.dtype)


def split_classes(labels: Tensor, subsets: int, generator: torch.Generator) -> Tensor:
    """Splits the samples of each class into random subsets: label × `subsets` + subset, for each sample.

    The subsets of a class differ by at most one sample in size.
    """
    order = torch.randperm(len(labels), generator=generator).to(labels.device)
    subset = torch.zeros_like(labels)
    for label in labels.unique():  # type: ignore[no-untyped-call]
        members = order[labels[order] == label]
        subset[members] = torch.arange(len(members), device=labels.device) % subsets
    return labels * subsets + subset


def discriminant_weights(classes: Tensor, means: Tensor, counts: Tensor, number: int, shrinkage: float) -> Tensor:
    """The linear head of FedCOF (fedcof.py) for `number` classes, from class means μ_kc of clients, one per row.

    W = G⁻¹ B with each class's weights divided by their norm; G is the scatter within classes, plus γ I and N μ μᵀ.
    """
    n_k, means = counts.double(), means.double()
    zeros, width = n_k.new_zeros(number), means.shape[1]
    total = zeros.index_add(0, classes, n_k)  # N_c
    holders = zeros.index_add(0, classes, torch.ones_like(n_k))  # K_c
    class_sums = means.new_zeros(number, width).index_add(0, classes, means * n_k[:, None])  # N_c μ_c
    mu = class_sums / total.clamp(min=1)[:, None]
    samples = (total - 1).clamp(min=0)
    factor = (samples / (holders - 1).clamp(min=1)).where(holders > 1, 0.0)  # (N_c − 1) / (K_c − 1)
    deviations = (means - mu[classes]) * (n_k * factor[classes]).sqrt()[:, None]
    scatter = deviations.T @ deviations  # within classes, without γ
    gamma = shrinkage * float(scatter.trace() / width)
    identity = torch.eye(width, dtype=scatter.dtype, device=scatter.device)
    mean = class_sums.sum(0) / total.sum()  # μ
    g = scatter + (gamma or 1.0) * identity + total.sum() * torch.outer(mean, mean)
    weights: Tensor = torch.linalg.solve(g, class_sums.T).T
    return F.normalize(weights)
