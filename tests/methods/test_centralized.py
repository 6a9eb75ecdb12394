"""Centralized training against a NumPy reference."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

import fewer
from fewer import Centralized
from fewer.data import ArrayData, Data
from fewer.errors import SettingError
from fewer.runs.machines import FlowerServer
from fewer.runtime import stream
from fewer.runtime.flower.credentials import Credentials
from tests.helpers import experiment, is_close
from tests.methods.linear_harness import PAIRS, SEED, SIZES, WEIGHT, federation, linear, run_sgd, trained_weight

LR = 0.4


def test_it_trains_on_the_samples_of_all_clients() -> None:
    x, y = np.concatenate([x for x, _ in PAIRS]).astype(np.float64), np.concatenate([y for _, y in PAIRS])
    w = WEIGHT
    for round in (1, 2):
        indices = torch.randint(sum(SIZES), (3, 6), generator=stream(SEED, round, 0, "batches")).numpy()
        w = run_sgd(w, [(x[row], y[row]) for row in indices], LR)
    assert is_close(trained_weight(Centralized(rounds=2, local_steps=3, batch_size=6, lr=LR)), w)


def test_the_cohort_has_no_effect() -> None:
    options = {"rounds": 1, "local_steps": 2, "batch_size": 3}
    weights = [trained_weight(Centralized(**options, cohort=cohort)) for cohort in (None, 1, 2)]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


def test_clients_keep_their_test_samples() -> None:
    data = Centralized().prepare_data(federation())
    assert [data.size(client) for client in range(3)] == [10, 0, 0]
    assert [len(data.client(client).test) for client in range(3)] == [
        len(federation().client(client).test) for client in range(3)
    ]


def test_it_tunes_on_held_out_samples_of_all_clients() -> None:
    prepared = cast(ArrayData, Centralized().prepare_data(federation())).hold_out(0.2, seed=0)
    assert len(prepared.test) == 2 and len(prepared.train.rows) == 8
    result = fewer.run(Centralized(rounds=1, local_steps=2), prepared, model=linear())
    assert result.history[-1]["accuracy"] in (0.0, 0.5, 1.0)


def test_it_does_not_run_between_machines(tmp_path: Path) -> None:
    server = FlowerServer(Credentials.create(tmp_path / "keys", 2))
    with pytest.raises(SettingError, match=r"^centralized runs in simulation only: it needs the samples of all"):
        server.check_experiment(experiment(2, "centralized"))


def test_data_that_loads_each_client_is_refused() -> None:
    with pytest.raises(SettingError, match="centralized needs data in arrays, and 'own' loads each client on demand"):
        Centralized().prepare_data(cast(Data, SimpleNamespace(name="own")))
