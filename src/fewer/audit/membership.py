"""Membership inference: does a score reveal whether a sample was trained on?

- Yeom, Giacomelli, Fredrikson, Jha: Privacy Risk in Machine Learning, CSF 2018, use the loss as the score.
- The loss is low for easy samples too. So the loss is also compared with that of slightly transformed copies of the
  sample, as Mattern et al., ACL 2023, do for text. This needs no shadow model.
- Confidence intervals are those of DeLong, DeLong, Clarke-Pearson, Biometrics 1988.
- An average hides a few samples that an attack is certain about. So the fraction of members found at a very low false
  positive rate counts, too (Carlini et al., S&P 2022).
- Under (ε, δ)-differential privacy, TPR ≤ e^ε · FPR + δ for every attack. So an attack gives a lower bound on ε
  (Jagielski, Ullman, Oprea: Auditing Differentially Private Machine Learning, NeurIPS 2020), with the exact intervals
  of Clopper, Pearson, Biometrika 1934.
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

Floats = NDArray[np.float64]
CHUNK = 1000
VARIANTS = 8
"""Transformed copies of each sample."""
FALSE_POSITIVE_RATE, STRICT_RATE = 0.01, 0.001
"""False positive rates at which the true positive rate is measured."""
MIN_NONMEMBERS = round(1 / STRICT_RATE)
"""The number of nonmembers from which a false positive rate of 0.1 % can be measured."""
DELTA = 1e-5
"""The δ of a lower bound on ε, if the run states none."""


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
    strict_true_positive_rate: float | None
    """Fraction of members found at a false positive rate of 0.1 %; None with fewer than 1,000 nonmembers."""
    strict_low: float | None
    """Lower end of its 95 % confidence interval (Clopper–Pearson)."""
    epsilon_bound: float
    """A lower bound on ε that the attack proves, at 95 % confidence."""


def membership(members: Tensor, nonmembers: Tensor, delta: float = DELTA) -> Membership:
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
    strict, strict_low = None, None
    if n >= MIN_NONMEMBERS:
        strict = _true_positive_rate(inside, outside, STRICT_RATE)
        strict_low = float(clopper_pearson(np.array(round(strict * m)), m)[0])
    rate, bound = _true_positive_rate(inside, outside, FALSE_POSITIVE_RATE), epsilon_bound(inside, outside, delta)
    return Membership(auc, max(0.0, auc - half), min(1.0, auc + half), rate, m, n, strict, strict_low, bound)


def _true_positive_rate(inside: Floats, outside: Floats, false_positive_rate: float) -> float:
    """The fraction of members above a threshold that this fraction of nonmembers exceeds, rounded down."""
    threshold = np.sort(outside)[::-1][int(false_positive_rate * len(outside) + 1e-9)]
    return float((inside > threshold).mean())


# --- a lower bound on ε -----------------------------------------------------------------------------------------


def epsilon_bound(inside: Floats, outside: Floats, delta: float) -> float:
    """The ε that members above a threshold prove, or nonmembers below it; at least 0.

    Every other sample chooses the threshold. The rest measures TPR and FPR, whose Clopper–Pearson bounds hold at 97.5 %
    each, so together at 95 %. Samples count as independent.
    """
    thresholds = np.unique(np.concatenate([inside[::2], outside[::2]]))
    bounds = _bounds_at(thresholds, inside[::2], outside[::2], delta)
    side, best = np.unravel_index(bounds.argmax(), bounds.shape)
    return max(0.0, float(_bounds_at(thresholds[[best]], inside[1::2], outside[1::2], delta)[side, 0]))


def _bounds_at(thresholds: Floats, inside: Floats, outside: Floats, delta: float) -> Floats:
    """ln((TPR − δ) / FPR) and ln((TNR − δ) / FNR) with the rates at their bounds, for each threshold."""
    true_positives, false_positives = (
        len(scores) - np.searchsorted(np.sort(scores), thresholds, side="right") for scores in (inside, outside)
    )
    low, _ = clopper_pearson(true_positives, len(inside))  # of the TPR; the FNR is at most 1 − low
    _, high = clopper_pearson(false_positives, len(outside))  # of the FPR; the TNR is at least 1 − high
    ratios = np.stack([(low - delta) / high, (1 - high - delta) / (1 - low)])
    return np.log(np.maximum(ratios, 1e-300))


def clopper_pearson(counts: NDArray[np.int64], total: int) -> tuple[Floats, Floats]:
    """Lower and upper ends of the exact 95 % confidence intervals of the proportions `counts / total`."""
    from scipy.stats import beta

    tail = (1 - LEVEL) / 2
    low = np.where(counts > 0, beta.ppf(tail, np.maximum(counts, 1), total - counts + 1), 0.0)
    high = np.where(counts < total, beta.ppf(1 - tail, counts + 1, np.maximum(total - counts, 1)), 1.0)
    return low, high


def estimate_proportion(count: int, total: int) -> dict[str, float]:
    """Returns the fraction `count / total`, its 95 % Wilson interval and the total."""
    low, high = wilson_interval(count, total)
    return {"fraction": count / total, "low": low, "high": high, "total": total}


def _finite_scores(scores: Tensor) -> Floats:
    """Scores as an array, with NaN below all other values."""
    numbers: Floats = np.nan_to_num(scores.detach().cpu().double().numpy(), nan=-np.inf)
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
