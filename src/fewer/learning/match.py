"""Condensation by distribution matching: synthetic images learn the feature statistics of real ones in random nets.

Zhao, Bilen: Dataset Condensation with Distribution Matching, WACV 2023, matches the mean of each class. Here the
standard deviation is matched too, because the mean alone ignores noise that differs between images. A step is cheap: it
trains no net and needs no second derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fewer.data import Samples
from fewer.learning.augment import apply_affine, draw_affine

REAL_PER_CLASS = 64
"""Real samples per class and step."""
VARIANCE_EPS = 1e-2
"""Added to variances, because the square root has no gradient at 0."""


def match_statistics(
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
    """Trains `images` to match the class statistics of real samples: `steps` of Adam, each with a new random net."""
    images = images.clone().requires_grad_()
    optimizer = torch.optim.Adam([images], lr=lr)
    y = real.labels
    classes = torch.tensor(sorted(set(labels.tolist()) & set(y.tolist())), device=labels.device)
    indices_by_class = [torch.nonzero(y == label).squeeze(1).cpu() for label in classes]
    image_means = _build_averaging_matrix(labels, classes)
    real_means = _build_averaging_matrix(classes.repeat_interleave(REAL_PER_CLASS), classes)
    net.requires_grad_(False)
    with feature_extractor(net) as extract:
        for _ in range(steps):
            reinitialize(net)
            batch = [
                indices[torch.randint(len(indices), (REAL_PER_CLASS,), generator=stream)]
                for indices in indices_by_class
            ]
            x, _ = real.pick(torch.cat(batch))
            synthetic = images
            if augment:  # the same map for both
                affine = draw_affine(1, stream)
                x, synthetic = apply_affine(x, affine), apply_affine(images, affine)
            with torch.no_grad():
                target = class_statistics(extract(x), real_means)
            loss = statistics_distance(class_statistics(extract(synthetic), image_means), target)
            (images.grad,) = torch.autograd.grad(loss, images)
            optimizer.step()
    return images.detach()


def class_statistics(features: Tensor, averaging: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each class; `averaging` (classes × samples) takes class means."""
    mean = averaging @ features
    variance = (averaging @ features.square() - mean.square()).clamp_min(0)
    return mean, (variance + VARIANCE_EPS).sqrt()


def statistics_distance(statistics: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    """Squared distance of means and standard deviations, summed over classes and features."""
    return sum(((a - b).square().sum() for a, b in zip(statistics, target, strict=True)), torch.zeros(()))


def reinitialize(net: nn.Module) -> None:
    """Draws new random weights for every layer with `reset_parameters`, from the global random state."""
    for module in net.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()


class _Cut(Exception):
    """Ends a forward pass before the cut layer, with the features."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.features = features


@contextmanager
def feature_extractor(net: nn.Module) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yields a function that runs the net up to the end of its feature maps, and no layer after that.

    The cut is before the first linear layer that follows a convolution, or else before the last linear layer. For a
    net without linear layers, the features are its scores.
    """
    layer = _find_cut_layer(net)

    def cut(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        raise _Cut(inputs[0])

    def extract(x: Tensor) -> Tensor:
        try:
            features: Tensor = net(x)
        except _Cut as end:
            features = end.features
        return features.flatten(1)

    hook = layer.register_forward_pre_hook(cut) if layer else None
    try:
        yield extract
    finally:
        if hook:
            hook.remove()


def _build_averaging_matrix(labels: Tensor, classes: Tensor) -> Tensor:
    """Classes × samples: multiplied by features, it gives class means."""
    mask = (classes[:, None] == labels).float()
    return mask / mask.sum(1, keepdim=True)


def _find_cut_layer(net: nn.Module) -> nn.Module | None:
    seen_convolution, linear = False, None
    for module in net.modules():
        seen_convolution |= isinstance(module, nn.Conv1d | nn.Conv2d)
        if isinstance(module, nn.Linear):
            linear = module
            if seen_convolution:
                break
    return linear
