"""D-PSGD on a ring: clients average their models with those of their two neighbors.

Lian, Zhang, Zhang, Hsieh, Zhang, Liu: Can Decentralized Algorithms Outperform Centralized Algorithms?, NeurIPS 2017,
Algorithm 1; with several local steps and momentum it is DFedAvgM (Sun, Li, Wang, IEEE TPAMI 2023, Algorithm 1). All
clients stand in a ring. In a round, client i receives the models of both neighbors and trains the mean

    x_i ← (x_{i−1} + x_i + x_{i+1}) / 3

There is no global model: each client has its own, and they agree more and more.

Departures:

- A fixed number of local steps on batches drawn with replacement, as in FedAvg. `momentum=0.9` makes
  it DFedAvgM. D-PSGD itself takes one step, with the gradient at a client's own model before averaging.
- A server passes the models on, so it sees them and keeps the last ones. All clients take part in every round.
- If the answer of a neighbor is lost, its last model that arrived is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from fewer.learning import weighted_mean
from fewer.methods import Client, Group, PersonalMethod, State
from fewer.methods.fedavg import LocalTraining
from fewer.models import Task, Weights, get_weights
from fewer.registry import METHODS
from fewer.runtime import Clients, Each, on_client


@dataclass(frozen=True)
class NeighborsState(State):
    """The last model of every client that arrived, stacked by weight (clients × shape); a single one at first."""

    models: Weights


@METHODS.register("dpsgd-ring")
class DPSGDRing(PersonalMethod[NeighborsState], LocalTraining[NeighborsState]):
    """Each client averages its model with those of its two neighbors in a ring, and trains the mean."""

    group: ClassVar[Group] = "sequential"
    accepts_unseen_clients: ClassVar[bool] = False

    def init(self, task: Task, seed: int) -> NeighborsState:
        """All clients start from the same weights."""
        return NeighborsState({name: tensor[None] for name, tensor in task.initial_weights(seed).items()})

    def round(self, state: NeighborsState, clients: Clients) -> NeighborsState:
        """Each client gets its neighbors' models, and answers with its own."""
        count = len(clients)
        models = {name: stack.expand(count, *stack.shape[1:]).clone() for name, stack in state.models.items()}

        def models_of(neighbor: int) -> Each:
            """The model of the client at this distance along the ring, for each client."""
            return Each(
                {i: {name: stack[(i + neighbor) % count] for name, stack in models.items()} for i in range(count)}
            )

        returns = {"model": {name: stack[0] for name, stack in models.items()}}
        fields = {"left": models_of(-1), "right": models_of(1)}
        answers = clients.ask(range(count), self.train_mean, **fields, returns=returns)
        for answer in answers:
            for name, stack in models.items():
                stack[answer.client] = answer["model"][name]
        return NeighborsState(models)

    @on_client(stream="train")
    def train_mean(self, client: Client, left: Weights, right: Weights) -> dict[str, Any]:
        """x_i ← (x_{i−1} + x_i + x_{i+1}) / 3, then local training."""
        own = client.store.get("model") or client.initial_weights()
        net = client.net(weighted_mean([left, own, right], [1, 1, 1]))
        self.fit(net, client)
        weights = get_weights(net)
        client.store.put("model", weights)
        return {"model": weights}

    def personal_model(self, shared: Weights, client: Client) -> nn.Module:
        """The client's own model; before its first round, the initial one."""
        return client.net(client.store.get("model") or client.initial_weights())
