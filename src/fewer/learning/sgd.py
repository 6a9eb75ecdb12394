"""Plain stochastic gradient descent on a party's own samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Pull = Callable[[list[Tensor], tuple[Tensor, ...]], None]


def draw_batches(count: int, steps: int, batch: int, stream: torch.Generator) -> Tensor:
    """Sample numbers for `steps` batches (steps × batch), each drawn evenly from all, with replacement."""
    return torch.randint(count, (steps, batch), generator=stream)


def sgd(net: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], rate: float, pull: Pull | None = None) -> None:
    """One step w ← w − rate · ∇ cross-entropy for each batch, in place.

    `pull(parameters, gradients)` may change the gradients before each step.
    """
    net.train()
    parameters: list[Tensor] = [parameter for parameter in net.parameters() if parameter.requires_grad]
    for x, y in batches:
        gradients = torch.autograd.grad(
            F.cross_entropy(net(x), y), parameters, allow_unused=True, materialize_grads=True
        )
        with torch.no_grad():
            if pull is not None:
                pull(parameters, gradients)
            torch._foreach_add_(parameters, gradients, alpha=-rate)
