"""FedEnsemble: FedAvg that predicts with the ensemble of all client models instead of their mean.

The baseline of Zhu, Hong, Zhou: Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021.
Clients train as in FedAvg. The prediction sums the logits of the cohort's models. With one round, this is the one-shot
ensemble (Guha, Talwalkar, Smith: One-Shot Federated Learning, 2019) of all models that clients train.

Departures: those of FedAvg. Logits are averaged, not summed: the predicted class is the same, and its softmax is a
usable confidence.

Cost: training sends as much as FedAvg. The state and its checkpoint also hold all models of the last round. A
prediction takes one forward pass per model, and an export contains all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fewer.learning.aggregate import stack_models, unstack_models
from fewer.methods import Context, ModelState
from fewer.methods.fedavg import LocalTraining, average_by_size, train_models
from fewer.models import Task, Weights
from fewer.registry import METHODS
from fewer.runtime import Clients


class Ensemble(nn.Module):
    """An ensemble of nets that averages their logits."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of a batch."""
        return torch.stack([member(x) for member in self.members]).mean(0)


@dataclass(frozen=True)
class EnsembleState(ModelState):
    """The mean model, from which clients train, and the models that it averages."""

    members: Weights
    """The models, stacked along a new first dimension."""

    @property
    def shared(self) -> Weights:
        """The members of the ensemble."""
        return self.members


@METHODS.register("fedensemble")
class FedEnsemble(LocalTraining[EnsembleState]):
    """FedAvg that predicts with the mean logits of the cohort's models."""

    @property
    def evaluates_clients(self) -> bool:
        """False: all clients use the same ensemble."""
        return False

    def init(self, task: Task, seed: int) -> EnsembleState:
        """The initial model, as an ensemble of one."""
        model = task.initial_weights(seed)
        return EnsembleState(model, stack_models([model]))

    def round(self, state: EnsembleState, clients: Clients) -> EnsembleState:
        """A round of FedAvg that also keeps the clients' models."""
        answers = train_models(clients, self.sample_cohort(clients), self.local_train, state.model)
        return EnsembleState(average_by_size(answers), stack_models([answer["model"] for answer in answers]))

    def build_predictor(self, shared: Weights, context: Context) -> nn.Module:
        """The ensemble."""
        return Ensemble([context.net(weights) for weights in unstack_models(shared)])
