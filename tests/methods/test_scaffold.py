"""SCAFFOLD against a NumPy reference, with partial participation and lost answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fewer
from fewer.methods.scaffold import Scaffold
from tests.helpers import Array, is_close
from tests.methods.linear_harness import (
    SEED,
    WEIGHT,
    answered,
    client_batches,
    federation,
    gradient,
    linear,
    run_rounds,
)

LOCAL: dict[str, Any] = {"local_steps": 3, "batch_size": 2, "lr": 0.3}


def local_steps(method: Scaffold, x: Array, c: Array, c_i: Array, client: int, round: int) -> tuple[Array, Array]:
    """y, and c_i⁺ by option II."""
    y = x
    for batch in client_batches(method, client, round):
        y = y - method.lr * (gradient(y, *batch) - c_i + c)
    return y, c_i - c + (x - y) / (method.local_steps * method.lr)


def reference(method: Scaffold, cohorts: list[list[int]]) -> tuple[Array, Array, dict[int, Array]]:
    x, c, controls = WEIGHT, np.zeros_like(WEIGHT), {client: np.zeros_like(WEIGHT) for client in range(3)}
    for round, cohort in enumerate(cohorts, 1):
        trained = {client: local_steps(method, x, c, controls[client], client, round) for client in cohort}
        x = x + method.server_lr * np.mean([y - x for y, _ in trained.values()], axis=0)
        c = c + sum(new - controls[client] for client, (_, new) in trained.items()) / 3
        controls |= {client: new for client, (_, new) in trained.items()}
    return x, c, controls


@pytest.mark.parametrize("server_lr", [1.0, 0.6])
def test_rounds_with_all_clients_follow_algorithm_1(server_lr: float) -> None:
    method = Scaffold(rounds=3, server_lr=server_lr, **LOCAL)
    state = fewer.run(method, federation(), model=linear(), seed=SEED).state
    x, c, controls = reference(method, [[0, 1, 2]] * 3)
    assert is_close(state.model["weight"], x) and is_close(state.control["weight"], c)
    assert np.allclose(c, np.mean(list(controls.values()), axis=0))


def test_with_partial_participation_c_moves_by_the_share_of_all_clients(tmp_path: Path) -> None:
    method = Scaffold(rounds=4, cohort=2, **LOCAL)
    state, cohorts = run_rounds(method, tmp_path, 4)
    x, c, controls = reference(method, cohorts)
    assert is_close(state.model["weight"], x) and is_close(state.control["weight"], c)
    assert np.allclose(c, np.mean(list(controls.values()), axis=0))
    assert {tuple(sorted(cohort)) for cohort in cohorts} != {(0, 1)}  # clients come and go


def test_a_client_whose_answer_was_lost_keeps_its_old_control_variate() -> None:
    """Otherwise c is no longer the mean of all c_i, and training drifts."""
    method = Scaffold(rounds=5, **LOCAL)
    result = fewer.run(method, federation(), model=linear(), seed=SEED, slow=0.4)
    cohorts = answered(5, slow=0.4)
    assert sum(line["absent"] for line in result.history) == 15 - sum(map(len, cohorts)) >= 2
    x, c, controls = reference(method, cohorts)
    assert is_close(result.state.model["weight"], x) and is_close(result.state.control["weight"], c)
    assert np.allclose(c, np.mean(list(controls.values()), axis=0))


def test_a_message_has_the_size_of_two_models() -> None:
    net = nn.Linear(3, 2)
    big = fewer.run(Scaffold(rounds=1, **LOCAL), federation(), model=net, seed=SEED).metrics
    small = fewer.run(fewer.FedAvg(rounds=1, **LOCAL), federation(), model=net, seed=SEED).metrics
    for direction in ("up", "down"):
        assert big[direction] - small[direction] >= 3 * 8 * 4  # three clients, eight more floats each


def test_buffers_are_averaged_and_frozen_layers_stay() -> None:
    linear_layer = nn.Linear(3, 2)
    linear_layer.bias.requires_grad_(False)
    net, start = nn.Sequential(nn.BatchNorm1d(3), linear_layer), linear_layer.bias.detach().clone()
    state = fewer.run(Scaffold(rounds=2, **LOCAL), federation(), model=net, seed=SEED).state
    assert "0.running_mean" not in state.control and torch.equal(state.model["1.bias"], start)
    assert not torch.equal(state.model["0.running_mean"], torch.zeros(3))
