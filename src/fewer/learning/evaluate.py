"""Evaluation: correct predictions and loss of a net."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EVAL_BATCH_SIZE = 1000
"""Samples in one forward pass of evaluation."""
MAX_LOSS = 1e30
"""The loss of a net whose scores are not finite. It counts as a very bad loss, not as a missing one."""


class Counts(NamedTuple):
    """Correct predictions, number of samples and summed loss. Counts of disjoint samples can be added."""

    correct: int
    total: int
    loss: float


@torch.no_grad()
def evaluate_net(net: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], top_k: int = 1) -> Counts:
    """Evaluates the net in evaluation mode. A sample is correct if its label has one of the `top_k` highest scores."""
    net.eval()
    sums = Counts(0, 0, 0.0)
    for x, y in batches:
        counts = count_correct(net(x), y, top_k)
        sums = Counts(sums.correct + counts.correct, sums.total + counts.total, sums.loss + counts.loss)
    return sums


def count_correct(scores: Tensor, y: Tensor, top_k: int = 1) -> Counts:
    """Evaluates scores (samples × classes). Among equal scores, the first class ranks highest.

    If the score of a sample's class is −∞, the sample counts as wrong and adds no loss (it would be infinite).
    """
    if top_k == 1:
        best = scores.argmax(1, keepdim=True)
    else:
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    correct, total = int((best == y[:, None]).sum()), len(y)
    possible = scores.gather(1, y[:, None])[:, 0] != -torch.inf
    if not bool(possible.all()):
        scores, y = scores[possible], y[possible]
    loss = float(F.cross_entropy(scores, y, reduction="sum").nan_to_num(nan=MAX_LOSS))
    return Counts(correct, total, min(loss, MAX_LOSS))
