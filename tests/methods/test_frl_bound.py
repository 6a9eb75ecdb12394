"""The convergence bound of FRL against Theorem 1."""

from __future__ import annotations

import numpy as np
import pytest

from fewer.errors import SettingError
from fewer.methods.frl_bound import (
    convergence_bound,
    convergence_error,
)

CONSTANTS: dict[str, float] = {"smoothness": 2.0, "sample_variance": 3.0, "client_variance": 5.0}


def test_convergence_bound_matches_theorem_1() -> None:
    assert convergence_error(0.01, 3, 60, 10, **CONSTANTS) == pytest.approx(0.01 * 2 * 32 * (3 / 60 + 5 / 10))
    assert convergence_bound(100, 7.0, 0.01, 0.352) == pytest.approx(28 / (0.01 * 100) + 0.352)
    with pytest.raises(SettingError, match="clients must be >= 1, got batch_size = 60, clients = 0"):
        convergence_error(0.01, 3, 60, 0, **CONSTANTS)
    with pytest.raises(SettingError, match="got episodes = 0, meta_lr = 0.01"):
        convergence_bound(0, 7.0, 0.01, 0.352)
    assert convergence_error(0.01, 4, 60, 10, **CONSTANTS) == pytest.approx(
        2 * convergence_error(0.01, 3, 60, 10, **CONSTANTS)
    )


@pytest.mark.parametrize("start_distance", [8.0, 0.0], ids=["far", "at the optimum"])
@pytest.mark.parametrize(("beta", "rounds", "k"), [(0.05, 1, 2), (0.05, 3, 5), (0.01, 2, 10)])
def test_preparation_on_quadratics_stays_below_the_bound(
    beta: float, rounds: int, k: int, start_distance: float
) -> None:
    """f_k(φ) = L/2 (φ − c_k)²: a group ends at q φ + (1 − q) c̄, q = (1 − αL)^R, so ∇F(φ) = L q² (φ − mean of c).

    A gradient on 5 samples has noise. At the optimum, the bound is ε alone.
    """
    rng, smoothness, alpha, clients, episodes = np.random.default_rng(1), 1.5, 0.2, 40, 400
    centers = rng.normal(0, 2, clients)
    shrinkage = (1 - alpha * smoothness) ** rounds
    phi = initial = centers.mean() + start_distance
    squares = []
    for _ in range(episodes):
        squares.append((smoothness * shrinkage**2 * (phi - centers.mean())) ** 2)
        group = centers[rng.choice(clients, k, replace=False)]
        noise = rng.normal(0, 3 / np.sqrt(5), k)
        phi -= beta * float(np.mean(smoothness * (shrinkage * phi + (1 - shrinkage) * group.mean() - group) + noise))
    gap = smoothness / 2 * shrinkage**2 * (initial - centers.mean()) ** 2
    variance = smoothness**2 * float(centers.var())
    error = convergence_error(beta, rounds, 5, k, smoothness=smoothness, sample_variance=9.0, client_variance=variance)
    assert 0 < np.mean(squares) <= convergence_bound(episodes, gap, beta, error)
    assert not start_distance or abs(phi - centers.mean()) < start_distance
