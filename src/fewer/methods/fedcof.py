"""FedCOF: class covariances from the class means of clients, and the linear head that follows from them.

Goswami, Magistri, Wang, Twardowski, Bagdanov, van de Weijer: Covariances for Free: Exploiting Mean Distributions for
Training-free Federated Learning, NeurIPS 2025. As in FedNCM, client k sends the mean features μ_kc of each of its
classes and their number n_kc. The means of samples vary as the samples do, n_kc times less. So the server estimates

    Σ_c = Σ_k n_kc (μ_kc − μ_c)(μ_kc − μ_c)ᵀ / (K_c − 1) + γ I        with K_c clients that hold class c
    G = Σ_c (N_c − 1) Σ_c + N μ μᵀ        B = [N_c μ_c]        W = G⁻¹ B, each column divided by its norm

N_c is the number of samples and μ_c the mean of class c; N and μ are those of all classes. G is the second moment of
the features without the scatter between classes. The term N μ μᵀ is that of the authors' code.

Departures:

- A class that a single client holds has Σ_c = γ I: one mean does not vary.
- With `subsets` > 1, a client sends the means of this many random subsets of each class. Each counts as a client.
- γ is `shrinkage` times the mean variance of a feature within classes. The paper's γ depends on the encoder.
- The server keeps all class means that clients sent, because K_c and μ_c are not known before.
- With `--dp record:…`, class means follow from noisy sums and counts. Their noise adds to Σ_c, and `subsets` is 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from fewer.learning.prototypes import discriminant_weights, split_classes
from fewer.methods import Client, SearchSpace
from fewer.methods.head_only import HEAD_WEIGHT, Head, HeadOnly, class_rows, merge_rows, row_schema
from fewer.models import Weights
from fewer.registry import METHODS
from fewer.runtime import Clients
from fewer.wire import Schema

SHRINKAGE = 1.0


@METHODS.register("fedcof")
class FedCOF(HeadOnly):
    """One round without training: a linear head from class means and their covariance. Clients send class means."""

    class_sums: ClassVar[Literal["", "joint", "by client"]] = "by client"
    tunable: ClassVar[SearchSpace] = {"shrinkage": (0.1, 0.3, 1.0, 3.0)}

    shrinkage: PositiveFloat = SHRINKAGE
    """Variance added to each feature (γ), relative to the mean variance within classes."""
    subsets: PositiveInt = 1
    """Random subsets of a client's samples of a class whose means are sent. More help if clients are few."""

    def statistics_schema(self, width: int, classes: int) -> Schema:
        """Class means and counts."""
        return row_schema(width)

    def summarize(self, features: Tensor, labels: Tensor, client: Client) -> Weights:
        """μ_kc and n_kc: the mean features of each class, or of each of its subsets, and the number of samples."""
        rows = class_rows(features, split_classes(labels, self.subsets, client.stream("subsets")))
        return {**rows, "classes": rows["classes"].div(self.subsets, rounding_mode="floor")}

    def merge(self, parts: Sequence[Mapping[str, Tensor]]) -> Weights:
        """All class means of all clients."""
        return merge_rows(parts)

    def fit_head(self, statistics: Weights, head: Weights, clients: Clients) -> Head:
        """W = G⁻¹ B, normalized"""
        classes, number = statistics["classes"], len(head[HEAD_WEIGHT])
        weight = discriminant_weights(classes, statistics["means"], statistics["counts"], number, self.shrinkage)
        seen = torch.isin(torch.arange(number, device=classes.device), classes)
        return Head(weight, weight.new_zeros(number), seen)
