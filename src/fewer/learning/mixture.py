"""Gaussian mixtures with diagonal covariances, fitted by expectation-maximization (EM)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MIN_VARIANCE = 1e-3
"""The smallest variance of a component, relative to the mean variance of the samples."""


class Mixture(NamedTuple):
    """A mixture of k Gaussians."""

    shares: Tensor
    """The share of each component (k)."""
    means: Tensor
    """k × width"""
    variances: Tensor
    """k × width; k × 1 if a component has the same variance in all directions."""


def fit_mixture(x: Tensor, components: int, spherical: bool, steps: int, stream: torch.Generator) -> Mixture:
    """Fits a mixture to samples (n × width). With fewer samples than components, each sample is one component.

    The first means are different samples, drawn at random.
    """
    variance = x.var(0, unbiased=False, keepdim=True)
    floor = (MIN_VARIANCE * variance.mean()).clamp(min=1e-12)
    if components == 1:
        return _maximize(x, x.new_ones(len(x), 1), spherical, floor)
    chosen = torch.randperm(len(x), generator=stream)[:components].to(x.device)
    width = 1 if spherical else x.shape[1]
    start = variance.mean(1, keepdim=True) if spherical else variance
    mixture = Mixture(
        x.new_full((len(chosen),), 1 / len(chosen)), x[chosen], start.clamp(min=floor).expand(len(chosen), width)
    )
    for _ in range(steps):
        mixture = _maximize(x, log_density(mixture, x).softmax(1), spherical, floor)
    return mixture


def log_density(mixture: Mixture, x: Tensor) -> Tensor:
    """log(share · density) of each sample and component (n × k), without the constant of 2π."""
    precision = 1 / mixture.variances.expand_as(mixture.means)
    squares = x.square() @ precision.T - 2 * x @ (mixture.means * precision).T
    squares = squares + (mixture.means.square() * precision).sum(1)
    return mixture.shares.log() + (precision.log().sum(1) - squares) / 2


def _maximize(x: Tensor, responsibilities: Tensor, spherical: bool, floor: Tensor) -> Mixture:
    """The shares, means and variances that maximize the likelihood, given the responsibilities (n × k)."""
    weights = responsibilities.sum(0).clamp(min=1e-12)
    means = responsibilities.T @ x / weights[:, None]
    variances = (responsibilities.T @ x.square() / weights[:, None] - means.square()).clamp(min=0)
    if spherical:
        variances = variances.mean(1, keepdim=True)
    return Mixture(weights / len(x), means, variances.clamp(min=floor))
