"""Small images, nets and clients for FedMK."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fewer.data import from_clients
from fewer.methods.context import Client, ContextFactory
from fewer.models import SmallCNN, Task

SHAPE, CLASSES, SEED = (1, 8, 8), 3, 5
DRAW = np.random.default_rng(2)
COUNTS = ([7, 0, 5], [4, 6, 1], [3, 3, 3], [2, 0, 0])
SMALL: dict[str, Any] = {
    "per_class": 2,
    "matching_steps": 2,
    "outer_steps": 2,
    "outer_batch_size": 6,
    "inner_steps": 2,
    "inner_batch_size": 3,
    "server_steps": 3,
    "server_batch_size": 5,
    "generator_steps": 2,
    "min_samples": 1,
    "refine_from": 1,
}


def make_samples(counts: list[int]) -> tuple[Any, Any]:
    y = np.repeat(np.arange(CLASSES), counts)
    x = DRAW.normal(size=(len(y), *SHAPE)) + y[:, None, None, None]
    return x.astype(np.float32), y


PAIRS = [make_samples(counts) for counts in COUNTS]
TEST = make_samples([5, 5, 5])
DATA = from_clients(PAIRS, test=TEST)


def small_cnn() -> nn.Module:
    return SmallCNN(SHAPE, CLASSES)


def make_task(build_net: Callable[[], nn.Module] = small_cnn) -> Task:
    return Task(SHAPE, CLASSES, build_net)


def make_contexts(folder: Path, task: Task | None = None) -> ContextFactory:
    return ContextFactory(DATA, task or make_task(), SEED, folder)


def make_client(folder: Path, id: int, round: int = 1, task: Task | None = None) -> Client:
    context = make_contexts(folder, task)(id, round)
    assert isinstance(context, Client)
    return context


def is_same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(is_same(first[key], second[key]) for key in first)
    return all(is_same(getattr(first, name), getattr(second, name)) for name in vars(first))
