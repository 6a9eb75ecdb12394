"""Seen and unseen classes: clients train on the seen ones only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fewer.data.federated import TEST_FRACTION, hold_out_rows
from fewer.data.raw_dataset import RawDataset
from fewer.errors import SettingError

OPTIONS = ("classes", "unseen_classes")
"""Options that every data set accepts."""


def split_seen_unseen(raw: RawDataset, classes: Any = None, unseen_classes: Any = None, name: str = "") -> RawDataset:
    """Moves all samples of `unseen_classes` to the test set.

    If `classes` is given, classes in neither list are dropped. Both are class labels: 3, "0-9" or "0-9,20,30-39".
    Labels do not change.
    """
    merged = raw.merge_test()
    y, rows = merged.y, np.arange(len(merged.y))
    train, test = np.split(rows, [len(raw.y)]) if raw.test else hold_out_rows(raw, rows, TEST_FRACTION)
    present = set(np.unique(y).tolist())
    unseen = _parse_classes("unseen_classes", unseen_classes, present, name) if unseen_classes is not None else set()
    seen = _parse_classes("classes", classes, present, name) if classes is not None else present - unseen
    if overlap := sorted(seen & unseen):
        raise SettingError(f"class {overlap[0]} of data '{name}' is in both classes and unseen_classes")
    if not seen:
        raise SettingError(f"unseen_classes = {unseen_classes} leaves no class of data '{name}' to train on")
    train = train[np.isin(y[train], sorted(seen))]
    test = np.concatenate([test[np.isin(y[test], sorted(seen))], np.flatnonzero(np.isin(y, sorted(unseen)))])
    held_out = merged.select(test)
    return replace(raw.select(train), test=(held_out.x, held_out.y), test_client_ids=held_out.client_ids)


def _parse_classes(option: str, value: Any, present: set[int], name: str) -> set[int]:
    """Parses class labels from a number, a list of numbers, or a string of numbers and ranges."""
    parts = value if isinstance(value, list) else str(value).split(",")
    classes: set[int] = set()
    for part in parts:
        first, dash, last = str(part).strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise SettingError(f"{option} of data '{name}' must be class labels and ranges like 0-9,20, got {value}")
        labels = range(int(first), int(last or first) + 1)  # may be huge: the search below stops at the first gap
        if (missing := next((label for label in labels if label not in present), None)) is not None:
            raise SettingError(f"{option} = {value}, but data '{name}' has no samples of class {missing}")
        classes.update(labels)
    if not classes:
        raise SettingError(f"{option} = {value} of data '{name}' names no class")
    return classes
