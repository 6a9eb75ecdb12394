"""Task: what is learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from fewer.models.weights import Weights, weights_of
from fewer.runtime.streams import global_streams

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Task:
    """Inputs, classes and the net that all clients agree on."""

    shape: tuple[int, ...]
    """Shape of one input."""
    classes: int
    """How many classes there are."""
    make: Callable[[], nn.Module]
    """Makes a net, with any weights."""
    device: torch.device = CPU
    given: Weights | None = None
    """Weights to start from; by default they are drawn."""
    _drawn: dict[int, Weights] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The weights drawn last, by their seed: clients ask for them in every round."""

    def net(self) -> nn.Module:
        """A new net on the task's device; its weights are for the caller to load."""
        with global_streams("net"):
            return self.make().to(self.device)

    def initial(self, seed: int) -> Weights:
        """The weights that learning starts from: the same for everyone who knows the seed."""
        if self.given is not None:
            return {name: tensor.to(self.device) for name, tensor in self.given.items()}
        if seed not in self._drawn:
            self._drawn.clear()
            with global_streams(seed, "model"):
                self._drawn[seed] = weights_of(self.make().to(self.device))
        return {name: tensor.clone() for name, tensor in self._drawn[seed].items()}
