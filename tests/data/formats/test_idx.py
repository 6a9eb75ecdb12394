"""IDX files: MNIST and QMNIST."""

from __future__ import annotations

import gzip
import struct
import time
from pathlib import Path

import numpy as np
import pytest

from fewer.data import ArrayData, load
from tests.data.arrays import IDX_FILES, idx_arrays
from tests.data.formats.files import Array, check_refused, count, needs_real_data, read, read_real, shapes, write

# --- files of every format --------------------------------------------------------------------------------------


def encode_idx(array: Array) -> bytes:
    kind = {"uint8": 8, "int32": 12}[str(array.dtype)]
    return (
        bytes([0, 0, kind, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.astype(array.dtype.newbyteorder(">")).tobytes()
    )


DIGITS = np.arange(12) % 10


def write_mnist(folder: Path, packed: bool = True) -> Path:
    for part, size in (("train", 12), ("t10k", 5)):
        images = np.arange(size * 16, dtype=np.uint8).reshape(size, 4, 4)
        for name, array in (("images-idx3", images), ("labels-idx1", DIGITS[:size].astype(np.uint8))):
            raw = encode_idx(array)
            write(folder / f"{part}-{name}-ubyte{'.gz' * packed}", gzip.compress(raw) if packed else raw)
    return folder


def write_qmnist(folder: Path) -> Path:
    write_mnist(folder / "mnist")
    for part, rows in (("train", 12), ("test", 8)):
        table = np.zeros((rows, 8), np.int32)
        table[:, 0] = DIGITS[:rows]
        table[:, 2] = 2000 + np.arange(rows) // 3
        write(folder / "qmnist" / f"qmnist-{part}-labels-idx2-int.gz", gzip.compress(encode_idx(table)))
    return folder / "qmnist"


# --- idx --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_of_mnist_are_read(tmp_path: Path, packed: bool) -> None:
    raw = read("idx", write_mnist(tmp_path, packed))
    assert shapes(raw) == ((12, 4, 4), (5, 4, 4)) and isinstance(raw.x, np.ndarray)
    assert raw.x.dtype == np.uint8 and raw.x[1, 0].tolist() == [16, 17, 18, 19]
    assert raw.y.tolist() == DIGITS.tolist() and raw.client_ids is None


def test_qmnist_adds_writers_to_the_images_of_mnist(tmp_path: Path) -> None:
    raw = read("qmnist", write_qmnist(tmp_path))
    assert shapes(raw) == ((12, 4, 4), (5, 4, 4))
    assert raw.client_ids is not None and raw.client_ids.tolist() == (2000 + np.arange(12) // 3).tolist()
    assert raw.test_client_ids is not None and raw.test_client_ids.tolist() == [2000, 2000, 2000, 2001, 2001]
    (tmp_path / "mnist").rename(tmp_path / "digits")
    assert len(read("qmnist", tmp_path / "qmnist", images="digits").y) == 12
    check_refused("qmnist", tmp_path / "qmnist", "mnist does not exist")


def test_bad_idx_files_are_refused(tmp_path: Path) -> None:
    folder = write_mnist(tmp_path / "good", packed=False)
    name = "train-labels-idx1-ubyte"
    good = (folder / name).read_bytes()
    for bad, message in (
        (b"\1" + good[1:], "wrong magic"),
        (good[:3] + b"\2" + good[4:], "wrong magic"),
        (good[:-1], "truncated"),
        (good + b"\0", "too long"),
        (good[:2], "wrong magic"),
        (encode_idx(DIGITS[:11].astype(np.uint8)), "12 inputs and 11 labels"),
    ):
        write(folder / name, bad)
        check_refused("idx", folder, message)
    (folder / name).unlink()
    check_refused("idx", folder, "no train-labels-idx1-ubyte")
    write(folder / f"{name}.gz", gzip.compress(good)[:-6])
    check_refused("idx", folder, "cannot decompress")


def test_qmnist_of_other_images_is_refused(tmp_path: Path) -> None:
    folder = write_qmnist(tmp_path)
    table = np.zeros((12, 8), np.int32)
    file = folder / "qmnist-train-labels-idx2-int.gz"
    write(file, gzip.compress(encode_idx(table)))
    check_refused("qmnist", folder, "digits that differ")
    write(file, gzip.compress(encode_idx(table[:5])))
    check_refused("qmnist", folder, "12 rows or more")


# --- real datasets ----------------------------------------------------------------------------------------------


@needs_real_data
def test_real_mnist_is_read_fast() -> None:
    times = []
    for _ in range(3):
        start = time.process_time()
        raw = read_real("idx", "mnist")
        times.append(time.process_time() - start)
    assert shapes(raw) == ((60_000, 28, 28), (10_000, 28, 28)) and min(times) <= 0.7


@needs_real_data
def test_real_qmnist_has_its_published_sizes() -> None:
    raw = read_real("qmnist", "qmnist")
    assert shapes(raw) == ((60_000, 28, 28), (10_000, 28, 28)) and raw.client_ids is not None
    assert (count(raw.client_ids), count(raw.test_client_ids)) == (539, 297)
    sizes = np.unique(raw.client_ids, return_counts=True)[1]
    assert (sizes.min(), sizes.max()) == (19, 131)
    assert raw.test_client_ids is not None and not set(raw.client_ids.tolist()) & set(raw.test_client_ids.tolist())


# --- files ------------------------------------------------------------------------------------------------------


def open_idx(folder: Path) -> ArrayData:
    return load(f"idx:{folder / 'mnist'}", clients=3, min_samples_per_client=1)


def test_idx_files_become_federated_data(folder: Path) -> None:
    data = open_idx(folder)
    x, y, x_test, y_test = idx_arrays()
    assert np.array_equal(data.source.x[:, 0].numpy(), x) and data.source.y.tolist() == y.tolist()
    assert np.array_equal(data.test.x[:, 0].numpy(), x_test) and data.test.y.tolist() == y_test.tolist()
    assert data.shape == (1, 5, 4) and data.classes == 3


def test_idx_files_may_be_compressed(folder: Path) -> None:
    expected = open_idx(folder).fingerprint()
    for name in IDX_FILES[:3]:
        path = folder / "mnist" / name
        path.with_name(name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert open_idx(folder).fingerprint() == expected
