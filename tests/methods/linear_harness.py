"""A linear net on a small federation, and NumPy SGD with gradients from formulas."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import fewer
from fewer.data import ArrayData, from_clients
from fewer.methods import Method
from fewer.methods.context import ContextFactory
from fewer.methods.fedavg import LocalTraining
from fewer.models import Task, get_weights, load_weights
from fewer.runtime import HandlerRunner, stream
from fewer.runtime.streams import seed_of
from tests.helpers import Array, Harness, Wiretap

Batch = tuple[Array, NDArray[np.int64]]

FEATURES, CLASSES, SIZES, SEED = 3, 2, (3, 5, 2), 4
DRAW = np.random.default_rng(1)
PAIRS = [
    (DRAW.normal(client, 1, (size, FEATURES)).astype(np.float32), DRAW.integers(CLASSES, size=size))
    for client, size in enumerate(SIZES)
]
TEST = DRAW.normal(1, 1, (11, FEATURES)).astype(np.float32), DRAW.integers(CLASSES, size=11)
WEIGHT: Array = DRAW.normal(0, 0.5, (CLASSES, FEATURES)).astype(np.float32).astype(np.float64)


def linear() -> nn.Module:
    net = nn.Linear(FEATURES, CLASSES, bias=False)
    load_weights(net, {"weight": torch.from_numpy(WEIGHT)})
    return net


def federation(pairs: Sequence[tuple[Any, Any]] = PAIRS) -> ArrayData:
    """Three clients with 3, 5 and 2 samples, and a global test set."""
    return from_clients(pairs, test=TEST)


def client_batches(
    method: LocalTraining, client: int, round: int, pairs: Sequence[tuple[Any, Any]] = PAIRS
) -> list[Batch]:
    """The batches of a client in a round, drawn from the stream of (seed, round, client)."""
    x, y = pairs[client]
    indices = torch.randint(
        len(y), (method.local_steps, method.batch_size), generator=stream(SEED, round, client, "batches")
    )
    return [(x[row].astype(np.float64), y[row]) for row in indices.numpy()]


def residual(scores: Array, y: NDArray[np.int64]) -> Array:
    """Derivative of the mean cross-entropy by the scores: (softmax − one-hot) / batch size."""
    probabilities = np.exp(scores - scores.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    return np.asarray((probabilities - np.eye(CLASSES)[y]) / len(y))


def gradient(w: Array, x: Array, y: NDArray[np.int64]) -> Array:
    return residual(x @ w.T, y).T @ x


def run_sgd(w: Array, batches: list[Batch], lr: float, mu: float = 0.0) -> Array:
    start = w
    for x, y in batches:
        w = w - lr * (gradient(w, x, y) + mu * (w - start))
    return w


def weighted_average(models: Sequence[Array], sizes: Sequence[int] = SIZES) -> Array:
    return np.asarray(sum(size * model for size, model in zip(sizes, models, strict=True)) / sum(sizes))


def trained_weight(method: LocalTraining, **settings: Any) -> Tensor:
    weight = fewer.run(method, federation(), model=linear(), seed=SEED, **settings).state.model["weight"]
    assert isinstance(weight, Tensor)
    return weight


def run_rounds(method: Method, folder: Path, rounds: int) -> tuple[Any, list[list[int]]]:
    """The state after these rounds, and the cohort of each."""
    harness = make_harness(method, linear(), folder)
    cohorts, state = [], harness.state
    for round in range(1, rounds + 1):
        with harness.clients.training_round(round):
            cohorts.append(method.sample_cohort(harness.clients))
            state = method.round(state, harness.clients)
    return state, cohorts


def answered(rounds: int, slow: float) -> list[list[int]]:
    """The clients whose answer is in time in each round, if an answer is late with probability `slow`."""
    draws = {
        (round, client): np.random.default_rng(seed_of(SEED, round, client, "fault", "train")).random(3)[1]
        for round in range(1, rounds + 1)
        for client in range(3)
    }
    return [[client for client in range(3) if draws[round, client] >= slow] for round in range(1, rounds + 1)]


def make_harness(method: Method, net: nn.Module, folder: Path, pairs: Sequence[tuple[Any, Any]] = PAIRS) -> Harness:
    data = federation(pairs)
    task = Task((FEATURES,), CLASSES, lambda: copy.deepcopy(net), pretrained=get_weights(net))
    contexts = ContextFactory(data, task, SEED, folder)
    handlers = HandlerRunner(method, contexts, SEED, torch.device("cpu"))
    return Harness(method, task, Wiretap(len(data), SEED, handlers=handlers), contexts, method.init(task, SEED))
