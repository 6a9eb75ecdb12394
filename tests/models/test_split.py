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
from fewer.models.split import find_activation, find_head
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


class Functional(nn.Module):
    """A user's net that applies functions instead of modules."""

    def __init__(self, activate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.convolution, self.linear, self.activate = nn.Conv2d(3, 4, 1), nn.Linear(4, 5), activate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.linear(self.activate(self.convolution(x)).mean((2, 3)))
        return scores


@pytest.mark.parametrize(
    ("activate", "expected"),
    [
        (torch.relu, nn.ReLU),
        (torch.relu_, nn.ReLU),
        (torch.tanh, nn.Tanh),
        (torch.sigmoid, nn.Sigmoid),
        (nn.ReLU6(), nn.Hardtanh),
        (lambda x: x.clamp_min(0), nn.ReLU),
        (lambda x: x.clamp_min(-1), nn.Identity),
        (lambda x: torch.relu(x).double().float(), nn.ReLU),
        (lambda x: torch.cat([torch.relu(x[:, :2]), torch.relu(x[:, 2:])], 1), nn.ReLU),
        (lambda x: torch.cat([torch.relu(x[:, :2]), x[:, 2:]], 1), nn.Identity),
        (nn.LeakyReLU(), nn.Identity),
        (lambda x: torch.relu(x) - 1, nn.Identity),
    ],
)
def test_the_activation_before_the_head_is_found(
    activate: Callable[[torch.Tensor], torch.Tensor], expected: type[nn.Module]
) -> None:
    net = Functional(activate).requires_grad_(False)
    task = Task((3, 2, 2), 5, lambda: net)
    assert type(find_activation(task, net)) is expected
    setattr(net, "feature_activation", nn.Softplus)  # noqa: B010
    assert type(find_activation(task, net)) is nn.Softplus


def test_relu6_keeps_its_bounds() -> None:
    net = Functional(nn.ReLU6())
    activation = find_activation(Task((3, 2, 2), 5, lambda: net), net)
    assert isinstance(activation, nn.Hardtanh) and (activation.min_val, activation.max_val) == (0, 6)


def test_an_inplace_activation_of_the_inputs_is_found() -> None:
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(12, 5))
    assert type(find_activation(Task((3, 2, 2), 5, lambda: net), net)) is nn.ReLU


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
