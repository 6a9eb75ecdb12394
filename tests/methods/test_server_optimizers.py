"""FedAvgM, FedAdam, FedYogi and FedAdagrad against a NumPy reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fewer
from fewer.methods.fedavg import FedAvg
from fewer.methods.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedOpt, FedYogi
from tests.helpers import Array, is_close
from tests.methods.linear_harness import FEATURES, SEED, WEIGHT, client_batches, federation, run_sgd, trained_weight
from tests.methods.linear_harness import weighted_average as average

LOCAL: dict[str, Any] = {"rounds": 3, "local_steps": 2, "batch_size": 2, "lr": 0.3}


def reference(method: FedOpt) -> Array:
    x, m, tau = WEIGHT, np.zeros_like(WEIGHT), method.tau
    v = np.full_like(WEIGHT, tau**2)
    for round in range(1, method.rounds + 1):
        delta = average([run_sgd(x, client_batches(method, client, round), method.lr) for client in range(3)]) - x
        if isinstance(method, FedAvgM):
            m = method.beta1 * m + delta
            x = x + method.server_lr * m
            continue
        m = method.beta1 * m + (1 - method.beta1) * delta
        if isinstance(method, FedAdagrad):
            v = v + delta**2
        elif isinstance(method, FedYogi):
            v = v - (1 - method.beta2) * delta**2 * np.sign(v - delta**2)
        else:
            v = method.beta2 * v + (1 - method.beta2) * delta**2
        x = x + method.server_lr * m / (np.sqrt(v) + tau)
    return x


@pytest.mark.parametrize(
    "method",
    [
        FedAvgM(server_lr=0.7, beta1=0.8, **LOCAL),
        FedAdam(server_lr=0.05, beta1=0.8, beta2=0.9, tau=0.01, **LOCAL),
        FedYogi(server_lr=0.05, beta1=0.8, beta2=0.9, tau=0.3, **LOCAL),
        FedAdagrad(server_lr=0.05, beta1=0.5, tau=0.01, **LOCAL),
    ],
    ids=lambda method: method.name,
)
def test_three_rounds_follow_algorithm_2(method: FedOpt) -> None:
    assert is_close(trained_weight(method), reference(method))


def test_defaults_are_those_of_the_paper() -> None:
    assert (FedAdam().beta1, FedAdam().beta2, FedAdam().tau) == (0.9, 0.99, 1e-3)
    assert FedYogi().beta1 == FedAvgM().beta1 == 0.9 and FedAvgM().server_lr == 1
    assert FedAdagrad().beta1 == 0


def test_fedavgm_without_momentum_is_fedavg() -> None:
    plain = trained_weight(FedAvg(**LOCAL))
    assert torch.allclose(trained_weight(FedAvgM(beta1=0, server_lr=1, **LOCAL)), plain, atol=1e-6)


def test_buffers_are_averaged_and_have_no_momentum() -> None:
    """Momentum on the running statistics of batch norm would make a variance negative."""
    net = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 2))
    method = FedAvgM(beta1=0.9, **{**LOCAL, "rounds": 4})
    state = fewer.run(method, federation(), model=net, seed=SEED).state
    assert state.first_moment.keys() == dict(net.named_parameters()).keys()
    once = FedAvgM(beta1=0.9, **{**LOCAL, "rounds": 1})
    fedavg = FedAvg(**{**LOCAL, "rounds": 1})
    first, plain = (fewer.run(m, federation(), model=net, seed=SEED).state.model for m in (once, fedavg))
    assert all(torch.equal(first[name], plain[name]) for name in first if "running" in name or "num" in name)
    assert float(state.model["0.running_var"].min()) > 0
