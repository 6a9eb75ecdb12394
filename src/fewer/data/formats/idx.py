"""idx files: MNIST and the sets in its layout, and QMNIST, which says who wrote each digit."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from fewer.data.formats.readers import contents, reader
from fewer.data.raw_dataset import Array, RawDataset
from fewer.errors import DataError
from fewer.registry import FORMATS

_DIMENSIONS = {
    "train-images-idx3-ubyte": 3,
    "train-labels-idx1-ubyte": 1,
    "t10k-images-idx3-ubyte": 3,
    "t10k-labels-idx1-ubyte": 1,
}
_TYPES = {0x08: "u1", 0x0C: ">i4"}
_DIGIT, _WRITER, _COLUMNS = 0, 2, 8


@FORMATS.register("idx")
@reader("a directory of four idx files")
def idx(path: Path) -> RawDataset:
    """Four idx files, packed or not, in the layout of MNIST."""
    x, y, test_x, test_y = (_array(_file(path, part), count) for part, count in _DIMENSIONS.items())
    return RawDataset(x, y.astype(np.int64), (test_x, test_y.astype(np.int64)))


@FORMATS.register("qmnist")
@reader("QMNIST label files next to the images of MNIST")
def qmnist(path: Path, images: str = "mnist") -> RawDataset:
    """MNIST by writer: the labels of QMNIST, and the images of MNIST in the directory beside it named `images`.

    QMNIST has labels for 60,000 test digits; the first 10,000 are those of MNIST.
    """
    train, test = (_file(path, f"qmnist-{part}-labels-idx2-int") for part in ("train", "test"))
    mnist = idx(path if any(path.glob("train-images*")) else path.absolute().parent / images)
    assert mnist.test is not None
    train_y, train_client = _writers(train, mnist.y)
    test_y, test_client = _writers(test, mnist.test[1])
    return RawDataset(mnist.x, train_y, (mnist.test[0], test_y), train_client, test_client)


def _writers(file: Path, digits: Array) -> tuple[Array, Array]:
    """Digits and writers of the images that have the given digits."""
    table = _array(file, 2).astype(np.int64)
    if table.shape[1] != _COLUMNS or len(table) < len(digits):
        raise DataError(f"{file} has shape {table.shape} (allowed: {len(digits)} rows or more, {_COLUMNS} columns)")
    table = table[: len(digits)]
    if not np.array_equal(table[:, _DIGIT], digits):
        raise DataError(f"{file} has other digits than the labels of MNIST: the images are not those it describes")
    return table[:, _DIGIT], table[:, _WRITER]


def _file(folder: Path, part: str) -> Path:
    for path in (folder / part, folder / f"{part}.gz"):
        if path.exists():
            return path
    raise DataError(f"no {part}(.gz) in {folder}")


def _array(path: Path, dimensions: int) -> Array:
    try:
        raw = contents(path)
    except Exception as error:
        raise DataError(f"{path} cannot be unpacked: {error}") from error
    kind = _TYPES.get(raw[2]) if len(raw) >= 4 and raw[:2] == b"\0\0" else None
    if kind is None or raw[3] != dimensions:
        raise DataError(f"{path} is not an idx file of {dimensions} dimensions (wrong magic number)")
    start = 4 + 4 * dimensions
    shape = tuple(int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions))
    size = start + math.prod(shape) * np.dtype(kind).itemsize
    if len(raw) != size:
        raise DataError(f"{path} is cut short or too long: {len(raw)} bytes where {size} belong")
    return np.frombuffer(bytearray(raw), kind, offset=start).reshape(shape)
