"""SVHN: cropped house numbers in the official Matlab files."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np

from fewer.data.formats.readers import Members, reader
from fewer.data.raw_dataset import Array, RawDataset
from fewer.errors import DataError
from fewer.registry import FORMATS

_NAMES = "train_32x32.mat", "test_32x32.mat"


@FORMATS.register("svhn")
@reader("SVHN (train_32x32.mat and test_32x32.mat)")
def read_svhn(path: Path) -> RawDataset:
    """SVHN, format 2: a directory or an archive with train_32x32.mat and test_32x32.mat. The label 10 means digit 0."""
    files = Members(path, lambda name: name.rpartition("/")[2] in _NAMES)
    (x, y), test = (_parse_mat(files[name], f"{path}: {name}") for name in _NAMES)
    return RawDataset(x, y, test)


def _parse_mat(content: bytes, where: str) -> tuple[Array, Array]:
    """Parses X (height × width × colors × images) and y (images × 1)."""
    from scipy.io import loadmat  # slow to import

    try:
        table = loadmat(BytesIO(content), variable_names=("X", "y"))
    except Exception as error:
        raise DataError(f"{where} is damaged or not a Matlab file: {error}") from error
    if missing := {"X", "y"} - table.keys():
        raise DataError(f"{where} has no variable {' and no '.join(sorted(missing))}")
    x, y = table["X"], table["y"]
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[:3] != (32, 32, 3):
        raise DataError(f"{where} has X of shape {x.shape} and type {x.dtype} (expected: (32, 32, 3, images), uint8)")
    if y.size != x.shape[3] or not np.isin(y, range(1, 11)).all():
        raise DataError(f"{where} has invalid labels y (expected: {x.shape[3]} integers from 1 to 10)")
    return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y.ravel().astype(np.int64) % 10
