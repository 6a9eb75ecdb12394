"""LEAF: JSON files of users and their samples, read one file at a time."""

from __future__ import annotations

import json
import string
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fewer.data.formats.plays import ALPHABET, WINDOW, encode
from fewer.data.formats.readers import reader
from fewer.data.raw_dataset import Array, Inputs, RawDataset
from fewer.errors import DataError
from fewer.registry import FORMATS

_PIXELS = 28 * 28
Convert = Callable[[list[Any], str], Any]
"""Inputs or labels of one user, as they are in the file, to an array or a list of texts."""


@FORMATS.register("leaf-femnist")
@reader("LEAF's FEMNIST")
def femnist(path: Path) -> RawDataset:
    """Handwritten digits and letters by writer, as bytes; the background is white, as in the files."""
    return _read(path, _pixels, _numbers, tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase))


@FORMATS.register("leaf-shakespeare")
@reader("LEAF's Shakespeare")
def shakespeare(path: Path) -> RawDataset:
    """Eighty characters of a role of a play, and the one after them."""
    raw = _read(path, _windows, _next_characters, tuple(ALPHABET))
    return RawDataset(
        raw.x, raw.y, raw.test, raw.client_ids, raw.test_client_ids, raw.names, tuple(ALPHABET), in_time=True
    )


@FORMATS.register("leaf-sent140")
@reader("LEAF's Sent140")
def sent140(path: Path) -> RawDataset:
    """Tweets by author, and whether they are glad."""
    return _read(path, _tweets, _numbers, ("negative", "positive"))


def _read(path: Path, inputs: Convert, labels: Convert, names: tuple[str, ...]) -> RawDataset:
    train, test = _files(path)
    numbers: dict[str, int] = {}
    x, y, client_ids = _part(train, inputs, labels, numbers)
    if not test:
        return RawDataset(x, y, client_ids=client_ids, names=names)
    test_x, test_y, test_client_ids = _part(test, inputs, labels, numbers)
    return RawDataset(x, y, (test_x, test_y), client_ids, test_client_ids, names)


def _files(path: Path) -> tuple[list[Path], list[Path]]:
    """The files to train on, and to test on if there are any."""
    for root in (path, path / "data"):
        for folder in ("train", "all_data", "."):
            if train := sorted((root / folder).glob("*.json")):
                return train, sorted((root / "test").glob("*.json")) if folder == "train" else []
    raise DataError(f"no JSON files in {path} (expected: data/train and data/test, or data/all_data)")


def _part(files: list[Path], inputs: Convert, labels: Convert, numbers: dict[str, int]) -> tuple[Inputs, Array, Array]:
    """Inputs, labels and user numbers of some files. Arrays go to a temporary file by user, and are mapped from it."""
    texts: list[str] = []
    spool = tempfile.TemporaryFile()  # noqa: SIM115
    shape: tuple[int, ...] = ()
    y, users, sizes = [], [], []
    for file in files:
        for user, samples in _users(file):
            where = f"{file}, user '{user}'"
            if not isinstance(samples, dict) or not all(isinstance(samples.get(key), list) for key in "xy"):
                raise DataError(f"{where} has no lists 'x' and 'y'")
            if len(samples["x"]) != len(samples["y"]):
                raise DataError(f"{where} has {len(samples['x'])} inputs and {len(samples['y'])} labels")
            if samples["y"]:
                x = inputs(samples["x"], where)
                if isinstance(x, list):
                    texts += x
                else:
                    x.tofile(spool)
                    shape = x.shape[1:]
                y.append(labels(samples["y"], where))
                users.append(numbers.setdefault(user, len(numbers)))
                sizes.append(len(samples["y"]))
    if not users:
        raise DataError(f"{files[0].parent} has no samples")
    spool.flush()
    joined = texts or np.memmap(spool, np.uint8, "r+", shape=(sum(sizes), *shape))
    return joined, np.concatenate(y), np.repeat(np.array(users, np.int32), sizes)


def _users(file: Path) -> Iterator[tuple[str, Any]]:
    """Users and their samples, each let go of once it has been used."""
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
            raise DataError(f"{file}, user '{user}' has {len(samples.get('y', ()))} samples where {size} are announced")
        yield str(user), samples


# --- inputs and labels of one user ----------------------------------------------------------------------------


def _pixels(rows: list[Any], where: str) -> Array:
    try:
        pixels = np.array(rows, np.float32)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} has images that are not numbers: {error}") from error
    if pixels.shape[1:] != (_PIXELS,) or not ((pixels >= 0) & (pixels <= 1)).all():
        raise DataError(f"{where} has images of shape {pixels.shape[1:]} (allowed: {_PIXELS} numbers from 0 to 1)")
    return np.rint(pixels * 255).astype(np.uint8).reshape(-1, 28, 28)


def _windows(rows: list[Any], where: str) -> Array:
    if not all(isinstance(row, str) and len(row) == WINDOW for row in rows):
        raise DataError(f"{where} has an input that is not a text of {WINDOW} characters")
    return encode("".join(rows)).reshape(-1, WINDOW)


def _next_characters(labels: list[Any], where: str) -> Array:
    if not all(isinstance(label, str) and len(label) == 1 for label in labels):
        raise DataError(f"{where} has a label that is not one character")
    return encode("".join(labels)).astype(np.int64)


def _tweets(rows: list[Any], where: str) -> list[str]:
    if not all(isinstance(row, list) and len(row) > 4 and isinstance(row[4], str) for row in rows):
        raise DataError(f"{where} has an input that is not a tweet (expected: a list with the text in place 4)")
    return [row[4] for row in rows]


def _numbers(labels: list[Any], where: str) -> Array:
    if not all(isinstance(label, int) for label in labels):
        raise DataError(f"{where} has a label that is not a whole number")
    return np.array(labels, np.int64)
