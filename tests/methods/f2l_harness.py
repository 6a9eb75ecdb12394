"""Clusters of points with base, validation and novel classes, and clients on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fewer
from fewer.data import ArrayData, Data, RawDataset, federate
from fewer.data.episodes import Episode, sample_episode
from fewer.methods import Method
from fewer.models.sequences import MLP
from fewer.models.sets import SetEncoder

WAY, SHOT, QUERIES, FEATURES = 3, 2, 2, 8
BASE, VALIDATION, NOVEL = 6, 4, 5
FAST: dict[str, Any] = {"way": WAY, "shot": SHOT, "queries": QUERIES, "tasks": 2, "test_tasks": 8, "validate_every": 2}


def make_clusters(spread: float = 0.4, per_class: int = 48, extra_noise: float = 0.0) -> RawDataset:
    """Gaussian clusters, one per class; two input dimensions are pure noise that the encoder must ignore."""
    rng = np.random.default_rng(0)
    classes = BASE + VALIDATION + NOVEL
    centers = rng.normal(0, 1, (classes, 6)).astype(np.float32)
    y = np.repeat(np.arange(classes), per_class)
    x = centers[y] + spread * rng.normal(0, 1, (len(y), 6)).astype(np.float32)
    noise = (3 + extra_noise) * rng.normal(0, 1, (len(y), 2)).astype(np.float32)
    return RawDataset(np.concatenate([x, noise], 1).astype(np.float32), y, split=(BASE, VALIDATION, NOVEL))


def make_data(clients: int = 4, **settings: Any) -> ArrayData:
    return federate(make_clusters(), clients=clients, partition="iid", name="clouds", **settings)


def net() -> MLP:
    return MLP((8,), BASE, hidden=FEATURES)


def run(method: Method, data: Data, **settings: Any) -> Any:
    return fewer.run(method, data, model=net, evaluate_every=method.rounds, **settings)


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def set_encoder(context: int, heads: int = 4, transductive: bool = False) -> SetEncoder:
    """A `SetEncoder` with noise on its weights, because some initial weights are zero."""
    torch.manual_seed(context)
    encoder = SetEncoder(FEATURES, context, heads, dropout=0.0, transductive=transductive).double()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return encoder


def draw_task(data: ArrayData, seed: int = 0) -> Episode:
    return sample_episode(data.client(0).train, WAY, SHOT, QUERIES, torch.Generator().manual_seed(seed))


def make_client(data: Data, folder: Path, id: int = 0, round: int = 1) -> Any:
    from fewer.methods.context import ContextFactory
    from fewer.models import Task

    contexts = ContextFactory(data, Task((8,), BASE, net), 0, folder)
    return contexts(id, round)
