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
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from fewer.data import Data, Samples
from fewer.data.episodes import Episode, sample_episode
from fewer.errors import DataError, QuorumLost, SettingError
from fewer.learning import weighted_mean
from fewer.learning.adam import adam_step
from fewer.methods.base import Client, Method, Metrics
from fewer.models import EncoderHead, Task, Weights, all_finite, get_weights, load_weights, split_net
from fewer.models.split import feature_width
from fewer.runtime import Clients, Unable, on_client, stream
from fewer.wire import Shaped

Part = Literal["validation", "test"]
CURRENT, BEST = "current", "best"
"""Store keys of a client's private state: the latest, and the one of the best round."""
MAX_STEPS, GRADIENT_TOLERANCE = 500, 1e-3
"""Logistic regression stops after this many steps, or at this gradient norm."""


@dataclass(frozen=True)
class FewShotState:
    """The current model, and the best one so far on validation classes."""

    model: Weights
    best_model: Weights
    best_round: int
    """The round of the best model; 0 before the first selection."""
    validation_accuracy: float
    """The best model's accuracy on validation classes."""


class FewShot(Method):
    """A method that trains on tasks of base classes and solves tasks of novel classes."""

    needs_novel_classes: ClassVar[bool] = True
    predictors: ClassVar[tuple[str, ...]] = ("accuracy",)
    """The classifiers that solve a task. The first one gives the method's accuracy."""
    tunable: ClassVar[dict[str, tuple[float, ...]]] = {"lr": (0.001, 0.003, 0.01)}

    cohort: PositiveInt | None = None
    """Clients asked in each round. [default: all]"""
    way: Annotated[int, Field(ge=2)] = 5
    """Classes in a task (N)."""
    shot: PositiveInt = 1
    """Support samples per class (K)."""
    queries: PositiveInt = 5
    """Query samples per class."""
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

    def tuning_split(self, data: Data, fraction: float, seed: int) -> tuple[Method, Data]:
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
        return self.select_best(replace(state, model=average_models([answer["model"] for answer in answers])), clients)

    def select_best(self, state: FewShotState, clients: Clients) -> FewShotState:
        """Makes the current model the best one, unless it does worse on validation classes."""
        if self.validate_every >= self.rounds:  # only one candidate
            return state
        if clients.round % self.validate_every and clients.round != self.rounds:
            return state
        try:
            counts = self.ask_task_counts(state.model, clients, "validation", best=False)
            accuracy = mean_accuracy(self.task_accuracies(counts)[0])
        except QuorumLost as lost:
            if not lost.unable:
                raise
            # No client has enough validation classes: the latest model is the best one.
            accuracy = state.validation_accuracy
        if accuracy < state.validation_accuracy:
            return state
        clients.ask(clients.eval_cohort(), self.mark_best, returns={})
        return FewShotState(state.model, state.model, clients.round, accuracy)

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

    def draw_task(self, samples: Samples, generator: torch.Generator, kind: str = "base") -> Episode:
        """Draws a task. A client with too few classes raises `Unable` and is skipped."""
        try:
            return sample_episode(samples, self.way, self.shot, self.queries, generator)
        except DataError as error:
            raise Unable(f"{kind}: {error}") from error

    # Evaluation.

    def broadcast(self, state: FewShotState) -> Weights:
        """The best model so far; before the first selection, the current one."""
        return state.best_model if state.best_round else state.model

    def evaluate(self, state: FewShotState, clients: Clients, data: Data) -> Metrics:
        """Accuracy on tasks of novel classes for each predictor, with a 95 % confidence interval for the first."""
        accuracies = self.task_accuracies(self.ask_eval_counts(state, clients))
        first = [accuracy for by_task in accuracies[0].values() for accuracy in by_task]
        ci95 = 1.96 * statistics.stdev(first) / len(first) ** 0.5 if len(first) > 1 else None
        by_predictor = {
            name: mean_accuracy(by_client) for name, by_client in zip(self.predictor_order(), accuracies, strict=True)
        }
        return {
            "accuracy": mean_accuracy(accuracies[0]),
            **by_predictor,
            "groups": first,
            "tasks": len(first),
            "tasks_ci95": ci95,
            "best_round": state.best_round,
            "validation_accuracy": state.validation_accuracy if state.best_round else None,
            "clients": {str(client): statistics.fmean(by_task) for client, by_task in accuracies[0].items()},
        }

    def evaluate_final(self, state: FewShotState, clients: Clients, data: Data) -> Metrics:
        """No additional metrics: `evaluate` returns them all."""
        return {}

    def ask_eval_counts(self, state: FewShotState, clients: Clients) -> dict[int, Mapping[str, Tensor]]:
        """Correct predictions on the evaluation tasks, by client and predictor."""
        part: Part = "test" if self.eval_classes == "novel" else "validation"
        counts = self.ask_task_counts(self.broadcast(state), clients, part, best=state.best_round > 0)
        if not counts:
            raise SettingError(
                f"no client has {self.way} {self.eval_classes} classes with {self.shot} + {self.queries} samples; "
                "use fewer clients, shots or queries"
            )
        return counts

    def ask_task_counts(
        self, model: Weights, clients: Clients, part: Part, best: bool
    ) -> dict[int, Mapping[str, Tensor]]:
        """Correct predictions in each task, by client and predictor."""
        eval_cohort = clients.eval_cohort()
        tasks = ceil(self.test_tasks / len(eval_cohort))
        correct = Shaped((tasks,), torch.int64, max_value=self.way * self.queries)
        answers = clients.ask(
            eval_cohort,
            self.solve_tasks,
            model=model,
            part=part,
            tasks=tasks,
            best=best,
            returns={"correct": dict.fromkeys(self.predictors, correct)},
        )
        return {answer.client: answer["correct"] for answer in answers}

    def predictor_order(self) -> tuple[str, ...]:
        """The predictors; the first one gives the accuracy."""
        return self.predictors

    def task_accuracies(self, counts: Mapping[int, Mapping[str, Tensor]]) -> list[dict[int, list[float]]]:
        """For each predictor, the accuracies in all tasks, by client."""
        queries = self.way * self.queries
        return [
            {client: (correct[name].double() / queries).tolist() for client, correct in counts.items()}
            for name in self.predictor_order()
        ]

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

    def global_weights(self, state: FewShotState) -> Weights | None:
        """None: there is no model of a fixed set of classes."""
        return None

    def personal_model(self, client: Client, model: Weights) -> nn.Module:
        """Raises: a client has a model only after it has seen the support of a task."""
        raise SettingError(f"{self.name} has no personal models: it builds one from the support of each task")


class FineTuned(FewShot):
    """A method that meta-learns an initialization and fine-tunes it on the support of each task."""

    tunable: ClassVar[dict[str, tuple[float, ...]]] = {
        "lr": (0.001, 0.003, 0.01),
        "fine_tune_lr": (0.03, 0.1, 0.3),
    }

    fine_tune_lr: PositiveFloat = 0.01
    """Learning rate of fine-tuning on a support (α_ft)."""
    fine_tune_steps: PositiveInt = 1
    """Fine-tuning steps in training."""
    adapt_steps: PositiveInt | None = None
    """Fine-tuning steps on a task of novel classes. [default: fine_tune_steps]"""
    first_order: bool = False
    """Drop second derivatives from the meta-gradient."""
    zero_head: bool = False
    """Start each task with a zero N-way head. Otherwise meta-steps train the head too, although their mean over all
    class orders is 0."""

    def meta_step(
        self, weights: Weights, gradients: Weights, first: Weights, second: Weights, step: int, lr: float
    ) -> tuple[Weights, Weights, Weights]:
        """One Adam step with weight decay on the meta-learned weights. Returns the weights and both moments.

        With `zero_head`, the head stays at zero (as in Kao, Chiu, Chen, ICLR 2022). If all rows of the head are equal,
        permuting the classes of a task permutes the rows of the head's meta-gradient and changes nothing else. The mean
        over all permutations is the mean row in every row. It is 0, because adding the same vector to all rows changes
        no probability.
        """
        gradients = {
            name: gradient + self.weight_decay * weights[name]
            for name, gradient in gradients.items()
            if not (self.zero_head and name.startswith("head."))
        }
        return adam_step(weights, gradients, first, second, step, lr)


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


# --- building blocks --------------------------------------------------------------------------------------------


def average_models(models: list[Weights]) -> Weights:
    """The mean of the models with equal weights (Eq 2)."""
    return weighted_mean(models, [1] * len(models))


def mean_accuracy(by_client: Mapping[int, list[float]]) -> float:
    """The mean over all tasks of all clients."""
    return statistics.fmean(accuracy for by_task in by_client.values() for accuracy in by_task)


def n_way_net(task: Task, net: nn.Module, way: int) -> EncoderHead:
    """The encoder of `net` with a new N-way head."""
    return EncoderHead(split_net(net)[0], feature_width(task, net), way).to(task.device)


def initial_n_way_weights(task: Task, seed: int, way: int) -> Weights:
    """The initial weights of an N-way net: the task's initial encoder and a zero head."""
    weights = get_weights(zero_head(n_way_net(task, task.net(), way)))
    return weights | {
        name: tensor for name, tensor in task.initial_weights(seed).items() if name.startswith("encoder.")
    }


def load_n_way_net(client: Client, model: Weights, way: int) -> EncoderHead:
    """An N-way net with these weights."""
    net = n_way_net(client.task, client.net(client.initial_weights()), way)
    load_weights(net, model)
    return net


def zero_head(net: EncoderHead) -> EncoderHead:
    """Sets the head to zero, so that one fine-tuning step moves each class's row towards its mean feature."""
    with torch.no_grad():
        for parameter in net.head.parameters():
            parameter.zero_()
    return net


def logistic_regression(support: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
    """The predicted classes of the queries by logistic regression on L2-normalized features, with penalty ‖W‖²/2.

    The solver is Nesterov's gradient descent. An external solver would start its own threads.
    """
    x, query_x = (
        torch.cat([nn.functional.normalize(features.double(), dim=1), features.new_ones(len(features), 1)], 1)
        for features in (support, queries)
    )
    targets = nn.functional.one_hot(labels).double()
    penalized = (torch.arange(x.shape[1], device=x.device) < x.shape[1] - 1).double()  # all but the intercept
    step_size = 1 / (1 + x.square().sum() / 2)  # at most the inverse of the largest curvature
    weights = lookahead = x.new_zeros(targets.shape[1], x.shape[1])
    for step in range(MAX_STEPS):
        gradient = ((x @ lookahead.T).softmax(1) - targets).T @ x + lookahead * penalized
        if step % 10 == 0 and float(gradient.norm()) < GRADIENT_TOLERANCE:
            break
        previous, weights = weights, lookahead - step_size * gradient
        lookahead = weights + step / (step + 3) * (weights - previous)
    return (query_x @ weights.T).argmax(1)
