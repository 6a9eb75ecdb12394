"""Base class of methods that train with some clients and are evaluated on others.

Chen, Luo, Dong, Li, He: Federated Meta-Learning with Fast Convergence and Efficient Communication (FedMeta), 2018,
Section 4.1: 80 % of the clients train, 10 % are for validation, 10 % are new. Each client adapts the model on its
support set and is evaluated on its query set.

Departures:
- Training clients split their samples anew in each round (Algorithm 1, line 13: "sample"). Samples in time order are
  the exception: their support set comes first.
"""

from __future__ import annotations

import statistics
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, PositiveInt
from torch import nn
from typing_extensions import TypeVar

from fewer.data import Data, Samples
from fewer.data.episodes import ThreeWaySplit, split_clients, split_support_query
from fewer.learning.adapt import Batch, Criterion, LearningRate, adapt_weights, trainable_weights
from fewer.learning.evaluate import EVAL_BATCH_SIZE, Evaluation, measure_net
from fewer.methods.context import Client, Context
from fewer.methods.method import DEFAULT_COHORT, Group, Method, ModelState, State
from fewer.methods.scores import Scores, ask_evaluations, pool_evaluations, primary_metric, score_clients
from fewer.models import Task, Weights
from fewer.models.objective import find_metric
from fewer.runtime import Clients, Unable, on_client, stream
from fewer.runtime.flops import FlopCounter, count_flops

CLIENT_FRACTIONS = 0.8, 0.1, 0.1
"""Fractions of training, validation and new clients."""
WORST_FRACTION = 0.1
"""Fraction of clients whose mean is the `worst` of the fairness metrics."""

_split_clients = lru_cache(split_clients)


class CountingState(State):
    """A state that counts the operations of the training clients."""

    flops: int
    """Operations so far; 0 if they are not counted."""


@dataclass(frozen=True)
class CountingModelState(ModelState, CountingState):
    """A global model, and the operations of the clients that trained it."""

    flops: int = 0


CountingStateT = TypeVar("CountingStateT", bound=CountingState, default=Any)


class NewClients(Method[CountingStateT]):
    """A method that trains with some clients and adapts its model to the support set of each evaluation client."""

    group: ClassVar[Group] = "new clients"

    support_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Fraction of a client's samples in its support set (p). The rest is its query set."""
    query_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Fraction of a client's samples in its query set, taken from the end. [default: all but the support set]"""
    top_k: PositiveInt = 1
    """Count a prediction as correct if the label is among the `top_k` highest scores."""
    max_samples: Annotated[int, Field(ge=2)] = 1000
    """Maximum number of samples a client uses. A larger client takes evenly spaced ones."""
    eval_clients: Literal["new", "validation", "training"] = "new"
    """Evaluation clients: `new` (held out), `validation`, or `training`: all clients, on their own test samples."""
    count_flops: bool = False
    """Count the floating-point operations of the training clients (slower)."""

    # Clients: who trains and who is evaluated.

    def sample_cohort(self, clients: Clients) -> list[int]:
        """Samples the cohort among the training clients."""
        training = self.client_split(clients).train
        cohort = min(DEFAULT_COHORT, len(training)) if self.cohort is None else self.cohort
        return clients.sample(cohort, among=training)

    @property
    def evaluates_clients(self) -> bool:
        """True if training clients are evaluated, on their own test samples."""
        return self.eval_clients == "training"

    def eval_cohort_of(self, clients: Clients) -> list[int]:
        """The clients to evaluate on; none of them trains."""
        split = self.client_split(clients)
        return clients.eval_cohort(split.test if self.eval_clients == "new" else split.validation)

    def client_split(self, clients: Clients) -> ThreeWaySplit:
        """Splits the clients into training, validation and new ones, by the seed of the run."""
        if self.eval_clients == "training":
            return ThreeWaySplit(list(range(len(clients))), [], [])
        return _split_clients(len(clients), CLIENT_FRACTIONS, clients.seed)

    def tuning_split(self, data: Data, fraction: float, seed: int) -> tuple[Self, Data]:
        """Tunes on the validation clients, or if all clients train, on samples that are held out."""
        if self.eval_clients == "training":
            return self, data.hold_out(fraction, seed)
        return self.model_copy(update={"eval_clients": "validation"}), data

    # Samples: support and query set.

    def client_samples(self, client: Client) -> Samples:
        """All samples that a client uses: at most `max_samples`."""
        if len(client.train) <= self.max_samples:
            return client.train
        rows = torch.linspace(0, len(client.train) - 1, self.max_samples, dtype=torch.float64).round().long()
        return client.train.select(rows)

    def support_and_query(self, client: Client, generator: torch.Generator | None = None) -> tuple[Samples, Samples]:
        """Splits a client's samples into support and query set: drawn by `generator`, or by default fixed."""
        samples = self.client_samples(client)
        if len(samples) < 2:
            raise Unable("support and query set need at least 2 samples, got 1")
        generator = generator or stream(client.seed, client.id, "division")
        support, rest = split_support_query(samples, self.support_fraction, None if client.time_ordered else generator)
        if self.query_fraction is None:
            return support, rest
        count = min(max(1, round(len(samples) * self.query_fraction)), len(rest))
        return support, rest.select(torch.arange(len(rest) - count, len(rest)))

    def adaptation_samples(self, client: Client) -> Samples:
        """What an evaluation client adapts to: its support set, or if it is a training client, all samples."""
        is_training = self.eval_clients == "training"
        return self.client_samples(client) if is_training else self.support_and_query(client)[0]

    def count_flops_of(self, client: Client) -> AbstractContextManager[FlopCounter]:
        """Counts operations if `count_flops` is set, once for each net and number of samples."""
        return count_flops(self.count_flops, cache_key=(self, client.task.build_net, len(self.client_samples(client))))

    # Evaluation.

    @abstractmethod
    def adapt(self, net: nn.Module, support: Samples, shared: Weights, task: Task) -> None:
        """Adapts a net to a support set, in place. The net holds `initialization(shared)`."""

    @abstractmethod
    def initialization(self, shared: Weights) -> Weights:
        """The weights that adaptation starts from, given what the server broadcasts."""

    def build_predictor(self, shared: Weights, context: Context) -> nn.Module:
        """The model before adaptation; on a client, adapted to its support set."""
        net = context.net(self.initialization(shared))
        if isinstance(context, Client):
            self.adapt(net, self.adaptation_samples(context), shared, context.task)
        return net

    def evaluate(self, state: CountingStateT, clients: Clients, data: Data) -> Scores:
        """After a round: each evaluation client's adapted model on its query set, pooled over samples.

        After the last round also by client, with the fairness over clients.
        """
        evaluate = self.evaluate_clients if self.evaluates_clients else self.evaluate_queries
        by_client = evaluate(state, clients)
        scores = pool_evaluations(list(by_client.values()), self.top_k)
        metrics = scores.metrics | ({"flops": state.flops} if self.count_flops else {})
        if not clients.is_last:
            return replace(scores, metrics=metrics)
        scores = score_clients(scores, by_client, self.top_k)
        higher_is_better = find_metric(primary_metric(list(by_client.values()))).higher_is_better
        over_clients = fairness(list(scores.clients.values()), higher_is_better)
        return replace(scores, metrics=metrics | {"fairness": over_clients})

    def evaluate_queries(self, state: CountingStateT, clients: Clients) -> dict[int, Evaluation]:
        """Evaluates the model of each evaluation client on its query set."""
        return ask_evaluations(clients, self.eval_cohort_of(clients), self.answer_queries, model=state.shared)

    @on_client(exact=("model", "sums"))
    def answer_queries(self, client: Client, model: Weights) -> dict[str, Any]:
        """Adapts to the support set and evaluates on the query set."""
        queries = self.support_and_query(client)[1]
        net = self.build_predictor(model, client)
        return measure_net(net, queries.chunks(EVAL_BATCH_SIZE), client.task, self.top_k)._asdict()


def adapt_in_place(net: nn.Module, batches: Sequence[Batch], lr: LearningRate, criterion: Criterion) -> None:
    """Takes one inner step for each batch, in place."""
    net.train()
    adapted = adapt_weights(net, trainable_weights(net), batches, lr, criterion)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name in adapted:
                parameter.copy_(adapted[name])


def full_batches(samples: Samples, steps: int) -> list[Batch]:
    """A list of `steps` batches, each with all samples."""
    return [samples.all()] * steps


def worst_tenth(values: Sequence[float], higher_is_better: bool = True) -> float:
    """The mean of the worst tenth of the values, at least of one."""
    ranked = sorted(values, reverse=not higher_is_better)
    return statistics.fmean(ranked[: ceil(WORST_FRACTION * len(ranked))])


def fairness(values: Sequence[float], higher_is_better: bool = True) -> Mapping[str, float]:
    """Mean and variance of the primary metric over clients, and the mean of the worst tenth."""
    ranked = sorted(values)
    return {
        "mean": statistics.fmean(ranked),
        "variance": statistics.pvariance(ranked),
        "worst": worst_tenth(ranked, higher_is_better),
    }
