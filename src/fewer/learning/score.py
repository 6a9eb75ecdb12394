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
def score(net: nn.Module, chunks: Iterable[tuple[Tensor, Tensor]], top: int = 1) -> Counts:
    """Count on all chunks, with the net in evaluation mode; an answer is right if it is among the `top` best."""
    net.eval()
    found = Counts(0, 0, 0.0)
    for x, y in chunks:
        some = judged(net(x), y, top)
        found = Counts(found.correct + some.correct, found.total + some.total, found.loss + some.loss)
    return found


def judged(scores: Tensor, y: Tensor, top: int = 1) -> Counts:
    """Counts of some scores (samples × classes). Of equal scores the first counts as the best.

    A sample of a class that the net rules out altogether (−∞) is wrong and adds no loss, which would be infinite.
    """
    if top == 1:
        best = scores.argmax(1, keepdim=True)
    else:
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, :top]
    right, total = int((best == y[:, None]).sum()), len(y)
    can = scores.gather(1, y[:, None])[:, 0] != -torch.inf
    if not bool(can.all()):
        scores, y = scores[can], y[can]
    loss = float(F.cross_entropy(scores, y, reduction="sum").nan_to_num(nan=WORST))
    return Counts(right, total, min(loss, WORST))
