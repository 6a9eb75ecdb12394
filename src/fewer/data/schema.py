"""The schema of a data set: what inputs and labels mean, so that files of other clients are mapped by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

Kind = Literal["images", "features", "series", "text", "tokens"]


@dataclass(frozen=True)
class Column:
    """A column of a table, and how its values become inputs."""

    name: str
    categories: tuple[str, ...] = ()
    """The values of a categorical column, in the order of their one-hot inputs; empty for numbers."""
    fill: float | None = None
    """Replaces missing numbers; None if they are refused."""


@dataclass(frozen=True)
class Schema:
    """Input kind, shape and dtype, columns, classes, vocabulary, normalization and preprocessing of a data set."""

    kind: Kind
    shape: tuple[int, ...]
    """Shape of one input."""
    dtype: str
    """The dtype of inputs before normalization: uint8, int64 or float32."""
    classes: int
    """Number of classes; of labels or numbers to predict, if targets are floats."""
    class_names: tuple[str, ...] = ()
    """Names of the classes, in the order of their labels; empty if labels are just 0, 1, 2, …"""
    columns: tuple[Column, ...] = ()
    """Columns of a table that become inputs, in order."""
    tokens: tuple[str, ...] = ()
    """The vocabulary of a text; token ids are positions in it."""
    shift: tuple[float, ...] = (0.0,)
    """Inputs are normalized to (x − shift) · scale: one value for all, or one for each column."""
    scale: tuple[float, ...] = (1.0,)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options that the reader used (label, size, max_length …), so that other files are read alike."""

    def to_dict(self) -> dict[str, Any]:
        """The schema as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """The schema that `to_dict` describes."""
        tuples = ("shape", "class_names", "tokens", "shift", "scale")
        values: dict[str, Any] = {key: tuple(value) if key in tuples else value for key, value in content.items()}
        values["columns"] = tuple(
            Column(column["name"], tuple(column["categories"]), column["fill"]) for column in content["columns"]
        )
        return cls(**values)
