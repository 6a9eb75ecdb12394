"""SVHN's Matlab files."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import savemat

import fewer
from tests.data.formats.files import Array, check_refused, read, shapes, write, write_zip

NAMES = "train_32x32.mat", "test_32x32.mat"


def images(count: int) -> Array:
    """Pixels of which each is known by row, column, color and image."""
    row, column, color, number = np.indices((32, 32, 3, count))
    return np.asarray(4 * row + 2 * column + 50 * color + number, np.uint8)


def mat(count: int = 12, compress: bool = True, **replaced: Any) -> bytes:
    variables = {"X": images(count), "y": (1 + np.arange(count) % 10).astype(np.uint8)[:, None], **replaced}
    file = BytesIO()
    savemat(file, {name: value for name, value in variables.items() if value is not None}, do_compression=compress)
    return file.getvalue()


def write_svhn(folder: Path, train: bytes | None = None) -> Path:
    write(folder / NAMES[0], mat() if train is None else train)
    write(folder / NAMES[1], mat(3, compress=False))
    return folder


def test_images_come_by_color_and_label_ten_is_zero(tmp_path: Path) -> None:
    raw = read("svhn", write_svhn(tmp_path))
    assert shapes(raw) == ((12, 3, 32, 32), (3, 3, 32, 32)) and raw.test is not None
    assert isinstance(raw.x, np.ndarray) and raw.x.dtype == np.uint8
    assert raw.x[7, 2, 5, 9] == 4 * 5 + 2 * 9 + 50 * 2 + 7
    assert raw.y.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2] and raw.test[1].tolist() == [1, 2, 3]


def test_svhn_trains_from_a_data_directory_and_reads_archives(tmp_path: Path) -> None:
    write_svhn(tmp_path / "svhn")
    result = fewer.run("fedavg", "svhn", data_dir=tmp_path, clients=2, partition="iid", rounds=1)
    assert result.task.shape == (3, 32, 32) and result.task.classes == 10
    archive = write_zip(
        tmp_path / "svhn.zip", {f"svhn/{name}": (tmp_path / "svhn" / name).read_bytes() for name in NAMES}
    )
    assert read("svhn", archive).y.tolist() == read("svhn", tmp_path / "svhn").y.tolist()


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (b"no matlab", "train_32x32.mat is damaged or not a Matlab file"),
        (mat()[:1000], "train_32x32.mat is damaged or not a Matlab file"),
        (mat(y=None), "has no variable y"),
        (mat(X=images(12).astype(np.float32)), r"type float32 \(expected: \(32, 32, 3, images\), uint8\)"),
        (mat(X=images(12)[:16]), r"X of shape \(16, 32, 3, 12\)"),
        (mat(y=np.full((12, 1), 1.5)), "expected: 12 integers from 1 to 10"),
        (mat(y=np.zeros((12, 1), np.uint8)), "expected: 12 integers from 1 to 10"),
        (mat(y=np.full((12, 1), 11, np.uint8)), "expected: 12 integers from 1 to 10"),
        (mat(y=np.ones((11, 1), np.uint8)), "expected: 12 integers from 1 to 10"),
    ],
)
def test_wrong_files_are_refused_in_one_line(tmp_path: Path, train: bytes, message: str) -> None:
    check_refused("svhn", write_svhn(tmp_path, train), message)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write(tmp_path / NAMES[0], mat())
    check_refused("svhn", tmp_path, "no test_32x32.mat in")
