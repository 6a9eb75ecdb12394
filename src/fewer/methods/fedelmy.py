"""FedELMY: one model passes through the clients, and each trains a pool of diverse models around it.

Wang, Deng, Feng, Fan, Yin, Ng: One-Shot Sequential Federated Learning for Non-IID Data by Enhancing Local Model
Diversity, ACM MM 2024, Algorithm 1. A client starts its pool M with the model m_0 that it receives. S times, it
trains a new model m, which starts as the mean of the pool, on

    ℓ = CE − α d_1 + β d_2,        d_1 = mean over m_j ∈ M of ‖m − m_j‖,        d_2 = ‖m − m_0‖

and adds it to the pool. It passes on the mean of the pool. The first client of a run first warms up m_0 by plain
training.

Departures:

- A fixed number of local steps on batches drawn with replacement, as in FedAvg: `local_steps` for each model, and for
  the warm-up.
- Distances are relative to ‖m_0‖, so that one α and one β fit all nets. The paper rescales them by the loss.
- The released code squares the distances, scales them down by powers of ten to below the loss, counts the start of m
  as part of the pool, and keeps the m that is best on validation samples. None of this is done here.
- The server passes the model on, as in FedSeq.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from fewer.learning import draw_batches, weighted_mean
from fewer.methods import Client, SearchSpace
from fewer.methods.fedavg import LocalTraining
from fewer.methods.fedseq import FedSeq
from fewer.models import Weights, get_weights, load_weights
from fewer.registry import METHODS
from fewer.runtime import on_client

TINY = 1e-12
"""Added to squared distances: the root has no gradient at 0."""


@METHODS.register("fedelmy")
class FedELMY(FedSeq):
    """FedSeq in which each client trains several diverse models and passes on their mean."""

    tunable: ClassVar[SearchSpace] = {**LocalTraining.tunable, "diversity": (0.01, 0.1, 1.0)}

    pool_size: PositiveInt = 3
    """Models that each client adds to its pool (S)."""
    diversity: NonNegativeFloat = 0.1
    """Weight of the distance to the pool (α)."""
    anchor: NonNegativeFloat = 0.1
    """Weight of the distance to the received model (β)."""

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        """Trains a pool of models around the received one; returns their mean."""
        net = client.net(model)
        initial = client.initial_weights()
        if all(torch.equal(model[name], initial[name]) for name in model):  # the first client of the run
            self.train_net(net, client)
        pool = [get_weights(net)]
        names = [name for name, parameter in net.named_parameters() if parameter.requires_grad]
        for number in range(self.pool_size):
            load_weights(net, weighted_mean(pool, [1] * len(pool)))
            self._train_member(net, client, pool, names, number)
            pool.append(get_weights(net))
        return {"model": weighted_mean(pool, [1] * len(pool)), "size": len(client.train)}

    def _train_member(self, net: nn.Module, client: Client, pool: list[Weights], names: list[str], number: int) -> None:
        """Minimizes ℓ, in place."""
        members = [torch.cat([weights[name].flatten() for name in names]) for weights in pool]
        scale = float(members[0].norm()) or 1.0
        parameters = [dict(net.named_parameters())[name] for name in names]

        def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            flat = torch.cat([parameter.flatten() for parameter in parameters])
            distances = [((flat - member).square().sum() + TINY).sqrt() / scale for member in members]
            d_1, d_2 = torch.stack(distances).mean(), distances[0]
            return client.task.loss(net(x), y) - self.diversity * d_1 + self.anchor * d_2

        samples = self.training_samples(client)
        indices = draw_batches(len(samples), self.local_steps, self.batch_size, client.stream(f"member {number}"))
        self.train_net(net, client, samples.batches(indices), loss=loss)
