"""FedProto: clients exchange class prototypes instead of weights.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022,
Algorithm 1. C̄(j) is the mean of the prototypes of class j, over the clients that have it. Client i trains its own
model f_i, an encoder and a head, on

    ℓ = CE(head(z), y) + λ ‖z − C̄(y)‖²        (Eq 7; z are the features of x)

and sends the mean features of each of its classes. A client classifies by the nearest global prototype, not by its
head: its head never saw classes that it does not hold.

Departures:

- A fixed number of local steps, as in FedAvg.
- ‖·‖² is the mean over features (as in the authors' code), so that λ does not depend on their number.
- C̄(j) is weighted by samples, as in Eq 6. If a class has had no holder in this round, its last prototype stays.
- A class that never had a prototype cannot be predicted. Before the first prototypes, the head predicts.
- With `--dp record:…`, clients train by noisy gradients, too: prototypes depend on a record also through the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from pydantic import NonNegativeFloat
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.learning.evaluate import EVAL_BATCH_SIZE
from fewer.learning.prototypes import Prototypes, class_positions, class_prototypes, merge_prototypes, prototype_logits
from fewer.methods import Client, Needs, PersonalMethod, SearchSpace, State
from fewer.methods.fedavg import LocalTraining
from fewer.methods.few_rounds import valid_answers
from fewer.methods.private_prototypes import (
    add_class_sums,
    class_sums_schema,
    private_prototypes,
    send_class_sums,
    to_prototypes,
)
from fewer.models import Task, Weights, get_weights
from fewer.models.split import feature_width, split_net
from fewer.registry import METHODS
from fewer.runtime import Clients, on_client
from fewer.wire import Schema, Shaped


@dataclass(frozen=True)
class FedProtoState(State):
    """The global prototypes C̄ of the classes that have one."""

    classes: Tensor
    means: Tensor
    counts: Tensor
    num_classes: int

    @property
    def shared(self) -> Weights:
        """The prototypes, which clients need to predict."""
        return {"classes": self.classes, "means": self.means}


@METHODS.register("fedproto")
class FedProto(PersonalMethod[FedProtoState], LocalTraining[FedProtoState]):
    """Each client trains its own model near the class prototypes of all clients. Only prototypes are sent."""

    needs: ClassVar[Needs] = "classes"

    tunable: ClassVar[SearchSpace] = {**LocalTraining.tunable, "lam": (0.1, 1.0, 10.0)}

    lam: NonNegativeFloat = 1.0
    """Weight of the distance to the global prototypes (λ)."""

    def init(self, task: Task, seed: int) -> FedProtoState:
        """No prototypes yet."""
        none = torch.zeros(0, dtype=torch.int64)
        return FedProtoState(none, torch.zeros(0, feature_width(task)), none, task.classes)

    def round(self, state: FedProtoState, clients: Clients) -> FedProtoState:
        """Sends C̄ to the cohort, and averages the prototypes that come back."""
        number, width = range(1, state.num_classes + 1), state.means.shape[1]
        per_class = Shaped((number,), torch.int64)
        returns: Schema = {"classes": per_class, "means": Shaped((number, width)), "counts": per_class}
        if clients.protects_records:
            returns = class_sums_schema(state.num_classes, width)
        answers = clients.ask(
            self.sample_cohort(clients),
            self.train_near_prototypes,
            classes=state.classes,
            means=state.means,
            returns=returns,
        )
        if clients.protects_records:
            merged = to_prototypes(add_class_sums(answers))
        elif answers.private:
            merged = private_prototypes(answers, state.num_classes, width)
        else:
            valid = valid_answers(answers, clients, state.num_classes, "train_near_prototypes")
            merged = merge_prototypes(
                [Prototypes(a["classes"], a["means"], a["counts"]) for a in valid], answers.aggregation
            )
        kept = ~torch.isin(state.classes, merged.classes)
        old = Prototypes(state.classes[kept], state.means[kept], state.counts[kept])
        return replace(state, **merge_prototypes([merged, old])._asdict())

    @on_client(stream="train")
    def train_near_prototypes(self, client: Client, classes: Tensor, means: Tensor) -> dict[str, Any]:
        """Trains the client's own model on ℓ; returns the prototypes of its classes after training."""
        net = client.net(client.store.get("model") or client.initial_weights())

        def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            encoder, head = split_net(net)
            z = encoder(x)
            positions, known = class_positions(classes, y)
            targets = means[positions] if len(classes) else z.detach()
            distance = ((z - targets).square().mean(1) * known).sum() / len(y)
            total: Tensor = F.cross_entropy(head(z), y) + self.lam * distance
            return total

        self.train_net(net, client, loss=loss)
        client.store.put("model", get_weights(net))
        net.eval()
        if client.protects_records:
            return send_class_sums(client, split_net(net)[0])
        with torch.no_grad():
            features = torch.cat([split_net(net)[0](x) for x, _ in client.train.chunks(EVAL_BATCH_SIZE)])
        return class_prototypes(features, client.train.labels)._asdict()

    def personal_model(self, shared: Weights, client: Client) -> nn.Module:
        """The client's encoder with the global prototypes as its classifier."""
        net = client.net(client.store.get("model") or client.initial_weights())
        if not len(shared["classes"]):
            return net
        return NearestPrototype(split_net(net)[0], shared["classes"], shared["means"], client.task.classes)


class NearestPrototype(nn.Module):
    """Scores a class by minus the squared distance to its prototype; classes without one get the lowest score."""

    def __init__(self, encoder: nn.Module, classes: Tensor, means: Tensor, num_classes: int) -> None:
        super().__init__()
        self.encoder, self.num_classes = encoder, num_classes
        self.register_buffer("classes", classes)
        self.register_buffer("means", means)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of a batch."""
        logits = prototype_logits(self.encoder(x), self.get_buffer("means"))
        scores = logits.min(dim=1, keepdim=True).values.repeat(1, self.num_classes) - 1e4
        return scores.index_copy(1, self.get_buffer("classes"), logits)
