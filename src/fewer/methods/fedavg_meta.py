"""FedAvg(Meta): FedAvg whose model a new client fine-tunes on its support set. The baseline of FedMeta.

Chen, Luo, Dong, Li, He: Federated Meta-Learning with Fast Convergence and Efficient Communication, 2018, Section 4.1.
Training uses all samples of the training clients. With `adapt_steps = 0` it is plain FedAvg, evaluated on new clients.

Departures:
- Those of FedAvg.
- Local training is SGD by default; the paper uses Adam (`optimizer = adam`).
- Fine-tuning is plain gradient descent on the full support set.
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
from fewer.methods.base import MAX_SAMPLES, Client
from fewer.methods.new_clients import NewClients, adapt_in_place, full_batches
from fewer.models import Task, Weights, get_weights
from fewer.registry import METHODS
from fewer.runtime import Clients, on_client
from fewer.wire import Number


@dataclass(frozen=True)
class FedAvgMetaState:
    """The global model, and the operations of the clients that trained it."""

    model: Weights
    flops: int


@METHODS.register("fedavg-meta")
class FedAvgMeta(NewClients):
    """FedAvg whose model a new client fine-tunes on its support set (`adapt_steps = 0`: no fine-tuning)."""

    tunable: ClassVar[dict[str, tuple[float, ...]]] = {
        "lr": (0.03, 0.1, 0.3, 1.0),
        "adapt_lr": (0.01, 0.03, 0.1, 0.3),
    }

    lr: PositiveFloat = 0.1
    """Learning rate of local training (η)."""
    local_steps: PositiveInt = 20
    """Local steps in a round."""
    batch_size: PositiveInt = 32
    """Samples in a local step."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """Optimizer of local training. Adam starts fresh in each round."""
    adapt_steps: NonNegativeInt = 1
    """Fine-tuning steps of a new client, each on its full support set."""
    adapt_lr: PositiveFloat = 0.1
    """Learning rate of fine-tuning."""

    def search_space(self) -> Mapping[str, Sequence[float]]:
        """Tunes `adapt_lr` only if new clients fine-tune."""
        return {name: grid for name, grid in self.tunable.items() if self.adapt_steps or name != "adapt_lr"}

    def init(self, task: Task, seed: int) -> FedAvgMetaState:
        """Initializes w_0."""
        return FedAvgMetaState(task.initial_weights(seed), 0)

    def round(self, state: FedAvgMetaState, clients: Clients) -> FedAvgMetaState:
        """w_{t+1} ← Σ_k (n_k / n) w_{t+1}^k, over the clients that answered."""
        answers = clients.ask(
            self.sample_cohort(clients),
            self.local_train,
            model=state.model,
            returns={"model": state.model, "size": Number(int, 1, MAX_SAMPLES), "flops": Number(int, 0, MAX_FLOPS)},
        )
        models, sizes = [answer["model"] for answer in answers], [answer["size"] for answer in answers]
        flops = state.flops + sum(answer["flops"] for answer in answers)
        return FedAvgMetaState(self.aggregate(state.model, models, sizes), flops)

    def aggregate(self, model: Weights, models: Sequence[Weights], sizes: Sequence[int]) -> Weights:
        """Computes the new global model from the old one and the clients' models. Override this to change it."""
        return weighted_mean(models, sizes)

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        """ClientUpdate of FedAvg, on all samples of the client."""
        net = client.net(model)
        with self.count_flops_of(client) as counter:
            self.fit(net, client)
        return {"model": get_weights(net), "size": len(self.client_samples(client)), "flops": counter.flops}

    def fit(self, net: nn.Module, client: Client) -> None:
        """w ← w − η ∇ℓ(w; b) for each batch b, or a step of Adam, in place. Override this to change local training."""
        samples = self.client_samples(client)
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
        """Fine-tunes on the support set."""
        adapt_in_place(net, full_batches(support, self.adapt_steps), self.adapt_lr)
