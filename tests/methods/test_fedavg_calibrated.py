"""FedAvg with calibrated scores against a NumPy reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fewer.methods.fedavg import FedAvg
from fewer.methods.fedavg_calibrated import FedAvgCalibrated
from tests.helpers import Array, is_close
from tests.methods.linear_harness import PAIRS, WEIGHT, client_batches, residual, trained_weight, weighted_average

LOCAL: dict[str, Any] = {"rounds": 2, "local_steps": 3, "batch_size": 2, "lr": 0.3}


def calibrated_sgd(w: Array, method: FedAvg, client: int, round: int) -> Array:
    counts = np.bincount(PAIRS[client][1], minlength=2)
    shift = np.log((counts + 1) / (counts.sum() + 2))
    for x, y in client_batches(method, client, round):
        w = w - 0.3 * residual(x @ w.T + shift, y).T @ x
    return w


def test_local_losses_see_scores_plus_the_log_of_class_frequencies() -> None:
    method, w = FedAvgCalibrated(**LOCAL), WEIGHT
    for round in (1, 2):
        w = weighted_average([calibrated_sgd(w, method, client, round) for client in range(3)])
    assert is_close(trained_weight(method), w)
    assert not torch.allclose(trained_weight(method), trained_weight(FedAvg(**LOCAL)), atol=1e-3)
