"""Per-FedAvg: FedAvg whose local steps are steps of MAML.

Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach, NeurIPS 2020, Algorithm 1: in each of its local steps a party moves its model by
−β (I − α ∇²f(w; D″)) ∇f(w − α ∇f(w; D); D′); the coordinator averages the models with equal shares. `order = first`
leaves out the Hessian, as the paper's FO variant. Departures: the Hessian is taken on D, not on a batch D″ of its own,
so that the step is the exact gradient of f(w − α ∇f(w; D); D′); the mean goes over those that answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import PositiveFloat
from torch import nn

from fewer.learning import draw_batches, weighted_mean
from fewer.learning.adapt import learnable, meta_gradient
from fewer.methods.base import Party
from fewer.methods.fedavg_meta import FedAvgMeta
from fewer.models import Weights


class PerFedAvg(FedAvgMeta):
    """FedAvg for a model that is good after one step on a party's own data, exactly or to first order."""

    name: ClassVar[str] = "per-fedavg"
    tunable: ClassVar[dict[str, tuple[float, ...]]] = {
        "rate": (0.01, 0.03, 0.1, 0.3),
        "adapt_rate": (0.01, 0.03, 0.1, 0.3),
    }

    order: Literal["exact", "first"] = "exact"
    """With second derivatives, or without."""
    rate: PositiveFloat = 0.1
    """Step size of local training (β)."""
    adapt_rate: PositiveFloat = 0.1
    """Step size of the step that a party takes to its own model (α), in training too."""

    def merge(self, model: Weights, found: Sequence[tuple[Weights, int]]) -> Weights:
        """The mean with equal shares."""
        return weighted_mean([theirs for theirs, _ in found], [1] * len(found))

    def learn(self, net: nn.Module, me: Party) -> None:
        """Local steps of MAML, each on two batches of its own, in place."""
        samples = self.samples(me)
        numbers = draw_batches(len(samples), 2 * self.steps, self.batch, me.stream("batches"))
        batches = list(samples.batches(numbers))
        parameters = dict(net.named_parameters())
        for inner, outer in zip(batches[::2], batches[1::2], strict=True):
            found = meta_gradient(net, learnable(net), [inner], outer, self.adapt_rate, self.order == "exact")
            with torch.no_grad():
                for name, slope in found.weights.items():
                    parameters[name].sub_(slope, alpha=self.rate)
