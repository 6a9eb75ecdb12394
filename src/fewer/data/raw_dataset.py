"""A data set as its source provides it, before it is partitioned among clients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fewer.data.schema import Column

Array = NDArray[Any]
Inputs = Array | Tensor | list[str]


@dataclass(frozen=True)
class RawDataset:
    """Inputs, labels, and the metadata that the source provides."""

    x: Inputs
    """Images as bytes, features or time series as floats, token ids as integers, or texts."""
    y: Array
    """Class labels, starting at 0; or numbers or sets of labels (a matrix of 0 and 1) to predict."""
    test: tuple[Inputs, Array] | None = None
    """Test inputs and labels; None if the source has no test set."""
    client_ids: Array | None = None
    """The owner of each training sample (a name or number). For windows of one long text, -1 marks rows to skip."""
    test_client_ids: Array | None = None
    """The owner of each test sample."""
    class_names: tuple[str, ...] = ()
    """Names of the classes."""
    tokens: tuple[str, ...] = ()
    """The vocabulary, if inputs are token ids. Token 0 is padding, or an unknown character."""
    normalization: tuple[float, float] | None = None
    """Mean and standard deviation of pixels scaled to 0 … 1, if known."""
    time_ordered: bool = False
    """True if each client's samples are in temporal order. They are then split by time."""
    split: tuple[int, int, int] | None = None
    """Numbers of base, validation and novel classes, in label order, if the classes are split."""
    columns: tuple[Column, ...] = ()
    """Columns of a table that become inputs, in order."""
    notes: tuple[str, ...] = ()
    """What the reader did that the user should know: columns ignored, images transposed, labels renamed …"""

    def merge_test(self) -> RawDataset:
        """Appends the test samples to the training samples. Client ids stay if those of both parts are known."""
        if self.test is None:
            return self
        x, (test_x, test_y), client_ids = self.x, self.test, None
        x = x + list(test_x) if isinstance(x, list) else np.concatenate([np.asarray(x), np.asarray(test_x)])
        y = np.concatenate([self.y, test_y])
        if self.client_ids is not None and self.test_client_ids is not None:
            client_ids = np.concatenate([self.client_ids, self.test_client_ids])
        return replace(self, x=x, y=y, test=None, client_ids=client_ids, test_client_ids=None)

    def select(self, rows: NDArray[np.int64]) -> RawDataset:
        """Keeps only these training samples."""
        x = [self.x[row] for row in rows] if isinstance(self.x, list) else self.x[rows]
        return replace(self, x=x, y=self.y[rows], client_ids=None if self.client_ids is None else self.client_ids[rows])
