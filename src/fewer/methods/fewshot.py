"""Few-shot methods, evaluated on novel classes: tasks, model selection and evaluation.

A task is N-way K-shot. It has N classes, K support samples per class to learn from, and queries to classify. Clients
train on tasks of base classes, the best model is selected on tasks of validation classes, and evaluation uses tasks of
novel classes. Every task is drawn from one client's own samples. Validation and test tasks depend only on the seed and
the client, so all methods get the same ones. The setting is that of F2L (Wang et al., KDD 2023, Sections 2 and 4.2).

Departures:

- In the `local-*` methods each model solves only its client's tasks; in the paper, the tasks of all clients.
"""

from __future__ import annotations

import statistics
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from fewer.data import Data, Samples
from fewer.data.episodes import Episode, sample_episode
from fewer.errors import DataError, QuorumLost, SettingError
from fewer.methods import Client, Context, Group, Method, Needs, Scores, SearchSpace, State
from fewer.methods.fedavg import average_equally
from fewer.models import Task, Weights, all_finite
from fewer.runtime import Clients, Unable, on_client, stream
from fewer.statistics import half_width
from fewer.wire import Shaped

Part = Literal["validation", "test"]
CURRENT, BEST = "current", "best"
"""Store keys of a client's private state: the latest, and the one of the best round."""


@dataclass(frozen=True)
class FewShotState(State):
    """The current model, and the best one so far on validation classes."""

    model: Weights
    best_model: Weights
    best_round: int
    """The round of the best model; 0 before the first selection."""
    validation_accuracy: float
    """The best model's accuracy on validation classes."""

    @property
    def shared(self) -> Weights:
        """The best model so far; before the first selection, the current one."""
        return self.best_model if self.best_round else self.model


class FewShot(Method[FewShotState]):
    """A method that trains on tasks of base classes and solves tasks of novel classes."""

    group: ClassVar[Group] = "novel classes"

    needs: ClassVar[Needs] = "novel classes"
    predictors: ClassVar[tuple[str, ...]] = ("accuracy",)
    """The classifiers that solve a task. The first one gives the method's accuracy."""
    tunable: ClassVar[SearchSpace] = {"lr": (0.0003, 0.001, 0.003, 0.01, 0.03)}

    cohort: PositiveInt | None = None
    """Clients asked in each round. [default: all]"""
    way: Annotated[int, Field(ge=2)] = 5
    """Classes in a task (N)."""
    shot: PositiveInt = 1
    """Support samples per class (K)."""
    queries: PositiveInt = 5
    """Query samples per class."""
    train_way: Annotated[int, Field(ge=2)] | None = Field(default=None, json_schema_extra={"neutral": True})
    """Classes in a training task. [default: way]"""
    train_shot: PositiveInt | None = Field(default=None, json_schema_extra={"neutral": True})
    """Support samples per class in a training task. [default: shot]"""
    train_queries: PositiveInt | None = Field(default=None, json_schema_extra={"neutral": True})
    """Query samples per class in a training task. [default: queries]"""
    tasks: PositiveInt = 10
    """Tasks that a client trains on in a round (τ)."""
    lr: PositiveFloat = 0.001
    """Learning rate of the client's Adam."""
    weight_decay: NonNegativeFloat = 1e-4
    """Weight decay of the client's Adam."""
    test_tasks: PositiveInt = 100
    """Tasks for model selection and for evaluation, split evenly across the clients."""
    validate_every: PositiveInt = 5
    """Rounds between validations; the last round is always validated. If only the last round would be, its model is
    used without validation."""
    eval_classes: Literal["novel", "validation"] = "novel"
    """Classes of the evaluation tasks: novel ones, or the validation classes (for tuning)."""

    # What a method defines.

    @abstractmethod
    def initial_weights(self, task: Task, seed: int) -> Weights:
        """The shared weights before the first round."""

    @abstractmethod
    def fit(self, client: Client, model: Weights) -> Weights:
        """Trains the shared model on the client's tasks of base classes and returns it."""

    @abstractmethod
    def task_solver(self, client: Client, model: Weights, best: bool) -> Any:
        """What the client solves tasks with. `best` uses its private state of the best round, not the current one."""

    @abstractmethod
    def predict(self, solver: Any, task: Episode) -> dict[str, Tensor]:
        """The predicted classes of the queries, by predictor."""

    def client_weights(self, client: Client, model: Weights, best: bool) -> Weights:
        """The model that the client uses. Default: the one it received."""
        return model

    # Training.

    def sample_cohort(self, clients: Clients) -> list[int]:
        """Draws the clients that are asked in this round."""
        return clients.sample(len(clients) if self.cohort is None else self.cohort)

    @property
    def evaluates_clients(self) -> bool:
        """False: it is evaluated on tasks."""
        return False

    def tuning_split(self, data: Data, fraction: float, seed: int) -> tuple[Self, Data]:
        """A tuning trial is evaluated on validation classes."""
        return self.model_copy(update={"eval_classes": "validation"}), data

    def init(self, task: Task, seed: int) -> FewShotState:
        """The initial model, before any selection."""
        model = self.initial_weights(task, seed)
        return FewShotState(model, model, 0, 0.0)

    def round(self, state: FewShotState, clients: Clients) -> FewShotState:
        """Averages the clients' models with equal weights; every `validate_every` rounds, selects the best model."""
        cohort, returns = self.sample_cohort(clients), {"model": state.model}
        answers = clients.ask(cohort, self.local_train, model=state.model, returns=returns)
        return self.select_best(replace(state, model=average_equally(answers)), clients)

    def select_best(self, state: FewShotState, clients: Clients) -> FewShotState:
        """Makes the current model the best one, unless it does worse on validation classes."""
        if self.validate_every >= self.rounds:  # only one candidate
            return state
        if clients.round % self.validate_every and clients.round != self.rounds:
            return state
        try:
            counts = self.ask_task_counts(state.model, clients, "validation", best=False)
            accuracy = mean_accuracy(self.task_accuracies(counts, self.predictor_order()[0]))
        except QuorumLost as lost:
            if not lost.unable:
                raise
            # No client has enough validation classes: the latest model is the best one.
            accuracy = state.validation_accuracy
        if accuracy < state.validation_accuracy:
            return state
        clients.ask(clients.eval_cohort(), self.mark_best, returns={})
        return FewShotState(state.model, state.model, clients.round, accuracy)

    def why_not_extend(self, done: int, planned: int, unscheduled: bool) -> str:
        """A run can be extended if the same rounds have been validated as in a longer run."""

        def validated(rounds: int) -> set[int]:
            candidates = {round for round in range(1, done + 1) if round % self.validate_every == 0 or round == rounds}
            return set() if self.validate_every >= rounds else candidates

        if different := validated(planned) ^ validated(self.rounds):
            return f"round {min(different)} is validated in only one of them (validate_every = {self.validate_every})"
        return ""

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        """Trains on tasks of base classes."""
        return {"model": self.fit(client, model)}

    @on_client(stream="keep")
    def mark_best(self, client: Client) -> dict[str, Any]:
        """Saves the client's current private state as the best one."""
        if (private := client.store.get(CURRENT)) is not None:
            client.store.put(BEST, private)
        return {}

    def load_private(self, client: Client, best: bool) -> Any:
        """The client's private state, current or best; None before its first round."""
        return client.store.get(BEST if best else CURRENT)

    def save_private(self, client: Client, private: Any, weights: Weights) -> None:
        """Saves the client's private state. Raises `Unable` and saves nothing if its `weights` are not finite."""
        if not all_finite(weights):
            raise Unable(f"training diverged; lower lr (now {self.lr:g})")
        client.store.put(CURRENT, private)

    def task_size(self, training: bool) -> tuple[int, int, int]:
        """Classes of a task, and its support and query samples per class."""
        if not training:
            return self.way, self.shot, self.queries
        return self.train_way or self.way, self.train_shot or self.shot, self.train_queries or self.queries

    def draw_task(self, samples: Samples, generator: torch.Generator, kind: str = "base") -> Episode:
        """Draws a task, of base classes to train on. A client with too few classes raises `Unable` and is skipped."""
        try:
            return sample_episode(samples, *self.task_size(training=kind == "base"), generator)
        except DataError as error:
            raise Unable(f"{kind}: {error}") from error

    # Evaluation.

    def evaluate(self, state: FewShotState, clients: Clients, data: Data) -> Scores:
        """Accuracy on tasks of novel classes for each predictor, with a 95 % confidence interval for the first."""
        part: Part = "test" if self.eval_classes == "novel" else "validation"
        counts = self.ask_task_counts(state.shared, clients, part, best=state.best_round > 0)
        if not counts:
            raise SettingError(
                f"no client has {self.way} {self.eval_classes} classes with {self.shot} + {self.queries} samples; "
                "use fewer clients, shots or queries"
            )
        accuracies = [self.task_accuracies(counts, name) for name in self.predictor_order()]
        first = [accuracy for by_task in accuracies[0].values() for accuracy in by_task]
        metrics = {
            "accuracy": mean_accuracy(accuracies[0]),
            **dict(zip(self.predictor_order(), map(mean_accuracy, accuracies), strict=True)),
            "tasks": len(first),
            "tasks_ci95": half_width(first),
            "best_round": state.best_round,
            "validation_accuracy": state.validation_accuracy if state.best_round else None,
        }
        by_client = {client: statistics.fmean(by_task) for client, by_task in accuracies[0].items()}
        return Scores(metrics, "tasks", first, by_client)

    def ask_task_counts(
        self, model: Weights, clients: Clients, part: Part, best: bool
    ) -> dict[int, Mapping[str, Tensor]]:
        """Correct predictions in each task, by client and predictor."""
        eval_cohort = clients.eval_cohort()
        tasks = ceil(self.test_tasks / len(eval_cohort))
        correct = Shaped((tasks,), torch.int64, max_value=self.way * self.queries)
        fields = {"model": model, "part": part, "tasks": tasks, "best": best}
        returns = {"correct": dict.fromkeys(self.predictors, correct)}
        answers = clients.ask(eval_cohort, self.solve_tasks, returns=returns, **fields)
        return {answer.client: answer["correct"] for answer in answers}

    def predictor_order(self) -> tuple[str, ...]:
        """The predictors; the first one gives the accuracy."""
        return self.predictors

    def task_accuracies(self, counts: Mapping[int, Mapping[str, Tensor]], predictor: str) -> dict[int, list[float]]:
        """The accuracies of a predictor in all tasks, by client."""
        queries = self.way * self.queries
        return {client: (correct[predictor].double() / queries).tolist() for client, correct in counts.items()}

    @on_client(stream="answer_tasks")
    def solve_tasks(self, client: Client, model: Weights, part: str, tasks: int, best: bool) -> dict[str, Any]:
        """Counts correct predictions on tasks from the client's own samples."""
        samples, kind = (client.test, "novel") if part == "test" else (client.validation, "validation")
        generator = stream(client.seed, client.id, part, "tasks")
        episodes = [self.draw_task(samples, generator, kind) for _ in range(tasks)]
        solver = self.task_solver(client, self.client_weights(client, model, best), best)
        correct: dict[str, list[int]] = {name: [] for name in self.predictors}
        for task in episodes:
            for name, classes in self.predict(solver, task).items():
                correct[name].append(int((classes == task.query_y).sum()))
        return {"correct": {name: torch.tensor(counts) for name, counts in correct.items()}}

    # The trained model.

    def build_predictor(self, shared: Weights, context: Context) -> nn.Module:
        """Raises: there is a model only after the support of a task has been seen."""
        raise SettingError(f"{self.name} has no model of fixed classes: it builds one from the support of each task")


class LocalOnly(FewShot):
    """Mixin: each client trains its own model, and nothing is shared."""

    def init(self, task: Task, seed: int) -> FewShotState:
        """An empty state: there is no global model."""
        self.initial_weights(task, seed)  # raises now if the model is not usable
        return FewShotState({}, {}, 0, 0.0)

    def round(self, state: FewShotState, clients: Clients) -> FewShotState:
        """The clients train their own models. No weights are sent."""
        clients.ask(self.sample_cohort(clients), self.train_personal, returns={})
        return self.select_best(state, clients)

    @on_client(stream="practise")
    def train_personal(self, client: Client) -> dict[str, Any]:
        """Continues training the client's own model."""
        weights = self.fit(client, self.client_weights(client, {}, best=False))
        self.save_private(client, weights, weights)
        return {}

    def client_weights(self, client: Client, model: Weights, best: bool) -> Weights:
        """The client's own model; before its first round, the initial one."""
        return self.load_private(client, best) or self.initial_weights(client.task, client.seed)


def mean_accuracy(by_client: Mapping[int, list[float]]) -> float:
    """The mean over all tasks of all clients."""
    return statistics.fmean(accuracy for by_task in by_client.values() for accuracy in by_task)


def select_encoder(weights: Weights) -> Weights:
    """The weights of the encoder."""
    return {name: tensor for name, tensor in weights.items() if name.startswith("encoder.")}
