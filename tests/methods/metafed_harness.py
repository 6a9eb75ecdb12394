"""A small ring of federations, run without the engine."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fewer import MetaFed
from fewer.data import ArrayData, Data
from fewer.data.federated import from_arrays
from fewer.methods import Client
from fewer.methods.context import ContextFactory
from fewer.methods.metafed import FEDERATION
from fewer.models import EncoderHead, Task, Weights, get_weights, load_weights
from fewer.runtime import Absent, HandlerRunner, Inline
from fewer.runtime.handlers import FETCH_OUTGOING, Call, Reply
from fewer.wire import decode, pack, unpack
from tests.helpers import Array, run_contents

FEATURES, HIDDEN, CLASSES, SEED, COUNT = 3, 2, 2, 4, 4
DRAW = np.random.default_rng(1)
CLIENT = np.repeat(np.arange(COUNT), 20)
X = DRAW.normal(0, 1, (len(CLIENT), FEATURES)).astype(np.float32)
Y = (X[:, 0] + 0.5 * X[:, 1] * (CLIENT % 2) > 0).astype(np.int64)
A = DRAW.normal(0, 0.7, (HIDDEN, FEATURES)).astype(np.float32)
C = DRAW.normal(0, 0.7, (CLASSES, HIDDEN)).astype(np.float32)

Model = tuple[Array, Array]
"""Weights of the linear net: encoder and head."""


def ring_data(clients: int = COUNT) -> ArrayData:
    return from_arrays(X, Y, client_ids=CLIENT if clients == COUNT else np.arange(len(Y)) % clients, validation=0.3)


DATA = ring_data()


def linear() -> EncoderHead:
    net = EncoderHead(nn.Linear(FEATURES, HIDDEN, bias=False), HIDDEN, CLASSES)
    net.head = nn.Linear(HIDDEN, CLASSES, bias=False)
    load_weights(net, {"encoder.weight": torch.from_numpy(A), "head.weight": torch.from_numpy(C)})
    return net


def normed() -> EncoderHead:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh())
    return EncoderHead(encoder, HIDDEN, CLASSES)


@dataclass
class RecordingClients(Inline):
    """Records every call and injects the faults of a test."""

    down: list[tuple[Call, bytes]] = field(default_factory=list)
    injected_faults: Mapping[tuple[int, int], str] = field(default_factory=dict)
    absences: list[Absent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.on_absent = lambda absence, handler: self.absences.append(absence)

    def _deliver_calls(self, calls: Sequence[tuple[Call, bytes]]) -> Iterator[tuple[Call, Reply | None]]:
        self.down += calls
        return super()._deliver_calls(calls)

    def _draw_fault(self, client: int, stream_name: str) -> str | None:
        return None if stream_name == "begin" else self.injected_faults.get((self.round, client))


@dataclass
class RingHarness:
    """Runs the rounds of a ring without the engine."""

    method: MetaFed
    clients: RecordingClients
    contexts: ContextFactory
    state: Any

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.clients.round += 1
            self.state = self.method.round(self.state, self.clients)

    def client(self, id: int) -> Client:
        context = self.contexts(id, self.clients.round)
        assert isinstance(context, Client)
        return context

    def personal_model(self, client: int) -> Weights:
        return get_weights(self.method.personal_model({}, self.client(client)))

    def federation_state(self, client: int) -> dict[str, Any]:
        state: dict[str, Any] = self.client(client).store.get(FEDERATION)
        return state

    @property
    def hops(self) -> list[tuple[int | None, int]]:
        """Sender and receiver of each message; no sender means the ring starts here."""
        return [
            (call.hop.peer, call.client) for call, _ in self.clients.down if call.hop and call.handler != FETCH_OUTGOING
        ]

    @property
    def messages(self) -> list[bytes]:
        """The messages between federations."""
        return [
            blob
            for call, blob in self.clients.down
            if call.hop and call.handler != FETCH_OUTGOING and call.hop.peer is not None
        ]

    @property
    def absences(self) -> list[tuple[int, str]]:
        return [(absence.client, absence.reason) for absence in self.clients.absences]


def make_harness(
    method: MetaFed,
    net: nn.Module,
    folder: Path,
    data: Data = DATA,
    injected_faults: Mapping[tuple[int, int], str] | None = None,
) -> RingHarness:
    data = method.prepare_data(data)
    task = Task((FEATURES,), CLASSES, lambda: copy.deepcopy(net), pretrained=get_weights(net))
    contexts = ContextFactory(data, task, SEED, folder)
    handlers = HandlerRunner(method, contexts, SEED, torch.device("cpu"))
    return RingHarness(
        method,
        RecordingClients(len(data), SEED, handlers=handlers, injected_faults=injected_faults or {}),
        contexts,
        method.init(task, SEED),
    )


def run_sgd(
    model: Model, batches: Sequence[tuple[Array, Any]], lr: float, teacher: Model | None, distill_weight: float
) -> Model:
    """SGD on scores C A x and features A x.

    Cross-entropy has the derivative (softmax − one-hot) / n by the scores. The mean square of A x − A_t x over features
    and samples has the derivative 2 (A x − A_t x) / (n · features) by the features.
    """
    a, c = model
    for x, y in batches:
        features = x @ a.T
        scores = features @ c.T
        probabilities = np.exp(scores - scores.max(1, keepdims=True))
        probabilities /= probabilities.sum(1, keepdims=True)
        d_scores = (probabilities - np.eye(CLASSES)[y]) / len(y)
        d_features = d_scores @ c
        if teacher is not None:
            d_features = d_features + distill_weight * 2 * (features - x @ teacher[0].T) / (len(y) * HIDDEN)
        a, c = a - lr * d_features.T @ x, c - lr * d_scores.T @ features
    return a, c


INITIAL: Model = (A.astype(np.float64), C.astype(np.float64))


def all_sevens(net: nn.Module) -> Weights:
    return {name: torch.full_like(tensor, 7) for name, tensor in get_weights(net).items()}


SMALL: dict[str, Any] = {"rounds": 3, "lr": 0.3, "local_steps": 2, "batch_size": 4}


def comparable_parts(path: Path) -> dict[str, Any]:
    """The parts of two runs that must be equal. Messages are decoded, because the order of header fields varies."""
    parts = run_contents(path)
    outgoing = {f: unpack((path / f).read_bytes()) for f in parts["clients"] if f.name.startswith("ring_outgoing")}
    decoded_fields = {f: decode(bytes(message.numpy()))[1] for f, message in outgoing.items()}
    decoded = {
        f: (message_fields["net"], pack(message_fields["model"])) for f, message_fields in decoded_fields.items()
    }
    return {
        **parts,
        "clients": {f: blob for f, blob in parts["clients"].items() if f not in outgoing},
        "outgoing": decoded,
    }
