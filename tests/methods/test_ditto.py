"""Ditto and APFL against NumPy references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fewer
from fewer.methods.apfl import APFL
from fewer.methods.ditto import Ditto
from tests.helpers import Array, is_close
from tests.methods.linear_harness import SEED, WEIGHT, client_batches, federation, gradient, linear, run_sgd
from tests.methods.linear_harness import weighted_average as average

LOCAL: dict[str, Any] = {"local_steps": 3, "batch_size": 2, "lr": 0.3}


@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_ditto_pulls_personal_models_to_the_received_global_one(lam: float, tmp_path: Path) -> None:
    method = Ditto(rounds=2, lam=lam, **LOCAL)
    result = fewer.run(method, federation(), model=linear(), seed=SEED, out=tmp_path / "run")
    w, v = WEIGHT, [WEIGHT] * 3
    for round in (1, 2):
        for client in range(3):
            for batch in client_batches(method, client, round):
                v[client] = v[client] - 0.3 * (gradient(v[client], *batch) + lam * (v[client] - w))
        w = average([run_sgd(w, client_batches(method, client, round), 0.3) for client in range(3)])
    assert is_close(result.state.model["weight"], w)
    for client in range(3):
        assert is_close(result.personal_model(client).state_dict()["weight"], v[client])


@pytest.mark.parametrize("alpha_lr", [0.5, 50.0])
def test_apfl_trains_the_mixture_and_its_share(alpha_lr: float, tmp_path: Path) -> None:
    method = APFL(rounds=2, alpha=0.4, alpha_lr=alpha_lr, **LOCAL)
    result = fewer.run(method, federation(), model=linear(), seed=SEED, out=tmp_path / "run")
    w: Array = WEIGHT
    v, alphas = [WEIGHT] * 3, [0.4] * 3
    for round in (1, 2):
        local = []
        for client in range(3):
            own, alpha, y = v[client], alphas[client], w
            for batch in client_batches(method, client, round):
                at_mixture = gradient(alpha * own + (1 - alpha) * y, *batch)
                slope = float(((own - y) * at_mixture).sum())
                y, own = y - 0.3 * gradient(y, *batch), own - 0.3 * alpha * at_mixture
                alpha = float(np.clip(alpha - alpha_lr * slope, 0, 1))
            v[client], alphas[client] = own, alpha
            local.append(y)
        w = average(local)
    assert is_close(result.state.model["weight"], w) and len({round_(alpha) for alpha in alphas}) > 1
    assert (alpha_lr == 50) == bool({0.0, 1.0} & {*alphas})  # a large step ends at a bound
    for client in range(3):
        mixed = alphas[client] * v[client] + (1 - alphas[client]) * w
        assert is_close(result.personal_model(client).state_dict()["weight"], mixed)


def round_(value: float) -> float:
    return round(value, 4)
