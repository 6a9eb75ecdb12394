"""Plain SGD, the local training of most methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.data import Samples

GradientHook = Callable[[list[Tensor], tuple[Tensor, ...]], None]
"""Takes parameters and gradients, and changes the gradients in place."""
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Maps a net, inputs and labels to a loss."""


def draw_batches(num_samples: int, steps: int, batch_size: int, stream: torch.Generator) -> Tensor:
    """Draws sample indices for all batches (steps × batch size), uniformly with replacement."""
    return torch.randint(num_samples, (steps, batch_size), generator=stream)


def epoch_batches(
    samples: Samples, epochs: int, batch_size: int | None, stream: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields batches of all samples, in a new order each epoch. If `batch_size` is None, an epoch is one batch.

    A single sample left at the end joins the batch before it, because batch norm cannot train on one sample.
    """
    for _ in range(epochs):
        parts = list(torch.split(torch.randperm(len(samples), generator=stream), batch_size or len(samples)))
        if len(parts) > 1 and len(parts[-1]) == 1 < len(parts[-2]):
            parts[-2:] = [torch.cat(parts[-2:])]
        yield from map(samples.pick, parts)


def cross_entropy(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy of a batch."""
    return F.cross_entropy(net(x), y)


def sgd(
    net: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    lr: float,
    modify_gradients: GradientHook | None = None,
    loss: Loss = cross_entropy,
) -> None:
    """Trains the net in place, with one step w ← w − lr · ∇loss per batch.

    `modify_gradients(parameters, gradients)` may change the gradients before each step.
    """
    net.train()
    parameters: list[Tensor] = [parameter for parameter in net.parameters() if parameter.requires_grad]
    for x, y in batches:
        gradients = torch.autograd.grad(loss(net, x, y), parameters, allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            if modify_gradients is not None:
                modify_gradients(parameters, gradients)
            torch._foreach_add_(parameters, gradients, alpha=-lr)
