"""idx files: MNIST and data sets in its layout, and QMNIST, which lists the writer of each digit."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from fewer.data.formats.readers import read_contents, reader
from fewer.data.raw_dataset import Array, RawDataset
from fewer.errors import DataError
from fewer.registry import FORMATS

_NAMES = "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
_DTYPES = {0x08: "u1", 0x0C: ">i4"}
_DIGIT, _WRITER, _COLUMNS = 0, 2, 8


@FORMATS.register("idx")
@reader("a directory of four idx files")
def read_idx(path: Path) -> RawDataset:
    """Four idx files in the layout of MNIST, optionally compressed with gzip."""
    x, y, test_x, test_y = (_read_array(_find_file(path, name), 3 if "images" in name else 1) for name in _NAMES)
    return RawDataset(x, y.astype(np.int64), (test_x, test_y.astype(np.int64)))


@FORMATS.register("qmnist")
@reader("QMNIST label files next to the images of MNIST")
def read_qmnist(path: Path, images: str = "mnist") -> RawDataset:
    """MNIST by writer: labels of QMNIST, and images of MNIST from the sibling directory `images`.

    QMNIST has labels of 60,000 test digits. The first 10,000 are the test set of MNIST.
    """
    train, test = (_find_file(path, f"qmnist-{part}-labels-idx2-int") for part in ("train", "test"))
    mnist = read_idx(path if any(path.glob("train-images*")) else path.absolute().parent / images)
    assert mnist.test is not None
    train_y, train_writers = _read_writers(train, mnist.y)
    test_y, test_writers = _read_writers(test, mnist.test[1])
    return RawDataset(mnist.x, train_y, (mnist.test[0], test_y), train_writers, test_writers)


def _read_writers(file: Path, digits: Array) -> tuple[Array, Array]:
    """Reads digits and writers, and checks them against the digits of MNIST."""
    table = _read_array(file, 2).astype(np.int64)
    if table.shape[1] != _COLUMNS or len(table) < len(digits):
        raise DataError(f"{file} has shape {table.shape} (expected: {len(digits)} rows or more, {_COLUMNS} columns)")
    table = table[: len(digits)]
    if not np.array_equal(table[:, _DIGIT], digits):
        raise DataError(f"{file} has digits that differ from the labels of MNIST, so it describes other images")
    return table[:, _DIGIT], table[:, _WRITER]


def _find_file(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    raise DataError(f"no {name}(.gz) in {folder}")


def _read_array(path: Path, dimensions: int) -> Array:
    try:
        content = read_contents(path)
    except Exception as error:
        raise DataError(f"cannot decompress {path}: {error}") from error
    dtype = _DTYPES.get(content[2]) if len(content) >= 4 and content[:2] == b"\0\0" else None
    if dtype is None or content[3] != dimensions:
        raise DataError(f"{path} is not an idx file of {dimensions} dimensions (wrong magic number)")
    start = 4 + 4 * dimensions
    shape = tuple(int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions))
    size = start + math.prod(shape) * np.dtype(dtype).itemsize
    if len(content) != size:
        raise DataError(f"{path} is truncated or too long: {len(content)} bytes, expected {size}")
    return np.frombuffer(bytearray(content), dtype, offset=start).reshape(shape)
