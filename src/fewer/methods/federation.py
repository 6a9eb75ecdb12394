"""A federation in MetaFed's ring, either one client or a group of clients: trains, distills and evaluates models.

A group has a head without data, which asks its members. Plain training runs an inner method (FedAvg, FedProx, FedBN,
FedMK …), which restarts from the federation's model each time. If the inner method trains only personal models, the
federation's model is their mean, weighted by size. For distillation, members train on the loss with the teacher, and
the head averages their models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fewer.errors import QuorumLost
from fewer.learning import Counts, draw_batches, evaluate_net, sgd
from fewer.learning.distill import distill, fit_feature_map
from fewer.learning.evaluate import EVAL_BATCH_SIZE
from fewer.methods import Client, Method, PersonalMethod
from fewer.methods.fedavg import LocalTraining, average_by_size, model_schema, train_models
from fewer.methods.scores import COUNTS_SCHEMA
from fewer.models import Task, Weights, get_weights, net_factory
from fewer.registry import MODELS
from fewer.runtime import Clients, Unable, on_client
from fewer.runtime.streams import global_streams
from fewer.wire import Codec, Direction

WARM_UP = "begin"
"""Purpose of a federation's first training, before it receives a model."""
MAX_MAP_SAMPLES = 500
"""The most samples that fit the initial map between the features of two nets."""


@dataclass(frozen=True)
class Teacher:
    """A model to distill."""

    model: Weights
    net: str
    """The name of its net; '' is the task's net."""
    distill_weight: float
    """Weight of the feature loss (λ)."""


def replace_task_net(task: Task, net: str) -> Task:
    """The same task with another net; '' keeps the task's net."""
    if not net:
        return task
    build_net = net_factory(MODELS.find(net), {"shape": task.shape, "classes": task.classes}, {})
    return replace(task, build_net=build_net, pretrained=None)


def replace_client_net(client: Client, net: str) -> Client:
    """The same client with another net; '' keeps the task's net."""
    return replace(client, task=replace_task_net(client.task, net), _nets=[], _nets_in_use=0) if net else client


@dataclass
class SingleClient:
    """A federation of one client."""

    client: Client
    net: str
    training: LocalTraining
    """How much it trains."""

    def local_train(self, model: Weights, purpose: str) -> Weights:
        """The model after SGD on the cross-entropy (ℓ_cls)."""
        net = replace_client_net(self.client, self.net).net(model)
        sgd(net, self._batches(purpose), self.training.lr, optimizer=self.training)
        return get_weights(net)

    def distill(self, model: Weights, teacher: Teacher) -> Weights:
        """The model after SGD on the cross-entropy + λ · the squared difference of features (Eq 3)."""
        if teacher.distill_weight == 0:
            return self.local_train(model, "study")
        student_net = replace_client_net(self.client, self.net).net(model)
        teacher_net = replace_client_net(self.client, teacher.net).net(teacher.model)
        feature_map = None
        if teacher.net != self.net:
            feature_map = fit_feature_map(student_net, teacher_net, self.client.train.slice(0, MAX_MAP_SAMPLES)[0])
        lr, batches = self.training.lr, self._batches("study")
        distill(student_net, teacher_net, batches, lr, teacher.distill_weight, feature_map, self.training)
        return get_weights(student_net)

    def evaluate(self, model: Weights, net: str) -> Counts:
        """Correct predictions of any net on validation samples; a client without any uses its training samples."""
        samples = self.client.validation if len(self.client.validation) else self.client.train
        return evaluate_net(replace_client_net(self.client, net).net(model), samples.chunks(EVAL_BATCH_SIZE))

    def _batches(self, purpose: str) -> Iterable[tuple[Tensor, Tensor]]:
        samples, training = self.client.train, self.training
        generator = self.client.stream(purpose)
        indices = draw_batches(len(samples), training.local_steps, training.batch_size, generator)
        return training.augmented(samples.batches(indices), self.client)


@dataclass(frozen=True)
class GroupHandlers:
    """The handlers that the head of a group calls on its members."""

    inner_method: Method
    training: LocalTraining

    @property
    def codec(self) -> Codec:
        """Encoding of models that are sent inside a group."""
        return self.training.codec

    @on_client(stream="study")
    def local_distill(
        self, client: Client, model: Weights, teacher: Weights, net: str, teacher_net: str, distill_weight: float
    ) -> dict[str, Any]:
        """Distills the teacher into the model and returns the model."""
        member = SingleClient(client, net, self.training)
        weights = member.distill(model, Teacher(teacher, teacher_net, distill_weight))
        return {"model": weights, "size": len(client.train)}

    @on_client(stream="judge")
    def evaluate(self, client: Client, model: Weights, net: str) -> dict[str, float]:
        """Counts correct predictions of a model on the member's validation samples."""
        return SingleClient(client, "", self.training).evaluate(model, net)._asdict()

    @on_client(stream="show", exact=("shared",))
    def send_model(self, client: Client, shared: Weights) -> dict[str, Any]:
        """Returns the member's personal model."""
        weights = get_weights(self.inner_method.build_predictor(shared, client))
        return {"model": weights, "size": len(client.train)}


@dataclass
class ClientGroup:
    """A federation of several clients, with a method inside."""

    client: Client
    """The head, which asks the members."""
    net: str
    handlers: GroupHandlers
    inner_rounds: int
    """Inner rounds per training."""
    inner_bytes: Counter[Direction] = field(default_factory=Counter)
    """Bytes sent inside the group."""

    def local_train(self, model: Weights, purpose: str) -> Weights:
        """Rounds of the inner method, starting from `model`."""
        task = replace(replace_task_net(self.client.task, self.net), pretrained=model)
        inner_method = self.handlers.inner_method
        with self._open_members(inner_method, task) as clients:
            with global_streams(clients.seed, "start"):
                state = inner_method.init(task, clients.seed)
            for number in self._round_numbers(purpose):
                with clients.training_round(number):
                    state = inner_method.round(state, clients)
        shared: Weights = state.shared
        if not isinstance(inner_method, PersonalMethod):
            return shared
        with self._open_members(self.handlers, task) as clients:
            everyone, returns = range(len(clients)), model_schema(model)
            return average_by_size(clients.ask(everyone, self.handlers.send_model, shared=shared, returns=returns))

    def distill(self, model: Weights, teacher: Teacher) -> Weights:
        """Rounds of federated averaging with the teacher's loss."""
        with self._open_members(self.handlers, replace_task_net(self.client.task, self.net)) as clients:
            for number in self._round_numbers("study"):
                with clients.training_round(number):
                    answers = train_models(
                        clients,
                        range(len(clients)),
                        self.handlers.local_distill,
                        model,
                        teacher=teacher.model,
                        net=self.net,
                        teacher_net=teacher.net,
                        distill_weight=teacher.distill_weight,
                    )
                model = average_by_size(answers)
        return model

    def evaluate(self, model: Weights, net: str) -> Counts:
        """Correct predictions of all members, summed."""
        with self._open_members(self.handlers, self.client.task) as clients:
            everyone, handler = range(len(clients)), self.handlers.evaluate
            answers = clients.ask(everyone, handler, model=model, net=net, returns=COUNTS_SCHEMA)
        counts = [Counts(**answer.fields) for answer in answers]
        return Counts(*(sum(column) for column in zip(*counts, strict=True)))

    def _round_numbers(self, purpose: str) -> range:
        """The numbers of the inner rounds. No number repeats, so no random stream does."""
        done = 0 if purpose == WARM_UP else self.client.round * self.inner_rounds
        return range(done + 1, done + self.inner_rounds + 1)

    @contextmanager
    def _open_members(self, handlers: object, task: Task) -> Iterator[Clients]:
        """Connects to the members and counts the bytes. If too few answer, the federation is `Unable`."""
        clients = self.client.members(handlers, task)
        try:
            with clients.training_round(self.client.round * self.inner_rounds):
                yield clients
        except QuorumLost as lost:
            raise Unable(f"inside the federation: {lost}") from lost
        finally:
            self.inner_bytes.update(clients.ledger.total)


Federation = SingleClient | ClientGroup
