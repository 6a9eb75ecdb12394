"""The condensed images that FedMK's clients send (D̂): joined for training, and arranged for reports."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fewer.learning.aggregate import reject_outliers
from fewer.methods.capabilities import ImageGrid
from fewer.runtime import Aggregation

Knowledge = dict[str, Tensor]
"""D̂ of one client: the images of each class, by class number. A class that it does not send has no images."""
SAMPLES_PER_DRAW = 2
"""Samples of a class for each image that starts from its Gaussian. As many draws as samples would span all samples."""
MAX_SHOWN = 10
"""The most clients, or rounds, in an image grid."""


def concatenate_images(
    knowledge: Iterable[Knowledge],
    aggregation: Aggregation = Aggregation(),  # noqa: B008
) -> tuple[Tensor, Tensor]:
    """All images of several D̂, and their labels.

    A robust rule rejects clients' images of a class whose mean image is an outlier among all clients.
    """
    classes = [(images, int(label)) for d_hat in knowledge for label, images in d_hat.items()]
    if aggregation.rule != "mean":
        classes = [(images, label) for images, label in classes if len(images)]
        mean_images = torch.stack([images.mean(0).flatten() for images, _ in classes])
        kept = reject_outliers(mean_images, torch.tensor([label for _, label in classes]), aggregation)
        classes = [part for part, keep in zip(classes, kept.tolist(), strict=True) if keep]
    labels = [torch.full((len(images),), label) for images, label in classes]
    return torch.cat([images for images, _ in classes]), torch.cat(labels)


def draw_grids(knowledge: Mapping[int, Knowledge], image_history: Mapping[int, Knowledge]) -> list[ImageGrid]:
    """D̂ by client and class, and the D̂ of one client by round."""
    clients = {f"client {client}": _images_by_class(knowledge[client]) for client in sorted(knowledge)[:MAX_SHOWN]}
    per_class = 2 if len(next(iter(knowledge.values()), {})) <= MAX_SHOWN else 1
    caption = f"the last D̂ of {len(clients)} of the {len(knowledge)} clients that sent any"
    all_grids = [ImageGrid("made-by-client", "Condensed images (D̂) by client and class", caption, clients, per_class)]
    if len(image_history) > 1:
        history = sorted(image_history)
        shown = sorted({round(index) for index in torch.linspace(0, len(history) - 1, MAX_SHOWN).tolist()})
        rounds = {f"round {history[index]}": _images_by_class(image_history[history[index]]) for index in shown}
        caption = "the first image of each class in the D̂ of one client, in the rounds when it was in the cohort"
        all_grids.append(ImageGrid("made-by-round", "Condensed images (D̂) by round and class", caption, rounds))
    return all_grids


def _images_by_class(knowledge: Knowledge) -> dict[int, Tensor]:
    return {int(label): images for label, images in knowledge.items() if len(images)}


def snapshot(round: int, knowledge: Mapping[int, Knowledge], new: Mapping[int, Knowledge]) -> dict[int, Knowledge]:
    """One image per class of the client that was the first to send D̂, if it sent a new one this round."""
    first = next(iter(knowledge))
    return {round: {label: images[:1] for label, images in new[first].items()}} if first in new else {}


def draw_gaussian(x: Tensor, count: int, stream: torch.Generator) -> Tensor:
    """Draws from the Gaussian with the mean μ and the covariance C of the samples x: μ + C^½ ε, with C^½ symmetric.

    Whoever knows the seed knows ε. The draws then tell of the samples what μ and C^½ do. Random mixtures of samples
    have the same distribution, but with known weights they are linear equations in the samples.
    """
    flat = x.flatten(1)
    mean = flat.mean(0)
    noise = torch.randn(count, flat.shape[1], generator=stream).to(x)
    _, scales, axes = torch.linalg.svd(flat - mean, full_matrices=False)
    draws: Tensor = mean + (noise @ axes.T * (scales / math.sqrt(len(x)))) @ axes
    return draws.view(count, *x.shape[1:])
