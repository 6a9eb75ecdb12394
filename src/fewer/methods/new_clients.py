"""What methods share that are judged on clients they never met: who learns, who is judged, and on what.

Chen, Luo, Dong, Li, He: Federated Meta-Learning with Fast Convergence and Efficient Communication (FedMeta), 2018,
Section 4.1: 80 % of the clients train, 10 % are for choosing settings, 10 % are new. A share of a client's samples is
its support, on which it adapts; the rest are its queries, on which it is judged. Departures: clients that train divide
their samples anew each time (Algorithm 1, line 13: "sample"), unless they are in time; then the support comes first.
"""

from __future__ import annotations

import statistics
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from math import ceil
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveInt
from torch import nn

from fewer.data import Data, Samples
from fewer.data.episodes import Three, split_clients, support_query
from fewer.learning.adapt import Batch, LearningRate, adapted, learnable
from fewer.learning.flops import FlopCounter, counted
from fewer.learning.score import Counts, score
from fewer.methods.base import CHUNK, COUNTS, DEFAULT_COHORT, Client, Method, Scores, figures
from fewer.models import Weights
from fewer.runtime import Clients, Unable, on_client, stream

SHARES = 0.8, 0.1, 0.1
WORST = 0.1
"""The share of clients whose mean accuracy is the `worst` of the fairness figures."""

_split = lru_cache(split_clients)


class NewClients(Method):
    """A method that learns with some clients and is judged on others, each with a model adapted to its own support."""

    support_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of a client's samples that it adapts on; it is judged on the rest."""
    query_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of its samples, the last of the rest, that it is judged on. [default: all the rest]"""
    top_k: PositiveInt = 1
    """An answer counts as right if it is among so many best ones."""
    max_samples: Annotated[int, Field(ge=2)] = 1000
    """Samples of a client that are used at most; of more, so many evenly spread ones."""
    eval_clients: Literal["new", "validation"] = "new"
    """Whom it is judged on: clients never met, or those that settings are chosen on."""
    count_flops: bool = False
    """Count the floating-point operations of the clients that train (slower)."""

    # Who.

    def sample_cohort(self, clients: Clients) -> list[int]:
        """Some of the clients that train."""
        some = self.divided(clients).train
        return clients.sample(min(DEFAULT_COHORT, len(some)) if self.cohort is None else self.cohort, among=some)

    def judged(self, clients: Clients) -> list[int]:
        """Clients that never trained."""
        groups = self.divided(clients)
        return clients.eval_cohort(groups.test if self.eval_clients == "new" else groups.validation)

    def divided(self, clients: Clients) -> Three:
        """Clients that train, that settings are chosen on, and new ones, by the seed of the run."""
        return _split(len(clients), SHARES, clients.seed)

    def tuning_split(self, data: Data, share: float, seed: int) -> tuple[Method, Data]:
        """A trial is judged on the clients that are there for it."""
        return self.model_copy(update={"judge": "validation"}), data

    # What.

    def samples(self, client: Client) -> Samples:
        """All that a client uses."""
        if len(client.train) <= self.max_samples:
            return client.train
        which = torch.linspace(0, len(client.train) - 1, self.max_samples, dtype=torch.float64).round().long()
        return client.train.only(which)

    def halves(self, client: Client, draw: torch.Generator | None = None) -> tuple[Samples, Samples]:
        """Support and queries of a client: always the same, or drawn anew."""
        samples = self.samples(client)
        if len(samples) < 2:
            raise Unable("1 sample, which is its support: no queries are left")
        draw = draw or stream(client.seed, client.id, "division")
        support, rest = support_query(samples, self.support_fraction, None if client.in_time else draw)
        if self.query_fraction is None:
            return support, rest
        count = min(max(1, round(len(samples) * self.query_fraction)), len(rest))
        return support, rest.only(torch.arange(len(rest) - count, len(rest)))

    def tally(self, client: Client) -> AbstractContextManager[FlopCounter]:
        """Counts operations, if they are to be counted: once for each kind of net and number of samples."""
        return counted(self.count_flops, like=(self, client.task.make, len(self.samples(client))))

    # How it is judged.

    @abstractmethod
    def adapt(self, net: nn.Module, support: Samples, shared: Weights) -> None:
        """Adapt a net, which has the shared weights, to some samples, in place."""

    @abstractmethod
    def initialization(self, shared: Weights) -> Weights:
        """The weights that adaptation begins from."""

    def personal_model(self, client: Client, model: Weights) -> nn.Module:
        """The shared model, adapted to the client's support."""
        net = client.net(self.initialization(model))
        self.adapt(net, self.halves(client)[0], model)
        return net

    def evaluate(self, state: Any, clients: Clients, data: Data) -> Scores:
        """After a round: each judged client's adapted model on its own queries, pooled over samples."""
        scores = figures(list(self.ask_queries(state, clients).values()))
        return scores | ({"flops": state.flops} if self.count_flops else {})

    def report(self, state: Any, clients: Clients, data: Data) -> Scores:
        """Once: the same by client, and how fair it is."""
        counts = self.ask_queries(state, clients)
        own = {str(client): count.correct / count.total for client, count in counts.items() if count.total}
        return {"clients": own, "fairness": fairness(list(own.values()))}

    def ask_queries(self, state: Any, clients: Clients) -> dict[int, Counts]:
        """What each judged client counts."""
        answers = clients.ask(self.judged(clients), self.answer_queries, model=self.broadcast(state), returns=COUNTS)
        counts = {answer.client: Counts(**answer.fields) for answer in answers}
        return {client: count for client, count in counts.items() if count.correct <= count.total}

    @on_client
    def answer_queries(self, client: Client, model: Weights) -> dict[str, float]:
        """Adapt to the support, count right answers on the queries."""
        queries = self.halves(client)[1]
        return score(self.personal_model(client, model), queries.chunks(CHUNK), self.top_k)._asdict()


def descend(net: nn.Module, batches: Sequence[Batch], lr: LearningRate) -> None:
    """Inner steps in place, one for each batch."""
    net.train()
    end = adapted(net, learnable(net), batches, lr)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name in end:
                parameter.copy_(end[name])


def everything(samples: Samples, steps: int) -> list[Batch]:
    """All samples as one batch, so many times."""
    return [samples.slice(0, len(samples))] * steps


def worst_tenth(accuracies: Sequence[float]) -> float:
    """The mean of the worst tenth of them, and of one at least."""
    ranked = sorted(accuracies)
    return statistics.fmean(ranked[: ceil(WORST * len(ranked))])


def fairness(accuracies: Sequence[float]) -> Mapping[str, float]:
    """Mean and variance over clients, and the mean of the worst tenth of them."""
    ranked = sorted(accuracies)
    return {
        "mean": statistics.fmean(ranked),
        "variance": statistics.pvariance(ranked),
        "worst": worst_tenth(ranked),
    }
