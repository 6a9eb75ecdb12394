"""FedNova against a NumPy reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fewer
from fewer.errors import SettingError
from fewer.methods.fednova import FedNova
from fewer.runtime import stream
from tests.helpers import Array, is_close
from tests.methods.linear_harness import PAIRS, SEED, SIZES, WEIGHT, gradient, trained_weight


def local_model(method: FedNova, x: Array, client: int, round: int) -> tuple[Array, int]:
    """The client's model after its epochs, and its steps: batches in a random order, without replacement."""
    inputs, labels = PAIRS[client]
    generator, w, v, steps = stream(SEED, round, client, "batches"), x, np.zeros_like(x), 0
    for _ in range(method.local_epochs):
        parts = list(torch.split(torch.randperm(len(labels), generator=generator), method.batch_size))
        if len(parts) > 1 and len(parts[-1]) == 1:
            parts[-2:] = [torch.cat(parts[-2:])]
        for part in parts:
            v = method.momentum * v + gradient(w, inputs[part.numpy()].astype(np.float64), labels[part.numpy()])
            w, steps = w - method.lr * v, steps + 1
    return w, steps


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_each_change_is_divided_by_its_steps(momentum: float) -> None:
    method = FedNova(rounds=2, local_epochs=2, batch_size=2, lr=0.2, momentum=momentum)
    x, shares = WEIGHT, np.array(SIZES) / sum(SIZES)
    for round in (1, 2):
        models, steps = zip(*(local_model(method, x, client, round) for client in range(3)), strict=True)
        assert len(set(steps)) > 1  # otherwise it is FedAvg
        norms = [sum(sum(momentum**age for age in range(number)) for number in range(1, tau + 1)) for tau in steps]
        effective = sum(share * norm for share, norm in zip(shares, norms, strict=True))
        terms = zip(shares, models, norms, strict=True)
        x = x - effective * sum(share * (x - model) / norm for share, model, norm in terms)
    assert is_close(trained_weight(method), x)


def test_other_optimizers_are_refused() -> None:
    with pytest.raises(SettingError, match="fednova needs optimizer = sgd"):
        FedNova(optimizer="adam")
    with pytest.raises(SettingError, match="lr_schedule = constant"):
        fewer.run(FedNova(lr_schedule="cosine"))
