"""Makes src/fewer/data/embedded/fashion-mini.npz: python tools/make_fashion_mini.py DIR.

DIR contains the four idx.gz files of Fashion-MNIST, as in Debian's package dataset-fashion-mnist.
"""

import sys
from pathlib import Path

import numpy as np

from fewer.data.formats.idx import read_idx

raw = read_idx(Path(sys.argv[1]))
assert raw.test is not None


def take_first(x: np.ndarray, y: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first `count` samples of each class, in their original order."""
    rows = np.sort(np.concatenate([np.flatnonzero(y == label)[:count] for label in range(10)]))
    return x[rows], y[rows]


x, y = take_first(raw.x, raw.y, 600)
x_test, y_test = take_first(*raw.test, 100)
target = Path(__file__).parents[1] / "src/fewer/data/embedded/fashion-mini.npz"
np.savez_compressed(target, x=x, y=y, x_test=x_test, y_test=y_test)
print(target, target.stat().st_size, "bytes")
