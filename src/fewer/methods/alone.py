"""Alone: what a new client can do with its support and nobody's help.

Chen, Luo, Dong, Li, He: Federated Meta-Learning with Fast Convergence and Efficient Communication, 2018, Section 4.3,
setting SELF: the item used most (MFU), the item used last (MRU), naive Bayes, and a net trained from nothing. Nobody
trains before and nothing is shared. Departures: features of naive Bayes are taken as normal, their variances enlarged
by `smoothing` of the largest; nets take steps of gradient descent on the whole support, the paper's on batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.data import Data, Samples
from fewer.errors import SettingError
from fewer.learning.score import judged
from fewer.methods.base import Client, Scores
from fewer.methods.new_clients import NewClients, descend, everything
from fewer.models import Task, Weights
from fewer.registry import METHODS
from fewer.runtime import Clients, on_client

MARGIN = 10.0
"""How far naive Bayes puts a class that was not there below all that were."""


@dataclass(frozen=True)
class AloneState:
    """The initial model, which everyone knows from the seed."""

    model: Weights
    flops: int = 0


@METHODS.register("alone")
class Alone(NewClients):
    """Each new client learns from its own support alone: by a net, by counting, or by naive Bayes."""

    rounds: PositiveInt = 1
    """How many rounds to run; nothing happens in them."""
    learner: Literal["net", "most-used", "last-used", "naive-bayes"] = "net"
    """The task's net; the class that was there most, or last before each query; or naive Bayes."""
    local_steps: PositiveInt = 100
    """Steps of gradient descent of a net, each on the whole support."""
    lr: PositiveFloat = 0.1
    """Their step size."""
    smoothing: PositiveFloat = 1.0
    """Naive Bayes: what is added to all variances, as a share of the largest one."""

    def search_space(self) -> Mapping[str, Sequence[float]]:
        """What each learner has to choose."""
        if self.learner == "net":
            return {"lr": (0.003, 0.01, 0.03, 0.1)}
        return {"smoothing": (0.01, 0.1, 1.0, 10.0)} if self.learner == "naive-bayes" else {}

    def init(self, task: Task, seed: int) -> AloneState:
        """The initial model."""
        return AloneState(task.initial(seed))

    def round(self, state: AloneState, clients: Clients) -> AloneState:
        """Nobody is asked."""
        return state

    def global_weights(self, state: AloneState) -> Weights | None:
        """There is no global model."""
        return None

    def initialization(self, shared: Weights) -> Weights:
        """Nothing has been learned yet."""
        return shared

    def adapt(self, net: nn.Module, support: Samples, shared: Weights) -> None:
        """Training from nothing."""
        if self.learner != "net":
            raise SettingError(f"learner = {self.learner} has no net to write (allowed: learner = net)")
        descend(net, everything(support, self.local_steps), self.lr)

    def personal_model(self, client: Client, model: Weights) -> nn.Module:
        """What the client has learned from its support."""
        x, y = (support := self.halves(client)[0]).slice(0, len(support))
        if self.learner == "most-used":
            return MostUsed(y, client.task.classes)
        if self.learner == "naive-bayes":
            return NaiveBayes(x, y, client.task.classes, self.smoothing)
        return super().personal_model(client, model)

    def evaluate(self, state: AloneState, clients: Clients, data: Data) -> Scores:
        """As all do, where there is something to be last."""
        if self.learner == "last-used" and not data.in_time:
            raise SettingError("learner = last-used, but samples are in no order of time (allowed: data in time)")
        return super().evaluate(state, clients, data)

    @on_client
    def answer_queries(self, client: Client, model: Weights) -> dict[str, float]:
        """As all do; but what was used last is known only from one query to the next."""
        if self.learner != "last-used":
            return super().answer_queries(client, model)
        labels = self.samples(client).labels
        first = len(labels) - len(self.halves(client)[1])
        return judged(recency(labels, first, client.task.classes), labels[first:], self.top_k)._asdict()


def recency(labels: Tensor, first: int, classes: int) -> Tensor:
    """For each sample from `first` on, when each class was there last before it: its number from 1 on, or 0."""
    when = torch.zeros(classes, device=labels.device)
    rows = []
    for number, label in enumerate(labels.tolist()):
        rows.append(when.clone())
        when[label] = number + 1
    return torch.stack(rows[first:])


class MostUsed(nn.Module):
    """Scores are the logarithms of how often each class was there, and once more."""

    scores: Tensor

    def __init__(self, y: Tensor, classes: int) -> None:
        super().__init__()
        self.register_buffer("scores", (1.0 + torch.bincount(y, minlength=classes)).log())

    def forward(self, x: Tensor) -> Tensor:
        """The same for all."""
        return self.scores.expand(len(x), -1)


class NaiveBayes(nn.Module):
    """log P(c) + Σ log N(x; μ_c, σ²_c) over features; a class that was not there comes after all that were."""

    share: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, x: Tensor, y: Tensor, classes: int, smoothing: float) -> None:
        super().__init__()
        x = x.flatten(1).double()
        member = F.one_hot(y, classes).T.double()
        count = member.sum(1, keepdim=True)
        mean = member @ x / count.clamp(min=1)
        spread = member @ x.square() / count.clamp(min=1) - mean.square()
        widest = float(x.var(0, correction=0).max()) or 1.0
        self.register_buffer("share", count.squeeze(1) / len(y))
        self.register_buffer("mean", mean)
        self.register_buffer("variance", spread.clamp(min=0) + smoothing * widest)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of a batch."""
        away = (x.flatten(1).double()[:, None] - self.mean).square() / self.variance
        scores = self.share.log() - 0.5 * (away + self.variance.log()).sum(2)
        lowest = scores.masked_fill(self.share == 0, torch.inf).amin(1, keepdim=True)
        return torch.where(self.share > 0, scores, lowest - MARGIN)
