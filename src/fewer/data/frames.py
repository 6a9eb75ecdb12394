"""pandas DataFrames as inputs: columns by name, checked as those of a CSV are. pandas itself is not imported."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewer.data.checks import describe_numbers, is_missing, list_names
from fewer.data.schema import Column, missing_columns
from fewer.errors import DataError


def is_frame(x: Any) -> bool:
    """True for a pandas DataFrame. DataError for a table of another library."""
    if hasattr(x, "columns") and not hasattr(x, "iloc"):
        raise DataError(
            f"inputs are a {type(x).__module__.partition('.')[0]} table: pass a pandas DataFrame or an array"
        )
    return hasattr(x, "columns")


def columns_of(x: Any, name: str) -> tuple[Column, ...]:
    """The columns of a DataFrame, all of them numbers; none for other inputs."""
    if not is_frame(x):
        return ()
    names = [str(column) for column in x.columns]
    if repeated := next((column for column in names if names.count(column) > 1), None):
        raise DataError(f"data '{name}' has two columns with the same name '{repeated}'")
    return tuple(map(Column, names))


def encode_frame(x: Any, columns: Sequence[Column], name: str) -> Any:
    """The inputs of a DataFrame for these columns, which are found by name. Other inputs stay as they are."""
    if not columns or not is_frame(x):
        return x
    by_name = {column.name: column for column in columns_of(x, name)}
    if missing := [column.name for column in columns if column.name not in by_name]:
        raise missing_columns(f"data '{name}'", missing, list(by_name))
    positions = {str(column): position for position, column in enumerate(x.columns)}
    parts = [_encode_column(x.iloc[:, positions[column.name]], column, name) for column in columns]
    with np.errstate(over="ignore"):
        return np.concatenate(parts, axis=1).astype(np.float32)


def _encode_column(series: Any, column: Column, name: str) -> NDArray[np.float64]:
    """The inputs of a column (rows × 1, or rows × categories)."""
    where = f"data '{name}', column '{column.name}'"
    if column.categories:
        values = ["" if is_missing(value) else str(value).strip() for value in series.tolist()]
        if unknown := sorted({*values} - {*column.categories, ""}):
            raise DataError(f"{where} has the unknown category '{unknown[0]}' (known: {list_names(column.categories)})")
        _check_filled(np.array([not value for value in values]), column, where)
        return np.array([[float(value == category) for category in column.categories] for value in values])
    if not _has_numbers(series):
        raise DataError(f"{where} has no numbers, but {_describe_type(series)}: drop or convert it")
    numbers: NDArray[np.float64] = np.array(series.to_numpy(dtype=np.float64, na_value=np.nan))
    _check_filled(np.isnan(numbers), column, where)
    return np.where(np.isnan(numbers), column.fill or 0.0, numbers)[:, None]


def _check_filled(missing: NDArray[np.bool_], column: Column, where: str) -> None:
    if missing.any() and column.fill is None:
        raise DataError(f"{where} has missing values ({missing.sum()}, the first in row {int(missing.argmax())})")


def _has_numbers(series: Any) -> bool:
    kind = getattr(series.dtype, "kind", "O")
    if kind == "O" and str(series.dtype) == "object":
        values = [value for value in series.tolist() if not is_missing(value)]
        return all(isinstance(value, Real) and not isinstance(value, bool | np.bool_) for value in values)
    return kind in "iuf"


def _describe_type(series: Any) -> str:
    kinds = {"b": "True and False", "M": "dates", "m": "durations"}
    values = series.tolist()
    return kinds.get(getattr(series.dtype, "kind", "O"), f"values such as {values[0]!r}" if values else "text")


def describe_frame(x: Any, columns: Sequence[Column]) -> tuple[str, ...]:
    """Notes on columns that hardly help to predict: constants, identifiers, codes of missing values."""
    if not is_frame(x):
        return ()
    series = {column.name: x.iloc[:, index].to_numpy(dtype=np.float64) for index, column in enumerate(columns)}
    return tuple(note for name, values in series.items() if (note := describe_numbers(name, values)))


def check_index(x: Any, y: Any, name: str) -> None:
    """Raises DataError if inputs and labels are of pandas, and their rows have other names or another order."""
    if is_frame(x) and hasattr(y, "index") and hasattr(y, "iloc") and len(x) == len(y) and not x.index.equals(y.index):
        raise DataError(
            f"data '{name}' has labels with another index than its inputs: pass y.loc[x.index], or an array"
        )
