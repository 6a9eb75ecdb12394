"""FL-Proto: prototypical networks at each client, averaged. F2L's baseline.

Wang, Fu, Ding, Chen, Chen, Li: Federated Few-shot Learning (F2L), KDD 2023, Section 4.2 and Appendix C.2: clients train
an encoder as prototypical networks (Snell, Swersky, Zemel, NeurIPS 2017, Algorithm 1) do, on tasks of base classes, and
the server averages the encoders. A query is of the class whose mean support feature is nearest. Departures: Adam
begins anew in each round; the encoder is F2L's server encoder, without its Transformer. `local-proto` averages nothing:
each client has an encoder of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.data.episodes import Episode
from fewer.learning.prototypes import nearness, prototypes
from fewer.methods.base import Client
from fewer.methods.fewshot import FewShot, Unshared
from fewer.models import Task, Weights, parts_of, weights_of
from fewer.registry import METHODS

ENCODER = "encoder."


@METHODS.register("fl-proto")
class FLProto(FewShot):
    """Prototypical networks at each client; the server averages the encoders, and there is no head."""

    def begin(self, task: Task, seed: int) -> Weights:
        """An encoder alone."""
        parts_of(task.net())
        return encoder_of(task.initial(seed))

    def learn(self, client: Client, model: Weights) -> Weights:
        """A step of Adam for each task."""
        net = self.prepare(client, model, kept=False).train()
        encoder = parts_of(net)[0]
        optimizer = torch.optim.Adam(encoder.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        draw = client.stream("tasks")
        for _ in range(self.tasks):
            task = self.task(client.train, draw)
            scores = nearness(encoder(task.query_x), prototypes(encoder(task.support_x), task.support_y).means)
            optimizer.zero_grad()
            F.cross_entropy(scores, task.query_y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return encoder_of(weights_of(net))

    def prepare(self, client: Client, model: Weights, kept: bool) -> nn.Module:
        """A net with the encoder that was sent; its head is not used."""
        return client.net({**client.initial(), **model}).eval()

    def answer(self, ready: nn.Module, task: Episode) -> dict[str, Tensor]:
        """The nearest prototype."""
        encoder = parts_of(ready)[0]
        with torch.no_grad():
            scores = nearness(encoder(task.query_x), prototypes(encoder(task.support_x), task.support_y).means)
        return {"accuracy": scores.argmax(1)}


@METHODS.register("local-proto")
class LocalProto(Unshared, FLProto):
    """Prototypical networks at each client alone; nothing is shared."""


def encoder_of(weights: Weights) -> Weights:
    """Those of the encoder."""
    return {name: tensor for name, tensor in weights.items() if name.startswith(ENCODER)}
