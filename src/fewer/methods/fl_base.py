"""FL-Base: FedAvg on the base classes, and a classifier of novel classes on its features. A rival of F2L.

Chen, Liu, Kira, Wang, Huang: A Closer Look at Few-shot Classification, ICLR 2019 ("Baseline"): a plain classifier of
the base classes is a strong start for novel ones. Clients train it on batches of their own samples; the server averages
the models. The encoder then solves a task in one of two ways:

- `centroid`: the class with the nearest mean of L2-normalized support features (Wang, Chao, Weinberger, van der Maaten:
  SimpleShot, 2019).
- `lda`: linear discriminant analysis. The class with the largest zᵀ Σ⁻¹ μ_c − μ_cᵀ Σ⁻¹ μ_c / 2, with the support means
  μ_c and the covariance Σ within the base classes. A client computes Σ from its own training samples and sends nothing.

Departures:

- Training is federated: `tasks` steps of Adam in a round, on batches as large as a training task of other methods.
- Σ has `shrinkage` times its mean variance added to each feature.
"""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.data import Samples
from fewer.data.episodes import Episode
from fewer.learning import draw_batches
from fewer.learning.evaluate import EVAL_BATCH_SIZE
from fewer.learning.prototypes import class_positions, class_prototypes, nearest_centroid, nearest_mean
from fewer.methods.context import Client, Context
from fewer.methods.fewshot import FewShot
from fewer.models import Task, Weights, get_weights, split_net
from fewer.registry import METHODS


class BaseEncoder(NamedTuple):
    """What a client solves tasks with."""

    encoder: nn.Module
    whitening: Tensor
    """A matrix A with A Aᵀ = Σ⁻¹ (features × features)."""


@METHODS.register("fl-base")
class FLBase(FewShot):
    """FedAvg on the base classes; novel classes by nearest centroid or linear discriminant analysis."""

    predictors: ClassVar[tuple[str, ...]] = ("centroid", "lda")

    predictor: Literal["centroid", "lda"] = "centroid"
    """What solves a task. The other one is recorded, too."""
    batch_size: PositiveInt | None = None
    """Samples in a training step. [default: as many as a training task has]"""
    shrinkage: PositiveFloat = 0.1
    """`lda`: variance added to each feature, relative to the mean variance within base classes."""

    def predictor_order(self) -> tuple[str, ...]:
        """Both predictors, the chosen one first."""
        return (self.predictor, *(name for name in self.predictors if name != self.predictor))

    def initial_weights(self, task: Task, seed: int) -> Weights:
        """An encoder, and a head for all base classes."""
        split_net(task.net())
        return task.initial_weights(seed)

    def fit(self, client: Client, model: Weights) -> Weights:
        """Takes `tasks` steps of Adam on batches of base classes and returns the model."""
        net = client.net(model).train()
        optimizer = torch.optim.Adam(net.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        way, shot, queries = self.task_size(training=True)
        size = self.batch_size or way * (shot + queries)
        batches = draw_batches(len(client.train), self.tasks, size, client.stream("batches"))
        for x, y in client.train.batches(batches):
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(net(x), y))
            optimizer.step()
        return get_weights(net)

    def task_solver(self, client: Client, model: Weights, best: bool) -> BaseEncoder:
        """The encoder, and the whitening of its features within the client's base classes."""
        encoder = split_net(client.net(model).eval())[0]
        return BaseEncoder(encoder, whiten(encoder, client.train, self.shrinkage))

    def predict(self, solver: BaseEncoder, task: Episode) -> dict[str, Tensor]:
        """The nearest mean of normalized features, and of whitened features."""
        with torch.no_grad():
            support, queries = solver.encoder(task.support_x), solver.encoder(task.query_x)
        whitened = support.double() @ solver.whitening, queries.double() @ solver.whitening
        return {
            "centroid": nearest_centroid(support, task.support_y, queries),
            "lda": nearest_mean(whitened[0], task.support_y, whitened[1]),
        }

    def build_predictor(self, shared: Weights, context: Context) -> nn.Module:
        """The classifier of the base classes. A client has a model only for a task."""
        return super().build_predictor(shared, context) if isinstance(context, Client) else context.net(shared)


@torch.no_grad()
def whiten(encoder: nn.Module, samples: Samples, shrinkage: float) -> Tensor:
    """A with A Aᵀ = Σ⁻¹: distances between features times A are those of linear discriminant analysis."""
    features = torch.cat([encoder(x) for x, _ in samples.chunks(EVAL_BATCH_SIZE)]).double()
    classes, means, counts = class_prototypes(features, samples.labels)
    deviations = features - means[class_positions(classes, samples.labels)[0]]
    covariance = deviations.T @ deviations / max(1, int((counts - 1).sum()))
    variance = shrinkage * float(covariance.diagonal().mean())
    identity = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    root = torch.linalg.cholesky(covariance + (variance or 1.0) * identity)  # Σ = L Lᵀ, so A = L⁻ᵀ
    inverse: Tensor = torch.linalg.solve_triangular(root, identity, upper=False)
    return inverse.T
