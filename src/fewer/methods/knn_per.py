"""kNN-Per: the global model, interpolated with the nearest neighbors among the client's own samples.

Marfoq, Neglia, Kameni, Vidal: Personalized Federated Learning through Local Memorization, ICML 2022, Algorithm 1. The
rounds are those of FedAvg. A client keeps the features of its training samples under the global encoder, and predicts

    p(y | x) = λ p_kNN(y | x) + (1 − λ) p_global(y | x),    p_kNN(y | x) ∝ Σ_{i in k nearest, y_i = y} exp(−d(z, z_i))

Nothing is sent for it, and a client that never trained can use it, too.

Departures:

- Those of FedAvg. λ is one number for all clients, tuned on held-out samples; the paper tunes it per client.
- d is the Euclidean distance over the square root of the number of features, so that one temperature fits all nets.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.data import Samples
from fewer.learning.evaluate import EVAL_BATCH_SIZE
from fewer.methods import Client, ModelState, Needs, PersonalMethod, SearchSpace
from fewer.methods.fedavg import FedAvg
from fewer.models import Task, Weights
from fewer.models.split import split_net
from fewer.registry import METHODS


@METHODS.register("knn-per")
class KNNPer(PersonalMethod[ModelState], FedAvg):
    """FedAvg whose clients interpolate the global model with their own nearest neighbors."""

    has_global_model: ClassVar[bool] = True
    joins_by_training: ClassVar[bool] = False

    needs: ClassVar[Needs] = "classes"

    tunable: ClassVar[SearchSpace] = {**FedAvg.tunable, "weight": (0.1, 0.3, 0.9)}

    weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Weight of the neighbors (λ)."""
    neighbors: PositiveInt = 10
    """Number of neighbors (k)."""

    def init(self, task: Task, seed: int) -> ModelState:
        """The initial model. The net must have an encoder and a head."""
        split_net(task.net())
        return super().init(task, seed)

    def personal_model(self, shared: Weights, client: Client) -> nn.Module:
        """The global model with the client's memory; without samples, the global model."""
        return remember(client.net(shared), client.data.train, self.weight, self.neighbors)


def remember(net: nn.Module, samples: Samples, weight: float, neighbors: int) -> nn.Module:
    """The net with a memory of these samples; without samples, the net."""
    encoder, head = split_net(net.eval())
    if not len(samples):
        return net
    with torch.no_grad():
        features = torch.cat([encoder(x) for x, _ in samples.chunks(EVAL_BATCH_SIZE)])
    return NearestNeighbors(encoder, head, features, samples.labels, weight, neighbors)


class NearestNeighbors(nn.Module):
    """Interpolates the class probabilities of a net with those of the nearest stored samples."""

    def __init__(
        self, encoder: nn.Module, head: nn.Module, features: Tensor, labels: Tensor, weight: float, neighbors: int
    ) -> None:
        super().__init__()
        self.encoder, self.head, self.weight = encoder, head, weight
        self.neighbors = min(neighbors, len(labels))
        self.register_buffer("features", features)
        self.register_buffer("labels", labels)

    def forward(self, x: Tensor) -> Tensor:
        """Logarithms of the interpolated probabilities."""
        z = self.encoder(x)
        scores = self.head(z)
        distances = torch.cdist(z, self.get_buffer("features")) / z.shape[1] ** 0.5
        nearest, positions = distances.topk(self.neighbors, largest=False)
        votes = F.one_hot(self.get_buffer("labels")[positions], scores.shape[1]).to(scores.dtype)
        by_neighbors = ((-nearest).softmax(1)[:, :, None] * votes).sum(1)
        mixed: Tensor = self.weight * by_neighbors + (1 - self.weight) * scores.softmax(1)
        return mixed.clamp(min=1e-12).log()
