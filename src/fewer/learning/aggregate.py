"""Bringing what several clients sent into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fewer.models import Weights


def weighted_mean(models: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> Weights:
    """Σ shareᵢ·modelᵢ / Σ share, name by name, summed in float64 in the order given; whole numbers are rounded."""
    total = float(sum(shares))
    if not models or total <= 0:
        raise ValueError("a mean needs models, and shares that add up to more than 0")
    mean: Weights = {}
    for name, first in models[0].items():
        sum_ = torch.zeros_like(first, dtype=torch.float64)
        for model, share in zip(models, shares, strict=True):
            sum_.add_(model[name], alpha=share / total)
        mean[name] = (sum_ if first.dtype.is_floating_point else sum_.round()).to(first.dtype)
    return mean
