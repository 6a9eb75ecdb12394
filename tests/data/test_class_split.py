"""Seen and unseen classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fewer
from fewer.errors import SettingError


def test_unseen_classes_are_used_for_testing_only() -> None:
    full = fewer.data.load("digits", clients=5, partition="iid")
    data = fewer.data.load(
        "digits", clients=5, partition="iid", data_options={"classes": "0-3,5", "unseen_classes": [8, 9]}
    )
    all_labels = torch.cat([full.source.y[full.train.rows], full.test.labels])
    trained = torch.cat([data.client(client).train.labels for client in range(5)])
    assert set(trained.tolist()) == {0, 1, 2, 3, 5} and data.unseen_classes == {8, 9} and data.classes == 10
    for label in (8, 9):
        assert int((data.test.labels == label).sum()) == int((all_labels == label).sum())
    for label in (0, 5):
        assert int((data.test.labels == label).sum()) == int((full.test.labels == label).sum())
        assert int((trained == label).sum()) == int((full.source.y[full.train.rows] == label).sum())
    assert not full.unseen_classes
    glyphs = fewer.data.load("glyphs", partition="natural", data_options={"unseen_classes": 3})
    assert len(glyphs) == 120 and glyphs.unseen_classes == {3} and int((glyphs.test.labels == 3).sum()) == 480
    assert int((glyphs.client(7).test.labels == 3).sum()) == 4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"unseen_classes": "x"}, "must be class labels and ranges like 0-9,20, got x"),
        ({"unseen_classes": "3-12"}, "has no samples of class 10"),
        ({"unseen_classes": "0-9999999999"}, "has no samples of class 10"),
        ({"unseen_classes": "9-3"}, "names no class"),
        ({"classes": "0-5", "unseen_classes": "5-6"}, "class 5 of data 'digits' is in both classes and unseen_classes"),
        ({"unseen_classes": "0-9"}, "leaves no class of data 'digits' to train on"),
        ({"unsen": "1"}, "allowed: classes, held_out, max_per_class, normalization, split, unseen"),
    ],
)
def test_wrong_classes_are_reported(options: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError, match=text):
        fewer.data.load("digits", data_options=options)
