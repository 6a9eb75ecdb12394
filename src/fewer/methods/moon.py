"""MOON: local training with a contrast between models.

Li, He, Song: Model-Contrastive Federated Learning, CVPR 2021, Algorithm 1. With z the features of a sample x by the net
in training, z_glob those by the global model and z_prev those by the client's last local model, the loss is

    ℓ = CE(f(x), y) − μ log( exp(sim(z, z_glob) / τ) / (exp(sim(z, z_glob) / τ) + exp(sim(z, z_prev) / τ)) )    (Eq 3)

sim is the cosine. The global and the last local model are constants. The server averages models as FedAvg does.

Departures:

- Those of FedAvg.
- The features are those of the net's encoder; the paper adds a projection head of two layers.
- In its first round a client has no last model, so its loss is that of FedAvg. The paper's code starts from the
  global model, which makes the second term a constant, too.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.methods import Client, Group, ModelState, SearchSpace
from fewer.methods.fedavg import FedAvg
from fewer.models import Task, Weights
from fewer.models.split import split_net
from fewer.registry import METHODS
from fewer.runtime import on_client


@METHODS.register("moon")
class MOON(FedAvg):
    """FedAvg whose clients keep their features close to the global model's and away from their last model's."""

    group: ClassVar[Group] = "drift correction"

    tunable: ClassVar[SearchSpace] = {**FedAvg.tunable, "mu": (0.1, 1.0, 5.0)}

    mu: NonNegativeFloat = 1.0
    """Weight of the contrastive loss (μ)."""
    temperature: PositiveFloat = 0.5
    """Temperature of the contrastive loss (τ)."""

    def init(self, task: Task, seed: int) -> ModelState:
        """The initial model. The net must have an encoder and a head."""
        split_net(task.net())
        return super().init(task, seed)

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        """Trains the global model, and keeps the result as the client's last local model."""
        answer = super().local_train(client, model)
        client.store.put("model", answer["model"])
        return answer

    def fit(self, net: nn.Module, client: Client) -> None:
        """Minimizes ℓ over the client's batches, in place."""
        last = client.store.get("model")
        if last is None:
            self.train_net(net, client)
            return
        constants = [split_net(client.net(weights).eval())[0] for weights in (net.state_dict(), last)]

        def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            encoder, head = split_net(net)
            z = encoder(x)
            with torch.no_grad():
                z_glob, z_prev = (constant(x) for constant in constants)
            similarities = torch.stack([F.cosine_similarity(z, other) for other in (z_glob, z_prev)], dim=1)
            contrast = F.cross_entropy(similarities / self.temperature, torch.zeros_like(y))
            return client.task.loss(head(z), y) + self.mu * contrast

        self.train_net(net, client, loss=loss)
