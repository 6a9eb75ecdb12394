"""Checks of a user's own data. A note says in one sentence what is suspicious and how to change it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
from torch import Tensor

from fewer.data.raw_dataset import Array, Inputs, RawDataset
from fewer.data.schema import Column, is_integer
from fewer.errors import DataError, SettingError, unknown_name

Channels = Literal["first", "last"]
LABELS = "labels: "
"""Start of the notes about classes, which do not apply to a regression."""
_CHANNELS = (1, 3, 4)
_SMALLEST_IMAGE = 5
_LISTED = 8
_LARGE = 10
"""A typical size of values (root of the mean square) above which training with common learning rates often fails."""
_SCALES = 100
"""Columns of numbers whose standard deviations differ by a larger factor get a note."""
ID_NAME = re.compile(r"(?i:(^|[^a-z])(id|index|uuid|nr|no|number))$|[a-z]I[dD]$")
"""Names of columns that may hold identifiers."""
_CODES = (-99, -999, -9999, 999, 9999, 99999)
"""Numbers that often stand for missing values."""
_LARGEST_EXACT = 2**24
"""Inputs (float32) cannot tell larger integers apart."""
_MISSING = ("", "na", "n/a", "nan", "null", "?", "<na>")


# --- inputs -----------------------------------------------------------------------------------------------------


def arrange_images(x: Array | Tensor, channels: Channels | None, name: str) -> tuple[Array | Tensor, str]:
    """Moves the channels of images (samples × height × width × channels) to the front. Also returns a note or "".

    Without `channels`, a last dimension of 1, 3 or 4 is the channels. It is an error if the first could be, too.
    """
    if channels not in (None, *get_args(Channels)):
        raise unknown_name("channels", str(channels), get_args(Channels))
    if channels == "first" or (channels is None and x.ndim != 4):
        return x, ""
    if x.ndim != 4:
        raise SettingError(f"channels = last needs four dimensions, but inputs of data '{name}' have {x.ndim}")
    _, first, middle, last = x.shape
    size = f"{first}×{middle}×{last}"
    if channels is None and last in _CHANNELS and first in _CHANNELS and middle != last:
        raise DataError(
            f"data '{name}' has inputs of {size}: the first or the last dimension may be the channels; "
            "pass channels=first or channels=last"
        )
    if channels is None and (last not in _CHANNELS or first in _CHANNELS or min(first, middle) < _SMALLEST_IMAGE):
        unusual = first > max(_CHANNELS) and first > last
        return x, f"images: {size} are read as {first} channels; channels=last reads {last}" if unusual else ""
    moved = x.movedim(-1, 1).contiguous() if isinstance(x, Tensor) else np.ascontiguousarray(np.moveaxis(x, -1, 1))
    return moved, "" if channels else f"images: {size} are read as height × width × channels (channels=first if not)"


def check_inputs(raw: RawDataset, channels: Channels | None, name: str) -> RawDataset:
    """Moves the channels of images to the front, and adds notes about inputs."""
    x, test, notes = raw.x, raw.test, list(raw.notes)
    if not isinstance(x, list):
        x, note = arrange_images(x, channels, name)
        if x is not raw.x and test is not None and not isinstance(test[0], list):
            test = arrange_images(test[0], "last", f"{name} (test)")[0], test[1]
        notes += [note] if note else []
    return replace(raw, x=x, test=test, notes=(*notes, *describe_inputs(x)))


def describe_inputs(x: Inputs) -> list[str]:
    """Notes about inputs that may be meant otherwise: gray images without channels, pixels of 0 … 255 not as bytes."""
    if isinstance(x, list) or x.ndim not in (3, 4) or not len(x) or str(x.dtype) in ("uint8", "torch.uint8"):
        return []
    notes = []
    if x.ndim == 3:
        rows, columns = x.shape[1:]
        hint = "images need a dimension for channels: samples × 1 × height × width"
        if rows > columns:
            hint = "for steps × channels, swap the last two dimensions"
        notes.append(f"inputs: {rows}×{columns} floats are series of {rows} channels and {columns} steps ({hint})")
    elif float(x.min()) >= 0 and 1.5 < float(x.max()) <= 255:
        notes.append("images: values up to 255 are used as they are; pass bytes (uint8) to normalize them")
    return notes


def describe_numbers(name: str, values: Array, hint: str = "") -> str:
    """A note on a column of numbers that hardly helps to predict, or ""; `hint` says how to drop it."""
    values = values[~np.isnan(values)]
    if len(np.unique(values)) == 1:
        return f"columns: {name} has the same value in all rows{hint}"
    if note := describe_code(name, values):
        return note
    is_counter = len(values) >= 10 and (np.diff(values) == 1).all()
    is_large = np.abs(values).max() > _LARGEST_EXACT and len(np.unique(values)) == len(values)
    if (values % 1 == 0).all() and (ID_NAME.search(name) or is_counter or is_large):
        return f"columns: {name} may be an identifier, but it is an input{hint}"
    return ""


def describe_code(name: str, values: Array, least: int = 2) -> str:
    """A note on a number, in at least `least` rows, that may stand for missing values; or ""."""
    for code in _CODES:
        count, others = int((values == code).sum()), values[(values != code) & ~np.isnan(values)]
        if count >= least and len(others) and abs(code) > 5 * np.abs(others).max():
            rows = "row" if count == 1 else "rows"
            return f"columns: {name} is {code} in {count} {rows}, which may mean a missing value"
    return ""


def describe_scales(x: Tensor, columns: Sequence[Column]) -> tuple[str, ...]:
    """A note on columns of numbers with very different standard deviations, or with values far from 1."""
    widths = [max(1, len(column.categories)) for column in columns]
    numeric = [(c.name, start) for c, start in zip(columns, np.cumsum([0, *widths]), strict=False) if not c.categories]
    deviations = {name: float(x[:, start].double().std(correction=0)) for name, start in numeric}
    deviations = {name: deviation for name, deviation in deviations.items() if deviation > 0}
    if not deviations:
        return ()
    if max(deviations.values()) <= _SCALES * min(deviations.values()):
        sizes = {name: float(x[:, start].double().square().mean().sqrt()) for name, start in numeric}
        largest = max(sizes, key=sizes.__getitem__)
        if sizes[largest] <= _LARGE:
            return ()
        return (f"columns: {largest} is about {sizes[largest]:.0f} in size, which may not train; try --standardize",)
    large, small = max(deviations, key=deviations.__getitem__), min(deviations, key=deviations.__getitem__)
    factor = f"{deviations[large] / deviations[small]:.0f} times"
    return (f"columns: {large} varies {factor} as much as {small}; --standardize brings all to one scale",)


# --- clients and splits -----------------------------------------------------------------------------------------


def describe_split(x: Inputs, rows: Iterable[int], test_x: Inputs, test_rows: Iterable[int]) -> tuple[str, ...]:
    """A note on test inputs that are equal to training inputs."""
    known, tests = set(_hash_rows(x, rows)), _hash_rows(test_x, test_rows)
    copies = sum(test in known for test in tests)
    return (f"split: {copies} of {len(tests)} test samples are copies of training samples",) if copies else ()


def _hash_rows(x: Inputs, rows: Iterable[int]) -> list[int]:
    if isinstance(x, list):
        return [hash(x[row]) for row in rows]
    array = x.numpy() if isinstance(x, Tensor) else x
    return [hash(array[row].tobytes()) for row in rows]


def describe_clients(client_ids: Array, partition: str) -> tuple[str, ...]:
    """Notes on clients with similar names, and on clients that the partition ignores."""
    notes = [f"clients: {names} are different clients" for names in find_variants(client_ids)]
    if partition != "natural":
        notes.append(f"clients: --partition {partition} ignores those of the data; --partition natural uses them")
    return tuple(notes)


# --- labels -----------------------------------------------------------------------------------------------------


def name_labels(raw: RawDataset) -> RawDataset:
    """Numbers labels such as 3 and 7 from 0, and keeps the old ones as names.

    Labels with small gaps stay: at least half of the classes up to the largest label, and class 0, have samples.
    """
    parts = [raw.y] if raw.test is None else [raw.y, raw.test[1]]
    if raw.class_names or raw.tokens or any(part.ndim != 1 or part.dtype.kind == "f" for part in parts):
        return raw
    present = np.unique(np.concatenate(parts))
    if not len(present) or (present[0] == 0 and present[-1] < 2 * len(present)):
        return raw
    y, *test_y = (np.searchsorted(present, part).astype(np.int64) for part in parts)
    test = None if raw.test is None else (raw.test[0], test_y[0])
    names = tuple(str(label) for label in present.tolist())
    notes = raw.notes
    if len(names) > 1 and describe_many_classes(len(names), sum(map(len, parts))) is None:
        notes += (f"{LABELS}{list_names(names)} are the names of {len(names)} classes, numbered from 0",)
    return replace(raw, y=y, test=test, class_names=names, notes=notes)


def describe_labels(labels: Array, test_labels: Array, class_names: Sequence[str]) -> tuple[str, ...]:
    """Notes about classes: one only, none in training, too few samples, or more than classes usually are."""
    counts = np.bincount(np.concatenate([labels, test_labels]), minlength=len(class_names))
    train = np.bincount(labels, minlength=len(counts))

    def names(chosen: Array) -> str:
        known = [class_names[label] if label < len(class_names) else str(label) for label in chosen.tolist()]
        return f"{'class' if len(known) == 1 else 'classes'} {list_names(known)}"

    notes = []
    if (problem := describe_many_classes(int((counts > 0).sum()), int(counts.sum()))) is not None:
        return (f"{LABELS}{problem} (--loss mse predicts numbers)",)
    notes += [f"{LABELS}{variants} are different classes" for variants in find_variants(np.array(class_names))]
    negative = [name for name in class_names if name.startswith("-") and is_integer(name)]
    if len(negative) == 1 and len(class_names) > 2:
        notes.append(f"{LABELS}{negative[0]} is a class; it may mean a missing label")
    if (train > 0).sum() == 1:
        notes.append(f"{LABELS}all training samples are of {names(np.flatnonzero(train))}; nothing can be learned")
    if (missing := np.flatnonzero(counts == 0)).size:
        notes.append(f"{LABELS}no samples of {names(missing)}")
    if (untrained := np.flatnonzero((counts > 0) & (train == 0))).size:
        notes.append(f"{LABELS}only test samples, no training samples of {names(untrained)}")
    if (single := np.flatnonzero((counts == 1) & (train == 1))).size:
        notes.append(f"{LABELS}a single sample of {names(single)}")
    return tuple(notes)


def is_missing(value: object) -> bool:
    """True for None, NaN, and texts that stand for a missing value. A name may be "none", but not "None"."""
    if isinstance(value, str):
        return value.strip() == "None" or value.strip().casefold() in _MISSING
    return value is None or str(value) in ("nan", "NaT", "<NA>")


def check_missing_labels(y: Array, class_names: Sequence[str], name: str) -> None:
    """Raises DataError if labels are missing. One of `class_names` may be "NA"."""
    if y.dtype.kind not in "UOT":
        return
    missing = [sample for sample, label in enumerate(y.tolist()) if is_missing(label) and label not in class_names]
    if missing:
        first = f"the first is {y[missing[0]]!s:.20}" if str(y[missing[0]]).strip() else "the first is empty"
        raise DataError(
            f"data '{name}' has missing labels ({len(missing)}; {first}, in sample {missing[0]}): drop these samples"
        )


def describe_many_classes(distinct: int, count: int) -> str | None:
    """Says that these are too many distinct values for classes: over 20, and fewer than five samples of each."""
    return f"{distinct} distinct values in {count} samples" if distinct > 20 and 5 * distinct > count else None


def describe_mixed_names(names: Sequence[str]) -> tuple[str, ...]:
    """A note on labels that are partly numbers and partly names."""
    mixed = len({name.removeprefix("-").isdecimal() for name in names}) > 1
    return (f"{LABELS}numbers and names are mixed: {list_names(names)}",) if mixed else ()


def list_names(names: Sequence[str]) -> str:
    """Names separated by commas. Many names are shortened."""
    shown = ", ".join(name or "''" for name in names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown}, … ({len(names)} in total)"


def find_variants(names: Array) -> list[str]:
    """Names that differ only in spaces or in upper and lower case, or are the same number, such as "'A' and 'a'"."""
    groups: dict[str, set[str]] = {}
    for name in map(str, np.unique(names).tolist()):
        key = " ".join(name.casefold().split())
        if number := re.fullmatch(r"([+-]?)0*(\d+)(\.0*)?", key):
            key = number[1] + number[2]
        groups.setdefault(key, set()).add(name)
    return [" and ".join(f"'{name}'" for name in sorted(group)) for group in groups.values() if len(group) > 1]
