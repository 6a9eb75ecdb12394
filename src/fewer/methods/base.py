"""`Method`, the base class of all federated algorithms, and the `Client` and `Server` that its handlers receive.

A handler is a function of a method that runs on a client (`@on_client`) or on a worker of the server (`@on_server`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError
from torch import Tensor, nn

from fewer.data import ClientData, Data, Samples
from fewer.errors import SettingError, setting_error
from fewer.learning import Counts, evaluate_net
from fewer.models import Task, Weights, load_weights
from fewer.runtime import (
    Clients,
    HandlerRunner,
    Inline,
    Store,
    Unable,
    on_client,
    on_server,
    seed_of,
    stream,
)
from fewer.runtime.keys import KeyFiles, Keys
from fewer.runtime.store import client_folder
from fewer.wire import Codec, Number, Schema

DEFAULT_COHORT = 10
"""Clients asked in each round if `cohort` is not set."""
MAX_SAMPLES = 10**9
"""The largest number of samples that a client may report."""
EVAL_BATCH_SIZE = 1000
"""Samples in one forward pass of evaluation."""
EVAL_CHUNK_SIZE = 2500
"""Samples of the global test set that a worker evaluates in one call."""
Metrics = dict[str, Any]
"""Metrics by name."""


# --- what handlers receive ------------------------------------------------------------------------------------


class _ReusableNet:
    """A net that handler calls reuse, because building one takes longer than loading weights into it."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.requires_grad = [parameter.requires_grad for parameter in net.parameters()]
        saved = net.state_dict().keys()
        self.non_persistent_buffers = [(b, b.detach().clone()) for name, b in net.named_buffers() if name not in saved]

    def reset(self) -> nn.Module:
        """Restores all that `load_weights` does not: gradients, `requires_grad`, training mode, other buffers."""
        for parameter, flag in zip(self.net.parameters(), self.requires_grad, strict=True):
            parameter.requires_grad_(flag)
            parameter.grad = None
        with torch.no_grad():
            for buffer, initial in self.non_persistent_buffers:
                buffer.copy_(initial)
        return self.net.train()


@dataclass
class Context:
    """The base of `Client` and `Server`: the round, the task, random generators, and nets to load weights into."""

    id: int
    """The client's number. On the server: -1, -2, … for the items of `clients.map_on_server`."""
    round: int
    """The current round, starting at 1."""
    seed: int
    """The seed of the run."""
    task: Task
    """The task: input shape, number of classes, and how to build the net."""
    global_test: Samples
    """The global test set."""
    _nets: list[_ReusableNet] = field(default_factory=list, repr=False)
    _nets_in_use: int = 0

    def net(self, weights: Mapping[str, torch.Tensor]) -> nn.Module:
        """A net with these weights. It is reused after the handler returns, so do not keep it."""
        if self._nets_in_use == len(self._nets):
            self._nets.append(_ReusableNet(self.task.net()))
        self._nets_in_use += 1
        net = self._nets[self._nets_in_use - 1].reset()
        load_weights(net, weights)
        return net

    def stream(self, purpose: str) -> torch.Generator:
        """A random generator seeded by (seed, round, client, purpose). The same purpose repeats the same numbers."""
        return stream(self.seed, self.round, self.id, purpose)


@dataclass
class Server(Context):
    """What an `@on_server` handler receives as its first argument."""


@dataclass
class Client(Context):
    """What an `@on_client` handler receives as its first argument: one client, its data and its private store."""

    store: Store = field(kw_only=True)
    """Private state, kept from round to round: `client.store.put("model", …)`, `client.store.get("model")`."""
    _data: Data = field(kw_only=True, repr=False)

    @cached_property
    def data(self) -> ClientData:
        """All of the client's samples, loaded on first use."""
        return self._data.client(self.id)

    @property
    def train(self) -> Samples:
        """Training samples. Raises `Unable` if there are none; the client is then absent from the round."""
        if len(self.data.train) == 0:
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
    def has_global_test(self) -> bool:
        """True if the client has access to the global test set."""
        return self._data.has_global_test

    def members(self, program: object, task: Task) -> Clients:
        """The clients inside this client, for nested federations. They run the `@on_client` functions of `program`.

        They have their own rounds, seed and byte counts. Their private state is stored in this client's folder with
        the round of the outer run, so that resuming the outer run restores it.
        """
        seed = seed_of(self.seed, self.id, "members")
        data = self._data.members_of(self.id)
        contexts = ContextFactory(data, task, seed, self.store.folder / "members", store_round=self.round)
        return Inline(len(data), seed, handlers=HandlerRunner(program, contexts, seed, task.device))

    def initial_weights(self) -> Weights:
        """The initial weights. Clients compute them from the seed, so that no message needs to carry them."""
        return self.task.initial_weights(self.seed)


@dataclass
class ContextFactory:
    """Makes the `Client` or `Server` for each handler call. All of them share the reusable nets."""

    data: Data
    task: Task
    seed: int
    folder: Path
    nets: list[_ReusableNet] = field(default_factory=list)
    store_round: int | None = None
    """The round under which clients store state. Default: the round of the call."""
    sealing_keys: Keys | None = None
    """Keys that encrypt messages from client to client. Default: the key files in `folder`."""

    def __call__(self, client: int, round: int) -> Context:
        """The `Client` with this number; the `Server` for negative numbers."""
        context = Server(client, round, self.seed, self.task, self.data.test, self.nets)
        if client < 0:
            return context
        return Client(**vars(context), store=self.store(client, round), _data=self.data)

    @property
    def keys(self) -> Keys:
        """The clients' keys for sealed messages."""
        return self.sealing_keys or KeyFiles(self.folder)

    def store(self, client: int, round: int) -> Store:
        """The client's private store."""
        return Store(client_folder(self.folder, client), round if self.store_round is None else self.store_round)

    def log_error(self, client: int, error: str) -> None:
        """Appends an error to errors.txt in the client's folder, or in `folder` for the server."""
        folder = client_folder(self.folder, client) if client >= 0 else self.folder
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "errors.txt").open("a") as file:
            file.write(error)


# --- methods --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelState:
    """The state of a method that keeps nothing but a global model."""

    model: Weights


class ImageGrid(NamedTuple):
    """Synthetic images for the report: one row per client or round, one column per class."""

    name: str
    """Used in file names."""
    title: str
    caption: str
    rows: Mapping[str, Mapping[int, Tensor]]
    """For each row, the images by class, as inputs of the net (count × sample shape)."""
    max_per_class: int = 1
    """How many images of one class a row shows at most."""


class Method(BaseModel):
    """A federated algorithm. Its fields are the hyperparameters; three functions are the algorithm.

        state   = method.init(task, seed)               # before the first round
        state   = method.round(state, clients)          # asks clients, returns the next state
        metrics = method.evaluate(state, clients, data)

    A method object never changes. Everything that changes on the server is in the state: a frozen dataclass of tensors,
    numbers, strings, and lists or dicts of these. Checkpoints save it.

    `round` reaches clients only through `clients.ask`:

        answers = clients.ask(cohort, self.local_train, model=weights, returns={"model": weights})

    This runs the handler `local_train(self, client, model)` on every client of the cohort. A handler returns a dict.
    `returns` describes that dict: here, tensors with the names, shapes and dtypes of `weights`. Messages with any other
    content are refused. Clients that fail, time out or are refused are missing from `answers`; if too few clients
    answer, `ask` raises QuorumLost.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    name: ClassVar[str] = ""
    """The registered name; for unregistered methods, the class name in lower case."""
    tunable: ClassVar[Mapping[str, Sequence[float]]] = {}
    """The hyperparameters that `--tune` searches, most important first, with starting values in ascending order."""
    needs_novel_classes: ClassVar[bool] = False
    """True if the method is evaluated on classes that are not in the training data."""
    file_options: ClassVar[tuple[str, ...]] = ()
    """Options that name files. Only the server reads them; remote clients receive "" instead."""

    rounds: PositiveInt = 10
    """Number of rounds."""
    cohort: PositiveInt | None = None
    """Clients asked in each round. [default: 10, or all if there are fewer]"""
    codec: Codec = "float32"
    """Encoding of floating-point tensors in messages."""

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
    def init(self, task: Task, seed: int) -> Any:
        """Returns the state before the first round."""

    @abstractmethod
    def round(self, state: Any, clients: Clients) -> Any:
        """Runs one round and returns the next state."""

    def evaluate(self, state: Any, clients: Clients, data: Data) -> Metrics:
        """Returns the metrics of a round; `accuracy` is required. Default: the global model on the global test set."""
        chunks = [
            {"start": start, "stop": start + EVAL_CHUNK_SIZE} for start in range(0, len(data.test), EVAL_CHUNK_SIZE)
        ]
        counts = clients.map_on_server(self.score_chunk, chunks, model=self.broadcast(state))
        return pool_counts([Counts(**count) for count in counts])

    def evaluate_final(self, state: Any, clients: Clients, data: Data) -> Metrics:
        """Returns further metrics after the last round. Default: `personal_model` on each client's own test samples."""
        metrics = self.evaluate_on_clients(state, clients)
        return {"personal_accuracy": metrics["accuracy"], "clients": metrics["clients"]} if metrics else {}

    def prepare_data(self, data: Data) -> Data:
        """Transforms the data before training. Default: no change."""
        return data

    def setting_warnings(self) -> Sequence[str]:
        """Returns warnings about these hyperparameters, shown once before training."""
        return ()

    # Tuning.

    def search_space(self) -> Mapping[str, Sequence[float]]:
        """Returns the hyperparameters that `--tune` searches. Default: `tunable`."""
        return self.tunable

    def tuning_split(self, data: Data, fraction: float, seed: int) -> tuple[Method, Data]:
        """Returns the method and the data of a tuning trial. Default: the same method. `fraction` of the training
        samples is held out and replaces the test data, which a trial never uses.
        """
        return self, data.hold_out(fraction, seed)

    # The trained models. `broadcast` selects what the server sends to clients for evaluation. From it, `build_model`
    # builds the global model, and `personal_model` the model of one client.

    def broadcast(self, state: Any) -> Weights:
        """Returns the weights that every client receives for evaluation. Default: the global model."""
        model: Weights = state.model
        return model

    def personal_model(self, client: Client, model: Weights) -> nn.Module:
        """Builds a client's model from the broadcast weights and its private store. Default: the global model."""
        return self.build_model(client.net, model)

    def build_model(self, make_net: Callable[[Weights], nn.Module], weights: Weights) -> nn.Module:
        """Builds the global model from the broadcast weights. `make_net(weights)` returns the task's net with them."""
        return make_net(weights)

    def global_weights(self, state: Any) -> Weights | None:
        """Returns the weights for `build_model`, or None if the method trains only personal models."""
        return self.broadcast(state)

    def image_grids(self, state: Any) -> Sequence[ImageGrid]:
        """Returns synthetic images to show in the report. Default: none."""
        return ()

    def synthetic_data(self, state: Any) -> dict[int, tuple[Tensor, Tensor]]:
        """Returns the synthetic inputs and labels that each client sent last. Default: none."""
        return {}

    # Helpers for subclasses.

    def sample_cohort(self, clients: Clients) -> list[int]:
        """Draws the clients of this round."""
        return clients.sample(min(DEFAULT_COHORT, len(clients)) if self.cohort is None else self.cohort)

    def evaluate_on_clients(self, state: Any, clients: Clients) -> Metrics:
        """Evaluates each client's model on its own test samples. Returns metrics over all samples, and by client.

        Returns no metrics if no client has test samples.
        """
        counts = self.count_on_clients(state, clients)
        if not any(count.total for count in counts.values()):
            return {}
        accuracies = {str(client): count.correct / count.total for client, count in counts.items() if count.total}
        return pool_counts(list(counts.values())) | {"clients": accuracies}

    def count_on_clients(self, state: Any, clients: Clients, use_global_test: bool = False) -> dict[int, Counts]:
        """Counts correct predictions of each client's model on its own test samples, or on the global test set."""
        answers = clients.ask(
            clients.eval_cohort(),
            self.score,
            model=self.broadcast(state),
            use_global_test=use_global_test,
            returns=COUNTS_SCHEMA,
        )
        counts = {answer.client: Counts(**answer.fields) for answer in answers}
        # Leave out clients that claim more correct predictions than samples.
        return {client: count for client, count in counts.items() if count.correct <= count.total}

    # Evaluation handlers.

    @on_client(exact=("model",))
    def score(self, client: Client, model: Weights, use_global_test: bool) -> dict[str, float]:
        """Counts the correct predictions of the client's model. All counts are 0 if it lacks the global test set."""
        if use_global_test and not client.has_global_test:
            return Counts(0, 0, 0.0)._asdict()
        samples = client.global_test if use_global_test else client.test
        return evaluate_net(self.personal_model(client, model), samples.chunks(EVAL_BATCH_SIZE))._asdict()

    @on_server
    def score_chunk(self, server: Server, model: Weights, start: int, stop: int) -> dict[str, float]:
        """Counts the global model's correct predictions on one chunk of the global test set."""
        stop = min(stop, len(server.global_test))
        starts = range(start, stop, EVAL_BATCH_SIZE)
        batches = (server.global_test.slice(first, min(first + EVAL_BATCH_SIZE, stop)) for first in starts)
        return evaluate_net(self.build_model(server.net, model), batches)._asdict()


class PersonalMethod(Method):
    """A method that trains one model per client and is evaluated on each client's own test samples."""

    def evaluate(self, state: Any, clients: Clients, data: Data) -> Metrics:
        """Returns the metrics after a round: each client's model on its own test samples."""
        return pool_counts(list(self.count_on_clients(state, clients).values()))

    def evaluate_final(self, state: Any, clients: Clients, data: Data) -> Metrics:
        """Returns further metrics: accuracy by client, and on the global test set if clients have it."""
        metrics = self.evaluate_on_clients(state, clients)
        counts = list(self.count_on_clients(state, clients, use_global_test=True).values())
        global_accuracy = pool_counts(counts)["accuracy"] if any(count.total for count in counts) else None
        return {
            "personal_accuracy": metrics["accuracy"],
            "global_accuracy": global_accuracy,
            "clients": metrics["clients"],
        }

    def global_weights(self, state: Any) -> Weights | None:
        """Returns None, because there is no global model."""
        return None


COUNTS_SCHEMA: Schema = {"correct": Number(int, 0), "total": Number(int, 0, MAX_SAMPLES), "loss": float}


def pool_counts(counts: Sequence[Counts]) -> Metrics:
    """Returns accuracy and mean loss over all samples of all counts."""
    total = sum(count.total for count in counts)
    if not total:
        raise SettingError("there are no test samples to evaluate on")
    return {
        "accuracy": sum(count.correct for count in counts) / total,
        "loss": sum(count.loss for count in counts) / total,
    }
