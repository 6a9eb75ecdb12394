"""Adam as a pure function, so that a method can keep the moments in its state from round to round."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fewer.models import Weights

BETAS = 0.9, 0.999
EPS = 1e-8


def adam_step(
    weights: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    first_moments: Mapping[str, Tensor],
    second_moments: Mapping[str, Tensor],
    step: int,
    lr: float,
) -> tuple[Weights, Weights, Weights]:
    """Takes step number `step` (starting at 1) of Adam. Returns the new weights and both moments.

    Kingma and Ba, ICLR 2015, Algorithm 1. Weights without a gradient stay the same.
    """
    beta1, beta2 = BETAS
    m = {name: beta1 * first_moments[name] + (1 - beta1) * gradient for name, gradient in gradients.items()}
    v = {name: beta2 * second_moments[name] + (1 - beta2) * gradient.square() for name, gradient in gradients.items()}
    updated = {
        name: weights[name] - lr * (m[name] / (1 - beta1**step)) / ((v[name] / (1 - beta2**step)).sqrt() + EPS)
        for name in gradients
    }
    return {**weights, **updated}, m, v
