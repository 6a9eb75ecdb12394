"""Per-FedAvg against a NumPy reference."""

from __future__ import annotations

import numpy as np
import pytest

import fewer
from fewer.methods.per_fedavg import PerFedAvg
from tests.methods.fedmeta_harness import (
    GROUPS,
    SEED,
    WEIGHT,
    client_batches,
    federation,
    is_close,
    linear,
    softmax_regression,
)


@pytest.mark.parametrize("first_order", [False, True])
def test_per_fedavg_matches_numpy(first_order: bool) -> None:
    method = PerFedAvg(rounds=1, cohort=8, local_steps=2, batch_size=3, lr=0.4, adapt_lr=0.6, first_order=first_order)
    models = []
    for client in GROUPS.train:
        w = WEIGHT
        drawn = client_batches(method, client, 4)
        for inner, outer in (drawn[:2], drawn[2:]):
            g, hessian = softmax_regression(w, *inner)
            v = softmax_regression(w - 0.6 * g, *outer)[0]
            second_order_term = 0.6 * (hessian @ v.ravel()).reshape(w.shape) if not first_order else 0
            w = w - 0.4 * (v - second_order_term)
        models.append(w)
    model = fewer.run(method, federation(), model=linear(), seed=SEED).state.model["weight"]
    assert is_close(model, np.mean(models, axis=0))
