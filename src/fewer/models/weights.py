"""Weights: the parameters and buffers of a net by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fewer.wire import Refused

Weights = dict[str, Tensor]

_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def weights_of(net: nn.Module) -> Weights:
    """A copy of everything that the net has learned."""
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def finite(weights: Mapping[str, Tensor]) -> bool:
    """Whether no weight ran off to infinity, or is no number."""
    return all(bool(tensor.isfinite().all()) for tensor in weights.values())


def load_weights(net: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into a net; Refused where names or shapes are not the net's own."""
    own = net.state_dict()
    if own.keys() != weights.keys():
        odd = sorted(own.keys() ^ weights.keys())
        raise Refused(f"weights do not fit the model: {', '.join(odd[:3])}{' …' if len(odd) > 3 else ''}")
    for name, tensor in own.items():
        if tensor.shape != weights[name].shape:
            raise Refused(f"weights do not fit the model: {name} is {tuple(weights[name].shape)}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])


def is_norm(net: nn.Module) -> set[str]:
    """The names of all weights that belong to normalization layers."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in net.named_modules(remove_duplicate=False)
        if isinstance(module, _NORMS)
        for name in module.state_dict()
    }
