"""Small arrays with labels."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from fewer.data.partition import Rows


def labels(count: int, classes: int = 10, seed: int = 0) -> Rows:
    return np.random.default_rng(seed).integers(classes, size=count)


def arrays(count: int = 200, seed: int = 0) -> tuple[NDArray[np.float32], Rows]:
    """Inputs that encode their row index, and labels."""
    return np.arange(2 * count, dtype=np.float32).reshape(count, 2), labels(count, 4, seed)


IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx_bytes(array: NDArray[np.uint8]) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def idx_arrays() -> list[NDArray[np.uint8]]:
    rng = np.random.default_rng(0)
    x, x_test = (rng.integers(256, size=(count, 5, 4), dtype=np.uint8) for count in (60, 12))
    return [x, (np.arange(60) % 3).astype(np.uint8), x_test, (np.arange(12) % 3).astype(np.uint8)]
