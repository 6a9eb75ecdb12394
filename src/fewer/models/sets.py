"""Nets over a set of samples: the output for a sample depends on the other samples."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SetEncoder(nn.Module):
    """One Transformer layer (Vaswani et al., NeurIPS 2017) over feature vectors, without positional encoding.

    The first `context` rows are the context, which every row attends to. Every other row also attends to itself, or
    (`transductive`) to all rows. Attention uses basic operations, so it is twice differentiable on every device. The
    residual branches start at zero: an untrained layer only normalizes the features.
    """

    def __init__(
        self, features: int, context: int, heads: int = 4, dropout: float = 0.1, transductive: bool = False
    ) -> None:
        super().__init__()
        self.context, self.heads, self.transductive = context, heads, transductive
        width = heads * max(1, features // heads)
        self.in_proj = nn.Linear(features, 3 * width)
        self.out_proj = nn.Linear(width, features)
        self.feed_forward = nn.Sequential(
            nn.Linear(features, 2 * features), nn.ReLU(), nn.Dropout(dropout), nn.Linear(2 * features, features)
        )
        self.dropout = nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        for last in (self.out_proj, self.feed_forward[-1]):
            for parameter in last.parameters():
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """One output vector per row, of the same width."""
        query, key, value = self.in_proj(x).unflatten(1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
        if not self.transductive:
            scores = scores.masked_fill(~self.attention_mask(len(x), x.device), -torch.inf)
        attended = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        x = self.norm1(x + self.dropout(self.out_proj(attended)))
        out: Tensor = self.norm2(x + self.dropout(self.feed_forward(x)))
        return out

    def attention_mask(self, rows: int, device: torch.device) -> Tensor:
        """True where a row attends to a column: the context, and itself."""
        diagonal = torch.eye(rows, dtype=torch.bool, device=device)
        return diagonal | (torch.arange(rows, device=device) < self.context)
