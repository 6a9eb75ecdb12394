"""Samples: a view of some rows of two large arrays, turned into floats batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

BLOCK = 1 << 20
"""Values gathered at once: enough to amortise the call, little enough to stay in cache."""


@dataclass(frozen=True)
class Samples:
    """Inputs `x` and labels `y` of all rows, and the `rows` that are meant (all, if None).

    Rows are gathered only when they are used, so clients share one copy of the data. Pixels stay bytes until then:
    `shift` and `scale` normalize them to (x − shift) · scale; token numbers become 64-bit integers.
    """

    x: Tensor
    y: Tensor
    rows: Tensor | None = None
    shift: float = 0.0
    scale: float = 1.0
    tokens: bool = False
    """Whether inputs are token numbers."""

    def __len__(self) -> int:
        return len(self.y) if self.rows is None else len(self.rows)

    @property
    def labels(self) -> Tensor:
        """The labels of all samples, in order."""
        return self.y if self.rows is None else self.y[self.rows]

    def only(self, which: Tensor) -> Samples:
        """The samples with these numbers, as another view."""
        which = which.to(self.y.device)
        return replace(self, rows=which if self.rows is None else self.rows[which])

    def pick(self, which: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the samples with these numbers (a one-dimensional tensor)."""
        which = which.to(self.y.device)
        rows = which if self.rows is None else self.rows[which]
        return self._normal(self.x.index_select(0, rows)), self.y.index_select(0, rows)

    def batches(self, numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """One batch for each row of `numbers` (batches × batch size)."""
        width = max(1, self.x[0].numel() * numbers.shape[1])
        for block in torch.split(numbers, max(1, BLOCK // width)):
            x, y = self.pick(block.reshape(-1))
            yield from zip(torch.split(x, numbers.shape[1]), torch.split(y, numbers.shape[1]), strict=True)

    def chunks(self, size: int = 1000) -> Iterator[tuple[Tensor, Tensor]]:
        """All samples in order, `size` at a time."""
        for start in range(0, len(self), size):
            yield self.slice(start, start + size)

    def slice(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The samples from `start` to before `stop`."""
        if self.rows is None:
            return self._normal(self.x[start:stop]), self.y[start:stop]
        return self.pick(torch.arange(start, min(stop, len(self))))

    def to(self, device: torch.device) -> Samples:
        """The same samples on another device."""
        rows = None if self.rows is None else self.rows.to(device)
        return replace(self, x=self.x.to(device), y=self.y.to(device), rows=rows)

    def _normal(self, x: Tensor) -> Tensor:
        if self.tokens:
            return x.long()
        if self.shift == 0.0 and self.scale == 1.0:
            return x
        return x.float().sub_(self.shift).mul_(self.scale)
