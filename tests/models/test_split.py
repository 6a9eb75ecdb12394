"""The head, the encoder and the norms of a net."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fewer
from fewer.data import Data
from fewer.errors import SettingError
from fewer.methods.fedavg import FedAvg
from fewer.models import (
    EncoderHead,
    SmallCNN,
    Task,
    get_weights,
    net_factory,
    norm_weight_names,
    split_net,
)
from fewer.models.split import find_head
from fewer.registry import MODELS


def test_a_missing_encoder_and_head_are_reported() -> None:
    with pytest.raises(SettingError, match="Linear has no encoder and no head"):
        split_net(nn.Linear(2, 2))


def test_the_head_of_a_plain_net_is_its_last_linear_layer() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 5)).train()
    task = Task((3, 2, 2), 5, lambda: net, torch.device("cpu"))
    head, width = find_head(task, net)
    assert head is net[3] and width == 7 and net.training and not net[3]._forward_hooks
    for other in (nn.Sequential(*net, nn.Softmax(1)), nn.Sequential(nn.Flatten(), nn.ReLU())):
        with pytest.raises(SettingError, match="has no encoder and no head"):
            find_head(task, other)
    model = EncoderHead(nn.Sequential(nn.Flatten(), nn.Linear(12, 6)), 6, 5)
    assert find_head(task, model) == (model.head, 6)


def test_a_frozen_encoder_stays_frozen(digits: Data) -> None:
    net = net_factory(MODELS.find("cnn"), {"shape": (1, 8, 8), "classes": 10}, {})()
    net.encoder.requires_grad_(False)
    before = get_weights(net)
    after = fewer.run(FedAvg(rounds=2, cohort=3), digits, model=net).state.model
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("encoder"))
    assert not torch.equal(before["head.weight"], after["head.weight"])


@pytest.mark.parametrize(
    ("layer", "parts"),
    [
        (lambda: nn.BatchNorm2d(4), {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}),
        (lambda: nn.GroupNorm(2, 4), {"weight", "bias"}),
        (lambda: nn.LayerNorm(4), {"weight", "bias"}),
        (lambda: nn.RMSNorm(4), {"weight"}),
        (lambda: nn.InstanceNorm2d(4, affine=True), {"weight", "bias"}),
        (lambda: nn.BatchNorm1d(4, affine=False, track_running_stats=False), set()),
        (lambda: nn.Linear(4, 4), set()),
        (lambda: nn.Identity(), set()),
    ],
)
def test_norm_weights_are_found_by_name(layer: Callable[[], nn.Module], parts: set[str]) -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Sequential(layer(), nn.Linear(4, 2)))
    assert norm_weight_names(net) == {f"1.0.{part}" for part in parts}
    assert norm_weight_names(layer()) == parts
    assert norm_weight_names(net) <= net.state_dict().keys()


def test_small_cnn_has_the_norms_it_was_asked_for() -> None:
    assert norm_weight_names(SmallCNN((1, 28, 28), 10, "none")) == set()
    names = norm_weight_names(SmallCNN((1, 28, 28), 10, "group"))
    assert names == {"encoder.1.weight", "encoder.1.bias", "encoder.4.weight", "encoder.4.bias"}
