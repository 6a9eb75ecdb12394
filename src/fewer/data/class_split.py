"""Classes set apart: some that clients train on, others that they never meet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewer.data.federated import TEST_SHARE, hold_out
from fewer.data.raw_dataset import Inputs, RawDataset
from fewer.errors import SettingError

OPTIONS = ("classes", "unseen_classes")
"""Options that all data has."""
Rows = NDArray[np.int64]


def set_apart(raw: RawDataset, classes: Any = None, unseen: Any = None, name: str = "") -> RawDataset:
    """The same data without samples of `unseen` classes to train on: all of these are for testing.

    Of the other classes only `classes` are kept, if they are named. Both are class numbers: 3, "0-9" or "0-9,20,30-39".
    Labels keep their numbers.
    """
    x, y, owners = raw.x, raw.y, raw.client_ids
    if raw.test is None:
        train, test = hold_out(raw, np.arange(len(y)), TEST_SHARE)
    else:
        train, test = np.arange(len(y)), len(y) + np.arange(len(raw.test[1]))
        x, y = _joined(x, raw.test[0]), np.concatenate([y, raw.test[1]])
        known = raw.client_ids is not None and raw.test_client_ids is not None
        owners = np.concatenate([raw.client_ids, raw.test_client_ids]) if known else None
    there = set(np.unique(y).tolist())
    away = _numbers("unseen_classes", unseen, there, name) if unseen is not None else set()
    kept = _numbers("classes", classes, there, name) if classes is not None else there - away
    if both_ways := sorted(kept & away):
        raise SettingError(f"class {both_ways[0]} of data '{name}' is both in classes and unseen")
    if not kept:
        raise SettingError(f"unseen = {unseen} leaves no class of data '{name}' to train on")
    train = train[np.isin(y[train], sorted(kept))]
    test = np.concatenate([test[np.isin(y[test], sorted(kept))], np.flatnonzero(np.isin(y, sorted(away)))])
    return replace(
        raw,
        x=_rows(x, train),
        y=y[train],
        test=(_rows(x, test), y[test]),
        client_ids=None if raw.client_ids is None else raw.client_ids[train],
        test_client_ids=None if owners is None else owners[test],
    )


def _numbers(what: str, given: Any, there: set[int], name: str) -> set[int]:
    """Class numbers from a number, a list of them, or a text of numbers and ranges."""
    parts = given if isinstance(given, list) else str(given).split(",")
    found: set[int] = set()
    for part in parts:
        first, dash, last = str(part).strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise SettingError(f"{what} = {given} of data '{name}' (allowed: class numbers and ranges, as 0-9,20)")
        wanted = range(int(first), int(last or first) + 1)  # however long: it ends at the first that is not there
        if (odd := next((label for label in wanted if label not in there), None)) is not None:
            raise SettingError(f"{what} = {given}, but data '{name}' has no samples of class {odd}")
        found.update(wanted)
    if not found:
        raise SettingError(f"{what} = {given} of data '{name}' names no class")
    return found


def _joined(x: Inputs, more: Inputs) -> Inputs:
    return x + list(more) if isinstance(x, list) else np.concatenate([np.asarray(x), np.asarray(more)])


def _rows(x: Inputs, rows: Rows) -> Inputs:
    return [x[row] for row in rows] if isinstance(x, list) else x[rows]
