"""Gaussian mixtures: moments of one component by hand, clusters, and few samples."""

from __future__ import annotations

import numpy as np
import torch
from scipy.stats import multivariate_normal

from fewer.learning.mixture import MIN_VARIANCE, Mixture, fit_mixture, log_density
from fewer.runtime import stream

SQUARE = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 4.0], [2.0, 4.0]], dtype=torch.float64)


def test_one_component_has_the_mean_and_the_variances_of_the_samples() -> None:
    mixture = fit_mixture(SQUARE, 1, False, 5, stream(0))
    assert mixture.means.tolist() == [[1.0, 2.0]] and mixture.variances.tolist() == [[1.0, 4.0]]
    assert mixture.shares.tolist() == [1.0]
    assert fit_mixture(SQUARE, 1, True, 5, stream(0)).variances.tolist() == [[2.5]]


def test_log_density_is_that_of_the_normal_distribution() -> None:
    mixture = Mixture(
        torch.tensor([0.3, 0.7]), torch.tensor([[0.0, 1.0], [2.0, -1.0]]), torch.tensor([[1.0, 2], [3, 4]])
    )
    x = torch.tensor([[0.5, 0.25], [3.0, 0.0]])
    expected = [
        [
            np.log(share) + multivariate_normal(mean, np.diag(variance)).logpdf(row) + np.log(2 * np.pi)
            for share, mean, variance in zip([0.3, 0.7], mixture.means.numpy(), mixture.variances.numpy(), strict=True)
        ]
        for row in x.numpy()
    ]
    assert np.allclose(log_density(mixture, x).numpy(), expected, atol=1e-5)


def test_two_clusters_are_found_with_their_shares() -> None:
    draw = torch.Generator().manual_seed(0)
    first, second = torch.randn(300, 2, generator=draw), 0.5 * torch.randn(100, 2, generator=draw) + 8
    for spherical in (False, True):
        mixture = fit_mixture(torch.cat([first, second]).double(), 2, spherical, 30, stream(1))
        order = mixture.means[:, 0].argsort()
        assert torch.allclose(mixture.shares[order], torch.tensor([0.75, 0.25], dtype=torch.float64), atol=1e-3)
        assert torch.allclose(mixture.means[order[1]], second.double().mean(0), atol=1e-3)
        variance = second.double().var(0, unbiased=False)
        assert torch.allclose(mixture.variances[order[1]], variance.mean() if spherical else variance, atol=1e-3)


def test_fewer_samples_than_components_and_equal_samples_keep_a_positive_variance() -> None:
    assert len(fit_mixture(SQUARE, 9, False, 3, stream(0)).means) == 4
    assert (fit_mixture(SQUARE, 4, False, 3, stream(0)).variances >= MIN_VARIANCE * 2.5).all()
    assert (fit_mixture(SQUARE[:1].repeat(3, 1), 2, True, 3, stream(0)).variances > 0).all()
