"""FedNCM: the head is the mean features of each class, over all clients.

Legate, Bernier, Page-Caccia, Oyallon, Belilovsky: Guiding the Last Layer in Federated Learning with Pre-Trained Models,
NeurIPS 2023. A client sends the mean features of each of its classes and their number. From their mean l_c over all
samples of class c, the server computes

    w_c = l_c / ‖l_c‖        and no bias

Departures:

- Clients send means and counts; the paper sends sums and counts. The result is the same.
- `distance = euclidean` predicts by the nearest mean: w_c = 2 l_c with bias −‖l_c‖².
- The mean of a single sample is that sample's features: a client reveals them if it has one sample of a class. With
  `--dp record:…`, clients send noisy class sums and counts instead (private_prototypes.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fewer.learning.prototypes import Prototypes, merge_prototypes
from fewer.methods import Client
from fewer.methods.head_only import HEAD_WEIGHT, Head, HeadOnly, class_rows, row_schema
from fewer.models import Weights
from fewer.registry import METHODS
from fewer.runtime import Clients
from fewer.wire import Schema


@METHODS.register("fedncm")
class FedNCM(HeadOnly):
    """One round without training: the head is the mean features of each class. Clients send class means."""

    class_sums: ClassVar[Literal["", "joint", "by client"]] = "joint"

    distance: Literal["cosine", "euclidean"] = "cosine"
    """How a sample is compared with the class means."""

    def statistics_schema(self, width: int, classes: int) -> Schema:
        """Class means and counts."""
        return row_schema(width)

    def summarize(self, features: Tensor, labels: Tensor, client: Client) -> Weights:
        """The mean features of each class, and the number of samples."""
        return class_rows(features, labels)

    def merge(self, parts: Sequence[Mapping[str, Tensor]]) -> Weights:
        """l_c: the mean over all samples of a class."""
        return merge_prototypes([Prototypes(**part) for part in parts])._asdict()

    def fit_head(self, statistics: Weights, head: Weights, clients: Clients) -> Head:
        """w_c = l_c / ‖l_c‖"""
        weight = torch.zeros_like(head[HEAD_WEIGHT])
        weight[statistics["classes"]] = statistics["means"]
        seen = torch.isin(torch.arange(len(weight), device=weight.device), statistics["classes"])
        if self.distance == "euclidean":
            return Head(2 * weight, -weight.square().sum(1), seen)
        return Head(F.normalize(weight), torch.zeros_like(weight[:, 0]), seen)
