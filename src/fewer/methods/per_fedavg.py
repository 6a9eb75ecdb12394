"""Per-FedAvg: FedAvg whose local steps are steps of MAML.

Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach, NeurIPS 2020, Algorithm 1: in each of its local steps a client moves its model by
−β (I − α ∇²f(w; D″)) ∇f(w − α ∇f(w; D); D′); the server averages the models with equal shares. `first_order`
leaves out the Hessian, as the paper's FO variant. Departures: the Hessian is taken on D, not on a batch D″ of its own,
so that the step is the exact gradient of f(w − α ∇f(w; D); D′); the mean goes over those that answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import PositiveFloat
from torch import nn

from fewer.learning import draw_batches, weighted_mean
from fewer.learning.adapt import learnable, meta_gradient
from fewer.methods.base import Client
from fewer.methods.fedavg_meta import FedAvgMeta
from fewer.models import Weights
from fewer.registry import METHODS


@METHODS.register("per-fedavg")
class PerFedAvg(FedAvgMeta):
    """FedAvg for a model that is good after one step on a client's own data, exactly or to first order."""

    tunable: ClassVar[dict[str, tuple[float, ...]]] = {
        "lr": (0.01, 0.03, 0.1, 0.3),
        "adapt_lr": (0.01, 0.03, 0.1, 0.3),
    }

    first_order: bool = False
    """With second derivatives, or without."""
    lr: PositiveFloat = 0.1
    """Step size of local training (β)."""
    adapt_lr: PositiveFloat = 0.1
    """Step size of the step that a client takes to its own model (α), in training too."""

    def merge(self, model: Weights, found: Sequence[tuple[Weights, int]]) -> Weights:
        """The mean with equal shares."""
        return weighted_mean([theirs for theirs, _ in found], [1] * len(found))

    def learn(self, net: nn.Module, client: Client) -> None:
        """Local steps of MAML, each on two batches of its own, in place."""
        samples = self.samples(client)
        numbers = draw_batches(len(samples), 2 * self.local_steps, self.batch_size, client.stream("batches"))
        batches = list(samples.batches(numbers))
        parameters = dict(net.named_parameters())
        for inner, outer in zip(batches[::2], batches[1::2], strict=True):
            found = meta_gradient(net, learnable(net), [inner], outer, self.adapt_lr, self.first_order)
            with torch.no_grad():
                for name, slope in found.weights.items():
                    parameters[name].sub_(slope, alpha=self.lr)
