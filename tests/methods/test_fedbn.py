"""FedBN against a NumPy reference; norms stay on the clients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fewer
from fewer.choices import Norm
from fewer.data import from_clients
from fewer.errors import SettingError
from fewer.methods.fedbn import FedBN
from fewer.models import get_weights, load_weights, norm_weight_names
from fewer.wire import decode
from tests.helpers import Array, data_bytes, is_close
from tests.methods.linear_harness import (
    CLASSES,
    FEATURES,
    WEIGHT,
    Batch,
    client_batches,
    federation,
    linear,
    make_harness,
    residual,
    weighted_average,
)


class Normed(nn.Module):
    """Batch norm of the inputs, then a linear layer: gradients do not flow through the batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norm(x))
        return scores


NORMS = {f"norm.{part}" for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}


def normed() -> Normed:
    net = Normed()
    weights = get_weights(net) | {
        "head.weight": torch.from_numpy(WEIGHT),
        "norm.weight": torch.tensor([1.0, 0.5, 2.0]),
        "norm.bias": torch.tensor([0.1, -0.2, 0.0]),
    }
    load_weights(net, weights)
    return net


def run_sgd_with_norm(
    norms: dict[str, Array], w: Array, batches: list[Batch], lr: float
) -> tuple[dict[str, Array], Array]:
    """h = γ x̂ + β and scores = W h. x̂ uses the batch's mean and variance; the running statistics have momentum 0.1."""
    gamma, beta, mean, var = (norms[part] for part in ("weight", "bias", "running_mean", "running_var"))
    for x, y in batches:
        batch_mean, batch_var = x.mean(axis=0), x.var(axis=0)
        normalized = (x - batch_mean) / np.sqrt(batch_var + 1e-5)
        d_scores = residual((gamma * normalized + beta) @ w.T, y)
        d_hidden = d_scores @ w
        w, gamma, beta = (
            w - lr * d_scores.T @ (gamma * normalized + beta),
            gamma - lr * (d_hidden * normalized).sum(axis=0),
            beta - lr * d_hidden.sum(axis=0),
        )
        mean, var = 0.9 * mean + 0.1 * batch_mean, 0.9 * var + 0.1 * batch_var * len(x) / (len(x) - 1)
    return {"weight": gamma, "bias": beta, "running_mean": mean, "running_var": var}, w


def test_fedbn_matches_numpy(tmp_path: Path) -> None:
    method = FedBN(local_steps=2, batch_size=4, lr=0.2)
    harness = make_harness(method, normed(), tmp_path)
    initial = {
        name.removeprefix("norm."): tensor.double().numpy()
        for name, tensor in get_weights(normed()).items()
        if name in NORMS
    }
    norms, w = [initial] * 3, WEIGHT
    for round in (1, 2):
        results = [
            run_sgd_with_norm(norms[client], w, client_batches(method, client, round), 0.2) for client in range(3)
        ]
        norms, w = [result[0] for result in results], weighted_average([result[1] for result in results])
        state = harness.rounds(1)
        assert list(state.model) == ["head.weight"] and is_close(state.model["head.weight"], w, 1e-5)
    for client in range(3):
        personal = harness.personal_model(client)
        assert is_close(personal["head.weight"], w, 1e-5)
        assert all(is_close(personal[f"norm.{part}"], value, 1e-5) for part, value in norms[client].items())
        assert int(personal["norm.num_batches_tracked"]) == 4


def test_fedbn_clients_differ_in_their_norms_only(tmp_path: Path) -> None:
    harness = make_harness(FedBN(local_steps=2, batch_size=4), normed(), tmp_path)
    harness.rounds(2)
    first, second = harness.personal_model(0), harness.personal_model(1)
    assert first.keys() == second.keys() == {"head.weight", *NORMS}
    assert torch.equal(first["head.weight"], second["head.weight"])
    for name in NORMS - {"norm.num_batches_tracked"}:
        assert not torch.equal(first[name], second[name])
    stored = harness.client(0).store.get("own")
    assert stored is not None and stored.keys() == NORMS
    assert all(torch.equal(stored[name], first[name]) for name in NORMS)


def test_fedbn_sends_no_norms(tmp_path: Path) -> None:
    harness = make_harness(FedBN(local_steps=2, batch_size=4), normed(), tmp_path)
    harness.rounds(2)
    traffic = harness.clients.down + harness.clients.up
    assert len(traffic) == 12
    for _, blob in traffic:
        assert list(decode(blob)[1]["model"]) == ["head.weight"]
        assert b"norm" not in blob and b"running" not in blob
        assert data_bytes(blob) == 4 * FEATURES * CLASSES
    assert sum(harness.clients.ledger.total.values()) == sum(len(blob) for _, blob in traffic)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_fedbn_bytes_of_the_small_cnn(norm: Norm, tmp_path: Path) -> None:
    """Each message has 4 bytes for each of the 26,390 weights outside the norms, and a header of less than 1 %."""
    x = np.random.default_rng(0).integers(256, size=(12, 28, 28), dtype=np.uint8)
    data = from_clients([(x[:6], np.arange(6)), (x[6:], np.arange(4, 10))], test=(x, np.arange(12) % 10))
    result = fewer.run(FedBN(rounds=1, local_steps=1, batch_size=4), data, norm=norm, seed=0, out=tmp_path / "run")
    payload = 4 * 26_390
    for direction in ("up", "down"):
        assert 2 * payload < result.history[-1][direction] <= 2 * payload * 1.01
    assert sum(tensor.numel() for tensor in result.state.model.values()) == 26_390
    nets = [get_weights(result.personal_model(client)) for client in range(2)]
    norm_names = norm_weight_names(result.task.net())
    assert len(norm_names) == (10 if norm == "batch" else 4)
    for name in nets[0]:
        if name not in norm_names:
            assert torch.equal(nets[0][name], nets[1][name])
    for name in norm_names - {"encoder.1.num_batches_tracked", "encoder.4.num_batches_tracked"}:
        assert not torch.equal(nets[0][name], nets[1][name])


def test_fedbn_client_outside_every_cohort_has_the_initial_norms(tmp_path: Path) -> None:
    harness = make_harness(FedBN(local_steps=2, batch_size=4, cohort=1), normed(), tmp_path)
    harness.rounds(1)
    asked = harness.clients.down[0][0].client
    for client in range(3):
        personal, initial = harness.personal_model(client), get_weights(normed())
        assert all(torch.equal(personal[name], initial[name]) for name in NORMS) == (client != asked)
        assert torch.equal(personal["head.weight"], harness.state.model["head.weight"])


def test_fedbn_needs_norm_layers() -> None:
    with pytest.raises(SettingError, match="fedbn needs a model with normalization layers"):
        fewer.run(FedBN(rounds=1), federation(), model=linear(), seed=0)
