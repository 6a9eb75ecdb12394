"""Plain stochastic gradient descent on a client's own samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.data import Samples

Pull = Callable[[list[Tensor], tuple[Tensor, ...]], None]
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Of a net on inputs and labels."""


def draw_batches(count: int, steps: int, batch: int, stream: torch.Generator) -> Tensor:
    """Sample numbers for `steps` batches (steps × batch), each drawn evenly from all, with replacement."""
    return torch.randint(count, (steps, batch), generator=stream)


def epochs(samples: Samples, count: int, batch: int | None, stream: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """All samples `count` times over, each time in a new order and in steps of `batch`, or at once.

    One sample that is left over goes with the step before: batch norm can do nothing with one alone.
    """
    for _ in range(count):
        parts = list(torch.split(torch.randperm(len(samples), generator=stream), batch or len(samples)))
        if len(parts) > 1 and len(parts[-1]) == 1 < len(parts[-2]):
            parts[-2:] = [torch.cat(parts[-2:])]
        yield from map(samples.pick, parts)


def cross_entropy(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean over the batch."""
    return F.cross_entropy(net(x), y)


def sgd(
    net: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    lr: float,
    pull: Pull | None = None,
    loss: Loss = cross_entropy,
) -> None:
    """One step w ← w − rate · ∇ loss for each batch, in place.

    `pull(parameters, gradients)` may change the gradients before each step.
    """
    net.train()
    parameters: list[Tensor] = [parameter for parameter in net.parameters() if parameter.requires_grad]
    for x, y in batches:
        gradients = torch.autograd.grad(loss(net, x, y), parameters, allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            if pull is not None:
                pull(parameters, gradients)
            torch._foreach_add_(parameters, gradients, alpha=-lr)
