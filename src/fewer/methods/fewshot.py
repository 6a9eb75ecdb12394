"""What methods share that are judged on classes nobody trained on: tasks, the choice of a model, and figures.

A task is N-way K-shot: N classes, of each K samples to learn from (the support) and some to answer (the queries).
Clients learn from tasks of base classes, a model is chosen by tasks of validation classes, and judged on tasks of novel
classes. All of them are drawn from a client's own samples. Those for choosing and judging depend on seed and client only,
so they are the same for all methods. The setting is that of F2L (Wang et al., KDD 2023, Sections 2 and 4.2).

Departure: where clients are alone, each model answers the tasks of its own client, in the paper those of all.
"""

from __future__ import annotations

import statistics
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from fewer.data import Data, Samples
from fewer.data.episodes import Episode, episode
from fewer.errors import DataError, QuorumLost, SettingError
from fewer.learning import weighted_mean
from fewer.learning.adam import adam
from fewer.methods.base import Client, Method, Scores
from fewer.models import Split, Task, Weights, finite, load_weights, parts_of, weights_of
from fewer.models.split import feature_width
from fewer.runtime import Clients, Unable, on_client, stream
from fewer.wire import Codec, Coded, Shaped

Part = Literal["validation", "test"]
DESCENTS, TINY = 500, 1e-3
"""Steps of logistic regression at most, and the slope at which it has arrived."""


@dataclass(frozen=True)
class FewShotState:
    """The model as it learns, and as it was when it did best on validation classes."""

    model: Weights
    best: Weights
    chosen: int
    """The round of the best model; 0 before the first choice."""
    validation: float
    """Its accuracy on validation classes."""


class FewShot(Method):
    """A method that learns from tasks of base classes and answers tasks of novel ones."""

    novel: ClassVar[bool] = True
    predictors: ClassVar[tuple[str, ...]] = ("accuracy",)
    """The ways in which it answers a task; the first one counts."""
    tunable: ClassVar[dict[str, tuple[float, ...]]] = {"lr": (0.001, 0.003, 0.01)}

    cohort: PositiveInt | None = None
    """How many clients are asked in a round; by default all."""
    way: Annotated[int, Field(ge=2)] = 5
    """Classes in a task (N)."""
    shot: PositiveInt = 1
    """Samples of each class that a task gives to learn from (K)."""
    queries: PositiveInt = 5
    """Samples of each class that are to be answered."""
    tasks: PositiveInt = 10
    """Tasks that a client learns from in a round (τ)."""
    lr: PositiveFloat = 0.001
    """Step size of a client's Adam."""
    weight_decay: NonNegativeFloat = 1e-4
    """Its weight decay."""
    test_tasks: PositiveInt = 100
    """Tasks that a model is chosen and judged by, divided among the clients."""
    validate_every: PositiveInt = 5
    """A model may be chosen after every so many rounds, and after the last; where it is after the last alone, that is
    the one, and no validation classes are looked at."""
    eval_classes: Literal["novel", "validation"] = "novel"
    """Which classes it is judged on: novel ones, or those that models and settings are chosen on."""
    codec: Codec = "float32"
    """How models are written on the wire."""

    # What each method says.

    @abstractmethod
    def begin(self, task: Task, seed: int) -> Weights:
        """What is shared before the first round."""

    @abstractmethod
    def learn(self, client: Client, model: Weights) -> Weights:
        """What a client makes of the shared model in a round."""

    @abstractmethod
    def prepare(self, client: Client, model: Weights, kept: bool) -> Any:
        """What a client answers tasks with; of its own, what it has now or what it was told to keep."""

    @abstractmethod
    def answer(self, ready: Any, task: Episode) -> dict[str, Tensor]:
        """The classes of the queries, by each reading."""

    def model_of(self, client: Client, model: Weights, kept: bool) -> Weights:
        """The model that a client uses: the one that was sent."""
        return model

    # Learning together.

    def sample_cohort(self, clients: Clients) -> list[int]:
        """Who is asked in this round."""
        return clients.sample(len(clients) if self.cohort is None else self.cohort)

    def tuning_split(self, data: Data, share: float, seed: int) -> tuple[Method, Data]:
        """A trial is judged on validation classes."""
        return self.model_copy(update={"judge": "validation"}), data

    def init(self, task: Task, seed: int) -> FewShotState:
        """Nothing is chosen yet."""
        model = self.begin(task, seed)
        return FewShotState(model, model, 0, 0.0)

    def round(self, state: FewShotState, clients: Clients) -> FewShotState:
        """The mean of what clients make of the model, with equal shares; from time to time, the choice."""
        answers = clients.ask(
            self.sample_cohort(clients),
            self.local_train,
            model=Coded(state.model, self.codec),
            returns={"model": state.model},
        )
        return self.choice(replace(state, model=mean([answer["model"] for answer in answers])), clients)

    def choice(self, state: FewShotState, clients: Clients) -> FewShotState:
        """The new model instead of the best so far, if it does as well on validation classes."""
        if self.validate_every >= self.rounds:  # there would be one to choose from
            return state
        if clients.round % self.validate_every and clients.round != self.rounds:
            return state
        try:
            accuracy = mean_of(self.shares(self.ask_tasks(state.model, clients, "validation", kept=False))[0])
        except QuorumLost as lost:
            if not lost.unable:
                raise
            # nobody has classes enough to choose by: it is the last model
            accuracy = state.validation
        if accuracy < state.validation:
            return state
        clients.ask(clients.eval_cohort(), self.keep, returns={})
        return FewShotState(state.model, state.model, clients.round, accuracy)

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        """Learn from some tasks of base classes."""
        return {"model": Coded(self.learn(client, model), self.codec)}

    @on_client
    def keep(self, client: Client) -> dict[str, Any]:
        """What the client has of its own is the best so far."""
        if (own := client.store.get("own")) is not None:
            client.store.put("kept", own)
        return {}

    def own(self, client: Client, kept: bool) -> Any:
        """What the client has of its own, now or as it was kept; None where it had nothing."""
        return client.store.get("kept" if kept else "own")

    def put(self, client: Client, own: Any, weights: Weights) -> None:
        """What the client has of its own now; Unable, and nothing is put, where these weights of it are broken."""
        if not finite(weights):
            raise Unable(f"its training diverged (rate {self.lr:g})")
        client.store.put("own", own)

    def task(self, samples: Samples, draw: torch.Generator, kind: str = "base") -> Episode:
        """A task; a client that has too few classes for one says so, and is skipped."""
        try:
            return episode(samples, self.way, self.shot, self.queries, draw)
        except DataError as error:
            raise Unable(f"{kind}: {error}") from error

    # How it is judged.

    def broadcast(self, state: FewShotState) -> Weights:
        """The best model so far; before the first choice, the last one."""
        return state.best if state.chosen else state.model

    def evaluate(self, state: FewShotState, clients: Clients, data: Data) -> Scores:
        """Right answers to tasks of novel classes, by each reading, and how sure the first of them is."""
        predictors = self.shares(self.judged(state, clients))
        first = [share for shares in predictors[0].values() for share in shares]
        spread = 1.96 * statistics.stdev(first) / len(first) ** 0.5 if len(first) > 1 else None
        scores = {name: mean_of(shares) for name, shares in zip(self.ranked(), predictors, strict=True)}
        by_client = {str(client): statistics.fmean(shares) for client, shares in predictors[0].items()}
        return {
            "accuracy": mean_of(predictors[0]),
            **scores,
            "groups": first,
            "tasks": len(first),
            "tasks_ci95": spread,
            "chosen": state.chosen,
            "validation": state.validation if state.chosen else None,
            "clients": by_client,
        }

    def report(self, state: FewShotState, clients: Clients, data: Data) -> Scores:
        """All is in the figures already."""
        return {}

    def judged(self, state: FewShotState, clients: Clients) -> dict[int, Mapping[str, Tensor]]:
        """What each client gets right of its tasks."""
        part: Part = "test" if self.eval_classes == "novel" else "validation"
        found = self.ask_tasks(self.broadcast(state), clients, part, kept=state.chosen > 0)
        if not found:
            raise SettingError(
                f"no client has {self.way} {self.eval_classes} classes with {self.shot} + {self.queries} samples "
                "(allowed: fewer clients, shots or queries)"
            )
        return found

    def ask_tasks(self, model: Weights, clients: Clients, part: Part, kept: bool) -> dict[int, Mapping[str, Tensor]]:
        """How many queries each client gets right in each task, by reading."""
        eval_cohort = clients.eval_cohort()
        tasks = ceil(self.test_tasks / len(eval_cohort))
        right = Shaped((tasks,), torch.int64, max_value=self.way * self.queries)
        answers = clients.ask(
            eval_cohort,
            self.answer_tasks,
            model=Coded(model, self.codec),
            part=part,
            tasks=tasks,
            kept=kept,
            returns={"right": dict.fromkeys(self.predictors, right)},
        )
        return {answer.client: answer["right"] for answer in answers}

    def ranked(self) -> tuple[str, ...]:
        """The predictors, the one that counts first."""
        return self.predictors

    def shares(self, found: Mapping[int, Mapping[str, Tensor]]) -> list[dict[int, list[float]]]:
        """For each reading, the share of right answers in each task, by client."""
        queries = self.way * self.queries
        return [
            {client: (right[name].double() / queries).tolist() for client, right in found.items()}
            for name in self.ranked()
        ]

    @on_client
    def answer_tasks(self, client: Client, model: Weights, part: str, tasks: int, kept: bool) -> dict[str, Any]:
        """Answer tasks of the client's own samples; they depend on seed and client alone."""
        samples, kind = (client.test, "novel") if part == "test" else (client.validation, "validation")
        draw = stream(client.seed, client.id, part, "tasks")
        drawn = [self.task(samples, draw, kind) for _ in range(tasks)]
        ready = self.prepare(client, self.model_of(client, model, kept), kept)
        right: dict[str, list[int]] = {name: [] for name in self.predictors}
        for task in drawn:
            for name, classes in self.answer(ready, task).items():
                right[name].append(int((classes == task.query_y).sum()))
        return {"right": {name: torch.tensor(counts) for name, counts in right.items()}}

    # What it is worth to a user.

    def global_weights(self, state: FewShotState) -> Weights | None:
        """There is no model of classes known beforehand."""
        return None

    def personal_model(self, client: Client, model: Weights) -> nn.Module:
        """A client has a model only once it has a task."""
        raise SettingError(f"{self.name} has no models of clients: it makes one of the samples of each task")


class FineTuned(FewShot):
    """A method whose model is fine-tuned on the support of each task, from where meta-steps have brought it."""

    tunable: ClassVar[dict[str, tuple[float, ...]]] = {
        "lr": (0.001, 0.003, 0.01),
        "fine_tune_lr": (0.03, 0.1, 0.3),
    }

    fine_tune_lr: PositiveFloat = 0.01
    """Step size of fine-tuning on a support (α_ft)."""
    fine_tune_steps: PositiveInt = 1
    """Steps of fine-tuning in training."""
    adapt_steps: PositiveInt | None = None
    """Steps of fine-tuning on a task of novel classes; by default as many as in training."""
    first_order: bool = False
    """Whether meta-steps have second derivatives."""
    zero_head: bool = False
    """Whether the head for a task's classes begins each task at zero. If not it takes meta-steps too; classes come in
    any order, and over all orders their mean is 0."""

    def meta_step(
        self, weights: Weights, slopes: Weights, first: Weights, second: Weights, step: int, lr: float
    ) -> tuple[Weights, Weights, Weights]:
        """Adam's, with weight decay, on all that learns from task to task: new weights and both moments.

        With a head of equal rows another order of classes permutes the rows of its meta-gradient and leaves all else as
        it is; the mean over orders is the mean row, and that is 0, since what is the same for all classes changes no
        probability. So a head of zeros stays (as in Kao, Chiu, Chen, ICLR 2022).
        """
        slopes = {
            name: slope + self.weight_decay * weights[name]
            for name, slope in slopes.items()
            if not (self.zero_head and name.startswith("head."))
        }
        return adam(weights, slopes, first, second, step, lr)


class Unshared(FewShot):
    """Before a method of this family: each client has a model of its own, and nothing is shared."""

    def init(self, task: Task, seed: int) -> FewShotState:
        """There is no global model."""
        self.begin(task, seed)  # what is wrong with the model shows now
        return FewShotState({}, {}, 0, 0.0)

    def round(self, state: FewShotState, clients: Clients) -> FewShotState:
        """The clients train. What is sent is the order to do so, and that it was done."""
        clients.ask(self.sample_cohort(clients), self.train_personal, returns={})
        return self.choice(state, clients)

    @on_client(stream="practise")
    def train_personal(self, client: Client) -> dict[str, Any]:
        """Go on with the client's own model."""
        learned = self.learn(client, self.model_of(client, {}, kept=False))
        self.put(client, learned, learned)
        return {}

    def model_of(self, client: Client, model: Weights, kept: bool) -> Weights:
        """The client's own; before its first round, the one that all begin with."""
        return self.own(client, kept) or self.begin(client.task, client.seed)


# --- pieces -----------------------------------------------------------------------------------------------------


def mean(models: list[Weights]) -> Weights:
    """The mean with equal shares (Eq 2)."""
    return weighted_mean(models, [1] * len(models))


def mean_of(shares: Mapping[int, list[float]]) -> float:
    """Over all tasks of all clients."""
    return statistics.fmean(share for one in shares.values() for share in one)


def small_head(task: Task, net: nn.Module, way: int) -> Split:
    """The encoder of the task's net with a new head for so many classes."""
    return Split(parts_of(net)[0], feature_width(task, net), way).to(task.device)


def small_start(task: Task, seed: int, way: int) -> Weights:
    """The weights that such a net begins with: the encoder's as everyone's."""
    own = weights_of(blank(small_head(task, task.net(), way)))
    return own | {name: tensor for name, tensor in task.initial(seed).items() if name.startswith("encoder.")}


def small_net(client: Client, model: Weights, way: int) -> Split:
    """Such a net with these weights."""
    net = small_head(client.task, client.net(client.initial()), way)
    load_weights(net, model)
    return net


def blank(net: Split) -> Split:
    """The net with a head of zeros: one step of fine-tuning then gives each class the mean of its features."""
    with torch.no_grad():
        for parameter in net.head.parameters():
            parameter.zero_()
    return net


def logistic_regression(support: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
    """The classes of queries by logistic regression on features of length 1, with a penalty of ‖W‖²/2.

    By Nesterov's gradient descent, until the slope is tiny: a solver from outside would start threads of its own.
    """
    x, asked = (
        torch.cat([nn.functional.normalize(features.double(), dim=1), features.new_ones(len(features), 1)], 1)
        for features in (support, queries)
    )
    wanted = nn.functional.one_hot(labels).double()
    punished = (torch.arange(x.shape[1], device=x.device) < x.shape[1] - 1).double()  # all but the intercept
    far = 1 / (1 + x.square().sum() / 2)  # no more than one over the largest curvature
    here = ahead = x.new_zeros(wanted.shape[1], x.shape[1])
    for step in range(DESCENTS):
        slope = ((x @ ahead.T).softmax(1) - wanted).T @ x + ahead * punished
        if step % 10 == 0 and float(slope.norm()) < TINY:
            break
        before, here = here, ahead - far * slope
        ahead = here + step / (step + 3) * (here - before)
    return (asked @ here.T).argmax(1)
