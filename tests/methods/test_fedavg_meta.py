"""FedAvg with meta-evaluation, and Reptile, against a NumPy reference."""

from __future__ import annotations

import numpy as np
import torch

import fewer
from fewer.methods.fedavg_meta import FedAvgMeta
from fewer.methods.reptile import Reptile
from tests.methods.fedmeta_harness import (
    GROUPS,
    PAIRS,
    SEED,
    WEIGHT,
    client_batches,
    federation,
    is_close,
    linear,
    run_sgd,
    softmax_regression,
)


def test_fedavg_meta_and_reptile_match_numpy() -> None:
    sizes = [len(PAIRS[client][1]) for client in GROUPS.train]
    method = FedAvgMeta(rounds=1, cohort=8, local_steps=3, batch_size=2, lr=0.3)
    models = [run_sgd(WEIGHT, client_batches(method, client, 3), 0.3) for client in GROUPS.train]
    model = fewer.run(method, federation(), model=linear(), seed=SEED).state.model["weight"]
    assert is_close(model, np.average(models, axis=0, weights=sizes))
    reptile = Reptile(rounds=1, cohort=8, local_steps=3, batch_size=2, lr=0.3, outer_lr=0.25)
    model = fewer.run(reptile, federation(), model=linear(), seed=SEED).state.model["weight"]
    assert is_close(model, WEIGHT + 0.25 * (np.mean(models, axis=0) - WEIGHT))


def test_fedavg_meta_with_adam_is_a_new_torch_adam_per_round() -> None:
    method = FedAvgMeta(rounds=1, cohort=8, optimizer="adam", lr=0.07, local_steps=3, batch_size=2)
    models = []
    for client in GROUPS.train:
        w = torch.from_numpy(WEIGHT.copy()).requires_grad_()
        optimizer = torch.optim.Adam([w], lr=0.07)
        for batch in client_batches(method, client, 3):
            w.grad = torch.from_numpy(softmax_regression(w.detach().numpy(), *batch)[0])
            optimizer.step()
        models.append(w.detach().numpy())
    model = fewer.run(method, federation(), model=linear(), seed=SEED).state.model["weight"]
    assert is_close(model, np.average(models, axis=0, weights=[len(PAIRS[client][1]) for client in GROUPS.train]), 1e-5)


def test_fedavg_meta_with_adam_differs_from_sgd() -> None:
    sgd, adam = (
        fewer.run(FedAvgMeta(rounds=1, optimizer=kind, lr=0.1), federation(), model=linear(), seed=SEED).state.model
        for kind in ("sgd", "adam")
    )
    assert not torch.equal(sgd["weight"], adam["weight"])
