"""FedEnsemble: FedAvg that answers with all clients' models instead of their mean.

The baseline of Zhu, Hong, Zhou: Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021:
clients train as in FedAvg, and the prediction is that of the summed logits of the active clients' models. Departures:
as FedAvg; the mean of the logits, not their sum, which predicts the same class with a confidence that can be read.

What it costs: training sends what FedAvg sends. But the state and its checkpoint hold the models of a round besides
their mean, a prediction takes as many passes, and whoever uses the ensemble needs all of its models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fewer.learning import weighted_mean
from fewer.methods.base import ModelState
from fewer.methods.fedavg import FedAvg
from fewer.models import Task, Weights
from fewer.registry import METHODS
from fewer.runtime import Clients


class Ensemble(nn.Module):
    """Nets that answer together: the mean of their logits."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of a batch."""
        return torch.stack([member(x) for member in self.members]).mean(0)


@dataclass(frozen=True)
class EnsembleState(ModelState):
    """The mean model, from which clients train, and the models that it is the mean of."""

    members: Weights
    """One behind the other along a first dimension."""


@METHODS.register("fedensemble")
class FedEnsemble(FedAvg):
    """FedAvg that predicts with the mean logits of the active clients' models."""

    def init(self, task: Task, seed: int) -> EnsembleState:
        """The initial model, as an ensemble of one."""
        return _members(task.initial(seed), [task.initial(seed)])

    def round(self, state: Any, clients: Clients) -> EnsembleState:
        """As FedAvg, but the models that came are kept."""
        models, sizes = self.collect(state, clients)
        return _members(weighted_mean(models, sizes), models)

    def broadcast(self, state: Any) -> Weights:
        """The models of the ensemble; their mean is `state.model`."""
        members: Weights = state.members
        return members

    def build_model(self, net: Callable[[Weights], nn.Module], weights: Weights) -> nn.Module:
        """The ensemble."""
        count = len(next(iter(weights.values())))
        return Ensemble([net({name: tensor[number] for name, tensor in weights.items()}) for number in range(count)])


def _members(mean: Weights, models: Sequence[Weights]) -> EnsembleState:
    return EnsembleState(mean, {name: torch.stack([model[name] for model in models]) for name in mean})
