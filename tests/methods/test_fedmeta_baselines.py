"""FedBABU and kNN-Per on new clients, against explicit computation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fewer
from fewer.methods.fedavg_meta import FedAvgMeta
from fewer.methods.fedmeta_baselines import FedBABUMeta, KNNPerMeta
from fewer.models import EncoderHead, get_weights
from tests.methods.fedmeta_harness import (
    CLASSES,
    FEATURES,
    GROUPS,
    PAIRS,
    SEED,
    client_batches,
    federation,
    support_and_query,
)

OPTIONS: dict[str, Any] = {"rounds": 1, "cohort": 8, "local_steps": 3, "batch_size": 2, "lr": 0.3}


def small() -> EncoderHead:
    torch.manual_seed(2)
    return EncoderHead(nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh()), 4, CLASSES)


def take_steps(net: Any, batches: Any, lr: float, part: str = "") -> Any:
    for x, y in batches:
        x, y = torch.as_tensor(np.asarray(x), dtype=torch.float32), torch.as_tensor(np.asarray(y))
        parameters = [tensor for name, tensor in net.named_parameters() if name.startswith(part)]
        gradients = torch.autograd.grad(F.cross_entropy(net(x), y), parameters)
        with torch.no_grad():
            for tensor, gradient in zip(parameters, gradients, strict=True):
                tensor -= lr * gradient
    return net


def test_fedbabu_averages_encoders_and_a_new_client_fine_tunes_the_net() -> None:
    method = FedBABUMeta(**OPTIONS, adapt_steps=2, adapt_lr=0.4)
    result = fewer.run(method, federation(), model=small(), seed=SEED)
    sizes = [len(PAIRS[client][1]) for client in GROUPS.train]
    models = [
        get_weights(take_steps(small(), client_batches(method, client, 3), 0.3, "encoder")) for client in GROUPS.train
    ]
    assert result.state.model.keys() == {name for name in models[0] if name.startswith("encoder")}
    for name, tensor in result.state.model.items():
        mean = sum(size * model[name] for size, model in zip(sizes, models, strict=True)) / sum(sizes)
        assert torch.allclose(tensor, torch.as_tensor(mean), atol=1e-6), name
    correct = total = 0
    for client in GROUPS.test:
        net, (support, (x, y)) = small(), support_and_query(client, 0.2)
        net.load_state_dict(result.state.model, strict=False)
        take_steps(net, [support] * 2, 0.4)
        correct += int((net(torch.as_tensor(x, dtype=torch.float32)).argmax(1).numpy() == y).sum())
        total += len(y)
    assert result.accuracy == pytest.approx(correct / total)


def test_knn_per_interpolates_with_the_support_of_a_new_client() -> None:
    options = {**OPTIONS, "support_fraction": 0.5}
    result = fewer.run(KNNPerMeta(**options, weight=0.7, neighbors=2), federation(), model=small(), seed=SEED)
    plain = fewer.run(FedAvgMeta(**options, adapt_steps=0), federation(), model=small(), seed=SEED)
    for name, tensor in plain.state.model.items():
        assert torch.equal(tensor, result.state.model[name]), name  # training is FedAvg's
    net = small()
    net.load_state_dict(plain.state.model)
    correct = total = 0
    for client in GROUPS.test:
        (known, labels), (x, y) = support_and_query(client, 0.5)
        with torch.no_grad():
            memory, z = (net.encoder(torch.as_tensor(part, dtype=torch.float32)) for part in (known, x))
            probabilities = net.head(z).softmax(1).numpy()
        distances = torch.cdist(z, memory).numpy() / 2  # divided by the root of 4 features
        for row, distance, label in zip(probabilities, distances, y, strict=True):
            nearest = np.argsort(distance)[:2]
            votes = np.exp(-distance[nearest]) / np.exp(-distance[nearest]).sum()
            mixed = 0.3 * row
            for neighbor, vote in zip(nearest, votes, strict=True):
                mixed[labels[neighbor]] += 0.7 * vote
            correct, total = correct + int(mixed.argmax() == label), total + 1
    assert result.accuracy == pytest.approx(correct / total)
    assert KNNPerMeta().search_space().keys() == {"lr", "weight"}
