"""Alone: each new client learns from its own support set only.

Chen, Luo, Dong, Li, He: Federated Meta-Learning with Fast Convergence and Efficient Communication, 2018, Section 4.3,
setting SELF: most frequently used (MFU), most recently used (MRU), naive Bayes, and a net trained from scratch. No
client trains beforehand, and nothing is shared.

Departures:
- Naive Bayes models features as normal. `smoothing` times the largest variance is added to every variance.
- Nets take gradient steps on the full support set; the paper uses batches.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.data import Data, Samples
from fewer.errors import SettingError
from fewer.learning.evaluate import measure_outputs
from fewer.methods import Client, Context, Scores, SearchSpace
from fewer.methods.method import NoGlobalModel
from fewer.methods.new_clients import CountingModelState, NewClients, adapt_in_place, full_batches
from fewer.models import Task, Weights
from fewer.registry import METHODS
from fewer.runtime import Clients, on_client

MARGIN = 10.0
"""How far below all other classes naive Bayes scores a class without samples."""


@METHODS.register("alone")
class Alone(NewClients[CountingModelState]):
    """Each new client learns from its own support set: with a net, by counting, or with naive Bayes."""

    rounds: PositiveInt = 1
    """Number of rounds; nothing happens in them."""
    learner: Literal["net", "most-used", "last-used", "naive-bayes"] = "net"
    """The task's net, the most frequent class (MFU), the last class before each query (MRU), or naive Bayes."""
    local_steps: PositiveInt = 100
    """Gradient steps of a net, each on the full support set."""
    lr: PositiveFloat = 0.1
    """Learning rate of a net."""
    smoothing: PositiveFloat = 1.0
    """Naive Bayes: added to every variance, as a fraction of the largest one."""

    def search_space(self) -> SearchSpace:
        """Tunes what the learner uses."""
        if self.learner == "net":
            return {"lr": (0.003, 0.01, 0.03, 0.1)}
        return {"smoothing": (0.01, 0.1, 1.0, 10.0)} if self.learner == "naive-bayes" else {}

    def init(self, task: Task, seed: int) -> CountingModelState:
        """Starts from the initial model."""
        if self.learner != "net" and not task.has_classes:
            raise SettingError(
                f"learner = {self.learner} needs classes, but this is a {task.kind} task; use learner = net"
            )
        return CountingModelState(task.initial_weights(seed))

    def round(self, state: CountingModelState, clients: Clients) -> CountingModelState:
        """Asks no client."""
        return state

    def initialization(self, shared: Weights) -> Weights:
        """The initial model."""
        return shared

    def adapt(self, net: nn.Module, support: Samples, shared: Weights, task: Task) -> None:
        """Trains the net from scratch on the support set, in place."""
        if self.learner != "net":
            raise SettingError(f"learner = {self.learner} trains no net; use learner = net")
        adapt_in_place(net, full_batches(support, self.local_steps), self.lr, task.loss)

    def build_predictor(self, shared: Weights, context: Context) -> nn.Module:
        """The model that a client learns from its support set."""
        if not isinstance(context, Client):
            raise NoGlobalModel(self.name)
        x, y = (support := self.support_and_query(context)[0]).slice(0, len(support))
        if self.learner == "most-used":
            return MostUsed(y, context.task.classes)
        if self.learner == "naive-bayes":
            return NaiveBayes(x, y, context.task.classes, self.smoothing)
        return super().build_predictor(shared, context)

    def evaluate(self, state: CountingModelState, clients: Clients, data: Data) -> Scores:
        """Evaluates as usual; `last-used` needs samples in time order."""
        if self.learner == "last-used" and not data.time_ordered:
            raise SettingError("learner = last-used needs samples in time order, and this data has no order")
        return super().evaluate(state, clients, data)

    @on_client(exact=("model", "sums"))
    def answer_queries(self, client: Client, model: Weights) -> dict[str, Any]:
        """Evaluates on the query set; `last-used` predicts each query from the labels before it."""
        if self.learner != "last-used":
            return super().answer_queries(client, model)
        labels = self.client_samples(client).labels
        first = len(labels) - len(self.support_and_query(client)[1])
        scores = recency_scores(labels, first, client.task.classes)
        return measure_outputs(scores, labels[first:], client.task, self.top_k)._asdict()


def recency_scores(labels: Tensor, first: int, classes: int) -> Tensor:
    """For each sample from index `first` on, scores each class by its last position before it (from 1; 0: never)."""
    last_position = torch.zeros(classes, device=labels.device)
    rows = []
    for index, label in enumerate(labels.tolist()):
        rows.append(last_position.clone())
        last_position[label] = index + 1
    return torch.stack(rows[first:])


class MostUsed(nn.Module):
    """Scores each class by log(1 + its number of samples)."""

    scores: Tensor

    def __init__(self, y: Tensor, classes: int) -> None:
        super().__init__()
        self.register_buffer("scores", (1.0 + torch.bincount(y, minlength=classes)).log())

    def forward(self, x: Tensor) -> Tensor:
        """The same scores for every input."""
        return self.scores.expand(len(x), -1)


class NaiveBayes(nn.Module):
    """log P(c) + Σ log N(x; μ_c, σ²_c) over features. Classes without samples score below all others."""

    prior: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, x: Tensor, y: Tensor, classes: int, smoothing: float) -> None:
        super().__init__()
        x = x.flatten(1).double()
        member = F.one_hot(y, classes).T.double()
        count = member.sum(1, keepdim=True)
        mean = member @ x / count.clamp(min=1)
        variance = member @ x.square() / count.clamp(min=1) - mean.square()
        max_variance = float(x.var(0, correction=0).max()) or 1.0
        self.register_buffer("prior", count.squeeze(1) / len(y))
        self.register_buffer("mean", mean)
        self.register_buffer("variance", variance.clamp(min=0) + smoothing * max_variance)

    def forward(self, x: Tensor) -> Tensor:
        """The class scores of a batch."""
        distance = (x.flatten(1).double()[:, None] - self.mean).square() / self.variance
        scores = self.prior.log() - 0.5 * (distance + self.variance.log()).sum(2)
        lowest = scores.masked_fill(self.prior == 0, torch.inf).amin(1, keepdim=True)
        return torch.where(self.prior > 0, scores, lowest - MARGIN)
