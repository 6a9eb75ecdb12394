"""Convolutions with a faster gradient of their input."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fewer.models.convolution import FoldedConv2d, speed_up_convolutions


def make_pair(*sizes: int, **options: object) -> tuple[nn.Conv2d, nn.Module]:
    layer = nn.Conv2d(*sizes, **options).double()  # type: ignore[arg-type]
    return layer, speed_up_convolutions(copy.deepcopy(layer))


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"), [(3, 2, 1, 1), (3, 1, 1, 1), (4, 3, 0, 1), (3, 2, 2, 2)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_are_those_of_torch(
    kernel: int, stride: int, padding: int, dilation: int, bias: bool
) -> None:
    layer, fast = make_pair(2, 3, kernel, stride, padding, dilation, bias=bias)
    assert isinstance(fast, FoldedConv2d)
    x = torch.randn(4, 2, 9, 7, dtype=torch.double, requires_grad=True)
    weights = torch.randn_like(layer(x))

    def derivatives(module: nn.Module) -> list[Tensor]:
        output = module(x)
        first = torch.autograd.grad((weights * output).square().sum(), [x, *module.parameters()], create_graph=True)
        second = torch.autograd.grad(torch.stack([g.pow(3).sum() for g in first]).sum(), [x, *module.parameters()])
        return [output, *first, *second]

    for ours, expected in zip(derivatives(fast), derivatives(layer), strict=True):
        assert torch.allclose(ours, expected)


def test_layers_that_the_rule_does_not_cover_stay_as_they_are() -> None:
    for options in ({"groups": 2}, {"padding": "same"}):
        _, other = make_pair(2, 2, 3, **options)
        assert type(other) is nn.Conv2d
    circular, fast = make_pair(2, 2, 3, 1, 1, padding_mode="circular")
    x = torch.randn(1, 2, 5, 5, dtype=torch.double, requires_grad=True)
    assert torch.equal(circular(x), fast(x))
    single, fast = make_pair(2, 2, 3)
    assert torch.equal(single(x[0]), fast(x[0]))  # one image without a batch
