"""FedAvg with fine-tuning: the personal models are those of NumPy, and no message carries them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import fewer
from fewer import FedAvg, FedAvgFT
from fewer.models import get_weights
from fewer.runtime import stream
from tests.helpers import is_close
from tests.methods.linear_harness import (
    FEATURES,
    PAIRS,
    SEED,
    WEIGHT,
    client_batches,
    federation,
    linear,
    run_sgd,
    weighted_average,
)

OPTIONS = {"rounds": 2, "local_steps": 2, "batch_size": 3, "lr": 0.3}


def test_a_client_fine_tunes_the_global_model(tmp_path: Path) -> None:
    method = FedAvgFT(ft_steps=4, **OPTIONS)
    result = fewer.run(method, federation(), model=linear(), seed=SEED, out=tmp_path / "run")
    w = WEIGHT
    for round in (1, 2):
        w = weighted_average([run_sgd(w, client_batches(method, client, round), 0.3) for client in range(3)])
    assert is_close(result.model.state_dict()["weight"], w)
    for client, (x, y) in enumerate(PAIRS):
        rows = torch.randint(len(y), (4, 3), generator=stream(SEED, 2, client, "fine-tune")).numpy()
        expected = run_sgd(w, [(x[row].astype(np.float64), y[row]) for row in rows], 0.3)
        assert is_close(get_weights(result.personal_model(client))["weight"], expected)
        assert np.abs(expected - w).max() > 1e-3


def test_fine_tuning_sends_nothing_more_than_fedavg() -> None:
    runs = [
        fewer.run(method, federation(), model=linear(), seed=SEED)
        for method in (FedAvgFT(**OPTIONS), FedAvg(**OPTIONS))
    ]
    assert [runs[0].metrics[way] for way in ("up", "down")] == [runs[1].metrics[way] for way in ("up", "down")]
    assert torch.equal(runs[0].state.model["weight"], runs[1].state.model["weight"])


def test_a_client_without_training_samples_uses_the_global_model(tmp_path: Path) -> None:
    empty = np.zeros((0, FEATURES), np.float32), np.zeros(0, np.int64)
    method = FedAvgFT(**OPTIONS)
    result = fewer.run(method, federation([PAIRS[0], empty]), model=linear(), seed=SEED, out=tmp_path / "run")
    models = [get_weights(result.personal_model(client))["weight"] for client in (0, 1)]
    assert torch.equal(models[1], result.state.model["weight"]) and not torch.equal(models[0], models[1])
