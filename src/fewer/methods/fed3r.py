"""Fed3R: the head is the exact ridge regression on the features of all clients.

Fanì, Camoriano, Caputo, Ciccone: Accelerating Heterogeneous Federated Learning with Closed-form Classifiers, ICML 2024.
With features Z_k and one-hot labels Y_k, client k sends A_k = Z_kᵀ Z_k and b_k = Z_kᵀ Y_k. Sums over clients give

    W = (Σ_k A_k + λ I)⁻¹ Σ_k b_k        each column divided by its norm

The result does not depend on how samples are partitioned among clients.

Departures:

- A_k is symmetric: clients send its upper triangle. They send the columns of b_k of the classes that they hold.
- A_k has d (d + 1) / 2 numbers for d features. `projection` first maps features to fewer numbers by a random matrix
  that depends on the seed alone. The paper maps them to random Fourier features, usually to more numbers.
- λ is relative to the mean square of a feature: λ = `ridge` · trace(A) / d. The paper sets λ = 0.01.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn import functional as F

from fewer.learning.prototypes import class_prototypes
from fewer.methods import MAX_SAMPLES, Client, SearchSpace
from fewer.methods.head_only import HEAD_WEIGHT, Head, HeadOnly
from fewer.models import Weights
from fewer.registry import METHODS
from fewer.runtime import Clients, stream
from fewer.wire import Schema, Shaped


@METHODS.register("fed3r")
class Fed3R(HeadOnly):
    """One round without training: the head is a ridge regression. Clients send second moments of features."""

    tunable: ClassVar[SearchSpace] = {"ridge": (0.0001, 0.001, 0.01, 0.1)}

    ridge: PositiveFloat = 0.001
    """Regularization (λ), relative to the mean square of a feature."""
    projection: PositiveInt | None = None
    """Numbers that a random matrix maps the features of a sample to. [default: all features, without a matrix]"""

    def statistics_schema(self, width: int, classes: int) -> Schema:
        """The upper triangle of A_k, and the columns of b_k of the classes that the client holds."""
        width, rows = self.projection or width, range(1, classes + 1)
        return {
            "classes": Shaped((rows,), torch.int64),
            "sums": Shaped((rows, width)),
            "moments": Shaped((width * (width + 1) // 2,), max_value=float(MAX_SAMPLES) ** 2),
        }

    def summarize(self, features: Tensor, labels: Tensor, client: Client) -> Weights:
        """A_k = Z_kᵀ Z_k and b_k = Z_kᵀ Y_k"""
        features = self._project(features, client.seed)
        classes, means, counts = class_prototypes(features, labels)
        rows, columns = torch.triu_indices(features.shape[1], features.shape[1])
        moments = (features.T @ features)[rows, columns]
        return {"classes": classes, "sums": (means * counts[:, None]).float(), "moments": moments.float()}

    def _project(self, features: Tensor, seed: int) -> Tensor:
        """The features, or their product with a random matrix."""
        return features if self.projection is None else features @ self._matrix(features.shape[1], seed).to(features)

    def _matrix(self, width: int, seed: int) -> Tensor:
        """The random matrix. It keeps the mean square norm of features, so that moments fit into float16."""
        columns = self.projection or width
        return torch.randn(width, columns, generator=stream(seed, "fed3r", "projection")) / math.sqrt(columns)

    def merge(self, parts: Sequence[Mapping[str, Tensor]]) -> Weights:
        """Σ_k A_k and Σ_k b_k"""
        labels = torch.cat([part["classes"] for part in parts])
        classes, positions = torch.unique(labels, return_inverse=True)
        rows = torch.cat([part["sums"].double() for part in parts])
        sums = rows.new_zeros(len(classes), rows.shape[1]).index_add_(0, positions, rows)
        moments = torch.zeros_like(parts[0]["moments"], dtype=torch.float64)
        for part in parts:
            moments += part["moments"]
        return {"classes": classes, "sums": sums, "moments": moments}

    def fit_head(self, statistics: Weights, head: Weights, clients: Clients) -> Head:
        """W = (A + λ I)⁻¹ b, normalized"""
        classes, sums = statistics["classes"], statistics["sums"]
        width = sums.shape[1]
        rows, columns = torch.triu_indices(width, width)
        a = sums.new_zeros(width, width)
        a[rows, columns] = a[columns, rows] = statistics["moments"]
        a.diagonal().add_((self.ridge * float(a.trace()) / width) or 1.0)
        solution = torch.linalg.solve(a, sums.T).T
        if self.projection is not None:
            solution = solution @ self._matrix(head[HEAD_WEIGHT].shape[1], clients.seed).to(solution).T
        weight = solution.new_zeros(head[HEAD_WEIGHT].shape)
        weight[classes] = F.normalize(solution)
        seen = torch.isin(torch.arange(len(weight), device=weight.device), classes)
        return Head(weight, torch.zeros_like(weight[:, 0]), seen)
