"""Adam as a pure function of weights, gradient and moments, so that a state can hold the moments between rounds."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fewer.models import Weights

DECAYS = 0.9, 0.999
TINY = 1e-8


def adam(
    weights: Mapping[str, Tensor],
    gradient: Mapping[str, Tensor],
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    step: int,
    lr: float,
) -> tuple[Weights, Weights, Weights]:
    """Step number `step` (from 1 on) of Kingma and Ba, ICLR 2015, Algorithm 1: new weights and both moments.

    Weights that have no gradient stay as they are.
    """
    one, two = DECAYS
    m = {name: one * first[name] + (1 - one) * slope for name, slope in gradient.items()}
    v = {name: two * second[name] + (1 - two) * slope.square() for name, slope in gradient.items()}
    moved = {
        name: weights[name] - lr * (m[name] / (1 - one**step)) / ((v[name] / (1 - two**step)).sqrt() + TINY)
        for name in gradient
    }
    return {**weights, **moved}, m, v
