"""Nets over a set of samples: what they say of a sample depends on the others."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SetEncoder(nn.Module):
    """One Transformer layer (Vaswani et al., NeurIPS 2017) over feature vectors, without places: a set has no order.

    The first `context` rows are the context, which every row sees. Rows beyond it see the context and themselves,
    or (`transductive`) each other too. Attention is written out, so that it can be differentiated twice everywhere.
    What is added to the features begins at zero, so that at first they are only normalized.
    """

    def __init__(
        self, features: int, context: int, heads: int = 4, drop: float = 0.1, transductive: bool = False
    ) -> None:
        super().__init__()
        self.context, self.heads, self.transductive = context, heads, transductive
        inside = heads * max(1, features // heads)
        self.look = nn.Linear(features, 3 * inside)
        self.gather = nn.Linear(inside, features)
        self.think = nn.Sequential(
            nn.Linear(features, 2 * features), nn.ReLU(), nn.Dropout(drop), nn.Linear(2 * features, features)
        )
        self.drop = nn.Dropout(drop)
        self.first, self.second = nn.LayerNorm(features), nn.LayerNorm(features)
        for last in (self.gather, self.think[-1]):
            for parameter in last.parameters():
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """One vector for each row, as long as it was."""
        query, key, value = self.look(x).unflatten(1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
        if not self.transductive:
            scores = scores.masked_fill(~self.seen(len(x), x.device), -torch.inf)
        prepare_data = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        x = self.first(x + self.drop(self.gather(prepare_data)))
        out: Tensor = self.second(x + self.drop(self.think(x)))
        return out

    def seen(self, rows: int, device: torch.device) -> Tensor:
        """Which row sees which: the context, and itself."""
        itself = torch.eye(rows, dtype=torch.bool, device=device)
        return itself | (torch.arange(rows, device=device) < self.context)
