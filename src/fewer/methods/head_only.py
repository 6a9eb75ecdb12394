"""Methods that fit only the head, from statistics of features. The encoder keeps its initial weights.

Clients compute these weights themselves, so only statistics and the head are sent. Each client answers once. With a
smaller `cohort`, further rounds ask the clients that have not answered yet. Once all have, nothing is sent.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from fewer.errors import QuorumLost, SettingError
from fewer.learning.evaluate import EVAL_BATCH_SIZE
from fewer.learning.protect import ClassSums
from fewer.learning.prototypes import Prototypes, class_prototypes, reject_prototypes
from fewer.methods import MAX_SAMPLES, Client, Context, Method, Needs, State
from fewer.methods.private_prototypes import (
    add_class_sums,
    class_sums_schema,
    private_prototypes,
    send_class_sums,
    to_prototypes,
)
from fewer.models import Task, Weights
from fewer.models.split import feature_width, split_net
from fewer.runtime import Absent, Answer, Clients, on_client
from fewer.wire import Schema, Shaped

HEAD_WEIGHT, HEAD_BIAS = "head.weight", "head.bias"
UNSEEN_BIAS = -1e4
"""The score of a class that no client holds, so that it is never predicted."""


class Head(NamedTuple):
    """A linear classifier: scores are features · weightᵀ + bias."""

    weight: Tensor
    """One row per class."""
    bias: Tensor
    seen: Tensor
    """True for each class with samples. The other rows mean nothing."""


@dataclass(frozen=True)
class HeadState(State):
    """The head, and the statistics that it is computed from."""

    head: Weights
    statistics: Weights
    """Statistics of all clients that answered; empty before the first."""
    answered: list[int]
    """The clients that answered."""

    @property
    def shared(self) -> Weights:
        """The head. Clients compute the encoder."""
        return self.head


class HeadOnly(Method[HeadState]):
    """The base of these methods: what a client sends, and the head that follows from it."""

    needs: ClassVar[Needs] = "classes"
    answers_once: ClassVar[bool] = True
    class_sums: ClassVar[Literal["", "joint", "by client"]] = ""
    """The noisy class sums from which the head follows, under differential privacy: none, joint ones, or by client."""

    rounds: PositiveInt = 1
    """Number of rounds. One is enough if all clients answer."""
    cohort: PositiveInt | None = None
    """Clients asked in each round, of the clients without an answer so far. [default: all]"""

    @abstractmethod
    def statistics_schema(self, width: int, classes: int) -> Schema:
        """The form of a client's statistics, given the number of features and of classes."""

    @abstractmethod
    def summarize(self, features: Tensor, labels: Tensor, client: Client) -> Weights:
        """The statistics of a client's features."""

    @abstractmethod
    def merge(self, parts: Sequence[Mapping[str, Tensor]]) -> Weights:
        """The statistics of several clients together."""

    @abstractmethod
    def fit_head(self, statistics: Weights, head: Weights, clients: Clients) -> Head:
        """The head that follows from the statistics. `head` is the one before this round."""

    @classmethod
    def takes_rules(cls) -> bool:
        """True if clients send class means, among which a robust rule finds outliers."""
        return bool(cls.class_sums)

    def init(self, task: Task, seed: int) -> HeadState:
        """The initial head."""
        return HeadState(initial_head(task, seed), {}, [])

    def round(self, state: HeadState, clients: Clients) -> HeadState:
        """Asks the clients that have not answered yet for their statistics, and computes the head anew."""
        answered = set(state.answered)
        waiting = [client for client in range(len(clients)) if client not in answered]
        if not waiting:
            return state
        count = len(waiting) if self.cohort is None else min(self.cohort, len(waiting))
        cohort = waiting if count == len(waiting) else clients.sample(count, among=waiting)
        clients.forget_draw()  # who waits depends on earlier draws
        if clients.privacy and (self.class_sums == "joint" or (self.class_sums and clients.protects_records)):
            parts, new = self.ask_protected(clients, cohort, state.head)
        else:
            answers = self.ask_statistics(clients, cohort, self.send_statistics, state.head)
            parts, new = list(answers.values()), list(answers)
        if self.class_sums and parts:  # the rows of other statistics are no class means
            rows = reject_prototypes([Prototypes(**part) for part in parts], clients.aggregation)
            parts = [part._asdict() for part in rows]
        if not parts and not state.statistics:
            problem = "no class has more samples than the noise; use a larger epsilon" if clients.privacy else ""
            raise QuorumLost(f"round {clients.round}: {problem or 'no client sent valid statistics'}")
        statistics = self.merge([*([state.statistics] if state.statistics else []), *parts])
        head = write_head(state.head, self.fit_head(statistics, state.head, clients), UNSEEN_BIAS)
        return HeadState(head, statistics, sorted([*answered, *new]))

    def ask_statistics(
        self, clients: Clients, cohort: Sequence[int], handler: Callable[..., Any], head: Weights
    ) -> dict[int, Weights]:
        """The valid statistics by client. Others count as refused."""
        classes, width = head[HEAD_WEIGHT].shape
        answers = clients.ask(cohort, handler, returns=self.statistics_schema(width, classes))
        valid = {}
        for answer in answers:
            if _has_valid_rows(answer, classes):
                valid[answer.client] = dict(answer.fields)
            else:
                clients.on_absent(Absent(answer.client, "refused", "invalid classes or counts"), handler.__name__)
        return valid

    def ask_protected(self, clients: Clients, cohort: Sequence[int], head: Weights) -> tuple[list[Weights], list[int]]:
        """Class means under differential privacy, joint or by client, and the clients that answered."""
        classes, width = head[HEAD_WEIGHT].shape
        if clients.protects_records:
            answers = clients.ask(cohort, self.send_class_sums, returns=class_sums_schema(classes, width))
            if self.class_sums == "by client":
                released = [ClassSums(*(answer[name] for name in ClassSums._fields)) for answer in answers]
            else:
                released = [add_class_sums(answers)]
            parts = [to_prototypes(sums) for sums in released]
        else:
            answers = clients.ask(cohort, self.send_statistics, returns=self.statistics_schema(width, classes))
            parts = [private_prototypes(answers, classes, width)]
        return [part._asdict() for part in parts if len(part.classes)], [answer.client for answer in answers]

    @on_client
    def send_class_sums(self, client: Client) -> dict[str, Any]:
        """Noisy sums of the features of the client's training samples by class, and noisy counts."""
        encoder = split_net(client.net(client.initial_weights()))[0].eval()
        return send_class_sums(client, encoder)

    @on_client
    def send_statistics(self, client: Client) -> dict[str, Any]:
        """The statistics of the client's training samples."""
        return self.summarize(*encode_samples(client), client)

    def build_predictor(self, shared: Weights, context: Context) -> nn.Module:
        """The initial encoder with the head."""
        return context.net({**context.task.initial_weights(context.seed), **shared})


def initial_head(task: Task, seed: int) -> Weights:
    """The initial weights of a linear head. Raises SettingError if the net has another one."""
    head = split_net(task.net())[1]
    if not isinstance(head, nn.Linear) or head.in_features != feature_width(task):
        raise SettingError(f"this method needs a head that is one nn.Linear layer, got {type(head).__name__}")
    return head_of(task.initial_weights(seed))


def head_of(weights: Weights) -> Weights:
    """The weights of the head."""
    return {name: weights[name] for name in (HEAD_WEIGHT, HEAD_BIAS) if name in weights}


def write_head(weights: Weights, head: Head, unseen_bias: float | None = None) -> Weights:
    """The weights with this head. Classes without samples keep their weights, or get `unseen_bias` as their score."""
    written = dict(weights)
    for name, tensor in ((HEAD_WEIGHT, head.weight), (HEAD_BIAS, head.bias)):
        if name in weights:
            old = weights[name]
            if unseen_bias is not None:
                old = torch.full_like(old, unseen_bias) if name == HEAD_BIAS else torch.zeros_like(old)
            seen = head.seen.view(-1, *[1] * (tensor.ndim - 1))
            written[name] = tensor.to(old).where(seen, old)
    return written


@torch.no_grad()
def encode_samples(client: Client) -> tuple[Tensor, Tensor]:
    """The features of the client's training samples by the initial encoder, in double precision, and the labels."""
    encoder = split_net(client.net(client.initial_weights()))[0].eval()
    features = torch.cat([encoder(x) for x, _ in client.train.chunks(EVAL_BATCH_SIZE)])
    return features.double(), client.train.labels


def row_schema(width: int, count_type: torch.dtype = torch.int64) -> Schema:
    """The form of statistics in rows: the class of each row, a mean, and the number of samples behind it."""
    rows = range(1, MAX_SAMPLES)
    return {
        "classes": Shaped((rows,), torch.int64),
        "means": Shaped((rows, width)),
        "counts": Shaped((rows,), count_type),
    }


def class_rows(features: Tensor, labels: Tensor) -> Weights:
    """The mean features of each class, in single precision, and the number of samples."""
    prototypes = class_prototypes(features, labels)
    return {**prototypes._asdict(), "means": prototypes.means.float()}


def merge_rows(parts: Sequence[Mapping[str, Tensor]]) -> Weights:
    """The rows of all parts, in the given order."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _has_valid_rows(answer: Answer, classes: int) -> bool:
    """True if all rows have a class from 0 to `classes` − 1 and a positive count."""
    rows = answer["classes"]
    lengths = {len(answer[name]) for name in ("means", "variances", "counts", "sums") if name in answer.fields}
    counts = answer.fields.get("counts", rows.new_ones(1))
    in_range = int(rows.min()) >= 0 and int(rows.max()) < classes
    return lengths == {len(rows)} and in_range and float(counts.min()) > 0 and float(counts.max()) <= MAX_SAMPLES
