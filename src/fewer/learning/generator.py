"""A class-conditional generator of features, trained through a classifier's head (FedGen, FedMK).

Zhu, Hong, Zhou: Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021, Eq 4. The diversity
term comes from its released code: without it, all features of a class collapse to one point. Generated features end
with the activation that ends the encoder: behind a ReLU, a head never sees a negative feature. (In the released code,
both ranges are all numbers.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.models import Task, Weights, load_weights
from fewer.models.split import find_activation, find_head

GeneratorOutput = Literal["encoder", "linear"]
"""The range of generated features: that of the encoder's features, or all numbers."""


class Generator(nn.Module):
    """G(noise, y): maps noise and a one-hot label to features, with one hidden layer and batch norm.

    `activation` ends the features.
    """

    def __init__(
        self, classes: int, features: int, activation: nn.Module | None = None, noise: int = 32, hidden: int = 256
    ) -> None:
        super().__init__()
        self.classes, self.noise = classes, noise
        layers = nn.Linear(noise + classes, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, features)
        self.body = nn.Sequential(*layers, activation or nn.Identity())

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:
        """Features for these labels."""
        features: Tensor = self.body(torch.cat([noise, F.one_hot(y, self.classes).to(noise.dtype)], dim=1))
        return features

    def draw(self, count: int, stream: torch.Generator, class_weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Draws noise and labels for `count` features; labels are uniform, or in proportion to `class_weights`."""
        parameter = next(self.parameters())
        noise = torch.randn(count, self.noise, generator=stream).to(parameter)
        if class_weights is None:
            y = torch.randint(self.classes, (count,), generator=stream)
        else:
            y = torch.multinomial(class_weights.cpu(), count, replacement=True, generator=stream)
        return noise, y.to(parameter.device)


def diversity_loss(noise: Tensor, features: Tensor) -> Tensor:
    """exp(−mean over pairs of ‖noise_i − noise_j‖² · |z_i − z_j|), norms averaged over coordinates; 1 if collapsed."""
    noise_distance = (noise[:, None] - noise[None]).square().mean(2)
    feature_distance = (features[:, None] - features[None]).abs().mean(2)
    return torch.exp(-(noise_distance * feature_distance).mean())


def build_generator(task: Task, net: nn.Module, output: GeneratorOutput, weights: Weights | None = None) -> Generator:
    """Builds a generator for the inputs of the net's head, with the given or with new weights."""
    activation = find_activation(task, net) if output == "encoder" else None
    generator = Generator(task.classes, find_head(task, net)[1], activation).to(task.device)
    if weights is not None:
        load_weights(generator, weights)
    return generator


def train_generator(
    generator: Generator,
    classifier: Callable[[Tensor, Tensor], Tensor],
    class_weights: Tensor,
    stream: torch.Generator,
    *,
    steps: int,
    lr: float,
    batch_size: int,
) -> None:
    """Trains the generator in place, so that `classifier` predicts the class that features were generated for.

    `classifier` maps features and their classes to logits.
    """
    optimizer = torch.optim.Adam(generator.parameters(), lr=lr)
    generator.train()
    parameters = list(generator.parameters())
    for _ in range(steps):
        noise, y = generator.draw(batch_size, stream, class_weights)
        features = generator(noise, y)
        loss = F.cross_entropy(classifier(features, y), y) + diversity_loss(noise, features)
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient  # the classifier's own gradients stay untouched
        optimizer.step()
