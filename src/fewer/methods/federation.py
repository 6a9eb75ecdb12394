"""What a federation does with a model, whether it is one party or a group of them: train it, distil into it, judge it.

A group has a head, which holds no data and asks its members. Plain training is left to a star method (FedAvg, FedProx,
FedBN, FedMK …), which begins anew each time from the federation's model; of a method that makes personal models alone
the federation's is their mean by size. To distil, members train on the loss with the teacher, and the head averages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from fewer.errors import QuorumLost
from fewer.learning import Counts, draw_batches, score, sgd, weighted_mean
from fewer.learning.distil import distil, fitted
from fewer.methods.base import CHUNK, COUNTS, MAX_SIZE, Method, Party
from fewer.models import Task, Weights, find_net, maker, weights_of
from fewer.runtime import Answers, Parties, Unable, on_party
from fewer.runtime.streams import global_streams
from fewer.wire import Codec, Coded, Direction, Number, Schema

BEGIN = "begin"
"""The purpose of a federation's first training, before it meets others."""
FIT = 500
"""Samples at most that a map between features is first fitted on."""


@dataclass(frozen=True)
class Work:
    """How much a federation trains."""

    rate: float
    steps: int
    batch: int
    codec: Codec = "float32"
    """Of models that travel inside a group."""


@dataclass(frozen=True)
class Teacher:
    """A model to learn from, its net ('' is the task's own), and how strongly to (λ)."""

    model: Weights
    net: str
    weight: float


def with_net(task: Task, net: str) -> Task:
    """The same task for another net; '' is the task's own."""
    if not net:
        return task
    return replace(task, make=maker(find_net(net), {"shape": task.shape, "classes": task.classes}, {}), given=None)


def seated(me: Party, net: str) -> Party:
    """The same party with another net in the place of the task's."""
    return replace(me, task=with_net(me.task, net), _nets=[], _taken=0) if net else me


class Federation(Protocol):
    """One of the two below."""

    def practise(self, model: Weights, purpose: str) -> Weights:
        """The model after training on labels alone."""

    def study(self, model: Weights, teacher: Teacher) -> Weights:
        """The model after training on labels and on the teacher's features."""

    def judge(self, model: Weights, net: str) -> Counts:
        """How a model of any net does on the federation's validation samples."""


@dataclass
class Single:
    """A federation that is one party."""

    me: Party
    net: str
    work: Work

    def practise(self, model: Weights, purpose: str) -> Weights:
        """Steps of SGD on cross-entropy."""
        net = seated(self.me, self.net).net(model)
        sgd(net, self._batches(purpose), self.work.rate)
        return weights_of(net)

    def study(self, model: Weights, teacher: Teacher) -> Weights:
        """Steps of SGD on cross-entropy + λ · the squared difference of features."""
        if teacher.weight == 0:
            return self.practise(model, "study")
        net, guide = seated(self.me, self.net).net(model), seated(self.me, teacher.net).net(teacher.model)
        link = None
        if teacher.net != self.net:
            link = fitted(net, guide, self.me.train.slice(0, FIT)[0])
        distil(net, guide, self._batches("study"), self.work.rate, teacher.weight, link)
        return weights_of(net)

    def judge(self, model: Weights, net: str) -> Counts:
        """Right answers on validation samples; a party without any uses those that it trains on."""
        samples = self.me.validation if len(self.me.validation) else self.me.train
        return score(seated(self.me, net).net(model), samples.chunks(CHUNK))

    def _batches(self, purpose: str) -> Iterator[tuple[Tensor, Tensor]]:
        samples = self.me.train
        draw = self.me.stream(purpose)
        return samples.batches(draw_batches(len(samples), self.work.steps, self.work.batch, draw))


@dataclass(frozen=True)
class Members:
    """What the members of a group are asked by its head."""

    star: Method
    work: Work

    @on_party
    def study(self, me: Party, model: Weights, teacher: Weights, own: str, net: str, weight: float) -> dict[str, Any]:
        """Distil, and send the model that comes of it."""
        found = Single(me, own, self.work).study(model, Teacher(teacher, net, weight))
        return {"model": Coded(found, self.work.codec), "size": len(me.train)}

    @on_party
    def judge(self, me: Party, model: Weights, net: str) -> dict[str, float]:
        """Count right answers of a model."""
        return Single(me, "", self.work).judge(model, net)._asdict()

    @on_party
    def show(self, me: Party, model: Weights) -> dict[str, Any]:
        """The member's own model, where the star method makes no other."""
        weights = weights_of(self.star.personal(me, model))
        return {"model": Coded(weights, self.work.codec), "size": len(me.train)}


@dataclass
class Group:
    """A federation that is a group of parties."""

    me: Party
    net: str
    work: Work
    star: Method
    rounds: int
    """Rounds inside for each time the federation trains."""
    bytes: Counter[Direction] = field(default_factory=Counter)
    """What was sent inside, as the members' coordinator counts it."""

    def practise(self, model: Weights, purpose: str) -> Weights:
        """Rounds of the star method from this model."""
        task = replace(with_net(self.me.task, self.net), given=model)
        with self._asking(self.star, task) as parties:
            with global_streams(parties.seed, "start"):
                state = self.star.start(task, parties.seed)
            for parties.round in self._numbers(purpose):
                with global_streams(parties.seed, parties.round, "coordinator"):
                    state = self.star.round(state, parties)
        found = self.star.whole(state)
        if found is None:
            program = Members(self.star, self.work)
            with self._asking(program, task) as parties:
                shared = self.star.shared(state)
                found = _mean(parties.ask(range(len(parties)), program.show, model=shared, returns=_like(model)))
        return found

    def study(self, model: Weights, teacher: Teacher) -> Weights:
        """Rounds of federated averaging with the teacher's loss."""
        program = Members(self.star, self.work)
        codec = self.work.codec
        with self._asking(program, with_net(self.me.task, self.net)) as parties:
            for parties.round in self._numbers("study"):
                answers = parties.ask(
                    range(len(parties)),
                    program.study,
                    model=Coded(model, codec),
                    teacher=Coded(teacher.model, codec),
                    own=self.net,
                    net=teacher.net,
                    weight=teacher.weight,
                    returns=_like(model),
                )
                model = _mean(answers)
        return model

    def judge(self, model: Weights, net: str) -> Counts:
        """Right answers of all members together."""
        program = Members(self.star, self.work)
        with self._asking(program, self.me.task) as parties:
            answers = parties.ask(
                range(len(parties)), program.judge, model=Coded(model, self.work.codec), net=net, returns=COUNTS
            )
        counts = [Counts(**answer.fields) for answer in answers]
        return Counts(*(sum(part) for part in zip(*counts, strict=True)))

    def _numbers(self, purpose: str) -> range:
        """The numbers of the rounds inside: none of them comes twice, so neither does what is drawn in them."""
        before = 0 if purpose == BEGIN else self.me.round * self.rounds
        return range(before + 1, before + self.rounds + 1)

    @contextmanager
    def _asking(self, program: object, task: Task) -> Iterator[Parties]:
        """The members, to be asked; what is sent is counted. Without enough of them the federation is absent."""
        parties = self.me.members(program, task)
        parties.round = self.me.round * self.rounds
        try:
            yield parties
        except QuorumLost as lost:
            raise Unable(f"inside, {lost}") from lost
        finally:
            self.bytes.update(parties.ledger.total)


def _like(model: Weights) -> Schema:
    return {"model": model, "size": Number(int, 1, MAX_SIZE)}


def _mean(answers: Answers) -> Weights:
    return weighted_mean([answer["model"] for answer in answers], [answer["size"] for answer in answers])
