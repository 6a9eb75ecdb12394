"""Where data comes from: sets that the package carries, and files in a data directory."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import numpy as np

from fewer.data.federated import ArrayData, federate
from fewer.data.partition import Division
from fewer.data.raw import Array, Inputs, Raw
from fewer.errors import DataError, unknown
from fewer.vocabulary import Partition


def load(name: str, *, directory: str | Path | None = None, seed: int = 0, **settings: Any) -> ArrayData:
    """The named data, divided among parties.

    `name` is one of `NAMES`, `idx:DIR` (four idx files, as MNIST has them) or `npz:FILE` (arrays x, y and, if there
    are any, x_test, y_test, client). Files are looked for in `directory`, by default $FEWER_DATA. The other
    settings are those of `federate`.
    """
    Division(**{key: settings[key] for key in ("parties", "alpha") if key in settings}).check()
    if (partition := settings.get("partition", "iid")) not in get_args(Partition):
        raise unknown("partition", partition, get_args(Partition))
    origin = {"name": name, "directory": None if directory is None else str(directory), "seed": seed, **settings}
    return federate(read(name, directory), name=name, seed=seed, origin=origin, **settings)


def read(name: str, directory: str | Path | None = None) -> Raw:
    """The arrays of the named data, not yet divided."""
    kind, colon, where = name.partition(":")
    if colon:
        if kind not in _FORMATS:
            raise unknown("data format", kind, _FORMATS)
        return _FORMATS[kind](_find(where, directory))
    if name in _EMBEDDED:
        return _EMBEDDED[name]()
    if name in _FILES:
        folder, normal = _FILES[name]
        return replace(idx(_find(folder, directory)), normal=normal)
    raise unknown("data", name, [*NAMES, *(f"{kind}:PATH" for kind in _FORMATS)])


def inputs(name: str, directory: str | Path | None = None) -> tuple[Inputs, Array | None]:
    """Inputs to predict for, and labels if there are any: an npz file's x and y, or the test part of a data set."""
    if name.startswith("npz:"):
        arrays = _arrays(_find(name.removeprefix("npz:"), directory), ("x",))
        return arrays["x"], arrays.get("y")
    raw = read(name, directory)
    return raw.test if raw.test is not None else (raw.x, raw.y)


def idx(folder: Path) -> Raw:
    """Four idx files, packed or not, in the layout of MNIST."""
    found = []
    for part in (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    ):
        paths = [path for path in (folder / part, folder / f"{part}.gz") if path.exists()]
        if not paths:
            raise DataError(f"no {part}(.gz) in {folder}")
        found.append(_idx_file(paths[0]))
    x, y, test_x, test_y = found
    return Raw(x, y, (test_x, test_y))


def npz(path: Path) -> Raw:
    """Arrays x, y and, if there are any, x_test, y_test and client."""
    arrays = _arrays(path, ("x", "y"))
    test = (arrays["x_test"], arrays["y_test"]) if {"x_test", "y_test"} <= arrays.keys() else None
    return Raw(arrays["x"], arrays["y"], test, arrays.get("client"))


def _arrays(path: Path, needed: tuple[str, ...]) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # a damaged archive raises any of a dozen kinds
        raise DataError(f"{path} is not an npz archive of plain arrays: {error}") from error
    for name in needed:
        if name not in arrays:
            raise DataError(f"{path} has no array '{name}' (it has: {', '.join(sorted(arrays)) or 'none'})")
    return arrays


def _idx_file(path: Path) -> Array:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise DataError(f"{path} is not an idx file of bytes (wrong magic number)")
    dimensions = raw[3]
    start = 4 + 4 * dimensions
    shape = tuple(int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions))
    if len(raw) != start + math.prod(shape):
        raise DataError(f"{path} is cut short: {len(raw)} bytes where {start + math.prod(shape)} belong")
    return np.frombuffer(bytearray(raw), np.uint8, offset=start).reshape(shape)


def _digits() -> Raw:
    """1,797 digits of 8×8 from scikit-learn; every fifth is for testing."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = (x.reshape(-1, 1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    last = np.arange(len(y)) % 5 == 4
    return Raw(x[~last], y[~last], (x[last], y[last]))


def _fashion_mini() -> Raw:
    """600 training and 100 test images of each of the ten classes of Fashion-MNIST."""
    with (
        files("fewer.data").joinpath("embedded/fashion-mini.npz").open("rb") as file,
        np.load(file) as arrays,
    ):
        return Raw(arrays["x"], arrays["y"], (arrays["x_test"], arrays["y_test"]), normal=_FASHION)


def _find(where: str, directory: str | Path | None) -> Path:
    """A path as given, or below the data directory."""
    root = directory or os.environ.get("FEWER_DATA")
    for path in [Path(where), *([Path(root) / where] if root else [])]:
        if path.exists():
            return path
    hint = f"in {root}" if root else "here, and no data directory is set (--data-dir, FEWER_DATA)"
    raise DataError(f"no '{where}' {hint}")


_FASHION = (0.2860, 0.3530)
_EMBEDDED: dict[str, Callable[[], Raw]] = {"digits": _digits, "fashion-mini": _fashion_mini}
_FILES = {"mnist": ("mnist", (0.1307, 0.3081)), "fashion": ("fashion-mnist", _FASHION)}
_FORMATS: dict[str, Callable[[Path], Raw]] = {"idx": idx, "npz": npz}
NAMES = (*_EMBEDDED, *_FILES)
