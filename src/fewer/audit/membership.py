"""Membership inference: can one tell from a score whether a sample was trained on?

Yeom, Giacomelli, Fredrikson, Jha: Privacy Risk in Machine Learning, CSF 2018, take the loss. It is low for easy samples
too, so it is also taken against that of near variants of the sample (as Mattern et al., ACL 2023, do for text): that
needs no shadow model. Confidence is that of DeLong, DeLong, Clarke-Pearson, Biometrics 1988.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.learning.augment import draw_moves, move

CHUNK = 1000
VARIANTS = 8
"""Near variants of each sample."""
ALARM = 0.01
"""The share of false alarms at which hits are counted."""
Z = 1.959963984540054
"""97.5 % of the normal distribution lie below."""


@dataclass(frozen=True)
class Membership:
    """How well a score tells members from others."""

    auc: float
    """The chance that a member scores higher than another sample, ties halved: 0.5 is guessing."""
    low: float
    """From here …"""
    high: float
    """… to here with 95 % confidence (DeLong)."""
    hits: float
    """Share of members found when 1 % of the others are taken for members."""
    members: int
    others: int


def membership(members: Tensor, others: Tensor) -> Membership:
    """The AUC of a score by ranks, with its confidence interval by DeLong's variance."""
    inside, outside = _numbers(members), _numbers(others)
    m, n = len(inside), len(outside)
    if m < 2 or n < 2:
        raise ValueError("an interval needs two members and two others")
    both = _ranks(np.concatenate([inside, outside]))
    beaten = (both[:m] - _ranks(inside)) / n  # by each member, the share of others
    beating = (both[m:] - _ranks(outside)) / m  # each other sample, by the share of members
    auc = float(beaten.mean())
    half = Z * math.sqrt(beaten.var(ddof=1) / m + beating.var(ddof=1) / n)
    threshold = np.sort(outside)[::-1][int(ALARM * n)]
    hits = float((inside > threshold).mean())
    return Membership(auc, max(0.0, auc - half), min(1.0, auc + half), hits, m, n)


@dataclass(frozen=True)
class Share:
    """Some of many, with the 95 % interval of Wilson."""

    share: float
    low: float
    high: float
    of: int


def share(some: int, of: int) -> Share:
    """A share as if each of them had been drawn by itself (Wilson, JASA 1927)."""
    lr, grown = some / of, 1 + Z**2 / of
    middle = (lr + Z**2 / (2 * of)) / grown
    half = Z / grown * math.sqrt(lr * (1 - lr) / of + Z**2 / (4 * of**2))
    return Share(lr, middle - half, middle + half, of)


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """From 1 on; equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: NDArray[np.float64] = (last - (counts - 1) / 2)[place]
    return ranks


def _numbers(scores: Tensor) -> NDArray[np.float64]:
    numbers: NDArray[np.float64] = np.nan_to_num(scores.detach().cpu().double().numpy(), nan=-np.inf)
    return numbers


# --- scores -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def losses(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of each sample, with the net in evaluation mode."""
    net.eval()
    parts = zip(torch.split(x, CHUNK), torch.split(y, CHUNK), strict=True)
    return torch.cat([F.cross_entropy(net(a), b, reduction="none") for a, b in parts])


def above_variants(net: nn.Module, x: Tensor, y: Tensor, stream: torch.Generator) -> Tensor:
    """How much lower the loss of each image is than the mean loss of slightly moved ones."""
    moved = [losses(net, move(x, draw_moves(len(x), stream)), y) for _ in range(VARIANTS)]
    return torch.stack(moved).mean(0) - losses(net, x, y)
