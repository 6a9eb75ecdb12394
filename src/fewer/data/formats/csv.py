"""CSV with a header: numeric features, or one column of text."""

from __future__ import annotations

import csv
from io import StringIO
from pathlib import Path

import numpy as np

from fewer.data.formats.readers import decode_text, number_labels, read_contents, reader
from fewer.data.raw_dataset import Array, RawDataset
from fewer.data.schema import Column, Schema, missing_columns
from fewer.errors import DataError
from fewer.registry import FORMATS


@FORMATS.register("csv")
@reader("CSV with a header")
def read_csv(
    path: Path,
    label: str = "label",
    client: str | None = None,
    text: str | None = None,
    regression: bool = False,
    schema: Schema | None = None,
) -> RawDataset:
    """A table separated by commas, semicolons or tabs, optionally compressed with gzip.

    `label`, `client` and `text` name columns. With `text`, that column is the input. Otherwise all other columns whose
    first value is a number are features. With `regression`, labels are numbers to predict; a regression loss sets it.
    With a schema, its columns are taken by name, and the label may be absent.
    """
    header, rows = _parse_table(decode_text(read_contents(path), path), path)
    for name in (label, client, text):
        if name is not None and name not in header and not (schema and name == label):
            raise DataError(f"{path} has no column '{name}' (it has: {', '.join(header)})")
    columns = dict(zip(header, zip(*rows, strict=True), strict=True))
    labels = columns.pop(label, ())
    targets: Array = np.zeros(0, np.int64)
    class_names: tuple[str, ...] = ()
    if not labels:
        pass
    elif regression:
        targets = _parse_features({label: labels}, path)
    else:
        targets, class_names = number_labels(labels, f"{path}, column '{label}',")
    client_ids = None if client is None else np.array(columns.pop(client))
    if text is not None:
        return RawDataset(list(columns[text]), targets, client_ids=client_ids, class_names=class_names)
    if schema and schema.columns:
        if missing := [column.name for column in schema.columns if column.name not in columns]:
            raise missing_columns(str(path), missing, header)
        columns = {column.name: columns[column.name] for column in schema.columns}
    used = tuple(Column(name) for name, values in columns.items() if _is_number(values[0]))
    return RawDataset(
        _parse_features(columns, path), targets, client_ids=client_ids, class_names=class_names, columns=used
    )


def _parse_table(content: str, path: Path) -> tuple[list[str], list[list[str]]]:
    first_line = content.partition("\n")[0]
    table = csv.reader(StringIO(content, newline=""), delimiter=max(",;\t", key=first_line.count), strict=True)
    header = next(table, [])
    if len(set(header)) < len(header):
        raise DataError(f"{path} has two columns with the same name")
    rows = []
    for row in table:
        if row and len(row) != len(header):
            raise DataError(f"{path}, line {table.line_num} has {len(row)} columns, expected {len(header)}")
        if row:
            rows.append(row)
    if not rows:
        raise DataError(f"{path} has no rows below its header")
    return header, rows


def _parse_features(columns: dict[str, tuple[str, ...]], path: Path) -> Array:
    numeric = {name: values for name, values in columns.items() if _is_number(values[0])}
    if not numeric:
        raise DataError(f"{path} has no column of numbers (it has: {', '.join(columns) or 'only the label'})")
    x = np.empty((len(next(iter(numeric.values()))), len(numeric)), np.float32)
    for column, (name, values) in enumerate(numeric.items()):
        try:
            x[:, column] = values
        except ValueError:
            row = next(row for row, value in enumerate(values) if not _is_number(value))
            raise DataError(f"{path}, column '{name}', row {row + 1} is not a number: '{values[row]}'") from None
    if not np.isfinite(x).all():
        row, column = np.argwhere(~np.isfinite(x))[0]
        raise DataError(f"{path}, column '{list(numeric)[column]}', row {row + 1} is not a finite number")
    return x


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
