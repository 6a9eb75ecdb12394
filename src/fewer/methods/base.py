"""The contract of a method, and what its handlers get to see."""

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
from fewer.runtime.store import folder_of
from fewer.wire import Number, Schema

DEFAULT_COHORT = 10
MAX_SIZE = 10**9
"""Samples that a client can claim to have."""
CHUNK = 1000
"""Samples that are scored at once."""
PIECE = 2500
"""Samples of the common test set that one worker scores before it is given more."""
Scores = dict[str, Any]
"""Figures by name; `accuracy` is always among them."""


# --- what a handler sees --------------------------------------------------------------------------------------


class _Pristine:
    """A net that is used again and again, and what must be put right each time besides its weights.

    That is: which parameters learn, leftover gradients, the mode, and buffers that are no part of the weights.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.learns = [parameter.requires_grad for parameter in net.parameters()]
        kept = net.state_dict().keys()
        self.hidden = [(b, b.detach().clone()) for name, b in net.named_buffers() if name not in kept]

    def again(self) -> nn.Module:
        """The net as it was made, but for its weights."""
        for parameter, flag in zip(self.net.parameters(), self.learns, strict=True):
            parameter.requires_grad_(flag).grad = None
        with torch.no_grad():
            for buffer, first in self.hidden:
                buffer.copy_(first)
        return self.net.train()


@dataclass
class Context:
    """Where something runs: the round, the task, random streams, and nets to load weights into."""

    id: int
    """The client's number; below zero for the server."""
    round: int
    """Which round it is, from 1 on."""
    seed: int
    """The seed of the run."""
    task: Task
    """What is learned."""
    common: Samples
    """The common test set, which everyone may have."""
    _nets: list[_Pristine] = field(default_factory=list, repr=False)
    _taken: int = 0

    def net(self, weights: Mapping[str, torch.Tensor]) -> nn.Module:
        """A net with these weights. Each call gives another one, for this question only."""
        if self._taken == len(self._nets):
            self._nets.append(_Pristine(self.task.net()))
        self._taken += 1
        net = self._nets[self._taken - 1].again()
        load_weights(net, weights)
        return net

    def stream(self, purpose: str) -> torch.Generator:
        """The random stream of (seed, round, client, purpose)."""
        return stream(self.seed, self.round, self.id, purpose)


@dataclass
class Server(Context):
    """The server's own seat (`here`)."""


@dataclass
class Client(Context):
    """A client (`me`): its own data and memory, and nobody else's."""

    store: Store = field(kw_only=True)
    """What it remembers between rounds: `me.store.put("model", …)`, `me.store.get("model")`."""
    _data: Data = field(kw_only=True, repr=False)

    @cached_property
    def data(self) -> ClientData:
        """All that it holds, read when first used."""
        return self._data.client(self.id)

    @property
    def train(self) -> Samples:
        """What it learns from. A client that has nothing says so, and is absent from the round."""
        if not len(self.data.train):
            raise Unable("no training data")
        return self.data.train

    @property
    def validation(self) -> Samples:
        """What it chooses settings on; may be empty."""
        return self.data.validation

    @property
    def test(self) -> Samples:
        """What it is tested on; may be empty."""
        return self.data.test

    @property
    def in_time(self) -> bool:
        """Whether its samples are in the order of time."""
        return self._data.in_time

    @property
    def alone(self) -> bool:
        """Whether it knows nobody else's test samples."""
        return self._data.alone

    def members(self, program: object, task: Task) -> Clients:
        """Those that this client is made of, where it is a federation, to be asked by a program of its own.

        They remember what they are told in the folder of the federation, with its rounds; their own rounds, seed and
        count of bytes have nothing to do with those outside.
        """
        seed = seed_of(self.seed, self.id, "members")
        data = self._data.inside(self.id)
        place = ContextFactory(data, task, seed, self.store.folder / "members", version=self.round)
        return Inline(len(data), seed, handlers=HandlerServer(program, place, seed, task.device, Rules.limit))

    def initial(self) -> Weights:
        """The weights that everyone starts from: known from the seed, so nothing need be sent."""
        return self.task.initial(self.seed)


@dataclass
class ContextFactory:
    """Makes the seat for each call; nets are built once in a process and used again."""

    data: Data
    task: Task
    seed: int
    folder: Path
    nets: list[_Pristine] = field(default_factory=list)
    version: int | None = None
    """The round under which clients keep things, where it is not that of the call."""
    sealing: Keys | None = None
    """Keys that are not in the folder: a client's on a machine of its own."""

    def __call__(self, client: int, round: int) -> Context:
        """The seat of one client, or for numbers below zero the server's."""
        context = (client, round, self.seed, self.task, self.data.test, self.nets)
        if client < 0:
            return Server(*context)
        return Client(*context, store=self.store(client, round), _data=self.data)

    @property
    def keys(self) -> Keys:
        """The clients' keys for what they pass to each other."""
        return self.sealing or KeyFiles(self.folder)

    def store(self, client: int, round: int) -> Store:
        """What a client remembers."""
        return Store(folder_of(self.folder, client), round if self.version is None else self.version)

    def keep(self, client: int, error: str) -> None:
        """Add an error to the client's own notes; the server's own go beside them."""
        folder = folder_of(self.folder, client) if client >= 0 else self.folder
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "errors.txt").open("a") as file:
            file.write(error)


# --- the contract ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelState:
    """The state of a method that has nothing but one model."""

    model: Weights


class ImageGrid(NamedTuple):
    """Images that a method made: a row for each client or round, a column for each class."""

    name: str
    """In file names."""
    title: str
    caption: str
    rows: Mapping[str, Mapping[int, Tensor]]
    """For each row, by class, images as a net sees them (number × shape of a sample)."""
    each: int = 1
    """At most so many images of a class stand side by side."""


class Method(BaseModel):
    """A federated algorithm: frozen hyper-parameters, checked and documented, and three pure parts.

    `start` gives the first state, `round` a new state from the old one, `evaluate` figures from a state. A state is
    a frozen dataclass of tensors, plain values and containers of them: it is the checkpoint. `round` reaches clients
    only through `clients`; a handler, marked `@on_client`, sees only its own client `me` and the fields it was sent.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    name: ClassVar[str] = ""
    """What it is called on the command line; by default the class's name in lower case."""
    tunable: ClassVar[Mapping[str, Sequence[float]]] = {}
    """The settings that `--tune` chooses, most important first, with values to begin from in rising order."""
    novel: ClassVar[bool] = False
    """Whether it is judged on classes that nobody trains on, and so needs data whose classes are divided."""
    files: ClassVar[tuple[str, ...]] = ()
    """Settings that name files. The server alone reads them: clients elsewhere are told "" instead."""

    rounds: PositiveInt = 10
    """How many rounds to run."""
    cohort: PositiveInt | None = None
    """How many clients are asked in a round; by default 10, or all where there are fewer."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Every method has a name, and a setting that only gets another default keeps its text."""
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()
        for above in cls.__mro__[1:-1]:
            for key, before in getattr(above, "model_fields", {}).items():
                cls.model_fields[key].description = cls.model_fields[key].description or before.description

    @abstractmethod
    def init(self, task: Task, seed: int) -> Any:
        """The state before the first round."""

    @abstractmethod
    def round(self, state: Any, clients: Clients) -> Any:
        """One round: ask clients, return the new state."""

    def evaluate(self, state: Any, clients: Clients, data: Data) -> Scores:
        """After a round: by default the global model on the common test set."""
        items = [{"start": start, "stop": start + PIECE} for start in range(0, len(data.test), PIECE)]
        counts = clients.map_on_server(self.score_chunk, items, model=self.broadcast(state))
        return figures([Counts(**count) for count in counts])

    def report(self, state: Any, clients: Clients, data: Data) -> Scores:
        """Once, after the last round: by default how each client's model does on its own test samples."""
        return {"personal_accuracy": (own := self.ask_scores(state, clients))["accuracy"], "clients": own["clients"]}

    def prepare_data(self, data: Data) -> Data:
        """The data as it lies with those whom this method asks: by default as it is."""
        return data

    def notes(self) -> Sequence[str]:
        """What a user should know of these settings before a run begins."""
        return ()

    # How its settings are chosen.

    def search_space(self) -> Mapping[str, Sequence[float]]:
        """What `--tune` chooses for this method as it is set: by default all that is tunable."""
        return self.tunable

    def tuning_split(self, data: Data, share: float, seed: int) -> tuple[Method, Data]:
        """Method and data of a trial, which must not see test data: by default some training data is held out."""
        return self, data.held_out(share, seed)

    # What a trained state is worth to a user; methods with personal models say more.

    def broadcast(self, state: Any) -> Weights:
        """What of the state a client needs to use its model."""
        model: Weights = state.model
        return model

    def personal_model(self, client: Client, model: Weights) -> nn.Module:
        """The net that a client ends up with, from what is shared and what it remembers."""
        return self.build_model(client.net, model)

    def build_model(self, net: Callable[[Weights], nn.Module], weights: Weights) -> nn.Module:
        """The net that gives the answers, from what `whole` gives; `net` makes one of the task's with weights."""
        return net(weights)

    def global_weights(self, state: Any) -> Weights | None:
        """The weights of the global model; None if the method makes only personal ones."""
        return self.broadcast(state)

    def image_grids(self, state: Any) -> Sequence[ImageGrid]:
        """What of the state can be looked at, as the report shows it; by default nothing."""
        return ()

    def condensed(self, state: Any) -> dict[int, tuple[Tensor, Tensor]]:
        """Synthetic inputs and their labels by client, as last sent; empty where clients send none."""
        return {}

    # Pieces.

    def sample_cohort(self, clients: Clients) -> list[int]:
        """Who is asked in this round."""
        return clients.sample(min(DEFAULT_COHORT, len(clients)) if self.cohort is None else self.cohort)

    def ask_scores(self, state: Any, clients: Clients) -> Scores:
        """Each client's model on its own test samples; pooled and by client."""
        counts = self.ask_counts(state, clients)
        accuracies = {str(client): count.correct / count.total for client, count in counts.items() if count.total}
        return figures(list(counts.values())) | {"clients": accuracies}

    def ask_counts(self, state: Any, clients: Clients, everywhere: bool = False) -> dict[int, Counts]:
        """What each client's model gets right of its own test samples, or (`everywhere`) of everyone's."""
        answers = clients.ask(
            clients.eval_cohort(), self.score, model=self.broadcast(state), everywhere=everywhere, returns=COUNTS
        )
        counts = {answer.client: Counts(**answer.fields) for answer in answers}
        return {client: count for client, count in counts.items() if count.correct <= count.total}

    @on_client
    def score(self, client: Client, model: Weights, everywhere: bool) -> dict[str, float]:
        """Count right answers of this client's model; none of none where everyone's samples are not known here."""
        if everywhere and client.alone:
            return Counts(0, 0, 0.0)._asdict()
        samples = client.common if everywhere else client.test
        return score(self.personal_model(client, model), samples.chunks(CHUNK))._asdict()

    @on_server
    def score_chunk(self, server: Server, model: Weights, start: int, stop: int) -> dict[str, float]:
        """Count right answers of the global model on a piece of the common test set."""
        stop = min(stop, len(server.common))
        chunks = (server.common.slice(at, min(at + CHUNK, stop)) for at in range(start, stop, CHUNK))
        return score(self.build_model(server.net, model), chunks)._asdict()


class PersonalMethod(Method):
    """A method whose clients each have a model of their own: it is measured where it is used."""

    def evaluate(self, state: Any, clients: Clients, data: Data) -> Scores:
        """After a round: each client's model on its own test samples, pooled."""
        scores = self.ask_scores(state, clients)
        del scores["clients"]
        return scores

    def report(self, state: Any, clients: Clients, data: Data) -> Scores:
        """Once: the figures by client, and how far a client's model carries on everyone's samples, if clients know it."""
        own = self.ask_scores(state, clients)
        everywhere = list(self.ask_counts(state, clients, everywhere=True).values())
        known = figures(everywhere)["accuracy"] if any(count.total for count in everywhere) else None
        return {"personal_accuracy": own["accuracy"], "global_accuracy": known, "clients": own["clients"]}

    def global_weights(self, state: Any) -> Weights | None:
        """There is no global model."""
        return None


COUNTS: Schema = {"correct": Number(int, 0), "total": Number(int, 0, MAX_SIZE), "loss": float}


def figures(counts: Sequence[Counts]) -> Scores:
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
