"""FedALA: each client learns, weight by weight, how much of the global model to take over.

Zhang, Hua, Wang, Song, Xue, Ma, Guan: FedALA: Adaptive Local Aggregation for Personalized Federated Learning,
AAAI 2023, Algorithm 1. Client i has its model Θ_i of its last round and receives the global model Θ. The lower layers
are those of Θ. In the p highest layers

    Θ̂_i = Θ_i + (Θ − Θ_i) ⊙ W_i,        W_i ← clip(W_i − η ∇_{W_i} L(Θ̂_i), 0, 1)        (Eq 3 and 4)

with W_i trained on s % of its samples: in its second round until the loss settles, later for one pass. Then it trains
Θ̂_i as FedAvg trains Θ.

Departures:

- Those of FedAvg.
- A layer is a module that has weights; p counts modules from the end of the net.
- Until the loss settles: as in the authors' code, all passes have the same batches, the loss of a pass is that of its
  last batch, and at least eleven passes end when the standard deviation of the last ten losses is below 0.1. Unlike in
  their code, there are at most `max_epochs` passes, and the last batch may be smaller than the others.
- A client's model is its trained one, as in Algorithm 1. The authors' code evaluates Θ̂_i, before training.

The published settings are s = 80, p = 1 and η = 1.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from fewer.methods import Client, ModelState, PersonalMethod, SearchSpace
from fewer.methods.fedavg import FedAvg
from fewer.models import Weights, get_weights
from fewer.registry import METHODS
from fewer.runtime import on_client

LAST_LOSSES = 10
SETTLED = 0.1
"""Standard deviation of the last losses below which W_i has settled."""


@METHODS.register("fedala")
class FedALA(PersonalMethod[ModelState], FedAvg):
    """FedAvg whose clients start each round from a learned mixture of the global model and their own."""

    has_global_model: ClassVar[bool] = True

    tunable: ClassVar[SearchSpace] = FedAvg.tunable

    ala_lr: PositiveFloat = 1.0
    """Learning rate of the mixing weights (η)."""
    ala_samples: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Fraction of a client's samples that the mixing weights are trained on (s)."""
    ala_layers: PositiveInt = 1
    """Number of highest layers that are mixed (p)."""
    max_epochs: PositiveInt = 100
    """Passes over the samples in which the mixing weights settle at most."""

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        """Mixes the received model with the client's own, trains the mixture, and stores it."""
        net = self._mix(model, client)
        self.fit(net, client)
        weights = get_weights(net)
        client.store.put("model", weights)
        return {"model": weights, "size": len(client.train)}

    def _mix(self, model: Weights, client: Client) -> nn.Module:
        """Learns W_i and returns a net with Θ̂_i."""
        net, own = client.net(model), client.store.get("model")
        if own is None:
            return net
        names = highest_parameters(net, self.ala_layers)
        parameters = [dict(net.named_parameters())[name] for name in names]
        local, change = [own[name] for name in names], [model[name] - own[name] for name in names]  # Θ_i, Θ − Θ_i
        stored = client.store.get("mixing")
        mixing = [torch.ones_like(tensor) for tensor in local] if stored is None else [stored[name] for name in names]
        self._load_mixture(parameters, local, change, mixing)
        stream, losses = client.stream("ala"), list[float]()
        count = max(1, round(self.ala_samples * len(client.train)))
        samples = client.train.select(torch.randperm(len(client.train), generator=stream)[:count])
        net.eval()
        for _ in range(self.max_epochs if stored is None else 1):
            for x, y in samples.chunks(self.batch_size):
                loss = client.task.loss(net(x), y)
                gradients = torch.autograd.grad(loss, parameters)
                for weight, gradient, difference in zip(mixing, gradients, change, strict=True):
                    weight.sub_(self.ala_lr * gradient * difference).clamp_(0, 1)  # ∇_{W} L = ∇_{Θ̂} L ⊙ (Θ − Θ_i)
                self._load_mixture(parameters, local, change, mixing)
            losses.append(float(loss.detach()))
            if has_settled(losses):
                break
        client.store.put("mixing", dict(zip(names, mixing, strict=True)))
        return net.train()

    @staticmethod
    @torch.no_grad()
    def _load_mixture(
        parameters: list[nn.Parameter], local: list[Tensor], change: list[Tensor], mixing: list[Tensor]
    ) -> None:
        """Θ̂_i = Θ_i + (Θ − Θ_i) ⊙ W_i"""
        for parameter, own, difference, weight in zip(parameters, local, change, mixing, strict=True):
            parameter.copy_(own + difference * weight)

    def personal_model(self, shared: Weights, client: Client) -> nn.Module:
        """The client's model after its last round; before its first, the global model."""
        return client.net(client.store.get("model") or shared)


def has_settled(losses: Sequence[float]) -> bool:
    """True if more than ten passes were taken, and the losses of the last ten deviate little."""
    return len(losses) > LAST_LOSSES and statistics.pstdev(losses[-LAST_LOSSES:]) < SETTLED


def highest_parameters(net: nn.Module, layers: int) -> list[str]:
    """The names of the trainable parameters in the last `layers` modules that have parameters of their own."""
    owners = dict.fromkeys(name.rpartition(".")[0] for name, p in net.named_parameters() if p.requires_grad)
    chosen = list(owners)[-layers:]
    return [name for name, p in net.named_parameters() if p.requires_grad and name.rpartition(".")[0] in chosen]
