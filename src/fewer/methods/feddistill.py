"""FedDistill: clients learn from each other's mean logits per class.

Seo, Park, Oh, Bennis, Kim: Federated Knowledge Distillation, arXiv 2011.02367, 2020 (first in Jeong et al.,
arXiv 1811.11479). While client k trains, it averages its logits by class, F_k(y). Its teacher is the mean over the
other clients, G_k(y) = mean of F_j(y) over j ≠ k. Its loss on a sample (x, y) is

    CE(f(x), y) + γ KL(softmax G_k(y) ‖ softmax f(x))

The KL term has the same gradient as the paper's cross-entropy.

Departures:

- Models are averaged too, as in FedAvg. Papers compare this variant under the name (FedDistill+ in FedGen, Zhu et al.
  2021). Without it, no model learns a class that its client does not hold. `feddistill-logits` is the paper's own form:
  only logits are sent, and every client keeps its model.
- The mean G_k(y) is over the clients that hold class y, each with the same weight as in the paper. There, all clients
  hold all classes. A class that no other client holds has no teacher; in the first round no class has one.
- Not all clients are in a cohort, so "the others" are the clients that answered in the previous round.
- Otherwise those of FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import NonNegativeFloat
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.methods import Client, ModelState, Needs, PersonalMethod, SearchSpace
from fewer.methods.fedavg import LocalTraining, average_by_size, train_models
from fewer.models import Task, Weights, get_weights
from fewer.registry import METHODS
from fewer.runtime import Clients, Each, on_client
from fewer.wire import Shaped


@dataclass(frozen=True)
class FedDistillState(ModelState):
    """The model, and the logits of the clients that answered in the previous round."""

    clients: list[int]
    """The clients that answered."""
    logits: Tensor
    """F_k: mean logits of each client by class (clients × classes × classes)."""
    held: Tensor
    """Whether the client had samples of the class (clients × classes)."""

    def teacher(self, client: int) -> tuple[Tensor, Tensor]:
        """G_k: the mean logits by class of all other clients, and the classes for which there are any."""
        others = torch.tensor([other != client for other in self.clients], dtype=torch.bool)
        held = self.held[others]
        holders = held.sum(0)
        total = (self.logits[others].double() * held[:, :, None]).sum(0)
        return (total / holders.clamp(min=1)[:, None]).float(), holders > 0


@METHODS.register("feddistill")
class FedDistill(LocalTraining[FedDistillState]):
    """FedAvg whose clients also learn from each other's mean logits per class."""

    needs: ClassVar[Needs] = "classes"

    tunable: ClassVar[SearchSpace] = {**LocalTraining.tunable, "distill_weight": (0.03, 0.1, 0.3, 1.0)}

    distill_weight: NonNegativeFloat = 0.3
    """Weight of the distillation term (γ)."""

    def init(self, task: Task, seed: int) -> FedDistillState:
        """The initial model and no teacher."""
        no_logits = torch.zeros(0, task.classes, task.classes)
        return FedDistillState(task.initial_weights(seed), [], no_logits, no_logits[:, 0].bool())

    def round(self, state: FedDistillState, clients: Clients) -> FedDistillState:
        """Each client gets the model and its teacher; models are averaged, logits are kept for the next round."""
        cohort = self.sample_cohort(clients)
        classes = state.held.shape[1]
        teachers = {client: state.teacher(client) for client in cohort}
        answers = train_models(
            clients,
            cohort,
            self.distill,
            state.model,
            {"logits": Shaped((classes, classes)), "held": Shaped((classes,), torch.bool)},
            teacher=Each({client: teacher for client, (teacher, _) in teachers.items()}),
            known=Each({client: known for client, (_, known) in teachers.items()}),
        )
        return FedDistillState(
            average_by_size(answers),
            [answer.client for answer in answers],
            torch.stack([answer["logits"] for answer in answers]),
            torch.stack([answer["held"] for answer in answers]),
        )

    def sent_logits(self, state: FedDistillState) -> dict[int, tuple[Tensor, Tensor]]:
        """F_k of each client that answered last, without the classes that it does not hold."""
        sent = zip(state.clients, state.held, state.logits, strict=True)
        return {client: (torch.nonzero(held).squeeze(1), logits[held]) for client, held, logits in sent}

    @on_client(stream="distil")
    def distill(self, client: Client, model: Weights, teacher: Tensor, known: Tensor) -> dict[str, Any]:
        """Trains on labels and teacher; `known` marks the classes with a teacher. F_k averages over all local steps."""
        net = self.build_predictor(model, client)
        classes = len(known)
        logit_sums = torch.zeros(classes, classes, dtype=torch.float64, device=teacher.device)
        counts = torch.zeros(classes, dtype=torch.int64, device=teacher.device)

        def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            scores = net(x)
            logits = scores[:, :classes]  # a net may have more outputs than there are classes
            logit_sums.index_add_(0, y, logits.detach().double())
            counts.add_(torch.bincount(y, minlength=classes))
            kl = F.kl_div(logits.log_softmax(1), teacher[y].log_softmax(1), reduction="none", log_target=True).sum(1)
            return F.cross_entropy(scores, y) + self.distill_weight * (kl * known[y]).mean()

        self.train_net(net, client, loss=loss)
        mean_logits = (logit_sums / counts.clamp(min=1)[:, None]).float()
        return {"model": get_weights(net), "size": len(client.train), "logits": mean_logits, "held": counts > 0}


@METHODS.register("feddistill-logits")
class FedDistillLogits(PersonalMethod[FedDistillState], FedDistill):
    """FedDistill as published: clients send mean logits only, and each keeps its own model."""

    def init(self, task: Task, seed: int) -> FedDistillState:
        """No model: clients know the initial one from the seed."""
        state = super().init(task, seed)
        return FedDistillState({}, state.clients, state.logits, state.held)

    @classmethod
    def averages(cls) -> bool:
        """False: clients send no models."""
        return False

    @on_client(stream="distil")
    def distill(self, client: Client, model: Weights, teacher: Tensor, known: Tensor) -> dict[str, Any]:
        """Trains as FedDistill does, but stores the model on the client."""
        answer = super().distill(client, model, teacher, known)
        client.store.put("model", answer["model"])
        return {**answer, "model": {}}

    def personal_model(self, shared: Weights, client: Client) -> nn.Module:
        """The client's own model; before its first round, the initial one."""
        return client.net(client.store.get("model") or client.initial_weights())
