"""CSV with a header: numeric and categorical columns, or one column of text."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from fewer.data.checks import (
    ID_NAME,
    describe_code,
    describe_many_classes,
    describe_mixed_names,
    describe_numbers,
    list_names,
)
from fewer.data.federated import TEST_FRACTION, hold_out_rows
from fewer.data.formats.readers import number_labels, read_contents, reader
from fewer.data.raw_dataset import Array, RawDataset
from fewer.data.schema import Column, Schema, missing_columns
from fewer.errors import DataError, SettingError, unknown_name
from fewer.registry import FORMATS

Missing = Literal["mean", "median", "zero", "drop"]
Names = str | Sequence[str]
"""Names of columns: a list, or one text with commas."""
Floats = NDArray[np.float64]
Masks = dict[str, NDArray[np.bool_]]
"""Missing cells by column."""

_MISSING = {"", "na", "n/a", "nan", "null", "none", "?"}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_DECIMAL_COMMA = re.compile(r"[+-]?(\d+,\d*|,\d+)([eE][+-]?\d+)?")
_AMBIGUOUS = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}")
_POINT_GROUP = re.compile(r"[+-]?[1-9]\d{0,2}\.\d{3}")
_GROUPED = re.compile(r"[+-]?\d{1,3}([.,'’ \u00a0\u202f]\d{3})+([.,]\d+)?")
_TIME_NAME = re.compile(r"(?i)(^|[^a-z])(date|time|datetime|timestamp)$")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_INDEX_NAMES = ("", "Unnamed: 0")
"""Names of the column that pandas writes for its index."""


@FORMATS.register("csv")
@reader("CSV with a header")
def read_csv(
    path: Path,
    label: str = "label",
    client: str | None = None,
    text: str | None = None,
    regression: bool | None = None,
    features: Names = (),
    ignore: Names = (),
    categorical: Names = (),
    missing: Missing | None = None,
    time: str | None = None,
    decimal: Literal[".", ","] | None = None,
    encoding: str = "utf-8",
    schema: Schema | None = None,
    keep_unlabeled: bool = False,
) -> RawDataset:
    """A table separated by commas, semicolons or tabs, optionally compressed with gzip.

    `label`, `client`, `text` and `time` name columns. With `text`, that column is the input. Otherwise the inputs are
    all other columns of numbers, or the `features`, without the columns in `ignore`.

    - `categorical` names columns to encode one-hot; `all` means all columns of text.
    - `missing` fills missing values with the mean, median or zero, or drops their rows. Otherwise they are an error.
    - `time` sorts the rows, so that the latest ones are held out for testing.
    - `decimal` is the decimal sign, by default as in the file.
    - `regression` says whether labels are numbers to predict; a regression loss sets it.

    With a `schema`, columns are taken by name as it says. The label may then be absent: `y` is empty. So
    it is with `keep_unlabeled` if some labels are missing: these rows stay.
    """
    if missing not in (None, *get_args(Missing)):
        raise unknown_name("missing", str(missing), get_args(Missing))
    if decimal not in (None, ".", ","):
        raise SettingError(f"decimal must be . or a comma, got '{decimal}'")
    table = _Table.parse(_decode(read_contents(path), encoding, path), path, decimal)
    label, client, text, time = str(label), _name(client), _name(text), _name(time)
    schema_columns = () if schema is None else schema.columns
    has_label = schema is None or label in table.cells
    if schema is not None and has_label:
        unlabeled = table.find_missing(label, bool(regression))
        has_label = not (unlabeled.any() if keep_unlabeled else unlabeled.all())
    roles = [name for name in (label if has_label else None, client, time, text) if name is not None]
    if has_label:
        table.check_names([label], "; pass --data-option label=COLUMN")
    table.check_names(roles)
    columns: list[Column] = []
    notes: list[str] = []
    if text is not None:
        notes += _describe_ignored([name for name in table.cells if name not in roles])
        if empty := table.cells[text].count(""):
            notes.append(f"rows: {empty} of {len(table.rows)} have no text")
    elif schema_columns:
        columns, notes = _match_schema(table, [*roles, label], schema_columns)
    else:
        columns, notes = _choose_columns(table, roles, *map(_split, (features, ignore, categorical)))
    if label in table.cells and not has_label and not unlabeled.all():
        notes.append(f"labels: {unlabeled.sum()} of {len(unlabeled)} are missing, so none are used")
    needed = [name for name in roles if name != text]
    absent = {column.name: table.find_missing(column.name, not column.categories) for column in columns}
    absent |= {name: table.find_missing(name, number=name == label and bool(regression)) for name in needed}
    if missing == "drop":
        table, absent = _drop_rows(table, absent, notes)
    unfilled = [column.name for column in columns if column.fill is None and (missing is None or schema_columns)]
    _check_missing(table, absent, needed, unfilled, "drop" if schema_columns else "mean, median, zero or drop")
    if time is not None:
        times = table.parse_times(time)
        table = table.select(np.array(sorted(range(len(times)), key=times.__getitem__)))
        notes.append(f"split: the latest rows by {time} are the test samples")
    elif schema is None:
        notes += [note for name in table.cells if (note := _describe_time(table, name))]
        notes += [note for name in table.cells if name not in roles and (note := _describe_ids(table, name))]
    targets: Array = np.zeros(0, np.int64)
    class_names: tuple[str, ...] = ()
    if has_label and regression:
        targets = table.parse_numbers(label, is_input=False).astype(np.float32)[:, None]
    elif has_label:
        targets, class_names = _parse_labels(table, label, schema is None and regression is None)
        notes += describe_mixed_names(class_names)
    client_ids = None if client is None else np.array(table.cells[client])
    raw = RawDataset([], targets, client_ids=client_ids, class_names=class_names, time_ordered=time is not None)
    raw = replace(raw, rows=table.rows - 1)
    if text is not None:
        return replace(raw, x=table.cells[text], notes=tuple(notes))
    if not schema_columns:
        train, _ = hold_out_rows(raw, np.arange(len(table.rows)), TEST_FRACTION)
        columns = [replace(column, fill=_compute_fill(table, column, missing, train)) for column in columns]
        notes += [note for column in columns if (note := _describe_column(table, column))]
    else:
        notes += [
            note
            for column in columns
            if not column.categories and (note := describe_code(column.name, table.parse_numbers(column.name), 1))
        ]
    for column in columns:
        if not column.categories and (count := int(np.isnan(table.parse_numbers(column.name)).sum())):
            notes.append(f"columns: missing values of {column.name} ({count}) are replaced by {column.fill:g}")
    x = np.concatenate([_encode(table, column) for column in columns], axis=1)
    return replace(raw, x=x, columns=tuple(columns), notes=tuple(notes))


def _name(value: Any) -> str | None:
    """The name of a column, which the command line may read as a number."""
    return None if value is None else str(value)


def _split(names: Any) -> list[str]:
    return [str(name).strip() for name in (names if isinstance(names, list | tuple) else str(names).split(","))]


# --- parsing ----------------------------------------------------------------------------------------------------


def _decode(content: bytes, encoding: str, path: Path) -> str:
    try:
        return content.decode("utf-8-sig" if encoding in ("utf-8", "utf8") else encoding)
    except LookupError:
        raise SettingError(f"unknown encoding '{encoding}' (allowed: utf-8, cp1252, latin-1, utf-16, …)") from None
    except UnicodeDecodeError as error:
        likely = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "cp1252"
        problem = f"{path} is not {encoding.upper()} text: byte {content[error.start]:#x} at {error.start}"
        raise DataError(f"{problem} (for another encoding: --data-option encoding={likely})") from error


def _is_missing(value: str, number: bool) -> bool:
    """True if a cell has no value. A name may be "none"."""
    return value.casefold() in _MISSING and (number or value.casefold() != "none")


@dataclass
class _Table:
    """Cells by column, without spaces at their ends, and the numbers of the rows in the file."""

    path: Path
    cells: dict[str, list[str]]
    rows: NDArray[np.int64]
    decimal: str | None
    numbers: dict[str, Floats] = field(default_factory=dict)
    """Columns that have been parsed."""

    @classmethod
    def parse(cls, content: str, path: Path, decimal: str | None) -> Self:
        first_line = re.sub(r'"[^"]*"', "", (content.splitlines() or [""])[0])
        sign = re.fullmatch(r"(?i)sep=(.)", first_line)  # Excel's line for the separator
        delimiter = sign[1] if sign else max(",;\t|", key=first_line.count)
        table = csv.reader(StringIO(content, newline=""), delimiter=delimiter, strict=True)
        if sign:
            next(table)
        header = [name.strip() for name in next(table, [])]
        if repeated := next((name for name in header if header.count(name) > 1), None):
            raise DataError(f"{path} has two columns with the same name '{repeated}'")
        if all(map(_NUMBER.fullmatch, header)) and header != [str(number) for number in range(len(header))]:
            raise DataError(f"{path} has numbers in its first line, which must name the columns: {list_names(header)}")
        is_comment = bool(header) and header[0].startswith("#")
        rows = []
        for row in table:
            if is_comment and row and (len(header) == 1 or len(row) != len(header)):
                raise DataError(f"{path} starts with a comment, '{header[0]}' (expected: the names of the columns)")
            if row and len(row) != len(header):
                raise DataError(f"{path}, line {table.line_num} has {len(row)} columns, expected {len(header)}")
            if row:
                rows.append(row)
        if not rows:
            raise DataError(f"{path} has no rows below its header")
        columns = ([cell.strip() for cell in column] for column in zip(*rows, strict=True))
        return cls(path, dict(zip(header, columns, strict=True)), np.arange(1, len(rows) + 1), decimal)

    def select(self, rows: NDArray[np.int64]) -> _Table:
        """The table with these rows only, in this order."""
        cells = {name: [values[row] for row in rows] for name, values in self.cells.items()}
        numbers = {name: values[rows] for name, values in self.numbers.items()}
        return replace(self, cells=cells, rows=self.rows[rows], numbers=numbers)

    def check_names(self, names: Sequence[str], advice: str = "") -> None:
        """Raises DataError if one of the columns does not exist."""
        for name in names:
            if name not in self.cells:
                raise DataError(f"{self.path} has no column '{name}' (it has: {', '.join(self.cells)}){advice}")

    def find_missing(self, name: str, number: bool) -> NDArray[np.bool_]:
        """True for each missing cell of a column."""
        if number and name in self.numbers:
            return np.isnan(self.numbers[name])
        return np.array([_is_missing(value, number) for value in self.cells[name]])

    def is_text(self, name: str) -> bool:
        """True if no cell of a column is a number, and not all are missing."""
        return not any(map(_is_number, self.cells[name])) and not self.is_empty(name)

    def is_index(self, name: str) -> bool:
        """True if a column has the row numbers from 0 or 1, in any order."""
        count = len(self.rows)
        return any(set(self.cells[name]) == set(map(str, range(first, first + count))) for first in (0, 1))

    def is_empty(self, name: str) -> bool:
        """True if all cells of a column are missing."""
        return all(_is_missing(value, True) for value in self.cells[name])

    def parse_numbers(self, name: str, is_input: bool = True) -> Floats:
        """The numbers of a column; NaN if missing. Any other text is an error."""
        if name not in self.numbers:
            numbers = self._parse_numbers(name, is_input)
            self._check_points(name, numbers)
            self.numbers[name] = numbers
        return self.numbers[name]

    def _check_points(self, name: str, numbers: Floats) -> None:
        """Raises DataError if points may separate thousands: 1.623 between integers of 100 … 999."""
        pointed = [row for row, value in enumerate(self.cells[name]) if "." in value]
        if self.decimal or not pointed or not all(_POINT_GROUP.fullmatch(self.cells[name][row]) for row in pointed):
            return
        integers = np.abs(np.delete(numbers, pointed))
        if 100 <= np.nanmax(integers, initial=0) < 1000:
            problem = f"may have a thousands separator: '{self.cells[name][pointed[0]]}' in a column with integers"
            hint = "remove it, or pass --data-option decimal=. if it is a decimal point"
            raise self.error(name, pointed[0], f"{problem}; {hint}")

    def _parse_numbers(self, name: str, is_input: bool) -> Floats:
        values = self.cells[name]
        unusual = "_nN." if self.decimal == "," else "_nN"  # 1_000, nan, inf
        if not set(unusual) & set("".join(values)):
            with suppress(ValueError):
                return np.array(values).astype(np.float64)
        present = [(row, value) for row, value in enumerate(values) if not _is_missing(value, True)]
        commas = [_DECIMAL_COMMA.fullmatch(value) is not None for _, value in present]
        if any(commas) and (self.decimal == "." or (self.decimal is None and self._is_ambiguous(present, commas))):
            row, value = present[commas.index(True)]
            hint = "" if self.decimal else ", or pass --data-option decimal=, if it is a decimal comma"
            raise self.error(name, row, f"may have a thousands separator: '{value}'; remove it{hint}")
        numbers = np.full(len(values), np.nan)
        for (row, value), comma in zip(present, commas, strict=True):
            if not (comma or _NUMBER.fullmatch(value)) or ("." in value and (any(commas) or self.decimal == ",")):
                raise self.error(name, row, self._describe_cell(name, value, is_input))
            numbers[row] = float(value.replace(",", "."))
        return numbers

    def parse_times(self, name: str) -> Sequence[Any]:
        """The times of a column: numbers, or dates in ISO format."""
        values = self.cells[name]
        if all(map(_NUMBER.fullmatch, values)):
            return [float(value) for value in values]
        times: list[datetime] = []
        for row, value in enumerate(values):
            try:
                times.append(datetime.fromisoformat(value))
                _ = times[0] <= times[-1]
            except (ValueError, TypeError):
                raise self.error(name, row, f"is '{value}' (allowed: numbers, or dates like 2024-12-31)") from None
        return times

    def has_dates(self, name: str) -> bool:
        """True if all cells of a column are dates in ISO format."""
        if not all(map(_DATE.match, self.cells[name])):
            return False
        try:
            return bool(self.parse_times(name))
        except DataError:
            return False

    def check_decimal_signs(self, names: Sequence[str]) -> None:
        """Raises DataError if some columns have decimal commas and others points, which may separate thousands."""
        signs = {name: set("".join(self.cells[name])) for name in names}
        comma = next((name for name in names if "," in signs[name]), None)
        for name in names if comma is not None else ():
            if "." in signs[name]:
                row, value = next((row, value) for row, value in enumerate(self.cells[name]) if "." in value)
                raise self.error(name, row, f"is '{value}', but column '{comma}' has decimal commas; use one sign")

    def _is_ambiguous(self, present: Sequence[tuple[int, str]], commas: Sequence[bool]) -> bool:
        cells = [value for (_, value), comma in zip(present, commas, strict=True) if comma]
        return all(map(_AMBIGUOUS.fullmatch, cells))

    def _describe_cell(self, name: str, value: str, is_input: bool) -> str:
        if _GROUPED.fullmatch(value):
            return f"has a thousands separator: '{value}'; remove it"
        if _NUMBER.fullmatch(value):
            return f"is '{value}', but the column has decimal commas; use one sign"
        hint = f"--data-option ignore={name} drops the column, categorical={name} encodes it"
        return f"is not a number: '{value}' ({hint if is_input else 'a regression predicts numbers'})"

    def error(self, name: str, row: int, problem: str) -> DataError:
        """The error of one cell."""
        return DataError(f"{self.path}, column '{name}', row {self.rows[row]} {problem}")


def _is_number(value: str) -> bool:
    return any(pattern.fullmatch(value) for pattern in (_NUMBER, _DECIMAL_COMMA, _GROUPED))


def _parse_labels(table: _Table, label: str, check_count: bool) -> tuple[Array, tuple[str, ...]]:
    """Class labels and their names. With `check_count`, values that are hardly classes are an error."""
    values = table.cells[label]
    if all(_NUMBER.fullmatch(value) or _DECIMAL_COMMA.fullmatch(value) for value in values):
        values = [value.replace(",", ".") for value in values]
    distinct = len(set(values))
    if check_count and describe_many_classes(distinct, len(values)):
        raise DataError(
            f"{table.path}, column '{label}' has {distinct} distinct values in {len(values)} rows: pass --loss mse for "
            "a regression, or --data-option regression=false if these are classes"
        )
    return number_labels(values, f"{table.path}, column '{label}',")


# --- columns ----------------------------------------------------------------------------------------------------


def _choose_columns(
    table: _Table, roles: Sequence[str], features: list[str], ignore: list[str], categorical: list[str]
) -> tuple[list[Column], list[str]]:
    """The columns that become inputs, and notes about all columns."""
    features, ignore, categorical = ([name for name in names if name] for names in (features, ignore, categorical))
    if features and ignore:
        raise SettingError("features and ignore cannot be combined: features names all inputs")
    if categorical == ["all"] and "all" not in table.cells:
        categorical = [name for name in table.cells if name not in roles and table.is_text(name)]
    table.check_names([*features, *ignore, *categorical])
    for name in (*features, *categorical):
        if name in roles:
            raise SettingError(f"column '{name}' cannot be an input: it is the label, client or time")
    candidates = [name for name in table.cells if name not in (*roles, *ignore)]
    index = [name for name in candidates if name in _INDEX_NAMES and not features and not table.is_empty(name)]
    for name in index:
        if not table.is_index(name):
            where = f"{table.path}, column {list(table.cells).index(name) + 1}"
            allowed = f"name it, or pass --data-option 'ignore={name}'" if name else "name it"
            raise DataError(f"{where} has no name, and its cells are not row numbers: {allowed}")
    chosen = [name for name in candidates if name in (features or candidates) and name not in index]
    columns, texts, empty = [], [], []
    for name in chosen:
        if name in categorical:
            values = {value for value in table.cells[name] if not _is_missing(value, False)}
            columns.append(Column(name, tuple(sorted(values))))
        elif table.is_empty(name):
            empty.append(name)
        elif table.is_text(name):
            texts.append(name)
        else:
            table.parse_numbers(name)
            columns.append(Column(name))
    hint = f"text; --data-option categorical={','.join(texts)} makes them inputs"
    if features and texts:
        raise DataError(f"{table.path} has features that are not numbers: {list_names(texts)} ({hint})")
    if not columns:
        names = ", ".join(candidates) or "only the label"
        raise DataError(f"{table.path} has no column of numbers (it has: {names})")
    table.check_decimal_signs([column.name for column in columns if not column.categories])
    inputs = [f"{c.name} ({len(c.categories)} categories)" if c.categories else c.name for c in columns]
    notes = [f"columns: the inputs are {list_names(inputs)}; the label is {roles[0]}"]
    notes += _describe_ignored(texts, hint) + _describe_ignored(empty, "empty")
    others = [name for name in table.cells if name not in (*roles, *chosen, *index)]
    return columns, notes + _describe_ignored(index, "row numbers") + _describe_ignored(others)


def _match_schema(table: _Table, roles: Sequence[str], columns: Sequence[Column]) -> tuple[list[Column], list[str]]:
    """The columns of a schema, found by name, and notes about the others."""
    names = [column.name for column in columns]
    if missing := [name for name in names if name not in table.cells]:
        raise missing_columns(str(table.path), missing, list(table.cells))
    for column in columns:
        if not column.categories:
            table.parse_numbers(column.name)
            continue
        for row, value in enumerate(table.cells[column.name]):
            if value not in column.categories and not _is_missing(value, False):
                known = list_names(column.categories)
                raise table.error(column.name, row, f"has the unknown category '{value}' (known: {known})")
    table.check_decimal_signs([column.name for column in columns if not column.categories])
    others = [name for name in table.cells if name not in (*names, *roles)]
    return list(columns), _describe_ignored(others, "not used by the model")


def _describe_ignored(names: Sequence[str], reason: str = "") -> list[str]:
    return [f"columns: ignored {list_names(names)}" + (f" ({reason})" if reason else "")] if names else []


def _describe_column(table: _Table, column: Column) -> str:
    """A note on a column that hardly helps to predict, or ""."""
    name, hint = column.name, f"--data-option ignore={column.name} drops it"
    if column.categories:
        problem = describe_many_classes(len(column.categories), len(table.rows))
        return f"columns: the categories of {name} are {problem}; {hint}" if problem else ""
    return describe_numbers(name, table.parse_numbers(name), f"; {hint}")


def _describe_ids(table: _Table, name: str) -> str:
    """A note on repeated identifiers, whose rows the split does not keep together, or ""."""
    distinct = set(table.cells[name])
    repeated = len(table.rows) - len(distinct)
    is_text = len(distinct) > 20 and table.is_text(name) and not table.has_dates(name)
    is_id = ID_NAME.search(name) or (is_text and all(re.search(r"\d", value) for value in distinct))
    if not repeated or not is_id:
        return ""
    return f"split: {name} has {repeated} repeated values, whose rows may be both training and test samples"


def _describe_time(table: _Table, name: str) -> str:
    """A note on a column of times that the split ignores, or ""."""
    if not _TIME_NAME.search(name) and not table.has_dates(name):
        return ""
    try:
        is_sorted = all(first <= second for first, second in pairwise(table.parse_times(name)))
    except DataError:
        is_sorted = True
    order = "" if is_sorted else " (rows are not sorted by it)"
    return f"split: test samples are random, not the latest by {name}{order}; --data-option time={name} tests on these"


def _drop_rows(table: _Table, absent: Masks, notes: list[str]) -> tuple[_Table, Masks]:
    """Drops all rows with missing values."""
    drop = np.logical_or.reduce(list(absent.values()))
    if drop.all():
        raise DataError(f"{table.path} has missing values in all rows, so missing = drop keeps none")
    if drop.any():
        notes.append(f"rows: {drop.sum()} of {len(drop)} are dropped because values are missing")
    return table.select(np.flatnonzero(~drop)), {name: mask[~drop] for name, mask in absent.items()}


def _check_missing(table: _Table, absent: Masks, roles: Sequence[str], unfilled: Sequence[str], allowed: str) -> None:
    """Raises DataError for missing values that nothing replaces."""
    found = [name for name in (*roles, *unfilled) if absent[name].any()]
    if found:
        mask = absent[found[0]]
        others = f"; so have {list_names(found[1:])}" if len(found) > 1 else ""
        problem = f"has missing values ({mask.sum()}, the first in row {table.rows[np.argmax(mask)]}){others}"
        allowed = "drop" if found[0] in roles else allowed
        raise DataError(f"{table.path}, column '{found[0]}' {problem}: pass --data-option missing={allowed}")


def _compute_fill(table: _Table, column: Column, missing: str | None, train: NDArray[np.int64]) -> float | None:
    """What replaces missing values, from training rows alone."""
    if missing in (None, "drop"):
        return None
    if missing == "zero" or column.categories:
        return 0.0
    values = table.parse_numbers(column.name)[train]
    values = values[~np.isnan(values)]
    if not len(values):
        raise DataError(
            f"{table.path}, column '{column.name}' has no values in the training rows to compute the {missing}"
        )
    return float(np.mean(values) if missing == "mean" else np.median(values))


def _encode(table: _Table, column: Column) -> NDArray[np.float32]:
    """The inputs of a column (rows × 1, or rows × categories)."""
    if column.categories:
        values = np.array(table.cells[column.name])
        one_hot: NDArray[np.float32] = (values[:, None] == np.array(column.categories)).astype(np.float32)
        return one_hot
    numbers = table.parse_numbers(column.name)
    with np.errstate(over="ignore"):
        inputs = np.where(np.isnan(numbers), column.fill or 0.0, numbers).astype(np.float32)
    if not np.isfinite(inputs).all():
        raise table.error(column.name, int(np.argmin(np.isfinite(inputs))), "is not a finite number")
    return inputs[:, None]
