"""FedPFT: clients send Gaussian mixtures of their features, and the server trains the head on samples from them.

Beitollahi, Bie, Hemati, Brunswic, Li, Chen, Zhang: Parametric Feature Transfer: One-shot Federated Learning with
Foundation Models, 2024. Client k fits a mixture of `components` Gaussians to the features of each of its classes, by
expectation-maximization, and sends it once. The server draws features of class c from the mixtures of all clients, in
proportion to their samples, and trains the head on them with cross-entropy.

Departures:

- Covariances are diagonal or spherical. The paper also has full ones, which need d² / 2 numbers.
- The server draws new features for each step, instead of one data set of the size of all clients' data.
- The optimizer is Adam with a learning rate that decays to 0. The paper does not need a particular one.
- A class with fewer samples than components has one component per sample. It reveals the features of these samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from fewer.learning import LocalOptimizer, sgd
from fewer.learning.mixture import fit_mixture
from fewer.methods import MAX_SAMPLES, Client, SearchSpace
from fewer.methods.head_only import HEAD_BIAS, HEAD_WEIGHT, Head, HeadOnly, merge_rows, row_schema
from fewer.models import Weights
from fewer.registry import METHODS
from fewer.runtime import Clients
from fewer.wire import Schema, Shaped


@METHODS.register("fedpft")
class FedPFT(HeadOnly):
    """One round: the server trains the head on features that it draws from Gaussian mixtures. Clients send these."""

    tunable: ClassVar[SearchSpace] = {"server_lr": (0.0003, 0.001, 0.003, 0.01)}

    components: PositiveInt = 1
    """Gaussians of each class of a client."""
    covariance: Literal["diagonal", "spherical"] = "diagonal"
    """One variance per feature, or one per Gaussian."""
    em_steps: PositiveInt = 20
    """Steps of expectation-maximization."""
    server_steps: PositiveInt = 1000
    """Training steps of the head on the server."""
    server_lr: PositiveFloat = 0.001
    """Learning rate of the head (Adam)."""
    batch_size: PositiveInt = 256
    """Features that the server draws for a step."""

    def statistics_schema(self, width: int, classes: int) -> Schema:
        """One row per Gaussian: its class, mean, variance, and its share of the client's samples."""
        variances = Shaped((range(1, MAX_SAMPLES), 1 if self.covariance == "spherical" else width))
        return {**row_schema(width, torch.float32), "variances": variances}

    def summarize(self, features: Tensor, labels: Tensor, client: Client) -> Weights:
        """A mixture for each class."""
        parts, stream = [], client.stream("mixtures")
        for label in labels.unique():  # type: ignore[no-untyped-call]
            members = features[labels == label]
            mixture = fit_mixture(members, self.components, self.covariance == "spherical", self.em_steps, stream)
            parts.append(
                {
                    "classes": label.expand(len(mixture.means)),
                    "means": mixture.means.float(),
                    "counts": (mixture.shares * len(members)).float(),
                    "variances": mixture.variances.float(),
                }
            )
        return merge_rows(parts)

    def merge(self, parts: Sequence[Mapping[str, Tensor]]) -> Weights:
        """All Gaussians of all clients."""
        return merge_rows(parts)

    def fit_head(self, statistics: Weights, head: Weights, clients: Clients) -> Head:
        """Trains the head on features drawn from the mixtures."""
        classes, width = head[HEAD_WEIGHT].shape
        net = nn.Linear(width, classes, bias=HEAD_BIAS in head).to(head[HEAD_WEIGHT])
        net.load_state_dict({name.removeprefix("head."): tensor for name, tensor in head.items()})
        adam = LocalOptimizer(optimizer="adam", lr_schedule="cosine")
        batches = self.draw_features(statistics, clients.stream("features"))
        sgd(net, batches, self.server_lr, optimizer=adam, steps=self.server_steps)
        seen = torch.isin(torch.arange(classes, device=net.weight.device), statistics["classes"])
        bias = net.bias.detach() if net.bias is not None else torch.zeros_like(net.weight[:, 0])
        return Head(net.weight.detach(), bias, seen)

    def draw_features(self, statistics: Weights, stream: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Features and classes for each step: a Gaussian in proportion to its samples, then a draw from it."""
        shares, device = statistics["counts"].cpu(), statistics["means"].device
        for _ in range(self.server_steps):
            rows = torch.multinomial(shares, self.batch_size, replacement=True, generator=stream).to(device)
            noise = torch.randn(self.batch_size, statistics["means"].shape[1], generator=stream).to(device)
            yield statistics["means"][rows] + statistics["variances"][rows].sqrt() * noise, statistics["classes"][rows]
