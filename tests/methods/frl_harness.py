"""A small federation for FRL, and an episode in explicit loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fewer
from fewer.data import ArrayData, from_clients
from fewer.methods.frl import (
    FRL,
)
from fewer.methods.frl_baselines import FRLMetaHead
from fewer.models import EncoderHead, Weights, load_weights


def eq2_loss(
    features: Tensor, labels: Tensor, classes: Sequence[int], means: Tensor, temperature: float = 1.0
) -> Tensor:
    """Eq 2 sample by sample, with the true class in the sum."""
    total = torch.zeros((), dtype=features.dtype)
    for x, label in zip(features, labels.tolist(), strict=True):
        distances = torch.stack([(x - mean).square().sum() / temperature for mean in means])
        total = total + distances[list(classes).index(label)] + torch.logsumexp(-distances, 0)
    return total / len(labels)


class Small(EncoderHead):
    """Two inputs and three features, small enough for explicit loops."""

    def __init__(self, shape: tuple[int, ...] = (2,), classes: int = 6) -> None:
        super().__init__(nn.Sequential(nn.Linear(shape[0], 3), nn.Tanh()), 3, classes)


DRAW = np.random.default_rng(5)
HELD = [[0, 1], [1, 2], [3], [0, 4], [2, 4]]
"""Classes of each client: the third client holds only class 3, and no other client holds it."""
PAIRS = [
    (
        np.concatenate([DRAW.normal([label, -label], 0.5, (size, 2)) for label in labels]).astype(np.float32),
        np.repeat(labels, size),
    )
    for labels, size in zip(HELD, (4, 6, 8, 4, 2), strict=True)
]
UNSEEN = DRAW.normal(0, 1, (60, 2)).astype(np.float32), DRAW.integers(4, 6, 60)


def federation(pairs: Sequence[tuple[Any, Any]] = PAIRS) -> ArrayData:
    """Clients with time-ordered samples: the first half of each class is the support set."""
    return replace(from_clients(pairs, test=UNSEEN), time_ordered=True)


def initial_net() -> nn.Module:
    torch.manual_seed(0)
    return Small()


def support_and_query(client: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    x, y = (torch.from_numpy(array) for array in PAIRS[client])
    support = torch.cat([torch.nonzero(y == label)[:, 0][: int((y == label).sum()) // 2] for label in HELD[client]])
    query = torch.tensor([row for row in range(len(y)) if row not in support.tolist()])
    return (x[support].double(), y[support]), (x[query].double(), y[query])


def class_means(features: Tensor, y: Tensor) -> dict[int, Tensor]:
    return {int(label): features[y == label].mean(0) for label in torch.unique(y)}


def episode_loss(
    method: FRL,
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    global_means: dict[int, Tensor],
    local_means: dict[int, Tensor] | None,
) -> Tensor:
    features = net.encoder(x)  # type: ignore[operator]
    if method.head == "linear":
        scores = net.head(features)[:, sorted(global_means)]  # type: ignore[operator]
        return F.cross_entropy(scores, torch.tensor([sorted(global_means).index(int(label)) for label in y]))
    prototypes = class_means(features, y) if local_means is None else local_means
    total = eq2_loss(features, y, list(prototypes), torch.stack(list(prototypes.values())), method.temperature)
    if method.head == "gpal" and global_means:
        aux = eq2_loss(features, y, list(global_means), torch.stack(list(global_means.values())), method.temperature)
        total = method.gamma * total + (1 - method.gamma) * aux
    return total


def compute_gradients(loss: Tensor, net: nn.Module) -> Weights:
    gradients = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True, materialize_grads=True)
    return dict(zip(dict(net.named_parameters()), gradients, strict=True))


def load_net(weights: Weights) -> nn.Module:
    net = Small().double()
    load_weights(net, weights)
    return net


def descend(weights: Weights, gradients: Weights, lr: float, weight_decay: float) -> Weights:
    return {name: tensor - lr * (gradients[name] + weight_decay * tensor) for name, tensor in weights.items()}


def episode(
    method: FRL, initial: Weights, cohort: Sequence[int] = range(5)
) -> tuple[Weights, Weights, dict[int, Tensor]]:
    """Algorithm 1, line by line: the meta-gradient, θ^R and Γ."""
    theta = initial
    global_means: dict[int, Tensor] = dict.fromkeys(range(5), torch.zeros(0)) if method.head == "linear" else {}
    last_means: dict[int, dict[int, Tensor]] = {}
    sizes = {client: len(support_and_query(client)[0][1]) for client in cohort}
    for _ in range(method.group_rounds):
        models, local_means = {}, {}
        for client in cohort:
            (x, y), _ = support_and_query(client)
            local_model = theta
            for step in range(method.local_steps or method.epochs):
                net = load_net(local_model)
                if step == 0:
                    local_means[client] = class_means(net.encoder(x).detach(), y)  # type: ignore[operator]
                gradients = compute_gradients(episode_loss(method, net, x, y, global_means, None), net)
                local_model = descend(local_model, gradients, method.lr, method.weight_decay)
            if method.prototypes_from == "after":
                local_means[client] = class_means(load_net(local_model).encoder(x).detach(), y)  # type: ignore[operator]
            models[client] = local_model
        theta = {
            name: sum(sizes[client] * models[client][name] for client in cohort) / sum(sizes.values())  # type: ignore[misc]
            for name in theta
        }
        if method.head != "linear":
            global_means = {}
            for label in range(6):
                holders = {
                    client: int((support_and_query(client)[0][1] == label).sum())
                    for client in cohort
                    if label in local_means[client]
                }
                if holders:
                    global_means[label] = sum(
                        count * local_means[client][label] for client, count in holders.items()
                    ) / sum(holders.values())  # type: ignore[assignment]
        last_means = local_means
    meta_names = [name for name in initial if isinstance(method, FRLMetaHead) or not name.startswith("head.")]
    meta_gradient = {name: torch.zeros_like(initial[name]) for name in meta_names}
    total_size = sum(len(PAIRS[client][1]) for client in cohort)
    for client in cohort:
        x, y = support_and_query(client)[1]
        net = load_net(theta)
        query_means = last_means[client] if method.query_prototypes == "support" else None
        prototypes = global_means if method.head != "distance" else {}
        gradients = compute_gradients(episode_loss(method, net, x, y, prototypes, query_means), net)
        phi = descend(initial, gradients, method.meta_lr, method.weight_decay)
        for _ in range(method.meta_steps - 1):  # ordinary steps from φ
            net = load_net(phi)
            gradients = compute_gradients(episode_loss(method, net, x, y, prototypes, query_means), net)
            phi = descend(phi, gradients, method.meta_lr, method.weight_decay)
        gradients = {name: (initial[name] - phi[name]) / method.meta_lr for name in initial}
        meta_gradient = {
            name: gradient + len(PAIRS[client][1]) / total_size * gradients[name]
            for name, gradient in meta_gradient.items()
        }
    return meta_gradient, theta, global_means


def to_double(weights: Weights) -> Weights:
    return {name: tensor.double() for name, tensor in weights.items()}


SMALL: dict[str, Any] = {"way": 2, "group_size": 2, "eval_groups": 1}


def read_messages(path: Path) -> list[tuple[int, int, str, str, int]]:
    lines = [line.split(",") for line in (path / "ledger.csv").read_text().splitlines()[1:]]
    return [(int(round), int(client), direction, kind, int(size)) for round, client, direction, kind, size in lines]


GROUPS: dict[str, Any] = {"way": 3, "group_size": 4, "eval_groups": 3, "samples_per_class": 8}


def load_digits(**settings: Any) -> ArrayData:
    options = {
        "clients": 12,
        "partition": "shards",
        "data_options": {"unseen_classes": "6-9"},
        "fraction": 0.3,
        **settings,
    }
    return fewer.data.load("digits", **options)
