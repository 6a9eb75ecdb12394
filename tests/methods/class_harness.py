"""A small federation whose clients hold different classes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fewer.data import ArrayData, from_clients
from fewer.methods import Method
from fewer.methods.context import ContextFactory
from fewer.methods.fedavg import LocalTraining
from fewer.models import EncoderHead, Task, get_weights, load_weights
from fewer.runtime import HandlerRunner, stream
from tests.helpers import Array, Harness, Wiretap

FEATURES, CLASSES, SEED = 3, 3, 5
HELD = ([0, 1], [0, 1, 2], [1])
"""Classes of each client: two clients hold class 0, all hold class 1, one holds class 2."""
SIZES = (6, 9, 4)
DRAW = np.random.default_rng(2)
PAIRS = [
    (DRAW.normal(0, 1, (size, FEATURES)).astype(np.float32), np.array([held[n % len(held)] for n in range(size)]))
    for held, size in zip(HELD, SIZES, strict=True)
]
EMPTY = (np.zeros((0, FEATURES), np.float32), np.zeros(0, np.int64))


def federation(pairs: Sequence[tuple[Any, Any]] = PAIRS) -> ArrayData:
    return from_clients(pairs, test=(np.concatenate([x for x, _ in PAIRS]), np.concatenate([y for _, y in PAIRS])))


def linear(outputs: int = CLASSES) -> nn.Module:
    net = nn.Linear(FEATURES, outputs, bias=False)
    draw = np.random.default_rng(7).normal(0, 0.5, (outputs, FEATURES)).astype(np.float32)
    load_weights(net, {"weight": torch.from_numpy(draw)})
    return net


def encoder_head_net() -> EncoderHead:
    torch.manual_seed(3)
    return EncoderHead(nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh()), 4, CLASSES)


def make_harness(method: Method, net: nn.Module, folder: Path, pairs: Sequence[tuple[Any, Any]] = PAIRS) -> Harness:
    data = federation(pairs)
    task = Task((FEATURES,), CLASSES, lambda: copy.deepcopy(net), pretrained=get_weights(net))
    contexts = ContextFactory(data, task, SEED, folder)
    handlers = HandlerRunner(method, contexts, SEED, torch.device("cpu"))
    return Harness(method, task, Wiretap(len(data), SEED, handlers=handlers), contexts, method.init(task, SEED))


def sample_indices(method: LocalTraining, client: int, round: int) -> Tensor:
    """Indices of the samples that a client uses in each step."""
    generator = stream(SEED, round, client, "batches")
    return torch.randint(SIZES[client], (method.local_steps, method.batch_size), generator=generator)


def softmax(scores: Array) -> Array:
    exponentials = np.exp(scores - scores.max())
    return np.asarray(exponentials / exponentials.sum())
