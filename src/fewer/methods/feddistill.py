"""FedDistill: clients teach each other by their mean scores of each class.

Seo, Park, Oh, Bennis, Kim: Federated Knowledge Distillation, arXiv 2011.02367, 2020 (first in Jeong et al.,
arXiv 1811.11479). While client k trains, it takes the mean of its logits by class, F_k(y). Its teacher is the mean of
the others', G_k(y) = Σ_{j≠k} F_j(y) / (number of those j), and its loss on a sample (x, y) is
CE(f(x), y) + γ KL(softmax G_k(y) ‖ softmax f(x)); the KL term has the gradient of the paper's cross-entropy.

Departures:

- Models are averaged too, as in FedAvg. This is what papers compare under the name (FedDistill+ in FedGen, Zhu et
  al. 2021): without, nobody's model hears of a class that its client does not hold. `feddistill-logits` is the paper's
  own form, in which logits alone travel and every client keeps its model.
- The mean goes over the clients that hold the class, each counted once as in the paper: the paper has all clients hold
  all classes. A class that none of the others holds has no teacher, nor has any class in the first round.
- Not all clients are active, so the others are those that answered in the round before.
- As FedAvg otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import NonNegativeFloat
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.learning import sgd, weighted_mean
from fewer.methods.base import MAX_SIZE, Client, ModelState, PersonalMethod
from fewer.methods.fedavg import FedAvg
from fewer.models import Task, Weights, weights_of
from fewer.registry import METHODS
from fewer.runtime import Clients, Each, on_client
from fewer.wire import Coded, Number, Shaped


@dataclass(frozen=True)
class Lessons(ModelState):
    """The model, and what was learned from whom in the round before."""

    who: list[int]
    logits: Tensor
    """Mean logits of each client by class (clients × classes × classes)."""
    held: Tensor
    """Whether the client had samples of the class (clients × classes)."""

    def teacher(self, client: int) -> tuple[Tensor, Tensor]:
        """G_k: mean logits by class of all clients but this one, and for which classes there are any."""
        others = torch.tensor([other != client for other in self.who], dtype=torch.bool)
        held = self.held[others]
        count = held.sum(0)
        total = (self.logits[others].double() * held[:, :, None]).sum(0)
        return (total / count.clamp(min=1)[:, None]).float(), count > 0


@METHODS.register("feddistill")
class FedDistill(FedAvg):
    """FedAvg whose clients also learn from each other's mean logits of each class."""

    tunable: ClassVar[dict[str, tuple[float, ...]]] = {**FedAvg.tunable, "distill_weight": (0.03, 0.1, 0.3, 1.0)}

    distill_weight: NonNegativeFloat = 0.3
    """Strength of the distillation term (γ)."""

    def init(self, task: Task, seed: int) -> Lessons:
        """The initial model, and no teacher."""
        none = torch.zeros(0, task.classes, task.classes)
        return Lessons(task.initial(seed), [], none, none[:, 0].bool())

    def round(self, state: Any, clients: Clients) -> Lessons:
        """Each client gets the model and a teacher; their models are averaged, their logits kept for the next round."""
        cohort = self.sample_cohort(clients)
        classes = state.held.shape[1]
        teachers = {client: state.teacher(client) for client in cohort}
        answers = clients.ask(
            cohort,
            self.distill,
            model=Coded(state.model, self.codec),
            teacher=Each({client: Coded(teacher, self.codec) for client, (teacher, _) in teachers.items()}),
            known=Each({client: known for client, (_, known) in teachers.items()}),
            returns={
                "model": state.model,
                "size": Number(int, 1, MAX_SIZE),
                "logits": Shaped((classes, classes)),
                "held": Shaped((classes,), torch.bool),
            },
        )
        return Lessons(
            weighted_mean([answer["model"] for answer in answers], [answer["size"] for answer in answers]),
            [answer.client for answer in answers],
            torch.stack([answer["logits"] for answer in answers]),
            torch.stack([answer["held"] for answer in answers]),
        )

    @on_client(stream="distil")
    def distill(self, client: Client, model: Weights, teacher: Tensor, known: Tensor) -> dict[str, Any]:
        """Train towards labels and teacher; F_k is the mean over all samples that the steps used."""
        net = self.personal_model(client, model)
        classes = len(known)
        totals = torch.zeros(classes, classes, dtype=torch.float64, device=teacher.device)
        counts = torch.zeros(classes, dtype=torch.int64, device=teacher.device)

        def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            scores = net(x)
            logits = scores[:, :classes]  # a net may have more outputs than there are classes
            totals.index_add_(0, y, logits.detach().double())
            counts.add_(torch.bincount(y, minlength=classes))
            apart = F.kl_div(logits.log_softmax(1), teacher[y].log_softmax(1), reduction="none", log_target=True).sum(1)
            return F.cross_entropy(scores, y) + self.distill_weight * (apart * known[y]).mean()

        sgd(net, client.train.batches(self.batch_indices(client)), self.lr, loss=loss)
        means = (totals / counts.clamp(min=1)[:, None]).float()
        return {
            "model": Coded(weights_of(net), self.codec),
            "size": len(client.train),
            "logits": Coded(means, self.codec),
            "held": counts > 0,
        }


@METHODS.register("feddistill-logits")
class FedDistillLogits(PersonalMethod, FedDistill):
    """FedDistill as first published: only mean logits travel, and every client keeps a model of its own."""

    def init(self, task: Task, seed: int) -> Lessons:
        """No model is shared, not even the first: everyone knows it from the seed."""
        first = super().init(task, seed)
        return Lessons({}, first.who, first.logits, first.held)

    @on_client(stream="distil")
    def distill(self, client: Client, model: Weights, teacher: Tensor, known: Tensor) -> dict[str, Any]:
        """As above, but the model stays."""
        answer = super().distill(client, model, teacher, known)
        client.store.put("model", answer["model"].value)
        return {**answer, "model": {}}

    def personal_model(self, client: Client, model: Weights) -> nn.Module:
        """The client's own model; before its first round, the initial one."""
        return client.net(client.store.get("model") or client.initial())
