"""Local: every client learns alone. The baseline that says what federation is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fewer.methods.base import Client, PersonalMethod
from fewer.methods.fedavg import FedAvg
from fewer.models import Task, Weights, weights_of
from fewer.registry import METHODS
from fewer.runtime import Clients, on_client


@dataclass(frozen=True)
class Nothing:
    """The server of Local knows nothing."""


@METHODS.register("local")
class Local(PersonalMethod, FedAvg):
    """Clients train their own models on their own data, as often as they would be asked; nothing is shared."""

    def init(self, task: Task, seed: int) -> Any:
        """There is no global model."""
        return Nothing()

    def round(self, state: Any, clients: Clients) -> Any:
        """The active clients train. What is sent is the order to do so, and that it was done."""
        clients.ask(self.sample_cohort(clients), self.train_personal, returns={})
        return state

    @on_client(stream="practise")
    def train_personal(self, client: Client) -> dict[str, Any]:
        """Go on with the client's own model."""
        net = self.personal_model(client, {})
        self.fit(net, client)
        client.store.put("model", weights_of(net))
        return {}

    def broadcast(self, state: Any) -> Weights:
        """Nothing."""
        return {}

    def personal_model(self, client: Client, model: Weights) -> nn.Module:
        """The client's own model; before its first round, the initial one."""
        return client.net(client.store.get("model") or client.initial())
