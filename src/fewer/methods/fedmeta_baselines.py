"""Baselines of FedMeta that are not in its paper: personalization methods on new clients.

They train with the same clients as FedMeta and are evaluated on the same new clients, each with its support set.
FedAvg with fine-tuning is `fedavg-meta`.

- `fedbabu-meta`: Oh, Kim, Yun: FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022.
  The federation trains the encoder under a random head that is never sent. A new client fine-tunes the whole net.
- `knn-per-meta`: kNN-Per. Marfoq, Neglia, Kameni, Vidal: Personalized Federated Learning through Local Memorization,
  ICML 2022. A new client interpolates FedAvg's model with the nearest neighbors among its support samples. It takes no
  step by default.

Departures: those of `fedavg-meta`, and of fedbabu.py and knn_per.py.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import PositiveInt
from torch import nn

from fewer.methods import Client, Context, Needs, SearchSpace
from fewer.methods.fedavg_meta import FedAvgMeta
from fewer.methods.few_rounds import Fraction
from fewer.methods.knn_per import remember
from fewer.methods.new_clients import CountingModelState
from fewer.methods.personal_parts import frozen, part_names
from fewer.models import Task, Weights
from fewer.models.split import split_net
from fewer.registry import METHODS
from fewer.runtime import on_client


@METHODS.register("fedbabu-meta")
class FedBABUMeta(FedAvgMeta):
    """FedMeta's rival: FedAvg on the encoder with a fixed random head; a new client fine-tunes the net."""

    def init(self, task: Task, seed: int) -> CountingModelState:
        """The initial encoder. Clients know the initial head from the seed."""
        net, weights = task.net(), super().init(task, seed).model
        split_net(net)
        return CountingModelState({name: weights[name] for name in weights if name in part_names(net, "encoder")})

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        """Trains the encoder under the initial head; returns the encoder."""
        answer = super().local_train(client, {**client.initial_weights(), **model})
        return {**answer, "model": {name: answer["model"][name] for name in model}}

    def fit(self, net: nn.Module, client: Client) -> None:
        """FedAvg's local training, with a constant head."""
        with frozen(split_net(net)[1]):
            super().fit(net, client)

    def build_predictor(self, shared: Weights, context: Context) -> nn.Module:
        """The encoder and the initial head; on a client, after fine-tuning on its support set."""
        return super().build_predictor({**context.task.initial_weights(context.seed), **shared}, context)


@METHODS.register("knn-per-meta")
class KNNPerMeta(FedAvgMeta):
    """FedMeta's rival: FedAvg's model, interpolated with a new client's nearest neighbors in its support set."""

    needs: ClassVar[Needs] = "classes"

    tunable: ClassVar[SearchSpace] = {"lr": FedAvgMeta.tunable["lr"], "weight": (0.1, 0.3, 0.5, 0.9)}

    adapt_steps: int = 0
    """Fine-tuning steps of a new client before it stores its features."""
    weight: Fraction = 0.5
    """Weight of the neighbors (λ)."""
    neighbors: PositiveInt = 10
    """Number of neighbors (k)."""

    def search_space(self) -> SearchSpace:
        """The learning rate of FedAvg, and λ."""
        return self.tunable

    def init(self, task: Task, seed: int) -> CountingModelState:
        """The initial model. The net must have an encoder and a head."""
        split_net(task.net())
        return super().init(task, seed)

    def build_predictor(self, shared: Weights, context: Context) -> nn.Module:
        """The global model; on a client, with its support set as memory."""
        net = super().build_predictor(shared, context)
        if not isinstance(context, Client):
            return net
        return remember(net, self.adaptation_samples(context), self.weight, self.neighbors)
