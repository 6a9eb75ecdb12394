"""Weights: drawn once, copied, and refused if they do not fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fewer.models import SmallCNN, Task, Weights, get_weights, load_weights, split_buffers
from fewer.wire import Refused


def test_initial_weights_are_drawn_once_and_copied() -> None:
    builds: list[int] = []

    def build_layer() -> nn.Module:
        builds.append(1)
        return nn.Linear(2, 2)

    task = Task((2,), 2, build_layer)
    first = task.initial_weights(1)
    again = task.initial_weights(1)
    assert len(builds) == 1 and all(torch.equal(first[name], again[name]) for name in first)
    first["weight"].zero_()
    assert float(task.initial_weights(1)["weight"].abs().sum()) > 0
    assert not torch.equal(task.initial_weights(2)["weight"], again["weight"]) and len(builds) == 2


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({}, "weights do not fit the model: bias, weight$"),
        ({"weight": torch.zeros(2, 3)}, "weights do not fit the model: bias$"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(2), "more": torch.zeros(1)}, "the model: more$"),
        ({"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, r"weight has shape \(3, 2\), expected \(2, 3\)$"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(1)}, r"bias has shape \(1,\), expected \(2,\)$"),
        ({str(number): torch.zeros(1) for number in range(9)}, "the model: 0, 1, 2 …$"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_not_loaded(weights: Weights, reason: str) -> None:
    net = nn.Linear(3, 2)
    before = get_weights(net)
    with pytest.raises(Refused, match=reason):
        load_weights(net, weights)
    assert all(torch.equal(tensor, before[name]) for name, tensor in get_weights(net).items())


def test_weights_are_copies() -> None:
    net = nn.Linear(3, 2)
    weights = get_weights(net)
    load_weights(net, {name: torch.full_like(tensor, 7) for name, tensor in weights.items()})
    assert not any((tensor == 7).any() for tensor in weights.values())
    copies = get_weights(net)
    load_weights(nn.Linear(3, 2), copies)
    assert all((tensor == 7).all() for tensor in net.state_dict().values())
    with torch.no_grad():
        net.weight.zero_()
    assert (copies["weight"] == 7).all()


def test_initial_weights_depend_on_the_seed_only() -> None:
    task = Task((1, 28, 28), 10, lambda: SmallCNN((1, 28, 28), 10))
    torch.manual_seed(1)
    first = task.initial_weights(3)
    torch.manual_seed(2)
    same_seed, other_seed = task.initial_weights(3), task.initial_weights(4)
    assert all(torch.equal(first[name], same_seed[name]) for name in first)
    assert not torch.equal(first["head.weight"], other_seed["head.weight"])


def test_pretrained_weights_are_the_initial_weights() -> None:
    pretrained = get_weights(SmallCNN((1, 28, 28), 10))
    task = Task((1, 28, 28), 10, lambda: SmallCNN((1, 28, 28), 10), pretrained=pretrained)
    for seed in (0, 1):
        initial = task.initial_weights(seed)
        assert all(torch.equal(initial[name], tensor) for name, tensor in pretrained.items())


def test_parameters_and_buffers_are_separated() -> None:
    linear = nn.Linear(3, 3)
    net = nn.Sequential(linear, nn.BatchNorm1d(3), linear)  # shared parameters have two names
    weights = get_weights(net)
    parameters, buffers = split_buffers(net, weights)
    assert parameters.keys() == {f"{layer}.{name}" for layer in "012" for name in ("weight", "bias")}
    assert buffers.keys() == {f"1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert {**parameters, **buffers} == weights
