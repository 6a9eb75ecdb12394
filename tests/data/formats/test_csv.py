"""CSV files of features and text."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

from tests.data.formats.files import check_refused, read, write


def test_csv_columns_become_features(tmp_path: Path) -> None:
    table = '\ufeffwidth,name,height,kind,who\r\n1,tall one,2.5,owl,7\r\n3,x,-4e1,cat,8\r\n\r\n5,"a, b",6,owl,7\r\n'
    raw = read("csv", write(tmp_path / "a.csv", table), label="kind", client="who")
    assert np.array_equal(np.asarray(raw.x), np.array([[1, 2.5], [3, -40], [5, 6]], np.float32))
    assert raw.y.tolist() == [1, 0, 1] and raw.class_names == ("cat", "owl")
    assert raw.client_ids is not None and raw.client_ids.tolist() == ["7", "8", "7"]
    packed = write(tmp_path / "a.csv.gz", gzip.compress(b"a;label\n1;3\n2;0\n"))
    assert read("csv", packed).y.tolist() == [3, 0] and not read("csv", packed).class_names


def test_a_csv_column_of_text_becomes_texts(tmp_path: Path) -> None:
    raw = read("csv", write(tmp_path / "a.tsv", "text\tlabel\nhello\t1\nthere, you\t0\n"), text="text")
    assert raw.x == ["hello", "there, you"] and raw.y.tolist() == [1, 0]


def test_bad_csv_is_refused(tmp_path: Path) -> None:
    for table, message in (
        ("a,kind\n1,2\n", r"no column 'label' \(it has: a, kind\)"),
        ("a,label\n1,2\n1\n", "line 3 has 1 columns, expected 2"),
        ("a,label\n1,2\nx,3\n", "column 'a', row 2 is not a number: 'x'"),
        ("a,label\n1,2\n1e99,3\n", "column 'a', row 2 is not a finite number"),
        ("a,label\n1,2\n2,0.5\n", "has label 0.5"),
        ("a,label\nx,2\n", "no column of numbers"),
        ("label\n1\n", "no column of numbers"),
        ("a,a,label\n1,2,3\n", "same name"),
        ("a,label\n", "no rows"),
        ('a,label\n"1,2\n', "cannot read .* as CSV"),
    ):
        check_refused("csv", write(tmp_path / "a.csv", table), message)
    check_refused("csv", write(tmp_path / "a.csv", b"a,label\n\xff,1\n"), "not UTF-8")
