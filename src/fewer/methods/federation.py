"""What a federation does with a model, whether it is one client or a group of them: train it, distill into it, judge it.

A group has a head, which holds no data and asks its members. Plain training is left to a star method (FedAvg, FedProx,
FedBN, FedMK …), which begins anew each time from the federation's model; of a method that makes personal models alone
the federation's is their mean by size. To distill, members train on the loss with the teacher, and the head averages.
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
from fewer.learning.distill import distill, fit_feature_map
from fewer.methods.base import CHUNK, COUNTS, MAX_SIZE, Client, Method
from fewer.models import Task, Weights, maker, weights_of
from fewer.registry import MODELS
from fewer.runtime import Answers, Clients, Unable, on_client
from fewer.runtime.streams import global_streams
from fewer.wire import Codec, Coded, Direction, Number, Schema

BEGIN = "begin"
"""The purpose of a federation's first training, before it meets others."""
FIT = 500
"""Samples at most that a map between features is first fitted on."""


@dataclass(frozen=True)
class Work:
    """How much a federation trains."""

    lr: float
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
    return replace(task, make=maker(MODELS.find(net), {"shape": task.shape, "classes": task.classes}, {}), given=None)


def with_model(client: Client, net: str) -> Client:
    """The same client with another net in the place of the task's."""
    return replace(client, task=with_net(client.task, net), _nets=[], _taken=0) if net else client


class Federation(Protocol):
    """One of the two below."""

    def local_train(self, model: Weights, purpose: str) -> Weights:
        """The model after training on labels alone."""

    def study(self, model: Weights, teacher: Teacher) -> Weights:
        """The model after training on labels and on the teacher's features."""

    def judge(self, model: Weights, net: str) -> Counts:
        """How a model of any net does on the federation's validation samples."""


@dataclass
class Single:
    """A federation that is one client."""

    client: Client
    net: str
    work: Work

    def local_train(self, model: Weights, purpose: str) -> Weights:
        """Steps of SGD on cross-entropy."""
        net = with_model(self.client, self.net).net(model)
        sgd(net, self._batches(purpose), self.work.lr)
        return weights_of(net)

    def study(self, model: Weights, teacher: Teacher) -> Weights:
        """Steps of SGD on cross-entropy + λ · the squared difference of features."""
        if teacher.weight == 0:
            return self.local_train(model, "study")
        net, guide = (
            with_model(self.client, self.net).net(model),
            with_model(self.client, teacher.net).net(teacher.model),
        )
        link = None
        if teacher.net != self.net:
            link = fit_feature_map(net, guide, self.client.train.slice(0, FIT)[0])
        distill(net, guide, self._batches("study"), self.work.lr, teacher.weight, link)
        return weights_of(net)

    def judge(self, model: Weights, net: str) -> Counts:
        """Right answers on validation samples; a client without any uses those that it trains on."""
        samples = self.client.validation if len(self.client.validation) else self.client.train
        return score(with_model(self.client, net).net(model), samples.chunks(CHUNK))

    def _batches(self, purpose: str) -> Iterator[tuple[Tensor, Tensor]]:
        samples = self.client.train
        draw = self.client.stream(purpose)
        return samples.batches(draw_batches(len(samples), self.work.steps, self.work.batch, draw))


@dataclass(frozen=True)
class GroupHandlers:
    """What the members of a group are asked by its head."""

    star: Method
    work: Work

    @on_client
    def study(
        self, client: Client, model: Weights, teacher: Weights, own: str, net: str, weight: float
    ) -> dict[str, Any]:
        """Distill, and send the model that comes of it."""
        found = Single(client, own, self.work).study(model, Teacher(teacher, net, weight))
        return {"model": Coded(found, self.work.codec), "size": len(client.train)}

    @on_client
    def judge(self, client: Client, model: Weights, net: str) -> dict[str, float]:
        """Count right answers of a model."""
        return Single(client, "", self.work).judge(model, net)._asdict()

    @on_client
    def show(self, client: Client, model: Weights) -> dict[str, Any]:
        """The member's own model, where the star method makes no other."""
        weights = weights_of(self.star.personal_model(client, model))
        return {"model": Coded(weights, self.work.codec), "size": len(client.train)}


@dataclass
class ClientGroup:
    """A federation that is a group of clients."""

    client: Client
    net: str
    work: Work
    star: Method
    rounds: int
    """Rounds inside for each time the federation trains."""
    bytes: Counter[Direction] = field(default_factory=Counter)
    """What was sent inside, as the members' server counts it."""

    def local_train(self, model: Weights, purpose: str) -> Weights:
        """Rounds of the star method from this model."""
        task = replace(with_net(self.client.task, self.net), given=model)
        with self._asking(self.star, task) as clients:
            with global_streams(clients.seed, "start"):
                state = self.star.init(task, clients.seed)
            for clients.round in self._numbers(purpose):
                with global_streams(clients.seed, clients.round, "coordinator"):
                    state = self.star.round(state, clients)
        found = self.star.global_weights(state)
        if found is None:
            program = GroupHandlers(self.star, self.work)
            with self._asking(program, task) as clients:
                shared = self.star.broadcast(state)
                found = _mean(clients.ask(range(len(clients)), program.show, model=shared, returns=_like(model)))
        return found

    def study(self, model: Weights, teacher: Teacher) -> Weights:
        """Rounds of federated averaging with the teacher's loss."""
        program = GroupHandlers(self.star, self.work)
        codec = self.work.codec
        with self._asking(program, with_net(self.client.task, self.net)) as clients:
            for clients.round in self._numbers("study"):
                answers = clients.ask(
                    range(len(clients)),
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
        program = GroupHandlers(self.star, self.work)
        with self._asking(program, self.client.task) as clients:
            answers = clients.ask(
                range(len(clients)), program.judge, model=Coded(model, self.work.codec), net=net, returns=COUNTS
            )
        counts = [Counts(**answer.fields) for answer in answers]
        return Counts(*(sum(part) for part in zip(*counts, strict=True)))

    def _numbers(self, purpose: str) -> range:
        """The numbers of the rounds inside: none of them comes twice, so neither does what is drawn in them."""
        before = 0 if purpose == BEGIN else self.client.round * self.rounds
        return range(before + 1, before + self.rounds + 1)

    @contextmanager
    def _asking(self, program: object, task: Task) -> Iterator[Clients]:
        """The members, to be asked; what is sent is counted. Without enough of them the federation is absent."""
        clients = self.client.members(program, task)
        clients.round = self.client.round * self.rounds
        try:
            yield clients
        except QuorumLost as lost:
            raise Unable(f"inside, {lost}") from lost
        finally:
            self.bytes.update(clients.ledger.total)


def _like(model: Weights) -> Schema:
    return {"model": model, "size": Number(int, 1, MAX_SIZE)}


def _mean(answers: Answers) -> Weights:
    return weighted_mean([answer["model"] for answer in answers], [answer["size"] for answer in answers])
