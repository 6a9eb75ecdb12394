"""A generator of features by class, as FedGen and FedMK train one beside a classifier's head.

Zhu, Hong, Zhou: Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021, Eq 4 and the
diversity term of its released form: without it all features of a class fall together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.models import Task, Weights, load_weights
from fewer.models.split import feature_width


class Generator(nn.Module):
    """G(noise, y): noise beside the one-hot label, a hidden layer with batch norm, and out come features."""

    def __init__(self, classes: int, features: int, noise: int = 32, hidden: int = 256) -> None:
        super().__init__()
        self.classes, self.noise = classes, noise
        self.body = nn.Sequential(
            nn.Linear(noise + classes, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, features)
        )

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:
        """Features of these labels."""
        features: Tensor = self.body(torch.cat([noise, F.one_hot(y, self.classes).to(noise.dtype)], dim=1))
        return features

    def draw(self, count: int, stream: torch.Generator, chances: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Noise and labels of `count` samples, labels evenly from all classes or in proportion to `chances`."""
        at = next(self.parameters())
        noise = torch.randn(count, self.noise, generator=stream).to(at)
        if chances is None:
            y = torch.randint(self.classes, (count,), generator=stream)
        else:
            y = torch.multinomial(chances.cpu(), count, replacement=True, generator=stream)
        return noise, y.to(at.device)


def diversity(noise: Tensor, features: Tensor) -> Tensor:
    """exp(−mean over pairs of ‖noise_i − noise_j‖² · |z_i − z_j|), means over coordinates: 1 when all fall together."""
    apart = (noise[:, None] - noise[None]).square().mean(2)
    spread = (features[:, None] - features[None]).abs().mean(2)
    return torch.exp(-(apart * spread).mean())


def generator_for(task: Task, net: nn.Module, weights: Weights | None = None) -> Generator:
    """A generator of the features that the net's encoder gives, with these weights or new ones."""
    generator = Generator(task.classes, feature_width(task, net)).to(task.device)
    if weights is not None:
        load_weights(generator, weights)
    return generator


def train_generator(
    make: Generator,
    says: Callable[[Tensor, Tensor], Tensor],
    chances: Tensor,
    stream: torch.Generator,
    *,
    steps: int,
    lr: float,
    batch: int,
) -> None:
    """Train it, in place, so that `says` (scores, from features and their classes) takes features for their class."""
    optimizer = torch.optim.Adam(make.parameters(), lr=lr)
    make.train()
    weights = list(make.parameters())
    for _ in range(steps):
        noise, y = make.draw(batch, stream, chances)
        features = make(noise, y)
        loss = F.cross_entropy(says(features, y), y) + diversity(noise, features)
        for weight, slope in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.grad = slope  # of the generator alone: whoever says keeps its own
        optimizer.step()
