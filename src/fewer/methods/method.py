"""`Method`, the base class of all federated algorithms: `init`, `round`, `evaluate` and `build_predictor`."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError
from torch import nn
from typing_extensions import TypeVar

from fewer.data import Data
from fewer.errors import SettingError, setting_error
from fewer.learning import Evaluation, measure_net
from fewer.learning.evaluate import EVAL_BATCH_SIZE, add_evaluations, empty_evaluation
from fewer.methods.context import Client, Context, Server
from fewer.methods.scores import Scores, ask_evaluations, pool_evaluations, primary_metric, score_clients
from fewer.methods.standardize import SendsColumnSums
from fewer.models import Task, Weights, get_weights, load_weights
from fewer.runtime import Clients, on_client, on_server
from fewer.wire import Codec

_LOG = logging.getLogger("fewer")
DEFAULT_COHORT = 10
"""Clients asked in each round if `cohort` is not set."""
EVAL_CHUNK_SIZE = 2500
"""Samples of the global test set that a worker evaluates in one call."""
AVERAGES = {"average_equally", "average_by_size", "average_field", "combine"}
"""Functions that average what clients send by the rule of the run."""
REJECTS = {"merge_prototypes", "concatenate_images", "add_class_sums"}
"""Functions that reject outliers by the rule of the run."""
BEST = "best_model"
"""Store key of a client's best model on its validation samples, and how good it is there."""


Needs = Literal["", "classes", "novel classes"]
Group = Literal[
    "global model",
    "server optimizers",
    "drift correction",
    "personalization",
    "sequential",
    "one-shot",
    "new clients",
    "later groups",
    "novel classes",
]
SearchSpace = Mapping[str, Sequence[float]]
"""Hyperparameters to tune, with starting values in ascending order."""


class State:
    """Base of all states: what a method keeps on the server from round to round. A subclass is a frozen dataclass."""

    @property
    def shared(self) -> Weights:
        """The weights that every client receives for evaluation. `build_predictor` builds models from them."""
        return {}


@dataclass(frozen=True)
class ModelState(State):
    """The state of a method that keeps nothing but a global model."""

    model: Weights

    @property
    def shared(self) -> Weights:
        """The global model."""
        return self.model


StateT = TypeVar("StateT", bound=State, default=Any)


class Method(SendsColumnSums, BaseModel, Generic[StateT]):
    """A federated algorithm. Its fields are the hyperparameters; four functions are the algorithm.

        state  = method.init(task, seed)                 # before the first round
        state  = method.round(state, clients)            # asks clients, returns the next state
        scores = method.evaluate(state, clients, data)
        net    = method.build_predictor(state.shared, client)  # on the server: the global model

    A method object never changes. Everything that changes on the server is in the state: a frozen dataclass of tensors,
    numbers, strings, and lists or dicts of these. Checkpoints save it.

    `round` reaches clients only through `clients.ask`:

        answers = clients.ask(cohort, self.local_train, model=weights, returns={"model": weights})

    This runs the handler `local_train(self, client, model)` on every client of the cohort. A handler returns a dict.
    `returns` describes that dict: here, tensors with the names, shapes and dtypes of `weights`. Messages with any other
    content are refused. Clients that fail, time out or are refused are missing from `answers`; if too few clients
    answer, `ask` raises QuorumLost.

    What only some methods can do, such as adapting to a new client, is in `fewer.methods.capabilities`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    name: ClassVar[str] = ""
    """The registered name; for unregistered methods, the class name in lower case."""
    tunable: ClassVar[SearchSpace] = {}
    """The hyperparameters that `--tune` searches, most important first, with starting values in ascending order."""
    group: ClassVar[Group] = "global model"
    """What the method is for; `fewer methods` lists methods by group."""
    needs: ClassVar[Needs] = ""
    """What the task must have: nothing in particular, classes, or test classes that are not in the training data."""
    file_options: ClassVar[tuple[str, ...]] = ()
    """Options that name files. Only the server reads them; remote clients receive "" instead."""
    accepts_unseen_clients: ClassVar[bool] = True
    """False if no client can join after training."""
    joins_by_training: ClassVar[bool] = False
    """True if a client's model depends on its own training, so that a new client must train before it has one."""
    answers_once: ClassVar[bool] = False
    """True if each client answers in one round only, so that a target ε is for one answer."""
    simulation_only: ClassVar[bool] = False
    """True if the method needs the samples of all clients in one place, so that it cannot run between machines."""

    rounds: PositiveInt = 10
    """Number of rounds."""
    cohort: PositiveInt | None = None
    """Clients asked in each round. [default: 10, or all if there are fewer]"""
    codec: Codec = "float32"
    """Encoding of floating-point tensors in messages."""
    keep: Literal["last", "best"] = Field(default="last", json_schema_extra={"neutral": True})
    """The model that a client uses: its last one, or of the evaluated rounds the best on its validation samples."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Sets the default name, and lets a field that overrides another inherit its description."""
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()
        for ancestor in cls.__mro__[1:-1]:
            for name, overridden in getattr(ancestor, "model_fields", {}).items():
                cls.model_fields[name].description = cls.model_fields[name].description or overridden.description

    if not TYPE_CHECKING:  # type checkers see the constructor that pydantic makes of the fields

        def __init__(self, **options: Any) -> None:
            """Sets the hyperparameters. Raises SettingError for the first invalid one."""
            try:
                super().__init__(**options)
            except ValidationError as error:
                raise setting_error(error, f"{type(self).name}: ", list(type(self).model_fields)) from None

    @abstractmethod
    def init(self, task: Task, seed: int) -> StateT:
        """Returns the state before the first round."""

    @abstractmethod
    def round(self, state: StateT, clients: Clients) -> StateT:
        """Runs one round and returns the next state."""

    def evaluate(self, state: StateT, clients: Clients, data: Data) -> Scores:
        """Returns the scores of a round. Default: the global model on the global test set.

        After the last round (`clients.is_last`) also each client's model on its own test samples.
        """
        starts = range(0, len(data.test), EVAL_CHUNK_SIZE)
        chunks = [{"start": start, "stop": start + EVAL_CHUNK_SIZE} for start in starts]
        answers = clients.map_on_server(self.score_chunk, chunks, model=state.shared)
        scores = pool_evaluations([add_evaluations([Evaluation(**answer) for answer in answers])])
        by_client = self.evaluate_clients(state, clients) if clients.is_last or self.keep == "best" else {}
        evaluations = list(by_client.values())
        if not clients.is_last or not any(evaluation.total for evaluation in evaluations):
            return scores
        name = primary_metric(evaluations)
        personal = {f"personal_{name}": pool_evaluations(evaluations).metrics[name]}
        return score_clients(replace(scores, metrics={**scores.metrics, **personal}), by_client)

    def build_predictor(self, shared: Weights, context: Context) -> nn.Module:
        """Builds the model of a `Client`, or on the `Server` the global model, from `state.shared`.

        Default: the task's net with these weights. A method without a global model raises NoGlobalModel on the server.
        """
        return context.net(shared)

    @property
    def evaluates_clients(self) -> bool:
        """True if the method is evaluated by one model per client, on the client's own test samples."""
        return True

    def evaluate_unseen_clients(self, state: StateT, clients: Clients, rounds: int) -> float:
        """Returns the primary metric of clients that never trained, after they joined.

        If the method needs it, they take `rounds` rounds of local training. The state of the server does not change.
        """
        if self.joins_by_training:
            for number in range(1, rounds + 1):
                with clients.training_round(clients.round + 1):
                    self.train_unseen_clients(state, clients, number)
        evaluations = list(self.evaluate_clients(state, clients).values())
        value: float = pool_evaluations(evaluations).metrics[primary_metric(evaluations)]
        return value

    def train_unseen_clients(self, state: StateT, clients: Clients, number: int) -> None:
        """Runs a new client's round `number`, from 1, for each of them. By default, a round that the server forgets."""
        self.round(state, clients)

    def why_not_extend(self, done: int, planned: int, unscheduled: bool) -> str:
        """Why a run cannot get this method's number of rounds after `done` of `planned` rounds; empty if it can.

        It can if its rounds so far do not depend on their number. Default: if no function but `evaluate` reads `rounds`
        or `clients.is_last`. `unscheduled`: round `done` was evaluated only because it was the last one.
        """
        if self.keep == "best" and unscheduled:
            return "with keep = best it depends on which rounds are evaluated"
        names = {"rounds", "is_last", *(["will_evaluate"] if unscheduled else [])}
        classes = type(self).__mro__[: type(self).__mro__.index(Method)]
        for name, function in (item for owner in classes for item in vars(owner).items()):
            read = names & _names_in(getattr(function, "__code__", None))
            if read and name != "evaluate":
                return f"its {name} depends on {min(read)}"
        return ""

    @classmethod
    def averages(cls) -> bool:
        """True if the method averages what clients send, so that another rule than the mean can take its place."""
        return cls._calls(AVERAGES)

    @classmethod
    def adds_class_sums(cls) -> bool:
        """True if the method adds up class sums, which clients can protect by a share of the noise."""
        return cls._calls({"add_class_sums"})

    @classmethod
    def takes_rules(cls) -> bool:
        """True if a robust rule can average what clients send, or reject outliers."""
        return cls.averages() or cls._calls(REJECTS)

    @classmethod
    def _calls(cls, names: Set[str]) -> bool:
        functions = (getattr(getattr(cls, name), "__code__", None) for name in dir(cls) if not name.startswith("__"))
        return any(names & _names_in(code) for code in functions)

    def client_model(self, shared: Weights, client: Client, choose: bool = False) -> nn.Module:
        """The model that a client uses: `build_predictor`, or with `keep = best` its best model so far.

        With `choose`, the client compares its current model with the best one, on its validation samples. Ties go to
        the lower loss, and then to the later model. A client without validation samples uses its current model.
        """
        net = self.build_predictor(shared, client)
        if self.keep == "last":
            return net
        best: Any = client.store.get(BEST)
        if choose and len(client.validation):
            values = measure_net(net, client.validation.chunks(EVAL_BATCH_SIZE), client.task).values()
            metric = client.task.metrics[0]
            rank = [values[metric.name] * (1 if metric.higher_is_better else -1), -values["loss"]]
            if best is None or rank >= best["rank"]:
                best = {"rank": rank, "model": get_weights(net)}
                client.store.put(BEST, best)
        if best is not None:
            load_weights(net, best["model"])
        return net

    # Helpers for subclasses.

    def sample_cohort(self, clients: Clients) -> list[int]:
        """Draws the clients of this round."""
        return clients.sample(min(DEFAULT_COHORT, len(clients)) if self.cohort is None else self.cohort)

    def evaluate_clients(self, state: StateT, clients: Clients, use_global_test: bool = False) -> dict[int, Evaluation]:
        """Evaluates each client's model on its own test samples, or on the global test set."""
        fields = {"model": state.shared, "use_global_test": use_global_test}
        return ask_evaluations(clients, clients.eval_cohort(), self.score, **fields)

    def warn(self, clients: Clients, message: str) -> None:
        """Logs a warning about the current round."""
        _LOG.warning(f"{self.name}, round {clients.round}: {message}")

    # Evaluation handlers.

    @on_client(exact=("model", "sums"), measures=True)
    def score(self, client: Client, model: Weights, use_global_test: bool) -> dict[str, Any]:
        """Evaluates the client's model. The evaluation is empty if the client lacks the global test set."""
        if use_global_test and not client.has_global_test:
            return empty_evaluation(client.task)._asdict()
        samples = client.global_test if use_global_test else client.test
        net = self.client_model(model, client, choose=not use_global_test)
        return measure_net(net, samples.chunks(EVAL_BATCH_SIZE), client.task)._asdict()

    @on_server
    def score_chunk(self, server: Server, model: Weights, start: int, stop: int) -> dict[str, Any]:
        """Evaluates the global model on one chunk of the global test set."""
        stop = min(stop, len(server.global_test))
        starts = range(start, stop, EVAL_BATCH_SIZE)
        batches = (server.global_test.slice(first, min(first + EVAL_BATCH_SIZE, stop)) for first in starts)
        return measure_net(self.build_predictor(model, server), batches, server.task)._asdict()


def _names_in(code: CodeType | None) -> set[str]:
    """All names that a function reads, with those of the functions in it."""
    if code is None:
        return set()
    inner = [_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names}.union(*inner)


class NoGlobalModel(SettingError):
    """The method trains only models of clients."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} has no global model: use personal_model(client), or --client N on the command line")


class PersonalMethod(Method[StateT]):
    """A method that trains one model per client and is evaluated on each client's own test samples."""

    group: ClassVar[Group] = "personalization"
    joins_by_training: ClassVar[bool] = True
    has_global_model: ClassVar[bool] = False
    """True if the method also trains a global model, with the weights `state.shared`."""

    def evaluate(self, state: StateT, clients: Clients, data: Data) -> Scores:
        """Returns the scores of a round: each client's model on its own test samples.

        After the last round also by client, and on the global test set if clients have it.
        """
        by_client = self.evaluate_clients(state, clients)
        evaluations = list(by_client.values())
        scores = pool_evaluations(evaluations)
        if not clients.is_last:
            return scores
        name = primary_metric(evaluations)
        on_global_test = list(self.evaluate_clients(state, clients, use_global_test=True).values())
        has_global_test = any(evaluation.total for evaluation in on_global_test)
        global_value = pool_evaluations(on_global_test).metrics[name] if has_global_test else None
        personal = {f"personal_{name}": scores.metrics[name], f"global_{name}": global_value}
        return score_clients(replace(scores, metrics={**scores.metrics, **personal}), by_client)

    def build_predictor(self, shared: Weights, context: Context) -> nn.Module:
        """Builds the model of a client; on the server, the global model, if there is one."""
        if isinstance(context, Client):
            return self.personal_model(shared, context)
        if self.has_global_model:
            return super().build_predictor(shared, context)
        raise NoGlobalModel(self.name)

    @abstractmethod
    def personal_model(self, shared: Weights, client: Client) -> nn.Module:
        """Builds the model of a client from `state.shared` and its private store."""
