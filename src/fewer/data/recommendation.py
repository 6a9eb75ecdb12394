"""Recommendation tasks: the items that users choose are the classes, numbered globally or per user."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fewer.data.raw_dataset import RawDataset
from fewer.errors import DataError, SettingError

MAX_ITEMS = 100_000
"""Upper limit of `max_items`. With more classes, the classifier would no longer be small."""
MAX_LAST_ITEMS = 1000
"""The largest number of items for `last_item`, which adds a feature for each."""
HABIT_PROBABILITIES = 0.4, 0.4
"""Probabilities in `generate_usage`: to repeat the last service, and to choose the usual one for the time of day."""


def build_user_tasks(
    raw: RawDataset, own_classes: bool = False, max_items: int = 0, min_records: int = 0, last_item: bool = False
) -> RawDataset:
    """Turns time-ordered records, labeled by item, into one task per user.

    Only a user's first `max_items` items count, in order of first appearance; records of later items are dropped.
    Users left with fewer than `min_records` records are dropped too. 0 disables either filter.

    `own_classes` relabels each user's items by that order. One small classifier then serves everyone, but its classes
    mean something different to each user.

    `last_item` adds features: the class of the user's record before, one-hot (all 0 in the first record). Other
    features describe an item. Only with these can a model learn that users repeat their last item, whichever it is.
    """
    if min(max_items, min_records) < 0 or max_items > MAX_ITEMS:
        raise SettingError(
            f"max_items must be 0 to {MAX_ITEMS:,} and min_records >= 0, got {max_items} and {min_records}"
        )
    assert raw.client_ids is not None and isinstance(raw.x, np.ndarray)
    item_rank = np.empty(len(raw.y), np.int64)
    for user in np.unique(raw.client_ids):
        rows = np.flatnonzero(raw.client_ids == user)
        _, first, item = np.unique(raw.y[rows], return_index=True, return_inverse=True)
        item_rank[rows] = np.argsort(np.argsort(first))[item.reshape(-1)]
    selected = item_rank < (max_items or len(item_rank))
    _, user, counts = np.unique(raw.client_ids[selected], return_inverse=True, return_counts=True)
    selected[selected] = (counts >= min_records)[user.reshape(-1)]
    if not selected.any():
        raise DataError(f"no user has {min_records} records; lower min_records or raise max_items")
    raw = raw.select(np.flatnonzero(selected))
    if own_classes:
        classes = max_items or int(item_rank[selected].max()) + 1
        names = tuple(f"item {number}" for number in range(1, classes + 1))
        raw = replace(raw, y=item_rank[selected], class_names=names)
    return _add_last_item(raw) if last_item else raw


def _add_last_item(raw: RawDataset) -> RawDataset:
    """Adds a feature for each class: 1 if it is the class of the user's record before."""
    assert raw.client_ids is not None and isinstance(raw.x, np.ndarray)
    if (classes := len(raw.class_names)) > MAX_LAST_ITEMS:
        raise SettingError(
            f"last_item adds a feature for each of {classes:,} items (allowed: up to {MAX_LAST_ITEMS:,}); "
            "set own_classes and max_items"
        )
    rows = np.argsort(raw.client_ids, kind="stable")  # of one user after the other, in order of time
    before, after = rows[:-1], rows[1:]
    same_user = raw.client_ids[before] == raw.client_ids[after]
    last_item = np.zeros((len(rows), classes), raw.x.dtype)
    last_item[after[same_user], raw.y[before[same_user]]] = 1
    return replace(raw, x=np.concatenate([raw.x, last_item], axis=1))


def generate_usage(users: int = 40, records: int = 60, services: int = 30) -> RawDataset:
    """Generates records of the services that users choose, from a fixed seed.

    A user has 3 to 8 services, and a usual one for each of four times of day. The features are a binary code of the
    last service and the time of day (one-hot).
    """
    rng = np.random.default_rng(0)
    codes = rng.integers(2, size=(services + 1, 12)).astype(np.float32)
    x, y = [], []
    for _ in range(users):
        user_services = rng.choice(services, rng.integers(3, 9), replace=False)
        usual = rng.choice(user_services, 4)
        last = services  # no service yet
        for _ in range(records):
            period = rng.integers(4)
            x.append(np.concatenate([codes[last], np.eye(4, dtype=np.float32)[period]]))
            habit = rng.choice(3, p=(*HABIT_PROBABILITIES, 1 - sum(HABIT_PROBABILITIES)))
            last = (
                last if habit == 0 and last < services else usual[period] if habit == 1 else rng.choice(user_services)
            )
            y.append(last)
    inputs, labels, client_ids = np.stack(x), np.array(y, np.int64), np.repeat(np.arange(users), records)
    class_names = tuple(f"service {number}" for number in range(1, services + 1))
    return RawDataset(inputs, labels, client_ids=client_ids, class_names=class_names, time_ordered=True)
