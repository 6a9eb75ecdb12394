"""Local: every client trains alone. The baseline that shows what federation gains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fewer.methods import Client, PersonalMethod, State
from fewer.methods.fedavg import LocalTraining
from fewer.models import Task, Weights, get_weights
from fewer.registry import METHODS
from fewer.runtime import Clients, on_client


@dataclass(frozen=True)
class EmptyState(State):
    """The server has no state."""


@METHODS.register("local")
class Local(PersonalMethod[EmptyState], LocalTraining[EmptyState]):
    """Each client trains its own model on its own data. Clients are sampled as in FedAvg, but share nothing."""

    def init(self, task: Task, seed: int) -> EmptyState:
        """The empty state: there is no global model."""
        return EmptyState()

    def round(self, state: EmptyState, clients: Clients) -> EmptyState:
        """The cohort trains. No weights are sent."""
        clients.ask(self.sample_cohort(clients), self.train_personal, returns={})
        return state

    @on_client(stream="practise")
    def train_personal(self, client: Client) -> dict[str, Any]:
        """Continues training the client's own model."""
        net = self.personal_model({}, client)
        self.fit(net, client)
        client.store.put("model", get_weights(net))
        return {}

    def personal_model(self, shared: Weights, client: Client) -> nn.Module:
        """The client's own model; before its first round, the initial one."""
        return client.net(client.store.get("model") or client.initial_weights())
