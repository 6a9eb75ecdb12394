"""Local: every client trains alone. The baseline that shows what federation gains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fewer.methods.base import Client, PersonalMethod
from fewer.methods.fedavg import FedAvg
from fewer.models import Task, Weights, get_weights
from fewer.registry import METHODS
from fewer.runtime import Clients, on_client


@dataclass(frozen=True)
class EmptyState:
    """The server has no state."""


@METHODS.register("local")
class Local(PersonalMethod, FedAvg):
    """Each client trains its own model on its own data. Clients are sampled as in FedAvg, but share nothing."""

    def init(self, task: Task, seed: int) -> Any:
        """The empty state: there is no global model."""
        return EmptyState()

    def round(self, state: Any, clients: Clients) -> Any:
        """The cohort trains. No weights are sent."""
        clients.ask(self.sample_cohort(clients), self.train_personal, returns={})
        return state

    @on_client(stream="practise")
    def train_personal(self, client: Client) -> dict[str, Any]:
        """Continues training the client's own model."""
        net = self.personal_model(client, {})
        self.fit(net, client)
        client.store.put("model", get_weights(net))
        return {}

    def broadcast(self, state: Any) -> Weights:
        """Nothing: clients keep their models."""
        return {}

    def personal_model(self, client: Client, model: Weights) -> nn.Module:
        """The client's own model; before its first round, the initial one."""
        return client.net(client.store.get("model") or client.initial_weights())
