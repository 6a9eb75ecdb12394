"""Adam against torch."""

from __future__ import annotations

import torch

from fewer.learning.adam import adam_step


def test_adam_matches_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(4)]
    expected = torch.ones(5, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([expected], lr=0.03)
    weights = {"w": torch.ones(5, dtype=torch.float64), "buffer": torch.tensor(7)}
    first_moment = second_moment = {"w": torch.zeros(5, dtype=torch.float64)}
    for step, gradient in enumerate(gradients, 1):
        expected.grad = gradient
        optimizer.step()
        weights, first_moment, second_moment = adam_step(
            weights, {"w": gradient}, first_moment, second_moment, step, 0.03
        )
        if step == 1:  # Adam's first step has the length lr, whatever the size of the gradient
            assert torch.allclose(weights["w"], 1 - 0.03 * gradient.sign(), atol=1e-7)
    assert torch.allclose(weights["w"], expected.detach(), rtol=1e-12) and int(weights["buffer"]) == 7


def test_adam_with_a_tiny_gradient() -> None:
    """ε is outside the square root: a gradient of ε gives half a step, a zero gradient none."""
    gradient, zeros = torch.tensor([1e-8, 0.0], dtype=torch.float64), {"w": torch.zeros(2, dtype=torch.float64)}
    updated, _, _ = adam_step(zeros, {"w": gradient}, zeros, zeros, 1, 0.5)
    assert torch.allclose(updated["w"], torch.tensor([-0.25, 0.0], dtype=torch.float64))
