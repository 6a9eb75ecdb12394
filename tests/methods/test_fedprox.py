"""FedProx against a NumPy reference."""

from __future__ import annotations

import pytest
import torch

from fewer.methods.fedavg import FedAvg
from fewer.methods.fedprox import FedProx
from tests.helpers import is_close
from tests.methods.linear_harness import WEIGHT, client_batches, run_sgd, trained_weight, weighted_average


@pytest.mark.parametrize("mu", [0.0, 0.7, 2.0])
def test_fedprox_adds_mu_times_the_difference_to_the_gradient(mu: float) -> None:
    method = FedProx(rounds=1, local_steps=3, batch_size=2, lr=0.3, mu=mu)
    expected = weighted_average([run_sgd(WEIGHT, client_batches(method, client, 1), 0.3, mu) for client in range(3)])
    assert is_close(trained_weight(method), expected)


def test_fedprox_differs_from_fedavg_from_the_second_step_on() -> None:
    def distance(steps: int) -> float:
        fedavg, fedprox = (
            trained_weight(build(rounds=1, local_steps=steps, batch_size=2, lr=0.3))
            for build in (FedAvg, lambda **settings: FedProx(mu=0.7, **settings))
        )
        return float((fedavg - fedprox).abs().max())

    assert distance(1) == 0
    assert distance(2) > 1e-3


def test_fedprox_anchor_is_the_global_model_of_the_round() -> None:
    method = FedProx(rounds=2, local_steps=2, batch_size=2, lr=0.3, mu=1.5)
    w = WEIGHT
    for round in (1, 2):
        w = weighted_average([run_sgd(w, client_batches(method, client, round), 0.3, 1.5) for client in range(3)])
    assert is_close(trained_weight(method), w)


def test_fedprox_without_mu_is_fedavg_bit_for_bit() -> None:
    settings = {"rounds": 2, "local_steps": 3, "batch_size": 2, "lr": 0.3}
    assert torch.equal(trained_weight(FedProx(mu=0, **settings)), trained_weight(FedAvg(**settings)))
