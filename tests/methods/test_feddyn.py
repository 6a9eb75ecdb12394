"""FedDyn against a NumPy reference, with partial participation and lost answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import fewer
from fewer.methods.feddyn import FedDyn
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

LOCAL: dict[str, Any] = {"local_steps": 3, "batch_size": 2, "lr": 0.3, "alpha": 0.2}


def reference(method: FedDyn, cohorts: list[list[int]]) -> tuple[Array, Array, dict[int, Array]]:
    theta, h, g = WEIGHT, np.zeros_like(WEIGHT), {client: np.zeros_like(WEIGHT) for client in range(3)}
    for round, cohort in enumerate(cohorts, 1):
        local = {}
        for client in cohort:
            w = theta
            for batch in client_batches(method, client, round):
                w = w - method.lr * (gradient(w, *batch) - g[client] + method.alpha * (w - theta))
            local[client] = w
        g |= {client: g[client] - method.alpha * (w - theta) for client, w in local.items()}
        h = h - method.alpha / 3 * sum(w - theta for w in local.values())
        theta = np.mean(list(local.values()), axis=0) - h / method.alpha
    return theta, h, g


def test_rounds_follow_algorithm_1() -> None:
    method = FedDyn(rounds=3, **LOCAL)
    state = fewer.run(method, federation(), model=linear(), seed=SEED).state
    theta, h, g = reference(method, [[0, 1, 2]] * 3)
    assert is_close(state.model["weight"], theta) and is_close(state.h["weight"], h)
    assert np.allclose(h, np.mean(list(g.values()), axis=0))


def test_with_partial_participation_h_is_the_mean_over_all_clients(tmp_path: Path) -> None:
    method = FedDyn(rounds=4, cohort=2, **LOCAL)
    state, cohorts = run_rounds(method, tmp_path, 4)
    theta, h, g = reference(method, cohorts)
    assert is_close(state.model["weight"], theta) and is_close(state.h["weight"], h)
    assert np.allclose(h, np.mean(list(g.values()), axis=0))


def test_a_client_whose_answer_was_lost_keeps_its_old_gradient() -> None:
    method = FedDyn(rounds=5, **LOCAL)
    result = fewer.run(method, federation(), model=linear(), seed=SEED, slow=0.4)
    cohorts = answered(5, slow=0.4)
    assert sum(map(len, cohorts)) < 15
    theta, h, _ = reference(method, cohorts)
    assert is_close(result.state.model["weight"], theta) and is_close(result.state.h["weight"], h)
