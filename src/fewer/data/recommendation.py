"""What users use again and again: their items as classes, numbered for all users together or for each one alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fewer.data.raw_dataset import RawDataset
from fewer.errors import DataError, SettingError

MOST = 100_000
"""Items of a user that may count: so many classes is no small classifier any more."""
HABITS = 0.4, 0.4
"""In `usage`: the chance to use the last service again, and that of the hour's own."""


def of_users(raw: RawDataset, own_classes: bool = False, max_items: int = 0, min_records: int = 0) -> RawDataset:
    """Records in time with an item as class, made a task for each user.

    Of a user's items the first `most` count, in the order in which they first came; records of later ones are left
    out, and then users with fewer than `least` records. 0 leaves out nothing. With `own`, the classes are a user's own
    items in that order: a small classifier serves everyone, but its classes mean something else to each.
    """
    if min(max_items, min_records) < 0 or max_items > MOST:
        raise SettingError(f"most = {max_items}, least = {min_records} (allowed: 0 or more, most up to {MOST:,})")
    assert raw.client_ids is not None and isinstance(raw.x, np.ndarray)
    place = np.empty(len(raw.y), np.int64)
    for user in np.unique(raw.client_ids):
        rows = np.flatnonzero(raw.client_ids == user)
        _, first, which = np.unique(raw.y[rows], return_index=True, return_inverse=True)
        place[rows] = np.argsort(np.argsort(first))[which.reshape(-1)]
    kept = place < (max_items or len(place))
    _, user, counts = np.unique(raw.client_ids[kept], return_inverse=True, return_counts=True)
    kept[kept] = (counts >= min_records)[user.reshape(-1)]
    if not kept.any():
        raise DataError(f"no user has {min_records} records (allowed: a smaller least, or a larger most)")
    raw = replace(raw, x=raw.x[kept], y=raw.y[kept], client_ids=raw.client_ids[kept])
    if not own_classes:
        return raw
    classes = max_items or int(place[kept].max()) + 1
    return replace(raw, y=place[kept], names=tuple(f"item {number}" for number in range(1, classes + 1)))


def usage(users: int = 40, records: int = 60, services: int = 30) -> RawDataset:
    """Generated records of which service a user used, each in an hour: made once and for all, by a fixed seed.

    A user has 3 to 8 services: one for each of four parts of the day. Features are a code of the last service
    and the part of the day.
    """
    draw = np.random.default_rng(0)
    codes = draw.integers(2, size=(services + 1, 12)).astype(np.float32)
    x, y = [], []
    for _ in range(users):
        mine = draw.choice(services, draw.integers(3, 9), replace=False)
        daily = draw.choice(mine, 4)
        last = services  # none yet
        for _ in range(records):
            hour = draw.integers(4)
            x.append(np.concatenate([codes[last], np.eye(4, dtype=np.float32)[hour]]))
            habit = draw.choice(3, p=(*HABITS, 1 - sum(HABITS)))
            last = last if habit == 0 and last < services else daily[hour] if habit == 1 else draw.choice(mine)
            y.append(last)
    client_ids = np.repeat(np.arange(users), records)
    names = tuple(f"service {number}" for number in range(1, services + 1))
    return RawDataset(np.stack(x), np.array(y, np.int64), client_ids=client_ids, names=names, in_time=True)
