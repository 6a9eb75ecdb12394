"""Weights: the parameters and buffers of a net by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fewer.wire import Refused

Weights = dict[str, Tensor]

_NORM_LAYERS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def get_weights(net: nn.Module) -> Weights:
    """A copy of the net's state dict."""
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def all_finite(weights: Mapping[str, Tensor]) -> bool:
    """True if all weights are finite."""
    return all(bool(tensor.isfinite().all()) for tensor in weights.values())


def load_weights(net: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copies weights into a net. Raises `Refused`, and changes nothing, if names or shapes do not fit."""
    current = net.state_dict()
    if current.keys() != weights.keys():
        unmatched = sorted(current.keys() ^ weights.keys())
        names = f"{', '.join(unmatched[:3])}{' …' if len(unmatched) > 3 else ''}"
        raise Refused(f"weights do not fit the model: {names}")
    for name, tensor in current.items():
        if tensor.shape != weights[name].shape:
            shape = tuple(weights[name].shape)
            raise Refused(f"weights do not fit the model: {name} has shape {shape}, expected {tuple(tensor.shape)}")
    with torch.no_grad():
        for name, tensor in current.items():
            tensor.copy_(weights[name])


def norm_weight_names(net: nn.Module) -> set[str]:
    """The names of all weights that belong to normalization layers."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in net.named_modules(remove_duplicate=False)
        if isinstance(module, _NORM_LAYERS)
        for name in module.state_dict()
    }


def split_buffers(net: nn.Module, weights: Mapping[str, Tensor]) -> tuple[Weights, Weights]:
    """Splits weights of a net into its parameters and its buffers, such as the batch statistics of batch norm.

    An optimizer on the server applies to parameters only. Buffers are averaged: with momentum, variances may even
    become negative.
    """
    names = {name for name, _ in net.named_parameters(remove_duplicate=False)}
    parameters = {name: tensor for name, tensor in weights.items() if name in names}
    return parameters, {name: tensor for name, tensor in weights.items() if name not in names}
