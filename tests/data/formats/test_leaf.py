"""LEAF files: FEMNIST, Shakespeare, Sent140."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fewer.data.formats.plays import ALPHABET
from fewer.registry import FORMATS
from tests.data.formats.files import check_refused, read, shapes, write

# --- files of every format --------------------------------------------------------------------------------------


def write_leaf(folder: Path, users: dict[str, tuple[list[Any], list[Any]]], file: str = "data/train/0.json") -> Path:
    data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    content = {"users": list(users), "num_samples": [len(y) for _, y in users.values()], "user_data": data}
    write(folder / file, json.dumps(content))
    return folder


# --- LEAF -------------------------------------------------------------------------------------------------------


def test_femnist_is_read_by_writer(tmp_path: Path) -> None:
    white, black = [1.0] * 784, [0.0] * 784
    write_leaf(tmp_path, {"f01_1": ([white, black], [0, 61]), "none": ([], [])}, "data/train/a.json")
    write_leaf(tmp_path, {"f02_2": ([black], [10])}, "data/train/b.json")
    write_leaf(tmp_path, {"f01_1": ([white], [36])}, "data/test/a.json")
    raw = read("leaf-femnist", tmp_path)
    assert shapes(raw) == ((3, 28, 28), (1, 28, 28)) and isinstance(raw.x, np.ndarray) and raw.x.dtype == np.uint8
    assert raw.x[:, 0, 0].tolist() == [255, 0, 0] and raw.y.tolist() == [0, 61, 10]
    assert raw.client_ids is not None and raw.client_ids.tolist() == [0, 0, 1]
    assert raw.test_client_ids is not None and raw.test_client_ids.tolist() == [0]
    assert len(raw.class_names) == 62 and raw.class_names[10] == "A" and raw.class_names[36] == "a"


def test_leaf_shakespeare_and_sent140(tmp_path: Path) -> None:
    write_leaf(tmp_path / "s", {"HAMLET": (["a" * 79 + "é", "b" * 80], ["\n", "}"])}, "data/all_data/all.json")
    raw = read("leaf-shakespeare", tmp_path / "s")
    assert shapes(raw) == ((2, 80), None) and raw.tokens == tuple(ALPHABET) and raw.time_ordered
    assert isinstance(raw.x, np.ndarray) and raw.x[0, -1] == ALPHABET.index(" ") and raw.y.tolist() == [0, 79]
    tweet = ["1", "date", "NO_QUERY", "ann", "so glad", "x"]
    write_leaf(tmp_path / "t", {"ann": ([tweet, tweet], [1, 0])}, "train/all.json")
    raw = read("leaf-sent140", tmp_path / "t")
    assert raw.x == ["so glad", "so glad"] and raw.y.tolist() == [1, 0] and raw.test is None


def test_bad_leaf_files_are_refused(tmp_path: Path) -> None:
    image = [0.5] * 784
    for users, message in (
        ({"ann": ([image], [0, 1])}, "user 'ann' has 1 inputs and 2 labels"),
        ({"ann": ([image], [62])}, r"label 62 .* \(allowed: 0 to 61\)"),
        ({"ann": ([image], ["a"])}, "not an integer"),
        ({"ann": ([[0.5] * 783], [0])}, "784 numbers from 0 to 1"),
        ({"ann": ([[255.0] * 784], [0])}, "784 numbers from 0 to 1"),
        ({"ann": ([[float("nan")] * 784], [0])}, "784 numbers from 0 to 1"),
        ({"ann": ([["a"] * 784], [0])}, "not numbers"),
        ({"ann": ([image, [0.5]], [0, 1])}, "not numbers"),
        ({"ann": ([], [])}, "no samples"),
    ):
        check_refused("leaf-femnist", write_leaf(tmp_path, users), message)
    for content, message in (
        ('{"users": ["a"], "num_samples"', "0.json is not JSON"),
        ("[" * 100_000, "0.json is not JSON"),
        ("[]", "not a LEAF file"),
        ('{"users": ["a"], "num_samples": [1], "user_data": {}}', "not a LEAF file"),
        (
            '{"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [1], "y": [1]}}}',
            "1 samples, but num_samples says 2",
        ),
        ('{"users": ["a"], "num_samples": [1], "user_data": {"a": [1]}}', "no lists 'x' and 'y'"),
        ('{"users": ["a"], "num_samples": [], "user_data": {"a": {}}}', "cannot read"),
    ):
        write(tmp_path / "data/train/0.json", content)
        check_refused("leaf-femnist", tmp_path, message)
    check_refused("leaf-shakespeare", write_leaf(tmp_path, {"ann": (["short"], ["a"])}), "80 characters")
    check_refused("leaf-shakespeare", write_leaf(tmp_path, {"ann": (["a" * 80], ["ab"])}), "one character")
    check_refused("leaf-sent140", write_leaf(tmp_path, {"ann": ([["a", "b"]], [1])}), "not a tweet")
    check_refused("leaf-sent140", write_leaf(tmp_path, {"ann": ([["a"] * 5], [2])}), "label 2")


# --- real datasets ----------------------------------------------------------------------------------------------


def test_leaf_does_not_hold_everything_in_memory(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    for number in range(3):
        users = [f"writer{number}-{n}" for n in range(4)]
        data = {user: {"x": [[number / 4] * 784] * 5, "y": [number] * 5} for user in users}
        content = {"users": users, "num_samples": [5] * 4, "user_data": data}
        (folder / f"{number}.json").write_text(json.dumps(content))
    raw = FORMATS["leaf-femnist"](tmp_path)
    assert isinstance(raw.x, np.memmap) and raw.x.shape == (60, 28, 28)
    assert raw.client_ids is not None and np.bincount(raw.client_ids).tolist() == [5] * 12
    assert raw.x[:, 0, 0].tolist() == [0] * 20 + [64] * 20 + [128] * 20
