"""DBE: FedAvg with a personal shift of the features, and features that agree on average.

Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan: Eliminating Domain Bias for Federated Learning in Representation Space,
NeurIPS 2023, Algorithm 1, on top of FedAvg. The net is a head on an encoder f. Client i has a trainable vector z̄_i of
its own (the memory of its representation bias). It predicts with head(f(x) + z̄_i) and minimizes

    ℓ = CE(head(f(x) + z̄_i), y) + κ/2 · mean_d (z̄^g_i − z̄^g)²        (mean regularization)

where z̄^g_i follows the mean of f(x) over the batches, z̄^g_i ← (1 − μ) z̄^g_i + μ · batch mean, from 0 in each round.
Before the first round is an initialization period: each client trains the initial model once without z̄_i and κ, and
sends the z̄^g_i that it ends with. Their mean, weighted by data size, is z̄^g, which stays fixed. The trained models are
discarded.

Departures:

- Those of FedAvg: local training, also that of the initialization period, takes a fixed number of steps, not an epoch.
- The server asks the cohort of the first round, not all clients, for their z̄^g_i.
- The global model predicts with head(f(x)), without a shift.
- κ is 1. The authors' 50 is for thousands of small steps; in ten rounds of 20 larger steps it drowns the loss.

The factor 1/2, the start of z̄^g_i at 0 and the initial z̄_i = 0 are those of the authors' code, which has κ = 50 and
μ = 1 for a small CNN on Fashion-MNIST.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn

from fewer.learning import draw_batches
from fewer.learning.aggregate import combine
from fewer.methods import MAX_SAMPLES, Client, ModelState, PersonalMethod, SearchSpace
from fewer.methods.fedavg import LocalTraining, average_by_size, train_models
from fewer.models import Task, Weights, get_weights
from fewer.models.split import feature_width, split_net
from fewer.registry import METHODS
from fewer.runtime import Clients, on_client
from fewer.wire import Number, Schema, Shaped


@dataclass(frozen=True)
class DBEState(ModelState):
    """The global model, and the mean features of all clients after the initialization period (z̄^g)."""

    mean: Tensor
    known: bool
    """True if the clients have sent their mean features."""


@METHODS.register("dbe")
class DBE(PersonalMethod[DBEState], LocalTraining[DBEState]):
    """FedAvg whose clients shift their features by a vector of their own, and keep the rest near a common mean."""

    has_global_model: ClassVar[bool] = True

    tunable: ClassVar[SearchSpace] = {**LocalTraining.tunable, "kappa": (0.1, 1.0, 10.0, 50.0)}

    kappa: NonNegativeFloat = 1.0
    """Weight of the mean regularization (κ). The authors ran 50, with many small steps."""
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
        """Trains the initial model without DBE; returns the mean of f(x) over the batches on the way (z̄^g_i)."""
        net = client.net(client.initial_weights())
        encoder, head = split_net(net)
        running = RunningMean(self.mu)

        def loss(_: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            z = encoder(x)
            running.update(z)
            return client.task.loss(head(z), y)

        samples = self.training_samples(client)
        indices = draw_batches(len(samples), self.local_steps, self.batch_size, client.stream("initial batches"))
        batches = iter(samples.batches(indices))  # read here, because more than gradients leaves the client
        self.train_net(net, client, batches, loss)
        return {"mean": running.mean.detach(), "size": len(client.train)}

    @on_client(stream="train")
    def train_shifted(self, client: Client, model: Weights, mean: Tensor) -> dict[str, Any]:
        """Trains the model and z̄_i together on ℓ; stores z̄_i and returns the model."""
        net = client.net(model)
        shifted = Shifted(*split_net(net), self._shift(client, len(mean)))
        running = RunningMean(self.mu)

        def loss(_: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            z = shifted.encoder(x)
            regularization = (running.update(z) - mean).square().mean() / 2
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


class RunningMean:
    """The mean features over the batches so far (z̄^g_i)."""

    def __init__(self, mu: float) -> None:
        self.mu, self.mean = mu, torch.zeros(())

    def update(self, features: Tensor) -> Tensor:
        """z̄^g_i ← (1 − μ) z̄^g_i + μ · batch mean. Only the batch mean has a gradient."""
        self.mean = (1 - self.mu) * self.mean.detach().to(features) + self.mu * features.mean(0)
        return self.mean


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
