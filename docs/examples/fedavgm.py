"""FedAvgM: FedAvg with momentum on the server.

Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019.
"""

from dataclasses import dataclass

import torch
from pydantic import Field, PositiveFloat

from fewer import Clients, FedAvg, ModelState, Task
from fewer.models import Weights, split_buffers


@dataclass(frozen=True)
class MomentumState(ModelState):
    """The global model, and the momentum v of its parameters."""

    momentum: Weights


class FedAvgM(FedAvg):
    """FedAvg with momentum on the server."""

    server_lr: PositiveFloat = 1.0
    """Learning rate of the server."""
    server_momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of the server (β)."""

    def init(self, task: Task, seed: int) -> MomentumState:
        weights = task.initial_weights(seed)
        parameters, _ = split_buffers(task.net(), weights)  # batch statistics are buffers: they get no momentum
        return MomentumState(weights, {name: torch.zeros_like(tensor) for name, tensor in parameters.items()})

    def round(self, state: MomentumState, clients: Clients) -> MomentumState:
        model = dict(super().round(state, clients).model)  # FedAvg's mean, also of the buffers
        momentum = {}
        for name, velocity in state.momentum.items():
            momentum[name] = self.server_momentum * velocity + (state.model[name] - model[name])  # v ← βv + Δw
            model[name] = state.model[name] - self.server_lr * momentum[name]  # w ← w − v
        return MomentumState(model, momentum)
