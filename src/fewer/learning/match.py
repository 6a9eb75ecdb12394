"""Condensation by statistics: images whose features, under random nets, are spread as those of real samples.

Zhao, Bilen: Dataset Condensation with Distribution Matching, WACV 2023, matches the mean of each class. Here the
standard deviation is matched too: the mean alone does not see noise that differs from image to image. No net is trained
and no second derivative is needed, so a step is cheap.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fewer.data import Samples
from fewer.learning.augment import draw_moves, move

REAL = 64
"""Real samples of each class in a step."""
FLOOR = 1e-2
"""Added to variances, whose root has no slope at 0."""


def match(
    net: nn.Module,
    images: Tensor,
    labels: Tensor,
    real: Samples,
    *,
    steps: int,
    lr: float,
    augment: bool,
    stream: torch.Generator,
) -> Tensor:
    """`images` after `steps` of Adam towards the statistics of the real samples, under another random net each."""
    images = images.clone().requires_grad_()
    optimizer = torch.optim.Adam([images], lr=lr)
    y = real.labels
    held = torch.tensor(sorted(set(labels.tolist()) & set(y.tolist())), device=labels.device)
    numbers = [torch.nonzero(y == label).squeeze(1).cpu() for label in held]
    ours = _means(labels, held)
    theirs = _means(held.repeat_interleave(REAL), held)
    net.requires_grad_(False)
    with _features(net) as features:
        for _ in range(steps):
            redraw(net)
            drawn = [of[torch.randint(len(of), (REAL,), generator=stream)] for of in numbers]
            x, _ = real.pick(torch.cat(drawn))
            made = images
            if augment:
                one = draw_moves(1, stream)
                x, made = move(x, one), move(images, one)
            with torch.no_grad():
                wanted = statistics(features(x), theirs)
            (gradient,) = torch.autograd.grad(distance(statistics(features(made), ours), wanted), images)
            images.grad = gradient
            optimizer.step()
    return images.detach()


def statistics(features: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each class; `means` (classes × samples) takes the mean of each."""
    mean = means @ features
    variance = (means @ features.square() - mean.square()).clamp_min(0)
    return mean, (variance + FLOOR).sqrt()


def distance(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> Tensor:
    """Squared distance of means and of deviations, summed over classes and features."""
    return sum(((a - b).square().sum() for a, b in zip(ours, theirs, strict=True)), torch.zeros(()))


def redraw(net: nn.Module) -> None:
    """New random weights for every layer that knows how to draw them, from the global stream."""
    for module in net.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()


def _means(labels: Tensor, held: Tensor) -> Tensor:
    chosen = (held[:, None] == labels).float()
    return chosen / chosen.sum(1, keepdim=True)


@contextmanager
def _features(net: nn.Module) -> Iterator[nn.Module]:
    """The net cut off where its feature maps end: before the first full layer after a convolution, or the last one.

    A net without full layers gives its scores.
    """
    kept: list[Tensor] = []
    layer = _end_of_maps(net)

    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            whole = net(x)
            return (kept.pop() if kept else whole).flatten(1)

    hook = layer.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0])) if layer else None
    try:
        yield Cut()
    finally:
        if hook:
            hook.remove()


def _end_of_maps(net: nn.Module) -> nn.Module | None:
    convolved, full = False, None
    for module in net.modules():
        convolved |= isinstance(module, nn.Conv1d | nn.Conv2d)
        if isinstance(module, nn.Linear):
            full = module
            if convolved:
                break
    return full
