"""What handlers receive: the `Client` or the `Server` that they run on.

A handler is a function of a method that runs on a client (`@on_client`) or on a worker of the server (`@on_server`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from fewer.data import ClientData, Data, Samples
from fewer.learning.aggregate import add_share
from fewer.learning.protect import ProtectedSamples, RecordGuard
from fewer.models import Task, Weights, load_weights
from fewer.privacy import Protection
from fewer.runtime import Clients, Store, Unable, open_members, seed_of, stream
from fewer.runtime.keys import KeyFiles, Keys
from fewer.runtime.noise import NoiseSource, NoiseStream
from fewer.runtime.secure_sum import count_withheld
from fewer.runtime.store import client_folder
from fewer.runtime.streams import server_key
from fewer.wire import Refused

ANSWERS_SO_FAR = "privacy_answers"
"""Store key of the number of a client's protected answers."""


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
    """The client's number; on the server, the number of the item of `clients.map_on_server`."""
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
        return stream(self.seed, self.round, self.stream_key, purpose)

    @property
    def stream_key(self) -> int:
        """The key of this context in random streams."""
        return self.id


@dataclass
class Server(Context):
    """What an `@on_server` handler receives as its first argument."""

    @property
    def stream_key(self) -> int:
        """The key of this item of work in random streams."""
        return server_key(self.id)


@dataclass
class Client(Context):
    """What an `@on_client` handler receives as its first argument: one client, its data and its private store."""

    store: Store = field(kw_only=True)
    """Private state, kept from round to round: `client.store.put("model", …)`, `client.store.get("model")`."""
    _data: Data = field(kw_only=True, repr=False)
    mislabeled: bool = field(default=False, kw_only=True)
    """True if the client lies by training on wrong labels."""
    protection: Protection | None = field(default=None, kw_only=True)
    """How the client protects what it sends, under differential privacy."""
    noise: NoiseSource | None = field(default=None, kw_only=True, repr=False)
    """Where the client's noise comes from."""
    _guard: RecordGuard | None = field(default=None, kw_only=True, repr=False)

    @cached_property
    def data(self) -> ClientData:
        """All of the client's samples, loaded on first use. If records are protected, only noisy sums are visible."""
        data = self._data.client(self.id)
        data = data._replace(train=data.train.flip_labels(self._data.classes)) if self.mislabeled else data
        if self._guard and self.protects_records:
            return ClientData(*(cast(Samples, ProtectedSamples(samples, self._guard)) for samples in data))
        return data

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
        if self._guard and self.protects_records:
            self._guard.refuse("its clients are federations")
        seed = seed_of(self.seed, self.id, "members")
        data = self._data.members_of(self.id)
        contexts = ContextFactory(data, task, seed, self.store.folder / "members", store_round=self.round)
        return open_members(program, contexts, len(data), seed, task.device)

    # Differential privacy.

    def protect(self, handler: str, shares: int, repeat: int = 0, question: str = "") -> None:
        """Protects the answer of this handler. Raises Unable if the budget is spent.

        `shares` is the number of shares that make up the noise of a sum, if clients share it.

        `repeat` is how often the handler was asked before in this round, `question` is its hash: no two answers
        share noise, unless the same question is asked again after an interruption.
        """
        assert self.protection is not None and self.noise is not None
        if not 1 <= shares <= len(self._data):
            raise Refused(f"{shares} shares of noise, but there are {len(self._data)} clients")
        if self.protection.noise is None and (self.store.get(ANSWERS_SO_FAR) or 0) >= self.protection.uses:
            raise Unable("its privacy budget is spent")
        again = f" {repeat}" if repeat else ""
        source, question = self.noise, f"{shares} {question}"
        if self.protection.settings.distributed:  # sums of the same answer over different clients must not share noise
            question += f" {count_withheld(self.store)}"

        def noise_stream(purpose: str) -> NoiseStream:
            return source.stream(self.round, self.id, purpose + again, question=question)

        self._guard = RecordGuard(self.protection, noise_stream, handler, shares)

    @property
    def protects_records(self) -> bool:
        """True if the client's answer must protect each record."""
        return self._guard is not None and self._guard.settings.level == "record"

    @property
    def shares_of_noise(self) -> int:
        """The number of shares that make up the noise of a sum; 0 if the client does not share it."""
        return self._guard.shares if self._guard and self._guard.settings.distributed else 0

    @property
    def releases(self) -> Sequence[tuple[float, float, int]]:
        """What the answer releases about records: sampling rate, noise multiplier, and number of releases."""
        return tuple(self._guard.releases) if self._guard else ()

    def protect_answer(self, answer: Mapping[str, Any], sent: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to send. At user level, each model or tensor in it is clipped and gets a share of the noise."""
        assert self._guard and self.protection
        if self.protects_records:
            if self.releases and self.protection.noise is None:
                self.store.put(ANSWERS_SO_FAR, (self.store.get(ANSWERS_SO_FAR) or 0) + 1)
            return dict(answer)
        noisy = dict(answer)
        for name, value in answer.items():
            start, single = sent.get(name), isinstance(value, torch.Tensor)
            if single:
                value, start = {"": value}, None if start is None else {"": start}
            if isinstance(value, dict) and value:
                stream = self._guard.stream(f"privacy {self._guard.handler} {name}")
                noise = (self.protection.noise or 0.0) / self._guard.shares**0.5
                shared = add_share(value, start, self._guard.settings.clip, noise, stream)
                noisy[name] = shared[""] if single else shared
        return noisy

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
    mislabeled: frozenset[int] = frozenset()
    """Clients that train on wrong labels."""
    protection: Protection | None = None
    """How clients protect what they send, under differential privacy."""
    noise: NoiseSource | None = None
    """Where their noise comes from."""

    def __call__(self, client: int, round: int) -> Client:
        """The client with this number."""
        shared = client, round, self.seed, self.task, self.data.test, self.nets
        return Client(
            *shared,
            store=self.store(client, round),
            _data=self.data,
            mislabeled=client in self.mislabeled,
            protection=self.protection,
            noise=self.noise,
        )

    def server(self, item: int, round: int) -> Server:
        """The server, at one item of its work."""
        return Server(item, round, self.seed, self.task, self.data.test, self.nets)

    @property
    def keys(self) -> Keys:
        """The clients' keys for sealed messages."""
        return self.sealing_keys or KeyFiles(self.folder)

    def store(self, client: int, round: int) -> Store:
        """The client's private store."""
        return Store(client_folder(self.folder, client), round if self.store_round is None else self.store_round)

    def log_error(self, client: int | None, error: str) -> None:
        """Appends an error to errors.txt in the client's folder, or in `folder` for the server."""
        folder = self.folder if client is None else client_folder(self.folder, client)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "errors.txt").open("a") as file:
            file.write(error)
