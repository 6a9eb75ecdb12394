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
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, PositiveInt
from torch import nn
from typing_extensions import TypeVar

from fewer.data import Data, Samples
from fewer.data.episodes import ThreeWaySplit, split_clients, split_support_query
from fewer.learning.adapt import Batch, LearningRate, adapt_weights, trainable_weights
from fewer.learning.evaluate import EVAL_BATCH_SIZE, Counts, evaluate_net
from fewer.learning.flops import FlopCounter, count_flops
from fewer.methods.context import Client, Context
from fewer.methods.method import DEFAULT_COHORT, Method, State
from fewer.methods.scores import COUNTS_SCHEMA, Scores, accuracy_by_client, pool_counts
from fewer.models import Weights
from fewer.runtime import Clients, Unable, on_client, stream

CLIENT_FRACTIONS = 0.8, 0.1, 0.1
"""Fractions of training, validation and new clients."""
WORST_FRACTION = 0.1
"""Fraction of clients whose mean accuracy is the `worst` of the fairness metrics."""

_split_clients = lru_cache(split_clients)


class CountingState(State):
    """A state that counts the operations of the training clients."""

    flops: int
    """Operations so far; 0 if they are not counted."""


CountingStateT = TypeVar("CountingStateT", bound=CountingState, default=Any)


class NewClients(Method[CountingStateT]):
    """A method that trains with some clients and adapts its model to the support set of each evaluation client."""

    support_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Fraction of a client's samples in its support set (p). The rest is its query set."""
    query_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Fraction of a client's samples in its query set, taken from the end. [default: all but the support set]"""
    top_k: PositiveInt = 1
    """Count a prediction as correct if the label is among the `top_k` highest scores."""
    max_samples: Annotated[int, Field(ge=2)] = 1000
    """Maximum number of samples a client uses. A larger client takes evenly spaced ones."""
    eval_clients: Literal["new", "validation"] = "new"
    """Evaluation clients: `new` (held out) or `validation`."""
    count_flops: bool = False
    """Count the floating-point operations of the training clients (slower)."""

    # Clients: who trains and who is evaluated.

    def sample_cohort(self, clients: Clients) -> list[int]:
        """Samples the cohort among the training clients."""
        training = self.client_split(clients).train
        cohort = min(DEFAULT_COHORT, len(training)) if self.cohort is None else self.cohort
        return clients.sample(cohort, among=training)

    def eval_cohort_of(self, clients: Clients) -> list[int]:
        """The clients to evaluate on; none of them trains."""
        split = self.client_split(clients)
        return clients.eval_cohort(split.test if self.eval_clients == "new" else split.validation)

    def client_split(self, clients: Clients) -> ThreeWaySplit:
        """Splits the clients into training, validation and new ones, by the seed of the run."""
        return _split_clients(len(clients), CLIENT_FRACTIONS, clients.seed)

    def tuning_split(self, data: Data, fraction: float, seed: int) -> tuple[Self, Data]:
        """Tunes on the validation clients."""
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

    def count_flops_of(self, client: Client) -> AbstractContextManager[FlopCounter]:
        """Counts operations if `count_flops` is set, once for each net and number of samples."""
        return count_flops(self.count_flops, cache_key=(self, client.task.build_net, len(self.client_samples(client))))

    # Evaluation.

    @abstractmethod
    def adapt(self, net: nn.Module, support: Samples, shared: Weights) -> None:
        """Adapts a net to a support set, in place. The net holds `initialization(shared)`."""

    @abstractmethod
    def initialization(self, shared: Weights) -> Weights:
        """The weights that adaptation starts from, given what the server broadcasts."""

    def build_predictor(self, shared: Weights, context: Context) -> nn.Module:
        """The model before adaptation; on a client, adapted to its support set."""
        net = context.net(self.initialization(shared))
        if isinstance(context, Client):
            self.adapt(net, self.support_and_query(context)[0], shared)
        return net

    def evaluate(self, state: CountingStateT, clients: Clients, data: Data) -> Scores:
        """After a round: each evaluation client's adapted model on its query set, pooled over samples.

        After the last round also by client, with the fairness over clients.
        """
        counts = self.ask_query_counts(state, clients)
        scores = pool_counts(list(counts.values()))
        metrics = scores.metrics | ({"flops": state.flops} if self.count_flops else {})
        if not clients.is_last:
            return replace(scores, metrics=metrics)
        accuracies = accuracy_by_client(counts)
        return replace(scores, metrics=metrics | {"fairness": fairness(list(accuracies.values()))}, clients=accuracies)

    def ask_query_counts(self, state: CountingStateT, clients: Clients) -> dict[int, Counts]:
        """Asks each evaluation client for its counts and drops impossible ones."""
        cohort = self.eval_cohort_of(clients)
        answers = clients.ask(cohort, self.answer_queries, model=state.shared, returns=COUNTS_SCHEMA)
        counts = {answer.client: Counts(**answer.fields) for answer in answers}
        return {client: count for client, count in counts.items() if count.correct <= count.total}

    @on_client(exact=("model",))
    def answer_queries(self, client: Client, model: Weights) -> dict[str, float]:
        """Adapts to the support set and counts correct predictions on the query set."""
        queries = self.support_and_query(client)[1]
        return evaluate_net(self.build_predictor(model, client), queries.chunks(EVAL_BATCH_SIZE), self.top_k)._asdict()


def adapt_in_place(net: nn.Module, batches: Sequence[Batch], lr: LearningRate) -> None:
    """Takes one inner step for each batch, in place."""
    net.train()
    adapted = adapt_weights(net, trainable_weights(net), batches, lr)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name in adapted:
                parameter.copy_(adapted[name])


def full_batches(samples: Samples, steps: int) -> list[Batch]:
    """A list of `steps` batches, each with all samples."""
    return [samples.all()] * steps


def worst_tenth(accuracies: Sequence[float]) -> float:
    """The mean of the lowest tenth of the accuracies, at least of one."""
    ranked = sorted(accuracies)
    return statistics.fmean(ranked[: ceil(WORST_FRACTION * len(ranked))])


def fairness(accuracies: Sequence[float]) -> Mapping[str, float]:
    """Mean and variance over clients, and the mean of the worst tenth."""
    ranked = sorted(accuracies)
    return {
        "mean": statistics.fmean(ranked),
        "variance": statistics.pvariance(ranked),
        "worst": worst_tenth(ranked),
    }
