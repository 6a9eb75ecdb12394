"""The contract of a method (`Method`), and what its handlers work with (`Client`, `Server`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt
from torch import Tensor, nn

from fewer.data import ClientData, Data, Samples
from fewer.errors import SettingError
from fewer.learning import Counts, score
from fewer.models import Task, Weights, load_weights
from fewer.runtime import (
    Answers,
    Clients,
    HandlerServer,
    Inline,
    Rules,
    Store,
    Unable,
    on_client,
    on_server,
    seed_of,
    stream,
)
from fewer.runtime.keys import KeyFiles, Keys
from fewer.runtime.store import client_folder
from fewer.wire import Number, Schema

DEFAULT_COHORT = 10
MAX_SIZE = 10**9
"""The largest number of samples that a client may report."""
EVAL_BATCH = 1000
"""Samples in one forward pass of evaluation."""
EVAL_CHUNK = 2500
"""Samples of the common test set that one worker evaluates at a time."""
Scores = dict[str, Any]
"""Metrics by name; `accuracy` is always one of them."""


# --- what a handler works with --------------------------------------------------------------------------------


class _ReusableNet:
    """A net that many calls share. `reset` restores everything but its weights.

    That is: `requires_grad`, gradients, training mode, and buffers that are not part of `state_dict()`.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.requires_grad = [parameter.requires_grad for parameter in net.parameters()]
        saved = net.state_dict().keys()
        self.hidden_buffers = [(b, b.detach().clone()) for name, b in net.named_buffers() if name not in saved]

    def reset(self) -> nn.Module:
        """The net as it was built, except for its weights."""
        for parameter, flag in zip(self.net.parameters(), self.requires_grad, strict=True):
            parameter.requires_grad_(flag).grad = None
        with torch.no_grad():
            for buffer, initial in self.hidden_buffers:
                buffer.copy_(initial)
        return self.net.train()


@dataclass
class Context:
    """What every handler has: the round, the task, random streams, and nets to load weights into."""

    id: int
    """The client's number; negative on the server."""
    round: int
    """The current round, starting at 1."""
    seed: int
    """The seed of the run."""
    task: Task
    """The task: input shape, number of classes, net."""
    common: Samples
    """The common test set."""
    _nets: list[_ReusableNet] = field(default_factory=list, repr=False)
    _nets_in_use: int = 0

    def net(self, weights: Mapping[str, torch.Tensor]) -> nn.Module:
        """A net with these weights. Each call in a handler returns a different net, valid until the handler ends."""
        if self._nets_in_use == len(self._nets):
            self._nets.append(_ReusableNet(self.task.net()))
        self._nets_in_use += 1
        net = self._nets[self._nets_in_use - 1].reset()
        load_weights(net, weights)
        return net

    def stream(self, purpose: str) -> torch.Generator:
        """The random generator for (seed, round, client, purpose)."""
        return stream(self.seed, self.round, self.id, purpose)


@dataclass
class Server(Context):
    """The first argument of an `@on_server` handler."""


@dataclass
class Client(Context):
    """The first argument of an `@on_client` handler: one client, with its own data and private store."""

    store: Store = field(kw_only=True)
    """Private state that lasts from round to round: `client.store.put("model", …)`, `client.store.get("model")`."""
    _data: Data = field(kw_only=True, repr=False)

    @cached_property
    def data(self) -> ClientData:
        """All of the client's samples, loaded on first use."""
        return self._data.client(self.id)

    @property
    def train(self) -> Samples:
        """Training samples. A client without any raises `Unable` and is absent from the round."""
        if not len(self.data.train):
            raise Unable("no training data")
        return self.data.train

    @property
    def validation(self) -> Samples:
        """Validation samples; may be empty."""
        return self.data.validation

    @property
    def test(self) -> Samples:
        """Test samples; may be empty."""
        return self.data.test

    @property
    def time_ordered(self) -> bool:
        """True if the samples are in temporal order."""
        return self._data.time_ordered

    @property
    def has_common_test(self) -> bool:
        """True if the client has access to the common test set."""
        return self._data.has_common_test

    def members(self, program: object, task: Task) -> Clients:
        """The clients inside this federation, which answer the handlers of `program`.

        Their private state lives in this federation's folder, under its rounds. Their own rounds, seed and byte counts
        are separate from the outer run.
        """
        seed = seed_of(self.seed, self.id, "members")
        data = self._data.members_of(self.id)
        contexts = ContextFactory(data, task, seed, self.store.folder / "members", version=self.round)
        return Inline(len(data), seed, handlers=HandlerServer(program, contexts, seed, task.device, Rules.limit))

    def initial_weights(self) -> Weights:
        """The initial weights. They follow from the seed, so they are never sent."""
        return self.task.initial_weights(self.seed)


@dataclass
class ContextFactory:
    """Makes the `Client` or `Server` for each handler call. Nets are built once per process and reused."""

    data: Data
    task: Task
    seed: int
    folder: Path
    nets: list[_ReusableNet] = field(default_factory=list)
    version: int | None = None
    """The round under which clients store state, if it differs from the round of the call."""
    sealing: Keys | None = None
    """The keys for sealed messages, if they are not in `folder`."""

    def __call__(self, client: int, round: int) -> Context:
        """The `Client` with this number; the `Server` for negative numbers."""
        shared = (client, round, self.seed, self.task, self.data.test, self.nets)
        if client < 0:
            return Server(*shared)
        return Client(*shared, store=self.store(client, round), _data=self.data)

    @property
    def keys(self) -> Keys:
        """The clients' keys for sealed messages."""
        return self.sealing or KeyFiles(self.folder)

    def store(self, client: int, round: int) -> Store:
        """The client's private store."""
        return Store(client_folder(self.folder, client), round if self.version is None else self.version)

    def log_error(self, client: int, error: str) -> None:
        """Append an error to errors.txt in the client's own folder, or in the run's folder for the server."""
        folder = client_folder(self.folder, client) if client >= 0 else self.folder
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "errors.txt").open("a") as file:
            file.write(error)


# --- the contract ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelState:
    """The state of a method that only has a global model."""

    model: Weights


class ImageGrid(NamedTuple):
    """Synthetic images for the report: one row per client or round, one column per class."""

    name: str
    """Used in file names."""
    title: str
    caption: str
    rows: Mapping[str, Mapping[int, Tensor]]
    """For each row, the images by class, as the net sees them (count × sample shape)."""
    each: int = 1
    """The most images of one class in a row."""


class Method(BaseModel):
    """A federated algorithm: frozen hyperparameters and three pure functions.

        state  = method.init(task, seed)             # the state before the first round
        state  = method.round(state, clients)        # asks clients, returns the next state
        scores = method.evaluate(state, clients, data)

    A state is a frozen dataclass of tensors, plain values and containers of them. It is what a checkpoint holds.
    `round` reaches clients only through `clients.ask(who, self.handler, …)`. A handler, decorated with `@on_client`,
    sees its own `client` and the fields it was sent, and returns a dict.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    name: ClassVar[str] = ""
    """The registered name; for unregistered methods, the class name in lower case."""
    tunable: ClassVar[Mapping[str, Sequence[float]]] = {}
    """The hyperparameters that `--tune` searches, most important first, with starting values in ascending order."""
    novel: ClassVar[bool] = False
    """True if the method is evaluated on novel classes, so that the data must split its classes."""
    files: ClassVar[tuple[str, ...]] = ()
    """Options that name files. Only the server reads them; remote clients receive "" instead."""

    rounds: PositiveInt = 10
    """Number of rounds."""
    cohort: PositiveInt | None = None
    """Clients asked in each round. [default: 10, or all if there are fewer]"""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Gives every method a name, and overridden fields the description of the field they override."""
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()
        for ancestor in cls.__mro__[1:-1]:
            for name, overridden in getattr(ancestor, "model_fields", {}).items():
                cls.model_fields[name].description = cls.model_fields[name].description or overridden.description

    @abstractmethod
    def init(self, task: Task, seed: int) -> Any:
        """The state before the first round."""

    @abstractmethod
    def round(self, state: Any, clients: Clients) -> Any:
        """One round: asks clients and returns the next state."""

    def evaluate(self, state: Any, clients: Clients, data: Data) -> Scores:
        """Metrics after a round. Default: the global model on the common test set."""
        chunks = [{"start": start, "stop": start + EVAL_CHUNK} for start in range(0, len(data.test), EVAL_CHUNK)]
        counts = clients.map_on_server(self.score_chunk, chunks, model=self.broadcast(state))
        return pool_counts([Counts(**count) for count in counts])

    def report(self, state: Any, clients: Clients, data: Data) -> Scores:
        """Additional metrics after the last round. Default: each client's model on its own test samples."""
        scores = self.ask_scores(state, clients)
        return {"personal_accuracy": scores["accuracy"], "clients": scores["clients"]}

    def prepare_data(self, data: Data) -> Data:
        """The data as the method's clients hold it. Default: unchanged."""
        return data

    def notes(self) -> Sequence[str]:
        """Warnings about these hyperparameters, shown once before training."""
        return ()

    # Tuning.

    def search_space(self) -> Mapping[str, Sequence[float]]:
        """The hyperparameters that `--tune` searches. Default: `tunable`."""
        return self.tunable

    def tuning_split(self, data: Data, fraction: float, seed: int) -> tuple[Method, Data]:
        """The method and data of a tuning trial, which never sees test data. Default: holds out training samples."""
        return self, data.hold_out(fraction, seed)

    # The trained models.

    def broadcast(self, state: Any) -> Weights:
        """The part of the state that a client needs to build its model."""
        model: Weights = state.model
        return model

    def personal_model(self, client: Client, model: Weights) -> nn.Module:
        """The client's final model, from the broadcast weights and its private store."""
        return self.build_model(client.net, model)

    def build_model(self, net: Callable[[Weights], nn.Module], weights: Weights) -> nn.Module:
        """The global model from `global_weights`; `net(weights)` makes a net of the task."""
        return net(weights)

    def global_weights(self, state: Any) -> Weights | None:
        """The weights of the global model; None if the method trains only personal models."""
        return self.broadcast(state)

    def image_grids(self, state: Any) -> Sequence[ImageGrid]:
        """Synthetic images to show in the report. Default: none."""
        return ()

    def condensed(self, state: Any) -> dict[int, tuple[Tensor, Tensor]]:
        """The synthetic inputs and labels that each client sent last. Default: none."""
        return {}

    # Building blocks for subclasses.

    def sample_cohort(self, clients: Clients) -> list[int]:
        """Draws the clients that are asked in this round."""
        return clients.sample(min(DEFAULT_COHORT, len(clients)) if self.cohort is None else self.cohort)

    def ask_scores(self, state: Any, clients: Clients) -> Scores:
        """Metrics of each client's model on its own test samples, pooled and by client."""
        counts = self.ask_counts(state, clients)
        accuracies = {str(client): count.correct / count.total for client, count in counts.items() if count.total}
        return pool_counts(list(counts.values())) | {"clients": accuracies}

    def ask_counts(self, state: Any, clients: Clients, global_test: bool = False) -> dict[int, Counts]:
        """Correct predictions of each client's model on its own test samples, or on the common test set."""
        answers = clients.ask(
            clients.eval_cohort(), self.score, model=self.broadcast(state), global_test=global_test, returns=COUNTS
        )
        counts = {answer.client: Counts(**answer.fields) for answer in answers}
        return {client: count for client, count in counts.items() if count.correct <= count.total}

    @on_client
    def score(self, client: Client, model: Weights, global_test: bool) -> dict[str, float]:
        """Counts this client's correct predictions; all zero if it lacks the common test set."""
        if global_test and not client.has_common_test:
            return Counts(0, 0, 0.0)._asdict()
        samples = client.common if global_test else client.test
        return score(self.personal_model(client, model), samples.chunks(EVAL_BATCH))._asdict()

    @on_server
    def score_chunk(self, server: Server, model: Weights, start: int, stop: int) -> dict[str, float]:
        """Counts the global model's correct predictions on one chunk of the common test set."""
        stop = min(stop, len(server.common))
        batches = (server.common.slice(at, min(at + EVAL_BATCH, stop)) for at in range(start, stop, EVAL_BATCH))
        return score(self.build_model(server.net, model), batches)._asdict()


class PersonalMethod(Method):
    """A method that trains one model per client and is evaluated on each client's own test samples."""

    def evaluate(self, state: Any, clients: Clients, data: Data) -> Scores:
        """Metrics after a round: each client's model on its own test samples, pooled."""
        scores = self.ask_scores(state, clients)
        del scores["clients"]
        return scores

    def report(self, state: Any, clients: Clients, data: Data) -> Scores:
        """Additional metrics after the last round: accuracy by client, and on the common test set if there is one."""
        scores = self.ask_scores(state, clients)
        counts = list(self.ask_counts(state, clients, global_test=True).values())
        global_accuracy = pool_counts(counts)["accuracy"] if any(count.total for count in counts) else None
        return {
            "personal_accuracy": scores["accuracy"],
            "global_accuracy": global_accuracy,
            "clients": scores["clients"],
        }

    def global_weights(self, state: Any) -> Weights | None:
        """None: there is no global model."""
        return None


COUNTS: Schema = {"correct": Number(int, 0), "total": Number(int, 0, MAX_SIZE), "loss": float}


def pool_counts(counts: Sequence[Counts]) -> Scores:
    """Accuracy and mean loss over all samples."""
    total = sum(count.total for count in counts)
    if not total:
        raise SettingError("there are no test samples to evaluate on")
    return {
        "accuracy": sum(count.correct for count in counts) / total,
        "loss": sum(count.loss for count in counts) / total,
    }


__all__ = [
    "Answers",
    "Client",
    "ContextFactory",
    "ImageGrid",
    "Method",
    "ModelState",
    "PersonalMethod",
    "Scores",
    "Server",
]
