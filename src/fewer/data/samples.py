"""Samples: a view of some rows of two large arrays, converted to floats batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

BLOCK = 1 << 20
"""Values gathered at once: enough to amortize the call, few enough to stay in cache."""


@dataclass(frozen=True, repr=False)
class Samples:
    """Inputs `x`, labels or other targets `y`, and the `rows` that belong to this view (all rows if None).

    Rows are gathered on use, so all clients share one copy of the data. Pixels stay bytes until then: `shift` and
    `scale` normalize them to (x − shift) · scale, with one value for all inputs or one for each column of a table.
    Token ids become 64-bit integers.
    """

    x: Tensor
    y: Tensor
    rows: Tensor | None = None
    shift: float | Tensor = 0.0
    scale: float | Tensor = 1.0
    is_text: bool = False
    """True if inputs are token ids."""

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.x.shape[1:]))
        return f"Samples({len(self)} inputs of {shape or 1}, {str(self.x.dtype).removeprefix('torch.')})"

    def __len__(self) -> int:
        return len(self.y) if self.rows is None else len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Input and label of one sample, so that a `torch.utils.data.DataLoader` takes samples as a dataset."""
        position = range(len(self))[index]  # raises IndexError at the end
        x, y = self.slice(position, position + 1)
        return x[0], y[0]

    @property
    def labels(self) -> Tensor:
        """The labels of all samples, in order."""
        return self.y if self.rows is None else self.y[self.rows]

    def all(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels of all samples."""
        return self.slice(0, len(self))

    def select(self, indices: Tensor) -> Samples:
        """A view of the samples at these indices."""
        indices = indices.to(self.y.device)
        return replace(self, rows=indices if self.rows is None else self.rows[indices])

    def pick(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the samples at these indices (a one-dimensional tensor)."""
        indices = indices.to(self.y.device)
        rows = indices if self.rows is None else self.rows[indices]
        return self._normalize(self.x.index_select(0, rows)), self.y.index_select(0, rows)

    def batches(self, indices: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields one batch for each row of `indices` (batches × batch size)."""
        batch_size = indices.shape[1]
        batch_values = max(1, self.x[0].numel() * batch_size)
        for block in torch.split(indices, max(1, BLOCK // batch_values)):
            x, y = self.pick(block.reshape(-1))
            yield from zip(torch.split(x, batch_size), torch.split(y, batch_size), strict=True)

    def chunks(self, size: int = 1000) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields all samples in order, `size` at a time."""
        for start in range(0, len(self), size):
            yield self.slice(start, start + size)

    def slice(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of samples `start` to `stop` − 1."""
        if self.rows is None:
            return self._normalize(self.x[start:stop]), self.y[start:stop]
        return self.pick(torch.arange(start, min(stop, len(self))))

    def flip_labels(self, classes: int) -> Samples:
        """The samples with labels classes − 1 − y in place of y."""
        return replace(self, y=classes - 1 - self.y)

    def to(self, device: torch.device) -> Samples:
        """Copies the samples to a device."""
        rows = None if self.rows is None else self.rows.to(device)
        shift, scale = (value.to(device) if isinstance(value, Tensor) else value for value in (self.shift, self.scale))
        return replace(self, x=self.x.to(device), y=self.y.to(device), rows=rows, shift=shift, scale=scale)

    def rescale(self, shift: Sequence[float], scale: Sequence[float]) -> Samples:
        """The samples with another normalization: one value for all inputs, or one for each column."""
        if len(shift) == 1:
            return replace(self, shift=shift[0], scale=scale[0])
        shifts, scales = (torch.tensor(v, dtype=torch.float64, device=self.x.device) for v in (shift, scale))
        return replace(self, shift=shifts, scale=scales)

    def _normalize(self, x: Tensor) -> Tensor:
        if self.is_text:
            return x.long()
        if isinstance(self.shift, Tensor):
            return x.double().sub_(self.shift).mul_(self.scale).float()
        if self.shift == 0.0 and self.scale == 1.0:
            return x
        return x.float().sub_(self.shift).mul_(self.scale)
