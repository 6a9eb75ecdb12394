"""MovieLens ratings by user."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fewer.data.formats.movielens import FEATURES
from tests.data.formats.files import (
    check_refused,
    film_line,
    needs_real_data,
    read,
    read_real,
    shapes,
    write,
    write_movielens,
    write_zip,
)

# --- MovieLens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", ["", "userid\titemid\trating\ttimestamp\n"])
def test_movielens_is_read_by_user(tmp_path: Path, header: str) -> None:
    write_movielens(tmp_path)
    write(tmp_path / "u.data", header + (tmp_path / "u.data").read_text())
    raw = read("movielens", tmp_path)
    assert isinstance(raw.x, np.ndarray) and raw.x.shape == (4, 103) == (4, len(set(FEATURES))) and raw.time_ordered
    assert raw.client_ids is not None and raw.client_ids.tolist() == [1, 1, 1, 2] and raw.y.tolist() == [0, 2, 1, 0]
    assert raw.class_names == ("Film 1 (1995)", "Film 2 ()", "Film 3 (1970)")
    features = [{FEATURES[column]: float(row[column]) for column in np.flatnonzero(row)} for row in raw.x]
    user = {"user: age / 50": 0.5, "user: female": 1.0, "user: writer": 1.0}
    assert features[0] == {**user, "time: hour 1": 1.0, "time: Thursday": 1.0}
    expected = {
        "last film: comedy": 1.0,
        "last film: year of release (decades after 1950)": 2.0,
        "last film: rated 5": 1.0,
        "films so far: share of action": 0.5,
        "films so far: share of comedy": 1.0,
        "films so far: mean rating / 5": 0.8,
        "films so far: log(1 + number) / 5": np.log(3) / 5,
        "time: hour 2": 1.0,
        "time: Thursday": 1.0,
        "time: log(1 + seconds since the first film) / 10": np.log(3601) / 10,
    }
    assert features[2] == pytest.approx({**user, **expected})
    assert features[3] == {
        "user: age / 50": 1.0,
        "user: male": 1.0,
        "user: other": 1.0,
        "time: hour 0": 1.0,
        "time: Friday": 1.0,
    }


def test_movielens_zipped_and_bad(tmp_path: Path) -> None:
    files = {f"ml-100k/{file.name}": file.read_bytes() for file in write_movielens(tmp_path / "a").iterdir()}
    write_zip(tmp_path / "zip" / "ml-100k.zip", files)
    assert len(read("movielens", tmp_path / "zip").y) == 4
    for ratings, message in (
        ("1\t1\t3\n", "u.data, line 1 has 3 columns, expected 4"),
        ("1\t1\t3\tnoon\n", "cannot read .* as MovieLens"),
        ("3\t1\t3\t1\n", r"user 3 or 3 \(allowed: 1 to 2\)"),
        ("1\t4\t3\t1\n", r"film 4 or 4 \(allowed: 1 to 3\)"),
        ("1\t1\t6\t1\n", r"rating 6 or 6 \(allowed: 1 to 5\)"),
        ("", "no ratings"),
    ):
        check_refused("movielens", write_movielens(tmp_path / "b", ratings), message)
    write(write_movielens(tmp_path / "b") / "u.item", film_line(2, "1995", {1}))
    check_refused("movielens", tmp_path / "b", "film ids in u.item must be")
    (tmp_path / "b" / "u.user").unlink()
    check_refused("movielens", tmp_path / "b", "no u.user")


# --- real datasets ----------------------------------------------------------------------------------------------


@needs_real_data
def test_real_movielens_has_its_published_sizes() -> None:
    raw = read_real("movielens", "movielens-100k")
    assert shapes(raw) == ((100_000, 103), None) and len(raw.class_names) == 1682
    sizes = np.unique(np.asarray(raw.client_ids), return_counts=True)[1]
    assert len(sizes) == 943 and (sizes.min(), sizes.max()) == (20, 737)
    assert isinstance(raw.x, np.ndarray) and np.abs(raw.x).max() < 6
