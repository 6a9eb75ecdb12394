"""FedELMY and D-PSGD on a ring, by formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import fewer
from fewer.methods.dpsgd_ring import DPSGDRing
from fewer.methods.fedelmy import FedELMY
from fewer.runtime import stream
from fewer.runtime.streams import seed_of
from tests.helpers import Array, is_close
from tests.methods.linear_harness import PAIRS, SEED, WEIGHT, client_batches, federation, gradient, linear, run_sgd

LOCAL: dict[str, Any] = {"local_steps": 3, "batch_size": 2, "lr": 0.3}


def test_each_client_trains_the_mean_of_its_neighborhood(tmp_path: Path) -> None:
    pairs = [*PAIRS, *PAIRS[:2]]  # in a ring of five, some clients are no neighbors
    method = DPSGDRing(rounds=3, **LOCAL)
    result = fewer.run(method, federation(pairs), model=linear(), seed=SEED, out=tmp_path / "run")
    models = [WEIGHT] * 5
    for round in (1, 2, 3):
        means = [(models[i - 1] + models[i] + models[(i + 1) % 5]) / 3 for i in range(5)]
        models = [run_sgd(mean, client_batches(method, k, round, pairs), 0.3) for k, mean in enumerate(means)]
    for client, model in enumerate(models):
        assert is_close(result.personal_model(client).state_dict()["weight"], model)
    assert is_close(result.state.models["weight"], np.stack(models))


def test_bytes_of_the_ring_are_one_model_up_and_two_down() -> None:
    metrics = fewer.run(DPSGDRing(rounds=2, **LOCAL), federation(), model=linear(), seed=SEED).metrics
    assert metrics["up"] >= 2 * 3 * WEIGHT.size * 4 and metrics["down"] >= 2 * 3 * 2 * WEIGHT.size * 4
    assert metrics["down"] < 2 * 3 * (2 * WEIGHT.size * 4 + 400)


def member_batches(method: FedELMY, client: int, number: int) -> list[tuple[Array, Any]]:
    x, y = PAIRS[client]
    rows = torch.randint(len(y), (3, 2), generator=stream(SEED, 1, client, f"member {number}")).numpy()
    return [(x[row].astype(np.float64), y[row]) for row in rows]


def test_fedelmy_trains_a_diverse_pool_and_passes_its_mean_on() -> None:
    method = FedELMY(pool_size=2, diversity=0.5, anchor=0.3, **LOCAL)
    result = fewer.run(method, federation(), model=linear(), seed=SEED)
    rng = np.random.default_rng(seed_of(SEED, 1, "sample"))
    order = [int(i) for i in rng.choice(3, 3, replace=False)]
    model = WEIGHT
    for position, client in enumerate(order):
        if position == 0:
            model = run_sgd(model, client_batches(method, client, 1), 0.3)  # the warm-up
        pool = [model]
        scale = np.linalg.norm(pool[0])
        for number in range(2):
            w = np.mean(pool, axis=0)
            for x, y in member_batches(method, client, number):
                towards = [(w - m) / (np.sqrt(((w - m) ** 2).sum() + 1e-12) * scale) for m in pool]
                w = w - 0.3 * (gradient(w, x, y) - 0.5 * np.mean(towards, axis=0) + 0.3 * towards[0])
            pool.append(w)
        model = np.mean(pool, axis=0)
    assert is_close(result.state.model["weight"], model)
