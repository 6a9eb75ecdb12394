"""A data set as its source provides it, before it is partitioned among clients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fewer.data import text
from fewer.data.schema import Column, Schema
from fewer.errors import DataError

Array = NDArray[Any]
Inputs = Array | Tensor | list[str]


@dataclass(frozen=True)
class RawDataset:
    """Inputs, labels, and the metadata that the source provides."""

    x: Inputs
    """Images as bytes, features or time series as floats, token ids as integers, or texts."""
    y: Array
    """Class labels, starting at 0; or numbers or sets of labels (a matrix of 0 and 1) to predict.

    Empty if the inputs are to be predicted, and the source has no labels.
    """
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
    class_gap: int | None = None
    """For windows of time series. If set, the last windows of each class of each client are held out, instead of the
    last of all. This many windows of the class before them are left out, because they overlap with them."""
    split: tuple[int, int, int] | None = None
    """Numbers of base, validation and novel classes, in label order, if the classes are split."""
    columns: tuple[Column, ...] = ()
    """Columns of a table that become inputs, in order."""
    rows: NDArray[np.int64] | None = None
    """The position of each training sample in the source, if the reader may drop or sort samples."""
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
        return replace(self, x=x, y=y, test=None, client_ids=client_ids, test_client_ids=None, rows=None)

    def select(self, rows: NDArray[np.int64]) -> RawDataset:
        """Keeps only these training samples."""
        x = [self.x[row] for row in rows] if isinstance(self.x, list) else self.x[rows]
        client_ids, positions = (None if part is None else part[rows] for part in (self.client_ids, self.rows))
        return replace(self, x=x, y=self.y[rows], client_ids=client_ids, rows=positions)

    def use_classes_of(self, schema: Schema, name: str) -> RawDataset:
        """Renumbers class labels by name, as in the schema. DataError if data `name` has a class that it lacks."""
        if schema.targets != "classes" or self.y.ndim > 1 or self.y.dtype.kind == "f":
            return self
        if self.split is not None and not self.class_names:  # the schema counts only the base classes
            return self
        y, unknown = schema.map_labels(self.y, self.class_names)
        test = self.test
        if test is not None:
            test_y, unknown_in_test = schema.map_labels(test[1], self.class_names)
            test, unknown = (test[0], test_y), sorted({*unknown, *unknown_in_test})
        if unknown:
            raise schema.unknown_class(name, unknown)
        return replace(self, y=y, test=test, class_names=schema.class_names)

    def use_tokens_of(self, schema: Schema, name: str) -> RawDataset:
        """Encodes texts with the schema's vocabulary. DataError if data `name` has another one."""
        if self.tokens and self.tokens != schema.tokens:
            raise DataError(f"data '{name}' has another vocabulary than the run: its token numbers mean other words")
        test = self.test and (encode_inputs(self.test[0], schema, name), self.test[1])
        return replace(self, x=encode_inputs(self.x, schema, name), test=test, tokens=schema.tokens)


def encode_inputs(x: Inputs, schema: Schema, name: str) -> Inputs:
    """Texts as token ids of the schema; other inputs stay as they are."""
    if not isinstance(x, list) or not x or not isinstance(x[0], str):
        return x
    if schema.kind != "text":
        raise DataError(f"data '{name}' is text; the model was trained on inputs of shape {schema.shape}")
    return text.encode(x, schema.tokens, schema.shape[0])
