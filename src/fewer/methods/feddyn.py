"""FedDyn: local training with a dynamic regularizer.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: Federated Learning Based on Dynamic Regularization,
ICLR 2021, Algorithm 1. θ is the global model, and g_k is the gradient of client k's loss at its last local model. Of
m clients, those in P answer in a round:

    θ_k = argmin_θ L_k(θ) − ⟨g_k, θ⟩ + α / 2 ‖θ − θ^{t−1}‖²
    g_k ← g_k − α (θ_k − θ^{t−1})
    h ← h − α / m Σ_{k ∈ P} (θ_k − θ^{t−1})
    θ^t = 1 / |P| Σ_{k ∈ P} θ_k − h / α

Departures:

- The argmin is a fixed number of SGD steps on batches drawn with replacement, as in FedAvg.
- A client whose answer was lost returns to its old g_k (confirmed.py). Otherwise h would not be the mean of all g_k.
- Buffers are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import PositiveFloat
from torch import Tensor

from fewer.methods import Client, Group, ModelState, SearchSpace
from fewer.methods.confirmed import (
    count_answers,
    last_counted,
    load_confirmed,
    store_unconfirmed,
    zeros_like_parameters,
)
from fewer.methods.fedavg import LocalTraining, average_equally
from fewer.models import Task, Weights, get_weights
from fewer.registry import METHODS
from fewer.runtime import Clients, on_client


@dataclass(frozen=True)
class FedDynState(ModelState):
    """The global model θ and the server's state h."""

    h: Weights
    counted: dict[str, int]
    """The last round in which each client's answer was counted."""


@METHODS.register("feddyn")
class FedDyn(LocalTraining[FedDynState]):
    """FedAvg whose clients add a regularizer that makes their optimum that of all clients."""

    group: ClassVar[Group] = "drift correction"

    tunable: ClassVar[SearchSpace] = {**LocalTraining.tunable, "alpha": (0.01, 0.03, 0.1)}

    alpha: PositiveFloat = 0.03
    """Weight of the regularizer (α)."""

    def init(self, task: Task, seed: int) -> FedDynState:
        """θ at random and h = 0."""
        model = task.initial_weights(seed)
        return FedDynState(model, zeros_like_parameters(task.net(), model), {})

    def round(self, state: FedDynState, clients: Clients) -> FedDynState:
        """Updates h and θ with the models of the clients that answered."""
        cohort = self.sample_cohort(clients)
        counted = last_counted(state.counted, cohort)
        answers = clients.ask(
            cohort, self.train_regularized, model=state.model, counted=counted, returns={"model": state.model}
        )
        model, h = average_equally(answers), {}
        share = len(answers) / len(clients)  # |P| / m
        for name, old in state.h.items():
            h[name] = old - self.alpha * share * (model[name] - state.model[name])
            model[name] = model[name] - h[name] / self.alpha
        return FedDynState(model, h, count_answers(state.counted, answers, clients.round))

    @on_client(stream="train")
    def train_regularized(self, client: Client, model: Weights, counted: int) -> dict[str, Any]:
        """Trains θ_k from θ^{t−1}, and updates g_k."""
        net = client.net(model)
        named = [(name, parameter) for name, parameter in net.named_parameters() if parameter.requires_grad]
        start = {name: parameter.detach().clone() for name, parameter in named}
        g_k = load_confirmed(client, counted, start.items())

        def add_regularizer(theta: list[Tensor], gradients: tuple[Tensor, ...]) -> None:
            """∇L_k(θ) − g_k + α (θ − θ^{t−1})"""
            torch._foreach_sub_(gradients, [g_k[name] for name in start])
            torch._foreach_add_(gradients, torch._foreach_sub(theta, list(start.values())), alpha=self.alpha)

        self.train_net(net, client, modify_gradients=add_regularizer)
        changed = {name: g_k[name] - self.alpha * (parameter.detach() - start[name]) for name, parameter in named}
        store_unconfirmed(client, g_k, changed)
        return {"model": get_weights(net)}
