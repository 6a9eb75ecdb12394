"""MOON: its loss by formula, and what is constant in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fewer
from fewer.errors import SettingError
from fewer.methods.fedavg import FedAvg
from fewer.methods.moon import MOON
from fewer.models.split import EncoderHead
from fewer.runtime import stream
from tests.methods.linear_harness import PAIRS, SEED, federation

LOCAL: dict[str, Any] = {"local_steps": 2, "batch_size": 2, "lr": 0.3}


def make_net() -> EncoderHead:
    torch.manual_seed(1)
    return EncoderHead(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), 4, 2)


def test_the_second_round_minimizes_the_contrastive_loss() -> None:
    """With two clients, so that the global model differs from a client's last one."""
    method = MOON(rounds=2, mu=2.0, temperature=0.4, **LOCAL)
    trained = fewer.run(method, federation(PAIRS[:2]), model=make_net(), seed=SEED).state.model
    start = {name: tensor.clone() for name, tensor in make_net().state_dict().items()}
    previous: dict[int, dict[str, Tensor]] = {}
    sizes = [len(y) for _, y in PAIRS[:2]]
    for round in (1, 2):
        for client, pair in enumerate(PAIRS[:2]):
            last, net = previous.get(client), make_net()
            net.load_state_dict(start)
            x_all, y_all = (torch.as_tensor(part) for part in pair)
            rows = torch.randint(len(y_all), (2, 2), generator=stream(SEED, round, client, "batches"))
            for row in rows:
                x, y = x_all[row], y_all[row]
                loss = F.cross_entropy(net(x), y)
                if last is not None:
                    z, z_glob, z_prev = net.encoder(x), encode(start, x), encode(last, x)
                    positive = torch.exp(torch.cosine_similarity(z, z_glob) / 0.4)
                    negative = torch.exp(torch.cosine_similarity(z, z_prev) / 0.4)
                    loss = loss - 2.0 * torch.log(positive / (positive + negative)).mean()
                gradients = torch.autograd.grad(loss, list(net.parameters()))
                with torch.no_grad():
                    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                        parameter.sub_(0.3 * gradient)
            previous[client] = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        start = {
            name: sum((size / sum(sizes) * previous[k][name] for k, size in enumerate(sizes)), torch.zeros(()))
            for name in start
        }
    for name, tensor in start.items():
        assert torch.allclose(trained[name], tensor, atol=1e-6), name


def encode(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    net = make_net()
    net.load_state_dict(weights)
    with torch.no_grad():
        return torch.as_tensor(net.encoder(x))


def test_without_mu_it_is_fedavg_and_with_mu_it_is_not() -> None:
    def weights(method: FedAvg) -> Tensor:
        weight: Tensor = fewer.run(method, federation(), model=make_net(), seed=SEED).state.model["head.weight"]
        return weight

    fedavg = weights(FedAvg(rounds=2, **LOCAL))
    assert torch.equal(weights(MOON(rounds=2, mu=0, **LOCAL)), fedavg)
    assert not torch.allclose(weights(MOON(rounds=2, mu=5.0, **LOCAL)), fedavg, atol=1e-4)


def test_a_net_without_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="has no encoder and no head"):
        fewer.run(MOON(), federation(), model=nn.Linear(3, 2))
