"""FedAvg(Meta): FedAvg whose model a new client fine-tunes on its support. FedMeta's baseline.

Chen, Luo, Dong, Li, He: Federated Meta-Learning with Fast Convergence and Efficient Communication, 2018, Section 4.1:
training uses all samples of the training clients; with `adapt_steps = 0` it is plain FedAvg, judged on new clients.
Departures: as FedAvg; local training is SGD where the paper has Adam (`optimizer = adam`: this too); fine-tuning is
plain gradient descent on the whole support.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import nn
from torch.nn import functional as F

from fewer.data import Samples
from fewer.learning import draw_batches, sgd, weighted_mean
from fewer.learning.flops import MAX_FLOPS
from fewer.methods.base import MAX_SIZE, Client
from fewer.methods.new_clients import NewClients, descend, everything
from fewer.models import Task, Weights, weights_of
from fewer.registry import METHODS
from fewer.runtime import Clients, on_client
from fewer.wire import Codec, Coded, Number


@dataclass(frozen=True)
class FedAvgMetaState:
    """The global model, and what it has cost."""

    model: Weights
    flops: int


@METHODS.register("fedavg-meta")
class FedAvgMeta(NewClients):
    """FedAvg on some clients' data; a new client fine-tunes the global model on its support (adapt_steps = 0: not)."""

    tunable: ClassVar[dict[str, tuple[float, ...]]] = {
        "lr": (0.03, 0.1, 0.3, 1.0),
        "adapt_lr": (0.01, 0.03, 0.1, 0.3),
    }

    lr: PositiveFloat = 0.1
    """Step size of local training (η)."""
    local_steps: PositiveInt = 20
    """Local steps in a round."""
    batch_size: PositiveInt = 32
    """Samples in a step."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """Of local training; Adam begins anew in each round."""
    adapt_steps: NonNegativeInt = 1
    """Steps of gradient descent that a new client takes on its support."""
    adapt_lr: PositiveFloat = 0.1
    """Their step size."""
    codec: Codec = "float32"
    """How models are written on the wire."""

    def search_space(self) -> Mapping[str, Sequence[float]]:
        """There is nothing to choose for a fine-tuning that does not happen."""
        return {name: grid for name, grid in self.tunable.items() if self.adapt_steps or name != "adapt_lr"}

    def init(self, task: Task, seed: int) -> FedAvgMetaState:
        """The initial model."""
        return FedAvgMetaState(task.initial(seed), 0)

    def round(self, state: FedAvgMetaState, clients: Clients) -> FedAvgMetaState:
        """w ← Σ (n_k / n) w_k over the clients that answered."""
        answers = clients.ask(
            self.sample_cohort(clients),
            self.local_train,
            model=Coded(state.model, self.codec),
            returns={"model": state.model, "size": Number(int, 1, MAX_SIZE), "flops": Number(int, 0, MAX_FLOPS)},
        )
        flops = state.flops + sum(answer["flops"] for answer in answers)
        return FedAvgMetaState(
            self.merge(state.model, [(answer["model"], answer["size"]) for answer in answers]), flops
        )

    def merge(self, model: Weights, found: Sequence[tuple[Weights, int]]) -> Weights:
        """The new global model from clients' models and sizes: what relatives change."""
        return weighted_mean([theirs for theirs, _ in found], [size for _, size in found])

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        """Local training on all samples of the client."""
        net = client.net(model)
        with self.tally(client) as tally:
            self.learn(net, client)
        return {"model": Coded(weights_of(net), self.codec), "size": len(self.samples(client)), "flops": tally.flops}

    def learn(self, net: nn.Module, client: Client) -> None:
        """Some steps of SGD or Adam, in place: what relatives change."""
        samples = self.samples(client)
        batches = samples.batches(
            draw_batches(len(samples), self.local_steps, self.batch_size, client.stream("batches"))
        )
        if self.optimizer == "sgd":
            sgd(net, batches, self.lr)
            return
        optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=self.lr)
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    # A new client.

    def initialization(self, shared: Weights) -> Weights:
        """The global model."""
        return shared

    def adapt(self, net: nn.Module, support: Samples, shared: Weights) -> None:
        """Fine-tuning."""
        descend(net, everything(support, self.adapt_steps), self.adapt_lr)
