"""What methods share that are judged on parties they never met: who learns, who is judged, and on what.

Chen, Luo, Dong, Li, He: Federated Meta-Learning with Fast Convergence and Efficient Communication (FedMeta), 2018,
Section 4.1: 80 % of the parties train, 10 % are for choosing settings, 10 % are new. A share of a party's samples is
its support, on which it adapts; the rest are its queries, on which it is judged. Departures: parties that train divide
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
from fewer.data.episodes import Three, split_parties, support_query
from fewer.learning.adapt import Batch, Rate, adapted, learnable
from fewer.learning.flops import Tally, counted
from fewer.learning.score import Counts, score
from fewer.methods.base import ACTIVE, CHUNK, COUNTS, Method, Party, Scores, figures
from fewer.models import Weights
from fewer.runtime import Parties, Unable, on_party, stream

SHARES = 0.8, 0.1, 0.1
WORST = 0.1
"""The share of parties whose mean accuracy is the `worst` of the fairness figures."""

_split = lru_cache(split_parties)


class NewParties(Method):
    """A method that learns with some parties and is judged on others, each with a model adapted to its own support."""

    support: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of a party's samples that it adapts on; it is judged on the rest."""
    query_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of its samples, the last of the rest, that it is judged on. [default: all the rest]"""
    top: PositiveInt = 1
    """An answer counts as right if it is among so many best ones."""
    most: Annotated[int, Field(ge=2)] = 1000
    """Samples of a party that are used at most; of more, so many evenly spread ones."""
    judge: Literal["new", "validation"] = "new"
    """Whom it is judged on: parties never met, or those that settings are chosen on."""
    flops: bool = False
    """Count the floating-point operations of the parties that train (slower)."""

    # Who.

    def choose(self, parties: Parties) -> list[int]:
        """Some of the parties that train."""
        some = self.divided(parties).train
        return parties.sample(min(ACTIVE, len(some)) if self.active is None else self.active, among=some)

    def judged(self, parties: Parties) -> list[int]:
        """Parties that never trained."""
        groups = self.divided(parties)
        return parties.panel(groups.test if self.judge == "new" else groups.validation)

    def divided(self, parties: Parties) -> Three:
        """Parties that train, that settings are chosen on, and new ones, by the seed of the run."""
        return _split(len(parties), SHARES, parties.seed)

    def trial(self, data: Data, share: float, seed: int) -> tuple[Method, Data]:
        """A trial is judged on the parties that are there for it."""
        return self.model_copy(update={"judge": "validation"}), data

    # What.

    def samples(self, me: Party) -> Samples:
        """All that a party uses."""
        if len(me.train) <= self.most:
            return me.train
        which = torch.linspace(0, len(me.train) - 1, self.most, dtype=torch.float64).round().long()
        return me.train.only(which)

    def halves(self, me: Party, draw: torch.Generator | None = None) -> tuple[Samples, Samples]:
        """Support and queries of a party: always the same, or drawn anew."""
        samples = self.samples(me)
        if len(samples) < 2:
            raise Unable("1 sample, which is its support: no queries are left")
        draw = draw or stream(me.seed, me.id, "division")
        support, rest = support_query(samples, self.support, None if me.in_time else draw)
        if self.query_share is None:
            return support, rest
        count = min(max(1, round(len(samples) * self.query_share)), len(rest))
        return support, rest.only(torch.arange(len(rest) - count, len(rest)))

    def tally(self, me: Party) -> AbstractContextManager[Tally]:
        """Counts operations, if they are to be counted: once for each kind of net and number of samples."""
        return counted(self.flops, like=(self, me.task.make, len(self.samples(me))))

    # How it is judged.

    @abstractmethod
    def adapt(self, net: nn.Module, support: Samples, shared: Weights) -> None:
        """Adapt a net, which has the shared weights, to some samples, in place."""

    @abstractmethod
    def initialisation(self, shared: Weights) -> Weights:
        """The weights that adaptation begins from."""

    def personal(self, me: Party, model: Weights) -> nn.Module:
        """The shared model, adapted to the party's support."""
        net = me.net(self.initialisation(model))
        self.adapt(net, self.halves(me)[0], model)
        return net

    def evaluate(self, state: Any, parties: Parties, data: Data) -> Scores:
        """After a round: each judged party's adapted model on its own queries, pooled over samples."""
        scores = figures(list(self.ask_queries(state, parties).values()))
        return scores | ({"flops": state.flops} if self.flops else {})

    def report(self, state: Any, parties: Parties, data: Data) -> Scores:
        """Once: the same by party, and how fair it is."""
        counts = self.ask_queries(state, parties)
        own = {str(party): count.correct / count.total for party, count in counts.items() if count.total}
        return {"parties": own, "fairness": fairness(list(own.values()))}

    def ask_queries(self, state: Any, parties: Parties) -> dict[int, Counts]:
        """What each judged party counts."""
        answers = parties.ask(self.judged(parties), self.answer_queries, model=self.shared(state), returns=COUNTS)
        counts = {answer.party: Counts(**answer.fields) for answer in answers}
        return {party: count for party, count in counts.items() if count.correct <= count.total}

    @on_party
    def answer_queries(self, me: Party, model: Weights) -> dict[str, float]:
        """Adapt to the support, count right answers on the queries."""
        queries = self.halves(me)[1]
        return score(self.personal(me, model), queries.chunks(CHUNK), self.top)._asdict()


def descend(net: nn.Module, batches: Sequence[Batch], rate: Rate) -> None:
    """Inner steps in place, one for each batch."""
    net.train()
    end = adapted(net, learnable(net), batches, rate)
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
    """Mean and variance over parties, and the mean of the worst tenth of them."""
    ranked = sorted(accuracies)
    return {
        "mean": statistics.fmean(ranked),
        "variance": statistics.pvariance(ranked),
        "worst": worst_tenth(ranked),
    }
