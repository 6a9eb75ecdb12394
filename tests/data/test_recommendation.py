"""Recommendation data: classes per user, in order of first use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fewer.data import RawDataset
from fewer.data.recommendation import build_user_tasks, generate_usage
from fewer.data.sources import read
from fewer.errors import DataError, SettingError
from tests.data.formats.files import film_line, write, write_movielens


def records() -> RawDataset:
    y = np.array([7, 2, 7, 5, 2, 9, 7, 7, 1])
    client_ids = np.array([1, 1, 1, 1, 1, 2, 2, 2, 2])
    return RawDataset(
        np.arange(9.0)[:, None], y, client_ids=client_ids, class_names=tuple("abcdefghij"), time_ordered=True
    )


def test_items_are_numbered_per_user_in_order_of_first_use() -> None:
    raw = build_user_tasks(records(), own_classes=True)
    assert (
        raw.y.tolist() == [0, 1, 0, 2, 1, 0, 1, 1, 2]
        and raw.class_names == ("item 1", "item 2", "item 3")
        and raw.time_ordered
    )
    assert build_user_tasks(records()).y.tolist() == records().y.tolist()


def test_later_items_and_users_with_few_records_are_left_out() -> None:
    raw = build_user_tasks(records(), own_classes=True, max_items=2)
    assert np.asarray(raw.x)[:, 0].tolist() == [0, 1, 2, 4, 5, 6, 7] and raw.y.tolist() == [0, 1, 0, 1, 0, 1, 1]
    raw = build_user_tasks(records(), max_items=2, min_records=4)
    assert raw.client_ids is not None and raw.client_ids.tolist() == [1] * 4 and raw.y.tolist() == [7, 2, 7, 2]
    assert (
        len(raw.class_names) == 10
        and len(build_user_tasks(records(), own_classes=True, max_items=40).class_names) == 40
    )
    with pytest.raises(DataError, match="no user has 6 records"):
        build_user_tasks(records(), min_records=6)
    with pytest.raises(SettingError, match="max_items must be 0 to 100,000 and min_records >= 0, got -1 and 0"):
        build_user_tasks(records(), max_items=-1)


def test_movielens_by_genres(tmp_path: Path) -> None:
    write_movielens(tmp_path)
    films = film_line(1, "1995", {1, 5}) + film_line(2, "", {0}) + film_line(3, "1970", {5, 1})
    write(tmp_path / "u.item", films)
    raw = read(f"movielens:{tmp_path}", items="genres")
    assert raw.class_names == ("action + comedy", "unknown") and raw.y.tolist() == [0, 0, 1, 0]
    assert read(f"movielens:{tmp_path}", items="genres", own_classes=True, max_items=1).y.tolist() == [0, 0, 0]
    assert len(read(f"movielens:{tmp_path}", min_records=2).y) == 3
    with pytest.raises(SettingError, match="unknown items of movielens 'genre'"):
        read(f"movielens:{tmp_path}", items="genre")


def test_usage_is_deterministic_and_repetitive() -> None:
    first, second = generate_usage(), generate_usage()
    assert np.array_equal(np.asarray(first.x), np.asarray(second.x)) and np.array_equal(first.y, second.y)
    assert first.client_ids is not None
    items_by_user = [first.y[first.client_ids == user] for user in range(40)]
    assert all(len(user) == 60 and 1 <= len(set(user)) <= 8 for user in items_by_user)
    assert 0.4 < np.mean([np.mean(user[1:] == user[:-1]) for user in items_by_user]) < 0.8
    assert len(read("usage", own_classes=True).class_names) <= 8 < 30 == len(read("usage").class_names)
