"""CSV with a header: numbers as features, or one column of texts."""

from __future__ import annotations

import csv as lines
from io import StringIO
from pathlib import Path

import numpy as np

from fewer.data.formats.readers import contents, numbered, reader
from fewer.data.formats.readers import text as decoded
from fewer.data.raw_dataset import Array, Inputs, RawDataset
from fewer.errors import DataError
from fewer.registry import FORMATS


@FORMATS.register("csv")
@reader("CSV with a header")
def csv(path: Path, label: str = "label", client: str | None = None, text: str | None = None) -> RawDataset:
    """A table separated by commas, semicolons or tabs, packed with gzip or not.

    `label`, `client` and `text` name columns. With `text` that column is the input; otherwise all other columns
    whose first value is a number are features.
    """
    header, rows = _table(decoded(contents(path), path), path)
    for name in (label, client, text):
        if name is not None and name not in header:
            raise DataError(f"{path} has no column '{name}' (it has: {', '.join(header)})")
    columns = dict(zip(header, zip(*rows, strict=True), strict=True))
    y, names = numbered(columns.pop(label), f"{path}, column '{label}',")
    owners = None if client is None else np.array(columns.pop(client))
    x: Inputs = _features(columns, path) if text is None else list(columns[text])
    return RawDataset(x, y, client_ids=owners, names=names)


def _table(content: str, path: Path) -> tuple[list[str], list[list[str]]]:
    first = content.partition("\n")[0]
    table = lines.reader(StringIO(content, newline=""), delimiter=max(",;\t", key=first.count), strict=True)
    header = next(table, [])
    if len(set(header)) < len(header):
        raise DataError(f"{path} has two columns of the same name")
    rows = []
    for row in table:
        if row and len(row) != len(header):
            raise DataError(f"{path}, line {table.line_num} has {len(row)} columns where {len(header)} belong")
        if row:
            rows.append(row)
    if not rows:
        raise DataError(f"{path} has no rows below its header")
    return header, rows


def _features(columns: dict[str, tuple[str, ...]], path: Path) -> Array:
    numeric = {name: values for name, values in columns.items() if _is_number(values[0])}
    if not numeric:
        raise DataError(f"{path} has no column of numbers (it has: {', '.join(columns) or 'none besides the label'})")
    x = np.empty((len(next(iter(numeric.values()))), len(numeric)), np.float32)
    for place, (name, values) in enumerate(numeric.items()):
        try:
            x[:, place] = values
        except ValueError:
            wrong = next(row for row, value in enumerate(values) if not _is_number(value))
            raise DataError(
                f"{path}, column '{name}', row {wrong + 1} is '{values[wrong]}' (allowed: numbers)"
            ) from None
    if not np.isfinite(x).all():
        row, place = np.argwhere(~np.isfinite(x))[0]
        raise DataError(f"{path}, column '{list(numeric)[place]}', row {row + 1} is not a finite number")
    return x


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
