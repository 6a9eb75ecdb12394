"""How good a net is on some samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORST = 1e30
"""The loss of a net whose scores are no longer finite: it must count as bad, not go missing."""


class Counts(NamedTuple):
    """Right answers, all answers, and the summed loss: they add up over any division of the samples."""

    correct: int
    total: int
    loss: float


@torch.no_grad()
def score(net: nn.Module, chunks: Iterable[tuple[Tensor, Tensor]]) -> Counts:
    """Count on all chunks, with the net in evaluation mode."""
    net.eval()
    correct = total = 0
    loss = 0.0
    for x, y in chunks:
        scores = net(x)
        correct += int((scores.argmax(1) == y).sum())
        loss += min(float(F.cross_entropy(scores, y, reduction="sum").nan_to_num(nan=WORST)), WORST)
        total += len(y)
    return Counts(correct, total, loss)
