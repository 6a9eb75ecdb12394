"""Aggregation of the clients' models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fewer.models import Weights


def weighted_mean(models: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> Weights:
    """Σ shareᵢ · modelᵢ / Σ shareᵢ for each tensor.

    Sums are in float64 and in the given order. Integer tensors are rounded.
    """
    total = float(sum(shares))
    if not models or total <= 0:
        raise ValueError(f"a mean needs at least one model and a positive sum of shares, got {len(models)} and {total}")
    mean: Weights = {}
    for name, first in models[0].items():
        weighted_sum = torch.zeros_like(first, dtype=torch.float64)
        for model, share in zip(models, shares, strict=True):
            weighted_sum.add_(model[name], alpha=share / total)
        mean[name] = (weighted_sum if first.dtype.is_floating_point else weighted_sum.round()).to(first.dtype)
    return mean


def stack_models(models: Sequence[Mapping[str, Tensor]]) -> Weights:
    """One tensor per name, with the models along a new first dimension."""
    return {name: torch.stack([model[name] for model in models]) for name in models[0]}


def unstack_models(stacked: Mapping[str, Tensor]) -> list[Weights]:
    """The models that `stack_models` stacked."""
    count = len(next(iter(stacked.values())))
    return [{name: tensor[index] for name, tensor in stacked.items()} for index in range(count)]
