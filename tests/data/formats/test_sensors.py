"""Sensor recordings: PAMAP2, HAR, HAPT."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fewer.data import load
from fewer.data.sources import read as read_by_name
from fewer.errors import SettingError
from tests.data.formats.files import (
    check_refused,
    count,
    har_files,
    needs_real_data,
    read,
    read_real,
    shapes,
    write,
    write_zip,
)

# --- files of every format --------------------------------------------------------------------------------------


def write_pamap2(folder: Path) -> Path:
    for subject, activities in ((101, (0, 4, 4, 1)), (102, (4, 1))):
        rows = np.repeat(activities, 20)
        table = np.tile(np.arange(54.0), (len(rows), 1)) + np.arange(len(rows))[:, None]
        table[:, 1] = rows
        table[::2, 2] = np.nan
        table[:, 16:20] = np.nan  # orientation is not used
        text = io.StringIO()
        np.savetxt(text, table, fmt="%g")
        write(folder / "Protocol" / f"subject{subject}.dat", text.getvalue().replace("nan", "NaN"))
    return folder


def write_hapt(folder: Path, labels: str = "1 1 5 1 200\n1 1 7 201 300\n2 7 1 11 150\n") -> Path:
    for name, rows in (("exp01_user01", 300), ("exp02_user07", 160)):
        for kind, value in (("acc", 1), ("gyro", 2)):
            lines = "".join(f"{value} {row} {-row}\n" for row in range(rows))
            write(folder / "RawData" / f"{kind}_{name}.txt", lines)
    write(folder / "RawData" / "labels.txt", labels)
    return folder


# --- sensors ----------------------------------------------------------------------------------------------------


def test_pamap2_is_read_by_person(tmp_path: Path) -> None:
    raw = read("pamap2", write_pamap2(tmp_path), window=10, stride=5, standardize=False)
    assert isinstance(raw.x, np.ndarray) and raw.x.dtype == np.float32 and raw.class_names == ("lying", "walking")
    assert raw.client_ids is not None and raw.client_ids.tolist() == [101] * 10 + [102] * 6
    assert raw.y.tolist() == [1] * 7 + [0] * 3 + [1] * 3 + [0] * 3
    assert raw.x.shape == (16, 40, 10) and np.isfinite(raw.x).all() and raw.time_ordered
    assert raw.x[0, 0].tolist() == [2 + row for row in range(20, 30)]  # heart rate, every second value interpolated
    assert raw.x[0, 1, 0] == 23 and raw.x[0, 14, 0] == 40
    standardized = read("pamap2", tmp_path / "Protocol", window=10, stride=5).x
    assert isinstance(standardized, np.ndarray)
    assert np.allclose(standardized.mean(axis=(0, 2)), 0, atol=1e-5) and np.allclose(
        standardized.std(axis=(0, 2)), 1, atol=1e-4
    )


def test_bad_pamap2_is_refused(tmp_path: Path) -> None:
    file = write_pamap2(tmp_path) / "Protocol" / "subject101.dat"
    good = file.read_text()
    for content, message in (
        (good + "1 2 3\n", "not a table of numbers"),
        (good.replace("NaN", "none"), "not a table of numbers"),
        ("1 2 3\n", "has 3 columns"),
        ("", "is empty"),
        ("\n".join(" ".join(["1", "8"] + ["0"] * 52) for _ in range(20)), "activity 8"),
        ("\n".join(" ".join(["1", "1", "NaN"] + ["0"] * 51) for _ in range(20)), "no values in channel 0"),
    ):
        write(file, content)
        check_refused("pamap2", tmp_path, message, window=10, stride=5)
    check_refused("pamap2", tmp_path, "window and stride must be >= 1, got 0 and 64", SettingError, window=0)
    file.rename(file.with_name("subjectX.dat"))
    check_refused("pamap2", tmp_path, "does not name a subject")


def test_har_is_read_by_person(tmp_path: Path) -> None:
    files = {f"UCI HAR Dataset/{name}": content for name, content in har_files().items()}
    inner = write_zip(tmp_path / "inner.zip", files).read_bytes()
    write_zip(tmp_path / "nested" / "har.zip", {"UCI HAR Dataset.zip": inner})
    for name, content in files.items():
        write(tmp_path / "tree" / name, content)
    for path in (tmp_path / "inner.zip", tmp_path / "nested", tmp_path / "tree", tmp_path / "tree" / "UCI HAR Dataset"):
        raw = read("har", path)
        assert shapes(raw) == ((4, 9, 128), (2, 9, 128)) and raw.class_names[0] == "walking" and raw.time_ordered
        assert isinstance(raw.x, np.ndarray) and raw.x[0, :, 0].tolist() == list(range(9))
        assert raw.y.tolist() == [0, 1, 2, 3]
        assert raw.client_ids is not None and raw.client_ids.tolist() == [1, 1, 2, 2]
    train = tmp_path / "tree" / "UCI HAR Dataset" / "train"
    write(train / "y_train.txt", "1\n2\n3\n7\n")
    check_refused("har", tmp_path / "tree", r"label 6 in sample 3 \(allowed: 0 to 5\)")
    write(train / "y_train.txt", "1\n2\n3\n")
    check_refused("har", tmp_path / "tree", "4 inputs and 3 labels")
    signal = train / "Inertial Signals" / "body_acc_x_train.txt"
    write(signal, signal.read_bytes()[: -16 * 128])
    check_refused("har", tmp_path / "tree", "train signals of unequal lengths|not a table")
    signal.unlink()
    check_refused("har", tmp_path / "tree", "no body_acc_x_train.txt")


def test_hapt_is_read_by_person(tmp_path: Path) -> None:
    raw = read("hapt", write_hapt(tmp_path), window=50, stride=25)
    assert raw.y.tolist() == [4] * 7 + [0] * 4 and raw.time_ordered and len(raw.class_names) == 6
    assert raw.client_ids is not None and raw.client_ids.tolist() == [1] * 7 + [7] * 4
    assert isinstance(raw.x, np.ndarray) and raw.x.shape == (11, 6, 50) and raw.x.dtype == np.float32
    assert raw.x[7, :, 0].tolist() == [1, 10, -10, 2, 10, -10]
    with_transitions = read("hapt", tmp_path / "RawData", window=50, stride=25, transitions=True)
    assert (
        with_transitions.y.tolist() == [4] * 7 + [6] * 3 + [0] * 4 and with_transitions.class_names[6] == "stand to sit"
    )
    for labels, message in (
        ("1 1 13 1 200\n", "labels.txt has '1 1 13 1 200'"),
        ("1 1 5 1 301\n", "within 300 rows"),
        ("1 1 5 1\n", "has 4 columns"),
        ("3 1 5 1 9\n", "no acc_exp03_user01.txt"),
        ("1 1 5 1 9\n", "has no samples"),
    ):
        check_refused("hapt", write_hapt(tmp_path, labels), message)
    write(write_hapt(tmp_path) / "RawData" / "gyro_exp01_user01.txt", "1 2 3\n")
    check_refused("hapt", tmp_path, r"shapes \(300, 3\) and \(1, 3\)")


def test_the_held_out_windows_of_sensors_are_the_last_of_each_activity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEWER_CACHE", str(tmp_path / "cache"))
    window: dict[str, Any] = {"window": 10, "stride": 3}
    for name in (f"pamap2:{write_pamap2(tmp_path / 'pamap2')}", f"hapt:{write_hapt(tmp_path / 'hapt')}"):
        for _ in range(2):  # the second time from the cache
            assert read_by_name(name, **window).class_gap == 3
        assert read_by_name(name, held_out="client", **window).class_gap is None
    (tmp_path / "hapt").mkdir(exist_ok=True)
    y, client = np.tile(np.repeat([0, 1], 10), 2), np.repeat([0, 1], 20)
    np.savez(tmp_path / "hapt" / "hapt.npz", x=np.zeros((40, 6, 128), np.float16), y=y, client=client)

    def test_rows(**options: str) -> list[int]:
        data = load("hapt", data_dir=tmp_path, partition="natural", data_options=options)
        assert data.test.rows is not None
        return data.test.rows.tolist()

    assert test_rows() == test_rows(held_out="class") == [8, 9, 18, 19, 28, 29, 38, 39]
    assert test_rows(held_out="client") == [16, 17, 18, 19, 36, 37, 38, 39]
    with pytest.raises(SettingError, match="held_out = class needs clients with samples in temporal order; data"):
        read_by_name("digits", held_out="class")
    with pytest.raises(SettingError, match="unknown held_out 'clas', did you mean 'class'"):
        test_rows(held_out="clas")


# --- real datasets ----------------------------------------------------------------------------------------------


@needs_real_data
def test_real_hapt_has_its_published_sizes() -> None:
    raw = read_real("npz", "hapt/hapt.npz")
    assert shapes(raw) == ((10_017, 6, 128), None) and count(raw.y) == 6 and count(raw.client_ids) == 30
