"""The schema of a data set: what inputs and labels mean, so that files of other clients are mapped by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from fewer.errors import DataError

Kind = Literal["images", "features", "series", "text", "tokens"]
Targets = Literal["classes", "numbers", "labels"]
"""One class per sample, numbers, or a set of labels per sample."""
LISTED_NAMES = 10
"""How many class names an error lists."""


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
    targets: Targets = "classes"
    """What is predicted for each sample."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The name of each label: of its class, or its number."""
        return (*self.class_names, *map(str, range(len(self.class_names), self.classes)))

    def map_labels(self, y: NDArray[Any], names: Sequence[str] = ()) -> tuple[NDArray[np.int64], list[str]]:
        """Renumbers the class labels of other data by name. Unknown classes get -1; their names are returned, too.

        `names` are the names of the labels in `y`. Without them, a label is its own name if the schema's names are
        numbers, and a position among the schema's names otherwise.
        """
        if not names and not all(map(is_integer, self.class_names)):
            names = self.labels
        known = {name: label for label, name in enumerate(self.labels)}
        present, positions = np.unique(y, return_inverse=True)
        present_names = [names[label] if 0 <= label < len(names) else str(label) for label in present.tolist()]
        labels = np.array([known.get(name, -1) for name in present_names], np.int64)
        return labels[positions.reshape(-1)], [name for name in present_names if name not in known]

    def unknown_class(self, name: str, unknown: Sequence[str]) -> DataError:
        """The error for data `name` with classes that the schema does not have."""
        known = ", ".join(self.labels[:LISTED_NAMES]) + (" …" if len(self.labels) > LISTED_NAMES else "")
        if all(map(is_integer, unknown)) and not all(map(is_integer, self.labels)):
            numbers = quote_names(unknown).replace("'", "")
            return DataError(
                f"data '{name}' has labels {numbers}, but the run's classes have names ({known}): use these"
            )
        classes = ("the class " if len(unknown) == 1 else "the classes ") + quote_names(unknown)
        return DataError(f"data '{name}' has {classes}, which the run does not know (it knows: {known})")

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


def is_integer(name: str) -> bool:
    """True if a name is an integer, such as 3 or -1."""
    return name.removeprefix("-").isdecimal()


def quote_names(names: Sequence[str]) -> str:
    """The names in quotes, for errors; only the first ones if there are many."""
    return ", ".join(f"'{name}'" for name in names[:LISTED_NAMES]) + (" …" if len(names) > LISTED_NAMES else "")


def missing_columns(where: str, missing: Sequence[str], present: Sequence[str]) -> DataError:
    """The error for a table that lacks columns."""
    columns = "column" if len(missing) == 1 else "columns"
    return DataError(f"{where} lacks the {columns} {quote_names(missing)} (it has: {', '.join(present)})")
