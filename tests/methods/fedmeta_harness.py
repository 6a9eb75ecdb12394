"""Softmax regression on a small federation, in torch and in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fewer.data import ArrayData, from_clients
from fewer.data.episodes import split_clients
from fewer.models import load_weights
from fewer.runtime import stream

Array = NDArray[np.float64]


def softmax_regression(w: Array, x: Array, y: NDArray[np.int64]) -> tuple[Array, Array]:
    """Gradient and Hessian (of the flattened weights) of the mean cross-entropy of scores x wᵀ."""
    scores = x @ w.T
    probabilities = np.exp(scores - scores.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    gradient = (probabilities - np.eye(len(w))[y]).T @ x / len(y)
    curvature = np.einsum("nc,cd->ncd", probabilities, np.eye(len(w))) - np.einsum(
        "nc,nd->ncd", probabilities, probabilities
    )
    return gradient, np.einsum("ncd,ni,nj->cidj", curvature, x, x).reshape(w.size, w.size) / len(y)


FEATURES, CLASSES, SEED = 3, 2, 4
DRAW = np.random.default_rng(1)
PAIRS = [
    (DRAW.normal(client % 3, 1, (size, FEATURES)).astype(np.float32), DRAW.integers(CLASSES, size=size))
    for client, size in enumerate([5, 8, 6, 10, 7, 9, 5, 6, 12, 8])
]
WEIGHT: Array = DRAW.normal(0, 0.5, (CLASSES, FEATURES)).astype(np.float32).astype(np.float64)
GROUPS = split_clients(10, seed=SEED)


def linear() -> nn.Module:
    net = nn.Linear(FEATURES, CLASSES, bias=False)
    load_weights(net, {"weight": torch.from_numpy(WEIGHT)})
    return net


def federation(pairs: Sequence[tuple[Any, Any]] = PAIRS) -> ArrayData:
    """Ten clients with time-ordered samples: the first ones are the support set."""
    return replace(from_clients(pairs, test=(PAIRS[0][0], PAIRS[0][1])), time_ordered=True)


def support_and_query(client: int, support_fraction: float) -> tuple[tuple[Array, Any], tuple[Array, Any]]:
    x, y = PAIRS[client]
    cut = round(len(y) * support_fraction)
    return (x[:cut].astype(float), y[:cut]), (x[cut:].astype(float), y[cut:])


def is_close(actual: Tensor, expected: Array, tolerance: float = 3e-6) -> bool:
    return actual.shape == expected.shape and bool(np.abs(actual.double().numpy() - expected).max() <= tolerance)


def client_batches(method: Any, client: int, count: int) -> list[tuple[Array, Any]]:
    x, y = PAIRS[client]
    indices = torch.randint(len(y), (count, method.batch_size), generator=stream(SEED, 1, client, "batches"))
    return [(x[row].astype(float), y[row]) for row in indices.numpy()]


def run_sgd(w: Array, batches: Sequence[tuple[Array, Any]], lr: float) -> Array:
    for batch in batches:
        w = w - lr * softmax_regression(w, *batch)[0]
    return w
