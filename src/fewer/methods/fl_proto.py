"""FL-Proto: prototypical networks at each party, averaged. F2L's baseline.

Wang, Fu, Ding, Chen, Chen, Li: Federated Few-shot Learning (F2L), KDD 2023, Section 4.2 and Appendix C.2: parties train
an encoder as prototypical networks (Snell, Swersky, Zemel, NeurIPS 2017, Algorithm 1) do, on tasks of base classes, and
the coordinator averages the encoders. A query is of the class whose mean support feature is nearest. Departures: Adam
begins anew in each round; the encoder is F2L's server encoder, without its Transformer. `local-proto` averages nothing:
each party has an encoder of its own.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.data.episodes import Episode
from fewer.learning.prototypes import nearness, prototypes
from fewer.methods.base import Party
from fewer.methods.fewshot import FewShot, Unshared
from fewer.models import Task, Weights, parts_of, weights_of

ENCODER = "encoder."


class FLProto(FewShot):
    """Prototypical networks at each party; the coordinator averages the encoders, and there is no head."""

    name: ClassVar[str] = "fl-proto"

    def begin(self, task: Task, seed: int) -> Weights:
        """An encoder alone."""
        parts_of(task.net())
        return encoder_of(task.initial(seed))

    def learn(self, me: Party, model: Weights) -> Weights:
        """A step of Adam for each task."""
        net = self.prepare(me, model, kept=False).train()
        encoder = parts_of(net)[0]
        optimiser = torch.optim.Adam(encoder.parameters(), lr=self.rate, weight_decay=self.decay)
        draw = me.stream("tasks")
        for _ in range(self.tasks):
            task = self.task(me.train, draw)
            scores = nearness(encoder(task.query_x), prototypes(encoder(task.support_x), task.support_y).means)
            optimiser.zero_grad()
            F.cross_entropy(scores, task.query_y).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        return encoder_of(weights_of(net))

    def prepare(self, me: Party, model: Weights, kept: bool) -> nn.Module:
        """A net with the encoder that was sent; its head is not used."""
        return me.net({**me.initial(), **model}).eval()

    def answer(self, ready: nn.Module, task: Episode) -> dict[str, Tensor]:
        """The nearest prototype."""
        encoder = parts_of(ready)[0]
        with torch.no_grad():
            scores = nearness(encoder(task.query_x), prototypes(encoder(task.support_x), task.support_y).means)
        return {"accuracy": scores.argmax(1)}


class LocalProto(Unshared, FLProto):
    """Prototypical networks at each party alone; nothing is shared."""

    name: ClassVar[str] = "local-proto"


def encoder_of(weights: Weights) -> Weights:
    """Those of the encoder."""
    return {name: tensor for name, tensor in weights.items() if name.startswith(ENCODER)}
