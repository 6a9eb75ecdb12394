"""Convolutions with a faster gradient of their input.

The gradient of the input x of y = x ∗ w is a matrix product and a sum over overlapping patches (`fold`): wᵀ ∂y gives
the share of each output position in its patch of x. On CPUs with few channels, this is two to five times as fast as the
backward kernel of a strided convolution. Results differ by rounding only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def speed_up_convolutions(net: nn.Module) -> nn.Module:
    """Makes the net's convolutions faster in the gradient of their inputs, in place. Weights stay the same."""
    for module in net.modules():
        if type(module) is nn.Conv2d and module.groups == 1 and not isinstance(module.padding, str):
            module.__class__ = FoldedConv2d
    return net


class FoldedConv2d(nn.Conv2d):
    """A convolution whose input gradient is a matrix product, folded."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not input.requires_grad or input.dim() != 4 or self.padding_mode != "zeros":
            output: Tensor = super()._conv_forward(input, weight, bias)
        else:
            output = _Convolution.apply(input, weight, bias, self.stride, self.padding, self.dilation)  # type: ignore[no-untyped-call]
        return output


class _Convolution(torch.autograd.Function):
    """y = x ∗ w + b. Its backward pass is differentiable, so it has second derivatives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options, ctx.bias_sizes = options, None if bias is None else [len(bias)]
        output: Tensor = F.conv2d(x, weight, bias, *options)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight), (stride, padding, dilation) = gradients, ctx.saved_tensors, ctx.options
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        x_gradient = weight_gradient = bias_gradient = None
        if needs_x:
            patches = weight.flatten(1).T @ gradient.flatten(2)
            x_gradient = F.fold(patches, x.shape[2:], weight.shape[2:], dilation, padding, stride)
        if needs_weight or needs_bias:
            _, weight_gradient, bias_gradient = torch.ops.aten.convolution_backward(
                *(gradient, x, weight, ctx.bias_sizes, stride, padding, dilation),
                *(False, [0, 0], 1, [False, needs_weight, needs_bias]),
            )
        return x_gradient, weight_gradient, bias_gradient, None, None, None
