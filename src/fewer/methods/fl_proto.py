"""FL-Proto: prototypical networks on each client, averaged on the server. A baseline of F2L.

Wang, Fu, Ding, Chen, Chen, Li: Federated Few-shot Learning (F2L), KDD 2023, Section 4.2 and Appendix C.2. Clients train
an encoder on tasks of base classes like prototypical networks (Snell, Swersky, Zemel, NeurIPS 2017, Algorithm 1); the
server averages the encoders. A query gets the class whose mean support feature is nearest. `local-proto` averages
nothing: each client trains its own encoder.

Departures:

- Adam restarts in every round.
- The encoder is F2L's server encoder, without the Transformer.
- `head` classifies the queries of a task by another head on the features of the support. Training does not change.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.data.episodes import Episode
from fewer.learning.prototypes import class_prototypes, prototype_logits
from fewer.methods.context import Client
from fewer.methods.fewshot import FewShot, LocalOnly, select_encoder
from fewer.methods.head_prototypes import head_prototypes
from fewer.models import Task, Weights, get_weights, split_net
from fewer.registry import METHODS


@METHODS.register("fl-proto")
class FLProto(FewShot):
    """Prototypical networks on each client; the server averages the encoders. There is no head."""

    head: Literal["distance", "fedncm", "fedcof"] = Field(default="distance", json_schema_extra={"neutral": True})
    """Classify queries by distance to prototypes, or by the head of FedNCM or FedCOF on the support. For FedCOF, each
    support sample counts as a client."""

    def initial_weights(self, task: Task, seed: int) -> Weights:
        """An encoder without a head."""
        split_net(task.net())
        return select_encoder(task.initial_weights(seed))

    def fit(self, client: Client, model: Weights) -> Weights:
        """Takes one Adam step per task and returns the encoder. A frozen encoder is not trained."""
        net = self.task_solver(client, model, best=False).train()
        encoder = split_net(net)[0]
        if next(encoder.parameters(), None) is None:
            return model
        optimizer = torch.optim.Adam(encoder.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        generator = client.stream("tasks")
        for _ in range(self.tasks):
            task = self.draw_task(client.train, generator)
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(query_logits(encoder, task), task.query_y))
            optimizer.step()
        return select_encoder(get_weights(net))

    def task_solver(self, client: Client, model: Weights, best: bool) -> nn.Module:
        """A net with the received encoder; its head is unused."""
        return client.net({**client.initial_weights(), **model}).eval()

    def predict(self, solver: nn.Module, task: Episode) -> dict[str, Tensor]:
        """The class of the nearest prototype."""
        encoder = split_net(solver)[0]
        with torch.no_grad():
            if self.head == "distance":
                return {"accuracy": query_logits(encoder, task).argmax(1)}
            support = zip(torch.split(encoder(task.support_x), 1), torch.split(task.support_y, 1), strict=True)
            means = head_prototypes(self.head, [class_prototypes(*sample) for sample in support])
            return {"accuracy": prototype_logits(encoder(task.query_x), means).argmax(1)}


@METHODS.register("local-proto")
class LocalProto(LocalOnly, FLProto):
    """Prototypical networks on each client alone; nothing is shared."""


def query_logits(encoder: nn.Module, task: Episode) -> Tensor:
    """Minus the squared distances of the queries to the prototypes of the support, up to a constant per query."""
    return prototype_logits(encoder(task.query_x), class_prototypes(encoder(task.support_x), task.support_y).means)
