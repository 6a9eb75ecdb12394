"""Membership inference: does a score reveal whether a sample was trained on?

- Yeom, Giacomelli, Fredrikson, Jha: Privacy Risk in Machine Learning, CSF 2018, use the loss as the score.
- The loss is low for easy samples too. So the loss is also compared with that of slightly transformed copies of the
  sample, as Mattern et al., ACL 2023, do for text. This needs no shadow model.
- Confidence intervals are those of DeLong, DeLong, Clarke-Pearson, Biometrics 1988.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.learning.augment import apply_affine, draw_affine
from fewer.statistics import LEVEL, wilson_interval

CHUNK = 1000
VARIANTS = 8
"""Transformed copies of each sample."""
FALSE_POSITIVE_RATE = 0.01
"""False positive rate at which the true positive rate is measured."""


@dataclass(frozen=True)
class Membership:
    """How well a score separates members from nonmembers."""

    auc: float
    """Probability that a member scores higher than a nonmember, ties counted half. 0.5 is guessing."""
    low: float
    """Lower end of the 95 % confidence interval (DeLong)."""
    high: float
    """Upper end of the 95 % confidence interval (DeLong)."""
    true_positive_rate: float
    """Fraction of members found at a false positive rate of 1 %."""
    members: int
    nonmembers: int


def membership(members: Tensor, nonmembers: Tensor) -> Membership:
    """Computes the AUC of a score from ranks, with a confidence interval from DeLong's variance."""
    inside, outside = _finite_scores(members), _finite_scores(nonmembers)
    m, n = len(inside), len(outside)
    if m < 2 or n < 2:
        raise ValueError(f"a confidence interval needs 2 members and 2 nonmembers, got {m} and {n}")
    from scipy.stats import norm, rankdata

    ranks = rankdata(np.concatenate([inside, outside]))
    beaten = (ranks[:m] - rankdata(inside)) / n  # for each member: the fraction of nonmembers below it
    beating = (ranks[m:] - rankdata(outside)) / m  # for each nonmember: the fraction of members below it
    auc = float(beaten.mean())
    half = float(norm.ppf((1 + LEVEL) / 2)) * math.sqrt(beaten.var(ddof=1) / m + beating.var(ddof=1) / n)
    threshold = np.sort(outside)[::-1][int(FALSE_POSITIVE_RATE * n)]
    true_positive_rate = float((inside > threshold).mean())
    return Membership(auc, max(0.0, auc - half), min(1.0, auc + half), true_positive_rate, m, n)


def estimate_proportion(count: int, total: int) -> dict[str, float]:
    """Returns the fraction `count / total`, its 95 % Wilson interval and the total."""
    low, high = wilson_interval(count, total)
    return {"fraction": count / total, "low": low, "high": high, "total": total}


def _finite_scores(scores: Tensor) -> NDArray[np.float64]:
    """Scores as an array, with NaN below all other values."""
    numbers: NDArray[np.float64] = np.nan_to_num(scores.detach().cpu().double().numpy(), nan=-np.inf)
    return numbers


# --- scores -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def losses(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Loss of each sample, with the net in evaluation mode."""
    net.eval()
    parts = zip(torch.split(x, CHUNK), torch.split(y, CHUNK), strict=True)
    return torch.cat([F.cross_entropy(net(inputs), labels, reduction="none") for inputs, labels in parts])


def loss_gaps(net: nn.Module, x: Tensor, y: Tensor, stream: torch.Generator) -> Tensor:
    """Mean loss of transformed copies minus the loss of the image itself, for each image."""
    copy_losses = [losses(net, apply_affine(x, draw_affine(len(x), stream)), y) for _ in range(VARIANTS)]
    return torch.stack(copy_losses).mean(0) - losses(net, x, y)
