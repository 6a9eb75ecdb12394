"""Nets for images."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fewer.choices import Norm
from fewer.models import (
    SmallCNN,
)
from fewer.models.images import Conv4, DropBlock


def test_conv4_equals_blocks_with_relu_before_pooling() -> None:
    torch.manual_seed(0)
    net = Conv4((1, 12, 12), 3, width=4, pools=2)
    layers, x = list(net.encoder), torch.randn(6, 1, 12, 12)  # type: ignore[call-overload]
    for index in reversed(range(len(layers) - 1)):
        if isinstance(layers[index], nn.MaxPool2d):
            layers[index : index + 2] = reversed(layers[index : index + 2])
    results = []
    for encoder in (net.encoder, nn.Sequential(*layers)):
        features = encoder(x)
        results.append([features, *torch.autograd.grad(features.square().sum(), list(net.encoder.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert isinstance(layers[2], nn.ReLU) and isinstance(net.encoder[2], nn.MaxPool2d)  # type: ignore[index]


def test_conv4_keeps_channels_last_in_memory_and_returns_features_in_the_usual_order() -> None:
    torch.manual_seed(0)
    net = Conv4((1, 12, 12), 3, width=4, pools=2)
    blocks, x = net.encoder[:-1], torch.randn(6, 1, 12, 12)  # type: ignore[index]
    usual = nn.Sequential(*[plain_convolution(layer) for layer in blocks])
    maps, expected = blocks(x), usual(x)
    assert maps.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(maps, expected, atol=1e-6) and torch.equal(net.encoder(x), maps.flatten(1))


def plain_convolution(layer: nn.Module) -> nn.Module:
    """A plain convolution with the same weights, or the layer itself."""
    if not isinstance(layer, nn.Conv2d):
        return layer
    plain = nn.Conv2d(layer.in_channels, layer.out_channels, 3, padding=1)
    plain.load_state_dict(layer.state_dict())
    return plain


def test_conv4_averages_the_last_feature_map() -> None:
    torch.manual_seed(0)
    net = Conv4((1, 12, 12), 3, width=4, pools=1)
    averaged = Conv4((1, 12, 12), 3, width=4, pools=1, average=True)
    averaged.encoder.load_state_dict(net.encoder.state_dict())
    x = torch.randn(6, 1, 12, 12)
    assert torch.allclose(averaged.encoder(x), net.encoder(x).reshape(6, 4, 36).mean(2), atol=1e-6)
    assert averaged(x).shape == (6, 3) and averaged.head.in_features == 4


def test_dropblock_drops_squares_and_keeps_the_sum() -> None:
    torch.manual_seed(0)
    layer = DropBlock(0.2, 5)
    x = torch.ones(20, 8, 16, 16)
    out = layer(x)
    assert float((out == 0).float().mean()) == pytest.approx(0.2, abs=0.05)
    assert float(out.mean()) == pytest.approx(1, abs=0.01)
    assert torch.equal(layer.eval()(x), x)


@pytest.mark.parametrize(("norm", "count"), [("batch", 26_434), ("group", 26_434), ("none", 26_390)])
def test_small_cnn_parameter_count(norm: Norm, count: int) -> None:
    net = SmallCNN((1, 28, 28), 10, norm)
    assert sum(parameter.numel() for parameter in net.parameters()) == count
    assert net(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize("feature_relu", [True, False])
def test_small_cnn_may_have_negative_features(feature_relu: bool) -> None:
    features = SmallCNN((1, 28, 28), 10, feature_relu=feature_relu).encoder(torch.randn(4, 1, 28, 28))
    assert bool((features < 0).any()) != feature_relu


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (1, 5, 12), (2, 1, 1)])
def test_small_cnn_takes_images_of_any_size(shape: tuple[int, int, int]) -> None:
    assert SmallCNN(shape, 4)(torch.zeros(3, *shape)).shape == (3, 4)
