"""DBE: FedAvg with a personal shift of the features, and features that agree on average.

Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan: Eliminating Domain Bias for Federated Learning in Representation Space,
NeurIPS 2023, Algorithm 1, on top of FedAvg. The net is a head on an encoder f. Client i has a trainable vector z̄_i of
its own (the memory of its representation bias). It predicts with head(f(x) + z̄_i) and minimizes

    ℓ = CE(head(f(x) + z̄_i), y) + κ · mean_d (z̄^g_i − z̄^g)²        (mean regularization)

where z̄^g_i is the mean of f(x) over the batch, moved from the previous ones by z̄^g_i ← (1 − μ) z̄^g_i + μ · batch mean,
and z̄^g is the mean of all clients' features under the initial model, which clients send once, before training.

Departures:

- Those of FedAvg. Before training, the server asks the cohort of the first round, not all clients, for their mean
  features and numbers of samples.
- The global model predicts with head(f(x)), without a shift.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn

from fewer.learning.aggregate import combine
from fewer.learning.evaluate import EVAL_BATCH_SIZE
from fewer.methods import MAX_SAMPLES, Client, ModelState, PersonalMethod, SearchSpace
from fewer.methods.fedavg import LocalTraining, average_by_size, train_models
from fewer.models import Task, Weights, get_weights
from fewer.models.split import feature_width, split_net
from fewer.registry import METHODS
from fewer.runtime import Clients, on_client
from fewer.wire import Number, Schema, Shaped


@dataclass(frozen=True)
class DBEState(ModelState):
    """The global model, and the mean features of all clients under the initial model (z̄^g)."""

    mean: Tensor
    known: bool
    """True if the clients have sent their mean features."""


@METHODS.register("dbe")
class DBE(PersonalMethod[DBEState], LocalTraining[DBEState]):
    """FedAvg whose clients shift their features by a vector of their own, and keep the rest near a common mean."""

    has_global_model: ClassVar[bool] = True

    tunable: ClassVar[SearchSpace] = {**LocalTraining.tunable, "kappa": (0.1, 1.0, 10.0)}

    kappa: NonNegativeFloat = 1.0
    """Weight of the mean regularization (κ)."""
    mu: Annotated[float, Field(gt=0, le=1)] = 1.0
    """How fast the mean features follow the batches (μ)."""

    def init(self, task: Task, seed: int) -> DBEState:
        """The initial model, before clients have sent their mean features."""
        return DBEState(task.initial_weights(seed), torch.zeros(feature_width(task)), False)

    def round(self, state: DBEState, clients: Clients) -> DBEState:
        """Before the first round, averages the clients' mean features. Then a round of FedAvg."""
        cohort, mean = self.sample_cohort(clients), state.mean
        if not state.known:
            returns: Schema = {"mean": Shaped(tuple(mean.shape)), "size": Number(int, 1, MAX_SAMPLES)}
            parts = clients.ask(cohort, self.mean_features, returns=returns)
            sizes = [part["size"] for part in parts]
            mean = combine([{"mean": part["mean"]} for part in parts], sizes, parts.aggregation)["mean"]
        answers = train_models(clients, cohort, self.train_shifted, state.model, mean=mean)
        return DBEState(average_by_size(answers), mean, True)

    @on_client(stream="features")
    def mean_features(self, client: Client) -> dict[str, Any]:
        """The mean of f(x) over the client's samples, under the initial model."""
        encoder = split_net(client.net(client.initial_weights()).eval())[0]
        with torch.no_grad():
            features = torch.cat([encoder(x) for x, _ in client.train.chunks(EVAL_BATCH_SIZE)])
        return {"mean": features.mean(0), "size": len(client.train)}

    @on_client(stream="train")
    def train_shifted(self, client: Client, model: Weights, mean: Tensor) -> dict[str, Any]:
        """Trains the model and z̄_i together on ℓ; stores z̄_i and returns the model."""
        net = client.net(model)
        shifted = Shifted(*split_net(net), self._shift(client, len(mean)))
        running: Tensor | None = None

        def loss(_: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            nonlocal running
            z = shifted.encoder(x)
            previous = z.mean(0) if running is None else running.detach()
            running = (1 - self.mu) * previous + self.mu * z.mean(0)
            regularization = (running - mean).square().mean()
            return client.task.loss(shifted.head(z + shifted.shift), y) + self.kappa * regularization

        self.train_net(shifted, client, loss=loss)
        client.store.put("shift", shifted.shift.detach())
        return {"model": get_weights(net), "size": len(client.train)}

    def _shift(self, client: Client, width: int) -> Tensor:
        """z̄_i: zero before the client's first round."""
        stored = client.store.get("shift")
        return (torch.zeros(width) if stored is None else stored).to(client.task.device)

    def personal_model(self, shared: Weights, client: Client) -> nn.Module:
        """head(f(x) + z̄_i)"""
        net = client.net(shared)
        return Shifted(*split_net(net), self._shift(client, feature_width(client.task, net)))


class Shifted(nn.Module):
    """A net that adds a vector to its features."""

    def __init__(self, encoder: nn.Module, head: nn.Module, shift: Tensor) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head
        self.shift = nn.Parameter(shift)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of a batch."""
        scores: Tensor = self.head(self.encoder(x) + self.shift)
        return scores
