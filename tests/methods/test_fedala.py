"""FedALA: the mixture, its weights and its layers, by formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fewer
from fewer.methods.fedala import FedALA, has_settled, highest_parameters
from fewer.models.split import EncoderHead
from fewer.runtime import stream
from tests.methods.linear_harness import PAIRS, SEED, SIZES, federation

LOCAL: dict[str, Any] = {"local_steps": 2, "batch_size": 2, "lr": 0.3}


def make_net() -> EncoderHead:
    torch.manual_seed(1)
    return EncoderHead(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), 4, 2)


def train(weights: dict[str, torch.Tensor], client: int, round: int) -> dict[str, torch.Tensor]:
    net = make_net()
    net.load_state_dict(weights)
    x, y = (torch.as_tensor(part) for part in PAIRS[client])
    for row in torch.randint(len(y), (2, 2), generator=stream(SEED, round, client, "batches")):
        gradients = torch.autograd.grad(F.cross_entropy(net(x[row]), y[row]), list(net.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter.sub_(0.3 * gradient)
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def test_the_published_settings_are_the_defaults() -> None:
    assert (FedALA().ala_lr, FedALA().ala_samples, FedALA().ala_layers) == (1.0, 0.8, 1)
    net = EncoderHead(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), 4, 2)
    assert highest_parameters(net, 1) == ["head.weight", "head.bias"]
    assert highest_parameters(net, 2)[:2] == ["encoder.1.weight", "encoder.1.bias"]


def average(models: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    return {name: sum(n * w[name] for n, w in zip(SIZES, models, strict=True)) / sum(SIZES) for name in models[0]}


def test_later_rounds_mix_the_head_by_learned_weights(tmp_path: Path) -> None:
    method = FedALA(rounds=3, max_epochs=3, **LOCAL)
    result = fewer.run(method, federation(), model=make_net(), seed=SEED, out=tmp_path / "run")
    start, names = dict(make_net().state_dict()), ["head.weight", "head.bias"]
    own = [train(start, client, 1) for client in range(3)]
    mixing = [{name: torch.ones_like(start[name]) for name in names} for _ in range(3)]  # kept from round to round
    for number, passes in ((2, 3), (3, 1)):
        shared, last, own = average(own), own, []
        for client in range(3):
            generator = stream(SEED, number, client, "ala")
            rows = torch.randperm(SIZES[client], generator=generator)[: max(1, round(0.8 * SIZES[client]))]
            subset = federation().client(client).train.select(rows)
            change = {name: shared[name] - last[client][name] for name in names}
            mixed = {**shared, **{name: last[client][name] + change[name] * mixing[client][name] for name in names}}
            for _ in range(passes):
                for x, y in subset.chunks(2):  # the same batches in each pass
                    net = make_net()
                    net.load_state_dict(mixed)
                    gradients = torch.autograd.grad(F.cross_entropy(net(x), y), [net.head.weight, net.head.bias])
                    for name, gradient in zip(names, gradients, strict=True):
                        mixing[client][name] = (mixing[client][name] - gradient * change[name]).clamp(0, 1)
                        mixed[name] = last[client][name] + change[name] * mixing[client][name]
            own.append(train(mixed, client, number))
    assert any(bool((weight < 1).any()) for weights in mixing for weight in weights.values())
    for client in range(3):
        for name, tensor in result.personal_model(client).state_dict().items():
            assert torch.allclose(tensor, own[client][name], atol=1e-5), (client, name)


def test_mixing_weights_have_settled_if_the_last_ten_losses_deviate_by_less_than_a_tenth() -> None:
    assert not has_settled([1.0] * 10) and has_settled([1.0] * 11)
    assert has_settled([9.0, *[0.0, 0.19] * 5]) and not has_settled([9.0, *[0.0, 0.21] * 5])  # deviations 0.095, 0.105


def test_mixing_weights_settle_in_the_second_round_and_then_take_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []

    def record(losses: list[float]) -> bool:
        passes.append(len(losses))
        return has_settled(losses)

    monkeypatch.setattr("fewer.methods.fedala.has_settled", record)
    fewer.run(FedALA(rounds=3, **LOCAL), federation(), model=make_net(), seed=SEED)
    assert passes == [*range(1, 12)] * 3 + [1] * 3
