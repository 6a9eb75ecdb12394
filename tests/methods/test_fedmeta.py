"""FedMeta against a NumPy reference, reproducible and with the stated traffic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fewer
from fewer.data import Samples
from fewer.learning.adapt import meta_gradient
from fewer.methods.fedavg_meta import FedAvgMeta
from fewer.methods.fedmeta import ALPHA, FedMeta
from fewer.methods.new_clients import NewClients
from fewer.methods.per_fedavg import PerFedAvg
from fewer.methods.reptile import Reptile
from fewer.runtime import stream
from tests.helpers import Stop, Stopping
from tests.methods.fedmeta_harness import (
    CLASSES,
    FEATURES,
    GROUPS,
    PAIRS,
    SEED,
    WEIGHT,
    Array,
    federation,
    is_close,
    linear,
    softmax_regression,
    support_and_query,
)

# --- methods against a NumPy reference --------------------------------------------------------------------------


def meta_gradients_reference(w: Array, client: int, alpha: Any, support_fraction: float) -> tuple[Array, Array]:
    """∇_θ and ∇_α of a client's query loss after one inner step."""
    support, query = support_and_query(client, support_fraction)
    g, hessian = softmax_regression(w, *support)
    v = softmax_regression(w - alpha * g, *query)[0]
    return v - (hessian @ (alpha * v).ravel()).reshape(w.shape), -g * v


@pytest.mark.parametrize("weighting", ["size", "uniform"])
@pytest.mark.parametrize("algorithm", ["maml", "fomaml", "meta-sgd"])
def test_three_rounds_of_fedmeta_match_numpy(algorithm: Any, weighting: Any) -> None:
    method = FedMeta(
        rounds=3, cohort=8, algorithm=algorithm, weighting=weighting, inner_lr=0.7, meta_lr=0.05, support_fraction=0.4
    )
    state = fewer.run(method, federation(), model=linear(), seed=SEED).state
    phi = np.stack([WEIGHT, np.full_like(WEIGHT, 0.7)])
    first_moment = second_moment = np.zeros_like(phi)
    for step in (1, 2, 3):
        gradients = []
        for client in GROUPS.train:
            theta, alpha = meta_gradients_reference(phi[0], client, phi[1], 0.4)
            if algorithm == "fomaml":
                support, query = support_and_query(client, 0.4)
                theta = softmax_regression(phi[0] - 0.7 * softmax_regression(phi[0], *support)[0], *query)[0]
            gradients.append(np.stack([theta, alpha if algorithm == "meta-sgd" else np.zeros_like(alpha)]))
        shares = [len(PAIRS[client][1]) if weighting == "size" else 1 for client in GROUPS.train]
        gradient = np.average(gradients, axis=0, weights=shares)
        first_moment, second_moment = 0.9 * first_moment + 0.1 * gradient, 0.999 * second_moment + 0.001 * gradient**2
        phi = phi - 0.05 * (first_moment / (1 - 0.9**step)) / (np.sqrt(second_moment / (1 - 0.999**step)) + 1e-8)
    assert state.step == 3 and is_close(state.algorithm["weight"], phi[0], 1e-5)
    assert (ALPHA + "weight" in state.algorithm) == (algorithm == "meta-sgd")
    if algorithm == "meta-sgd":
        assert is_close(state.algorithm[ALPHA + "weight"], phi[1], 1e-5)
    assert is_close(state.first_moment["weight"], first_moment[0]) and np.abs(phi[0] - WEIGHT).max() > 0.05


def test_local_steps_update_theta_and_the_server_updates_alpha() -> None:
    method = FedMeta(
        rounds=1,
        cohort=8,
        algorithm="meta-sgd",
        local_steps=2,
        local_lr=0.5,
        inner_lr=0.7,
        meta_lr=0.05,
        support_fraction=0.4,
    )
    models, alpha_gradients = [], []
    for client in GROUPS.train:
        first_gradient, first_alpha = meta_gradients_reference(WEIGHT, client, 0.7, 0.4)
        second_gradient, second_alpha = meta_gradients_reference(WEIGHT - 0.5 * first_gradient, client, 0.7, 0.4)
        models.append(WEIGHT - 0.5 * first_gradient - 0.5 * second_gradient)
        alpha_gradients.append((first_alpha + second_alpha) / 2)
    state = fewer.run(method, federation(), model=linear(), seed=SEED).state
    sizes = [len(PAIRS[client][1]) for client in GROUPS.train]
    assert is_close(state.algorithm["weight"], np.average(models, axis=0, weights=sizes), 1e-5)
    sign = np.sign(np.average(alpha_gradients, axis=0, weights=sizes))
    assert is_close(state.algorithm[ALPHA + "weight"], 0.7 - 0.05 * sign, 1e-4)  # the first step of Adam
    assert is_close(state.first_moment[ALPHA + "weight"], 0.1 * np.average(alpha_gradients, axis=0, weights=sizes))
    assert method.search_space().keys() == {"local_lr", "inner_lr"} and FedMeta().search_space().keys() == {
        "meta_lr",
        "inner_lr",
    }


def test_inner_steps_sets_the_number_of_inner_steps() -> None:
    method = FedMeta(rounds=1, cohort=8, inner_steps=3, inner_lr=0.7, support_fraction=0.4)
    state = fewer.run(method, federation(), model=linear(), seed=SEED).state
    gradients = []
    for client in GROUPS.train:
        (sx, sy), (qx, qy) = ([torch.from_numpy(array) for array in part] for part in support_and_query(client, 0.4))
        start = w = torch.from_numpy(WEIGHT).requires_grad_()
        for _ in range(3):  # all steps in one graph
            (gradient,) = torch.autograd.grad(F.cross_entropy(sx @ w.T, sy), w, create_graph=True)
            w = w - 0.7 * gradient
        gradients.append(torch.autograd.grad(F.cross_entropy(qx @ w.T, qy), start)[0].numpy())
    sizes = [len(PAIRS[client][1]) for client in GROUPS.train]
    assert is_close(state.first_moment["weight"], 0.1 * np.average(gradients, axis=0, weights=sizes))


def test_batch_size_and_queries_set_the_number_of_samples_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = Samples(torch.arange(8.0)[:, None], torch.zeros(8, dtype=torch.int64))
    method = FedMeta(rounds=1, inner_steps=3, batch_size=5, queries=2)
    inner = method.support_batches(samples, stream("test"))
    assert [len(x) for x, _ in inner] == [5, 5, 5] and not torch.equal(inner[0][0], inner[1][0])
    query_sizes = []

    def spy(net: Any, theta: Any, support: Any, query: Any, *args: Any, **options: Any) -> Any:
        query_sizes.append(len(query[0]))
        return meta_gradient(net, theta, support, query, *args, **options)

    monkeypatch.setattr("fewer.methods.fedmeta.meta_gradient", spy)
    fewer.run(method, federation(), model=linear, seed=SEED)
    assert set(query_sizes) == {2}


@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_running_statistics_are_averaged_like_gradients(weighting: Any) -> None:
    class Normed(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.BatchNorm1d(FEATURES, momentum=1.0), nn.Linear(FEATURES, CLASSES))

    method = FedMeta(rounds=1, cohort=8, support_fraction=0.4, weighting=weighting)
    state = fewer.run(method, federation(), model=Normed(), seed=SEED).state
    # The query set is the last batch of each client.
    means = [support_and_query(client, 0.4)[1][0].mean(axis=0) for client in GROUPS.train]
    shares = [len(PAIRS[client][1]) if weighting == "size" else 1 for client in GROUPS.train]
    assert is_close(state.algorithm["0.running_mean"], np.average(means, axis=0, weights=shares))


# --- reproducibility --------------------------------------------------------------------------------------------


METHODS = [
    FedMeta(rounds=3, algorithm="meta-sgd", inner_steps=2, batch_size=3, queries=4, count_flops=True),
    FedMeta(rounds=3),
    FedMeta(rounds=3, local_steps=3),
    FedAvgMeta(rounds=3, optimizer="adam", lr=0.01),
    PerFedAvg(rounds=3, local_steps=3, batch_size=4),
    Reptile(rounds=3, local_steps=3, batch_size=4),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_pool_and_resume_give_the_same_numbers(method: NewClients, tmp_path: Path) -> None:
    data = fewer.data.load("digits", clients=12, alpha=1.0)
    expected = fewer.run(method, data, seed=2)
    pooled = fewer.run(method, data, seed=2, runtime="pool")

    with pytest.raises(Stop):
        fewer.run(method, data, seed=2, out=tmp_path / "run", callbacks=[Stopping()])
    resumed = fewer.resume(tmp_path / "run")
    for other in (pooled, resumed):
        assert [{**line, "seconds": 0} for line in other.history] == [
            {**line, "seconds": 0} for line in expected.history
        ]
        weights, expected_weights = other.state.shared, expected.state.shared
        assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)


def test_batch_norm_is_learned_and_its_statistics_are_averaged() -> None:
    data = fewer.data.load("digits", clients=12, alpha=1.0)
    state = fewer.run(FedMeta(rounds=2, algorithm="meta-sgd"), data, norm="batch", seed=2).state
    assert int(state.algorithm["encoder.1.num_batches_tracked"]) == 4  # support and queries, two rounds
    assert float(state.algorithm["encoder.1.running_mean"].abs().sum()) > 0
    assert ALPHA + "encoder.1.weight" in state.algorithm and ALPHA + "encoder.1.running_mean" not in state.algorithm


def test_upload_has_the_size_of_the_algorithm() -> None:
    up = {}
    names: tuple[Any, ...] = ("maml", "fomaml", "meta-sgd")
    for algorithm in names:
        method = FedMeta(rounds=1, cohort=5, algorithm=algorithm)
        result = fewer.run(method, "digits", clients=12)
        size = 4 * sum(p.numel() for p in result.task.net().parameters()) * (2 if algorithm == "meta-sgd" else 1)
        up[algorithm] = result.metrics["up"]
        assert 5 * size < result.metrics["up"] < 5 * size * 1.05 + 5000
    assert up["maml"] == up["fomaml"] < up["meta-sgd"]


def test_float16_gradients_halve_the_upload() -> None:
    float32, float16 = (
        fewer.run(FedMeta(rounds=1, codec=codec), "digits", clients=12) for codec in ("float32", "float16")
    )
    assert float16.metrics["up"] < 0.6 * float32.metrics["up"]
