"""The task: inputs, targets, net, loss and metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

from fewer.models.objective import ACCURACY, Kind, Loss, Metric
from fewer.models.weights import Weights, get_weights
from fewer.runtime.streams import global_streams

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Task:
    """The inputs, targets, net, loss and metrics that all clients share."""

    shape: tuple[int, ...]
    """Shape of one input."""
    classes: int
    """Number of classes; of labels or numbers to predict, if targets are floats."""
    build_net: Callable[[], nn.Module]
    """Builds a net with random weights from the global generators."""
    device: torch.device = CPU
    pretrained: Weights | None = None
    """Initial weights; drawn at random if None."""
    kind: Kind = "classification"
    """What the net predicts."""
    loss: Loss = F.cross_entropy
    """Maps the outputs of a batch and its targets to the mean loss."""
    metrics: tuple[Metric, ...] = (ACCURACY,)
    """What evaluations measure. The first metric is the primary one, which ranks runs."""
    encoder: nn.Module | None = None
    """The frozen encoder that computes the inputs; None if inputs are not features of one."""
    partial: bool = False
    """True if only some parameters are trained. The others are buffers that the weights leave out."""
    _initial: dict[int, Weights] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The most recent initial weights, by seed. Cached, because clients need them in every round."""

    @property
    def has_classes(self) -> bool:
        """True if the net predicts one class for each sample."""
        return self.kind in ("classification", "next-token")

    def net(self) -> nn.Module:
        """Builds a net on the task's device. Load weights before you use it."""
        with global_streams("net"):
            return self.build_net().to(self.device)

    def initial_weights(self, seed: int) -> Weights:
        """The weights that training starts from. They depend on the seed alone, so they are never sent."""
        if self.pretrained is not None:
            return {name: tensor.to(self.device) for name, tensor in self.pretrained.items()}
        if seed not in self._initial:
            self._initial.clear()
            with global_streams(seed, "model"):
                self._initial[seed] = get_weights(self.build_net().to(self.device))
        return {name: tensor.clone() for name, tensor in self._initial[seed].items()}
