"""Recommendation data: classes per user, in order of first use."""

from __future__ import annotations

from dataclasses import replace
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


def test_the_last_item_is_a_feature_in_the_numbering_of_the_classes() -> None:
    raw = build_user_tasks(records(), own_classes=True, max_items=2, last_item=True)
    x = np.asarray(raw.x)
    assert (
        x.shape == (7, 1 + 2) and x[:, 0].tolist() == [0, 1, 2, 4, 5, 6, 7] and raw.y.tolist() == [0, 1, 0, 1, 0, 1, 1]
    )
    assert x[:, 1:].tolist() == [[0, 0], [1, 0], [0, 1], [1, 0], [0, 0], [1, 0], [0, 1]]
    mixed = records().select(np.array([5, 0, 6, 1, 7, 2, 8]))  # the rows of two users in turn
    x = np.asarray(build_user_tasks(mixed, last_item=True).x)
    assert x.shape == (7, 11) and [np.flatnonzero(row[1:]).tolist() for row in x] == [[], [], [9], [7], [7], [2], [7]]
    many = records()
    with pytest.raises(
        SettingError, match=r"last_item adds a feature for each of 1,001 items \(allowed: up to 1,000\)"
    ):
        build_user_tasks(replace(many, class_names=("item",) * 1001), last_item=True)


def test_recency_can_be_learned_only_with_the_last_item() -> None:
    """A user repeats the last item half of the time. The own number of that item makes this visible to one model."""
    rng = np.random.default_rng(0)
    choices = rng.integers(5, size=(2, 30, 40))
    for step in range(1, 40):
        repeated = rng.random((2, 30)) < 0.6
        choices[:, :, step][repeated] = choices[:, :, step - 1][repeated]
    features = np.zeros((30 * 40, 1), np.float32)
    users = [
        RawDataset(features, part.ravel(), None, np.repeat(np.arange(30), 40), class_names=tuple("abcde"))
        for part in choices
    ]
    train, new = (build_user_tasks(raw, own_classes=True, last_item=True) for raw in users)
    weights = np.linalg.lstsq(np.asarray(train.x), np.eye(5)[train.y], rcond=None)[0]  # one linear model of all users
    predicted = (np.asarray(new.x) @ weights).argmax(1)
    assert (predicted == new.y).mean() > 0.6
    train, new = (build_user_tasks(raw, own_classes=True) for raw in users)
    most_used = np.bincount(train.y).argmax()
    assert (new.y == most_used).mean() < 0.3


def test_movielens_by_genres(tmp_path: Path) -> None:
    write_movielens(tmp_path)
    films = film_line(1, "1995", {1, 5}) + film_line(2, "", {0}) + film_line(3, "1970", {5, 1})
    write(tmp_path / "u.item", films)
    raw = read(f"movielens:{tmp_path}", items="genres")
    assert raw.class_names == ("action + comedy", "unknown") and raw.y.tolist() == [0, 0, 1, 0]
    assert read(f"movielens:{tmp_path}", items="genres", own_classes=True, max_items=1).y.tolist() == [0, 0, 0]
    assert len(read(f"movielens:{tmp_path}", min_records=2).y) == 3
    x = np.asarray(read(f"movielens:{tmp_path}", items="genres", last_item=True).x)
    assert x.shape == (4, 103 + 2) and x[:, 103:].tolist() == [[0, 0], [1, 0], [1, 0], [0, 0]]
    assert read("usage", own_classes=True, last_item=True).x.shape[1] == 16 + 8  # type: ignore[union-attr]
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
