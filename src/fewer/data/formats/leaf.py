"""LEAF: JSON files of users and their samples, read one at a time."""

from __future__ import annotations

import json
import string
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fewer.data.formats.plays import ALPHABET, WINDOW, encode_characters
from fewer.data.formats.readers import reader
from fewer.data.raw_dataset import Array, Inputs, RawDataset
from fewer.errors import DataError
from fewer.registry import FORMATS

_PIXELS = 28 * 28
Convert = Callable[[list[Any], str], Any]
"""Converts the inputs or labels of one user to an array or a list of texts."""


@FORMATS.register("leaf-femnist")
@reader("LEAF's FEMNIST")
def read_femnist(path: Path) -> RawDataset:
    """Handwritten digits and letters by writer, as bytes; the background is white, as in the files."""
    return _read_leaf(
        path, _convert_pixels, _convert_labels, tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
    )


@FORMATS.register("leaf-shakespeare")
@reader("LEAF's Shakespeare")
def read_shakespeare(path: Path) -> RawDataset:
    """Windows of 80 characters of a role in a play, and the next character."""
    raw = _read_leaf(path, _convert_windows, _convert_next_characters, tuple(ALPHABET))
    return replace(raw, tokens=tuple(ALPHABET), time_ordered=True)


@FORMATS.register("leaf-sent140")
@reader("LEAF's Sent140")
def read_sent140(path: Path) -> RawDataset:
    """Tweets by author, and their sentiment."""
    return _read_leaf(path, _convert_tweets, _convert_labels, ("negative", "positive"))


def _read_leaf(
    path: Path, convert_inputs: Convert, convert_labels: Convert, class_names: tuple[str, ...]
) -> RawDataset:
    train, test = _find_files(path)
    user_ids: dict[str, int] = {}
    x, y, client_ids = _read_part(train, convert_inputs, convert_labels, user_ids)
    if not test:
        return RawDataset(x, y, client_ids=client_ids, class_names=class_names)
    test_x, test_y, test_client_ids = _read_part(test, convert_inputs, convert_labels, user_ids)
    return RawDataset(x, y, (test_x, test_y), client_ids, test_client_ids, class_names)


def _find_files(path: Path) -> tuple[list[Path], list[Path]]:
    """Finds the training files, and the test files if there are any."""
    for root in (path, path / "data"):
        for folder in ("train", "all_data", "."):
            if train := sorted((root / folder).glob("*.json")):
                return train, sorted((root / "test").glob("*.json")) if folder == "train" else []
    raise DataError(f"no JSON files in {path} (expected: data/train and data/test, or data/all_data)")


def _read_part(
    files: list[Path], convert_inputs: Convert, convert_labels: Convert, user_ids: dict[str, int]
) -> tuple[Inputs, Array, Array]:
    """Reads inputs, labels and user ids. Array inputs go to a temporary file, user by user, and are memory-mapped."""
    texts: list[str] = []
    buffer = tempfile.TemporaryFile()  # noqa: SIM115
    shape: tuple[int, ...] = ()
    y, users, sizes = [], [], []
    for file in files:
        for user, samples in _iter_users(file):
            where = f"{file}, user '{user}'"
            if not isinstance(samples, dict) or not all(isinstance(samples.get(key), list) for key in "xy"):
                raise DataError(f"{where} has no lists 'x' and 'y'")
            if len(samples["x"]) != len(samples["y"]):
                raise DataError(f"{where} has {len(samples['x'])} inputs and {len(samples['y'])} labels")
            if samples["y"]:
                x = convert_inputs(samples["x"], where)
                if isinstance(x, list):
                    texts += x
                else:
                    x.tofile(buffer)
                    shape = x.shape[1:]
                y.append(convert_labels(samples["y"], where))
                users.append(user_ids.setdefault(user, len(user_ids)))
                sizes.append(len(samples["y"]))
    if not users:
        raise DataError(f"{files[0].parent} has no samples")
    buffer.flush()
    x = texts or np.memmap(buffer, np.uint8, "r+", shape=(sum(sizes), *shape))
    return x, np.concatenate(y), np.repeat(np.array(users, np.int32), sizes)


def _iter_users(file: Path) -> Iterator[tuple[str, Any]]:
    """Yields users and their samples. Each is freed after use."""
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON: {error}") from error
    data = content.get("user_data") if isinstance(content, dict) else None
    users = content.get("users") if isinstance(content, dict) else None
    if not isinstance(data, dict) or not isinstance(users, list) or set(map(str, users)) != set(data):
        raise DataError(f"{file} is not a LEAF file (expected: 'users', 'num_samples', and 'user_data' for each user)")
    for user, size in zip(users, content.get("num_samples", []), strict=True):
        samples = data.pop(str(user))
        if isinstance(samples, dict) and len(samples.get("y", ())) != size:
            raise DataError(
                f"{file}, user '{user}' has {len(samples.get('y', ()))} samples, but num_samples says {size}"
            )
        yield str(user), samples


# --- inputs and labels of one user ----------------------------------------------------------------------------


def _convert_pixels(rows: list[Any], where: str) -> Array:
    try:
        pixels = np.array(rows, np.float32)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} has images that are not numbers: {error}") from error
    if pixels.shape[1:] != (_PIXELS,) or not ((pixels >= 0) & (pixels <= 1)).all():
        raise DataError(f"{where} has images of shape {pixels.shape[1:]} (expected: {_PIXELS} numbers from 0 to 1)")
    return np.rint(pixels * 255).astype(np.uint8).reshape(-1, 28, 28)


def _convert_windows(rows: list[Any], where: str) -> Array:
    if not all(isinstance(row, str) and len(row) == WINDOW for row in rows):
        raise DataError(f"{where} has an input that is not a string of {WINDOW} characters")
    return encode_characters("".join(rows)).reshape(-1, WINDOW)


def _convert_next_characters(labels: list[Any], where: str) -> Array:
    if not all(isinstance(label, str) and len(label) == 1 for label in labels):
        raise DataError(f"{where} has a label that is not one character")
    return encode_characters("".join(labels)).astype(np.int64)


def _convert_tweets(rows: list[Any], where: str) -> list[str]:
    if not all(isinstance(row, list) and len(row) > 4 and isinstance(row[4], str) for row in rows):
        raise DataError(f"{where} has an input that is not a tweet (expected: a list with the text at index 4)")
    return [row[4] for row in rows]


def _convert_labels(labels: list[Any], where: str) -> Array:
    if not all(isinstance(label, int) for label in labels):
        raise DataError(f"{where} has a label that is not an integer")
    return np.array(labels, np.int64)
