"""CSV files of features and text."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fewer.data import RawDataset, load
from fewer.data.federated import hold_out_rows
from fewer.data.schema import Column, Schema
from fewer.errors import SettingError
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
        ("a,kind\n1,2\n", r"no column 'label' \(it has: a, kind\); pass --data-option label=COLUMN"),
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


def check_inputs(table: str, expected: Sequence[Sequence[float]], folder: Path, **options: Any) -> RawDataset:
    raw = read("csv", write(folder / "a.csv", table), **options)
    assert np.allclose(np.asarray(raw.x), np.array(expected, np.float32))
    return raw


def make_schema(*columns: Column) -> Schema:
    return Schema("features", (len(columns),), "float32", 2, columns=columns)


# --- columns ----------------------------------------------------------------------------------------------------


def test_used_and_ignored_columns_are_noted(tmp_path: Path) -> None:
    table = "size,city,empty,weight,label\n,Ulm,,2,0\n"  # the first cell of a column decides nothing
    check_refused("csv", write(tmp_path / "a.csv", table + "1,Bonn,,3,1\n"), "column 'size' has missing values \\(1")
    raw = check_inputs(table.replace("\n,", "\n7,") + "1,Bonn,,3,1\n", [[7, 2], [1, 3]], tmp_path)
    assert raw.columns == (Column("size"), Column("weight"))
    assert raw.notes == (
        "columns: the inputs are size, weight; the label is label",
        "columns: ignored city (text; --data-option categorical=city makes them inputs)",
        "columns: ignored empty (empty)",
    )


def test_columns_are_chosen_by_name(tmp_path: Path) -> None:
    table = "a,b,c,label\n1,2,7,0\n3,5,8,1\n"
    check_inputs(table, [[1, 7], [3, 8]], tmp_path, features="c,a")
    raw = check_inputs(table, [[1, 7], [3, 8]], tmp_path, ignore=["b"])
    assert "columns: ignored b" in raw.notes
    file = tmp_path / "a.csv"
    check_refused("csv", file, r"no column 'x' \(it has: a, b, c, label\)", features="a,x")
    check_refused("csv", file, "features and ignore cannot be combined", SettingError, features="a", ignore="b")
    check_refused("csv", file, "column 'label' cannot be an input", SettingError, features="a,label")
    write(file, "a,city,label\n1,Ulm,0\n")
    check_refused("csv", file, r"features that are not numbers: city \(text; .*categorical=city", features="a,city")


def test_text_becomes_one_input_per_category(tmp_path: Path) -> None:
    table = "a,city,b,label\n1,Ulm,2,0\n3,Bonn,4,1\n5,none,6,1\n"
    expected = [[1, 0, 1, 0, 2], [3, 1, 0, 0, 4], [5, 0, 0, 1, 6]]
    for chosen in ("city", "all"):
        raw = check_inputs(table, expected, tmp_path, categorical=chosen)
        assert raw.columns == (Column("a"), Column("city", ("Bonn", "Ulm", "none")), Column("b"))
    assert raw.notes[0] == "columns: the inputs are a, city (3 categories), b; the label is label"


def test_numbers_and_text_in_one_column_are_refused(tmp_path: Path) -> None:
    for cells, message in (
        ("1\n2\nhigh", r"column 'a', row 3 is not a number: 'high' \(--data-option ignore=a drops the column, cat"),
        ("low\n2\nhigh", "column 'a', row 1 is not a number: 'low'"),
        ("1\n1_000", "row 2 is not a number: '1_000'"),
        ("1\n1 000", "row 2 has a thousands separator: '1 000'; remove it"),
        ("1.5\ninf", "row 2 is not a number: 'inf'"),
    ):
        table = "a;label\n" + "".join(f"{cell};0\n" for cell in cells.split("\n"))
        check_refused("csv", write(tmp_path / "a.csv", table), message)


def test_decimal_commas_are_read_and_thousands_are_refused(tmp_path: Path) -> None:
    check_inputs("a;b;label\n1,5;3;0\n-2,25e1;0,125;1\n", [[1.5, 3], [-22.5, 0.125]], tmp_path)
    check_inputs('a,label\n"1,5",0\n2,1\n', [[1.5], [2]], tmp_path)
    check_inputs("a;label\n1,234;0\n5,678;1\n", [[1.234], [5.678]], tmp_path, decimal=",")
    file = tmp_path / "a.csv"
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("a;label\n1,234;0\n5,678;1\n", "row 1 may have a thousands separator: '1,234'; remove it, or .*decimal=,", {}),
        ("a;label\n1,5;0\n", "row 1 may have a thousands separator: '1,5'; remove it$", {"decimal": "."}),
        ("a;label\n1.234,5;0\n", r"row 1 has a thousands separator: '1.234,5'", {}),
        ("a;label\n1,5;0\n1.5;1\n", r"row 2 is '1.5', but the column has decimal commas", {}),
        ("a;b;label\n1,5;1.234;0\n", r"column 'b', row 1 is '1.234', but column 'a' has decimal commas", {}),
        ("a;label\n756;0\n1.623;1\n703;1\n", r"row 2 may have a thousands separator: '1.623' .*decimal=\. if", {}),
        ("a;label\n1.234;0\n", "row 1 has a thousands separator: '1.234'", {"decimal": ","}),
    ]
    for table, message, options in cases:
        check_refused("csv", write(file, table), message, **options)
    check_inputs("a;label\n756;0\n1.623;1\n", [[756], [1.623]], tmp_path, decimal=".")
    for cells in ("756 1.62", "99 1.623", "1000 1.623", "756 0.623", "756 12.5 1.623"):  # no separators of thousands
        numbers = cells.split()
        check_inputs("a;label\n" + "".join(f"{n};0\n" for n in numbers), [[float(n)] for n in numbers], tmp_path)
    check_refused("csv", file, "decimal must be . or a comma", SettingError, decimal=";")


# --- missing values ---------------------------------------------------------------------------------------------


def test_missing_values_are_refused_or_replaced(tmp_path: Path) -> None:
    rows = [(str(row), "" if row % 4 == 1 else str(row % 7), row % 2) for row in range(40)]
    table = "id,a,label\n" + "".join(f"{x},{a},{y}\n" for x, a, y in rows)
    file = write(tmp_path / "a.csv", table)
    check_refused(
        "csv", file, r"column 'a' has missing values \(10, the first in row 2\): pass .*missing=mean, median, zero or"
    )
    plain = read("csv", file, missing="zero")
    train, test = hold_out_rows(plain, np.arange(40), 0.2)
    values = np.array([np.nan if a == "" else float(a) for _, a, _ in rows])
    for missing, fill in (("zero", 0), ("mean", np.nanmean(values[train])), ("median", np.nanmedian(values[train]))):
        raw = read("csv", file, missing=missing)
        assert np.allclose(np.asarray(raw.x)[:, 1], np.where(np.isnan(values), fill, values)) and len(test)
        assert raw.columns[1].fill == pytest.approx(fill)
        assert f"columns: missing values of a (10) are replaced by {fill:g}" in raw.notes
    dropped = read("csv", file, missing="drop")
    assert np.array_equal(np.asarray(dropped.x)[:, 0], np.flatnonzero(~np.isnan(values))) and len(dropped.y) == 30
    assert "rows: 10 of 40 are dropped because values are missing" in dropped.notes
    check_refused("csv", file, "unknown missing 'mode'", SettingError, missing="mode")


def test_missing_labels_and_clients_are_dropped_only(tmp_path: Path) -> None:
    for cell in ("", "NA", "nan", "NULL", "?"):
        file = write(tmp_path / "a.csv", f"a,who,label\n1,x,0\n2,y,{cell}\n")
        check_refused(
            "csv", file, r"'label' has missing values \(1, the first in row 2\): .*missing=drop$", missing="mean"
        )
        assert read("csv", file, missing="drop").y.tolist() == [0]
    file = write(tmp_path / "a.csv", "a,who,label\n1,x,0\n2,,1\n")
    check_refused("csv", file, "column 'who' has missing values", client="who")
    file = write(tmp_path / "a.csv", "a,b,label\n1,,0\n,1,1\n")
    check_refused("csv", file, "missing values in all rows", missing="drop")


# --- labels -----------------------------------------------------------------------------------------------------


def test_prices_are_not_classes(tmp_path: Path) -> None:
    table = "a,price\n" + "".join(f"{row},{200_000 + 7 * (row % 397)}\n" for row in range(400))
    file = write(tmp_path / "a.csv", table)
    check_refused("csv", file, "column 'price' has 397 distinct values in 400 rows: pass --loss mse", label="price")
    assert read("csv", file, label="price", regression=True).y.shape == (400, 1)
    assert len(set(read("csv", file, label="price", regression=False).y.tolist())) == 397
    check_refused("csv", write(file, 'a,label\n1,2\n2,"0,5"\n'), "has label 0.5 .*--loss mse predicts numbers")


def test_labels_of_numbers_and_names_are_noted(tmp_path: Path) -> None:
    raw = read("csv", write(tmp_path / "a.csv", "a,label\n1,0\n4,1\n6,yes\n"))
    assert raw.notes[-1] == "labels: numbers and names are mixed: 0, 1, yes"
    assert len(read("csv", write(tmp_path / "a.csv", "a,label\n1,-1\n4,1\n")).notes) == 1


def test_labels_with_leading_zeros_are_names(tmp_path: Path) -> None:
    raw = read("csv", write(tmp_path / "a.csv", "a,label\n1,007\n4,7\n6,7\n"))
    assert raw.class_names == ("007", "7") and raw.y.tolist() == [0, 1, 1]
    assert read("csv", write(tmp_path / "a.csv", "a,label\n1,0\n4,10\n")).y.tolist() == [0, 10]
    file = write(tmp_path / "a.csv", "a,label\n1,2\n4,high\n")
    check_refused("csv", file, r"row 2 is not a number: 'high' \(a regression predicts numbers\)", regression=True)


def test_integers_of_a_regression_are_numbers(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "a,label\n" + "".join(f"{row % 9},{row % 3}\n" for row in range(60)))
    data = load(f"csv:{tmp_path}/a.csv", data_options={"regression": True}, clients=2, partition="iid")
    assert not data.has_classes and data.classes == 1


# --- identifiers, time ------------------------------------------------------------------------------------------


def test_columns_that_hardly_help_are_noted(tmp_path: Path) -> None:
    rows = [f"{row},{row * 7},{row // 2},{row % 3},5,{-999 if row % 2 else row},{row % 2}\n" for row in range(12)]
    raw = read("csv", write(tmp_path / "a.csv", "count,patientId,visit_id,m,unit,dose,label\n" + "".join(rows)))
    for note in (
        "columns: count may be an identifier, but it is an input; --data-option ignore=count drops it",
        "columns: patientId may be an identifier, but it is an input; --data-option ignore=patientId drops it",
        "columns: visit_id may be an identifier, but it is an input; --data-option ignore=visit_id drops it",
        "split: visit_id has 6 repeated values, whose rows may be both training and test samples",
        "columns: dose is -999 in 6 rows, which may mean a missing value",
        "columns: unit has the same value in all rows; --data-option ignore=unit drops it",
    ):
        assert any(known.startswith(note) for known in raw.notes)
    assert not any("columns: m " in note for note in raw.notes)
    indexed = check_inputs(",a,label\n0,5,0\n1,6,1\n", [[5], [6]], tmp_path)
    assert "columns: ignored '' (row numbers)" in indexed.notes
    trailing = check_inputs("a,label,\n5,0,\n6,1,\n", [[5], [6]], tmp_path)
    assert "columns: ignored '' (empty)" in trailing.notes
    file = write(tmp_path / "a.csv", ",a,label\n0.3,5,0\n1.7,6,1\n")
    check_refused("csv", file, "column 1 has no name, and its cells are not row numbers: name it$")


def test_identifiers_and_dates_are_found_by_their_values(tmp_path: Path) -> None:
    rows = [f"P{row // 2},2024-01-{row % 28 + 1:02},{10**8 + 7 * row},{row % 3},{row % 2}\n" for row in range(60)]
    raw = read("csv", write(tmp_path / "a.csv", "person,seen,ticket,m,label\n" + "".join(rows)))
    for note in (
        "split: person has 30 repeated values",
        "split: test samples are random, not the latest by seen (rows are not sorted by it)",
        "columns: ticket may be an identifier",
    ):
        assert any(known.startswith(note) for known in raw.notes)
    assert not any("split: seen has" in note or ": m " in note for note in raw.notes)


def test_columns_of_different_scales_are_noted(tmp_path: Path) -> None:
    rows = "".join(f"{row % 5},{'uv'[row % 2]},{1000 * (row % 7)},{row % 2}\n" for row in range(40))
    write(tmp_path / "a.csv", "a,kind,income,label\n" + rows)
    for standardize in (False, True):
        data = load(
            f"csv:{tmp_path}/a.csv",
            data_options={"categorical": "kind"},
            clients=2,
            partition="iid",
            standardize=standardize,
        )
        assert any("income varies 1" in note and "as much as a;" in note for note in data.notes) is not standardize


def test_time_sorts_and_splits_the_rows(tmp_path: Path) -> None:
    days = [(7 * row) % 20 for row in range(20)]
    for times in ([f"2024-01-{day + 1:02}" for day in days], days):
        table = "date,a,label\n" + "".join(f"{time},{day},{day % 2}\n" for time, day in zip(times, days, strict=True))
        file = write(tmp_path / "a.csv", table)
        random = read("csv", file, features="a")
        note = "split: test samples are random, not the latest by date (rows are not sorted by it); --data-option time="
        assert any(known.startswith(note) for known in random.notes) and not random.time_ordered
        raw = read("csv", file, time="date", features="a")
        assert np.asarray(raw.x)[:, 0].tolist() == list(range(20)) and raw.time_ordered
        data = load(f"csv:{file}", data_options={"time": "date", "features": "a"}, clients=2, partition="iid")
        assert sorted(data.test.all()[0][:, 0].tolist()) == [16, 17, 18, 19]
    check_refused("csv", write(tmp_path / "a.csv", "t,a,label\n31.12.,1,0\n"), r"row 1 is '31.12.' \(allowed", time="t")


# --- files ------------------------------------------------------------------------------------------------------


def test_unusual_files_are_read_or_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", "größe,label\n1,ja\n".encode("cp1252"))
    check_refused("csv", file, r"not UTF-8 text: byte 0xf6 at 2 \(.*encoding=cp1252\)")
    assert read("csv", file, encoding="cp1252").columns == (Column("größe"),)
    check_refused("csv", file, "unknown encoding 'cp9'", SettingError, encoding="cp9")
    check_refused("csv", write(file, "a,label\n1,0\n".encode("utf-16")), "encoding=utf-16")
    check_inputs("\ufeffa , label\r\n 1, x \r\n\r\n2,x\r\n", [[1], [2]], tmp_path)
    check_inputs('"a,b";label\n1;0\n', [[1]], tmp_path)
    check_inputs("0,1,2\n5,6,0\n", [[5, 6]], tmp_path, label=2)  # pandas names columns so
    check_inputs("a|label\n1|0\n", [[1]], tmp_path)
    check_inputs("sep=;\na;label\n1;0\n", [[1]], tmp_path)
    check_inputs("#a,label\n1,0\n\n", [[1]], tmp_path)
    for comment in ("# export 2024", "# export, by a clinic"):
        check_refused("csv", write(file, f"{comment}\na;b;label\n1;2;0\n"), "starts with a comment, '# export")
    check_refused("csv", write(file, "5,6,0\n7,8,1\n"), "numbers in its first line, which must name the columns: 5, 6")
    check_refused("csv", write(file, "a,b,a\n1,2,3\n"), "two columns with the same name 'a'")


# --- schemas ----------------------------------------------------------------------------------------------------


def test_columns_are_mapped_by_name_with_a_schema(tmp_path: Path) -> None:
    schema = make_schema(Column("a"), Column("city", ("Bonn", "Ulm")), Column("b", fill=9.0))
    other = "label,b,extra,city,a\n1,2,x,Ulm,1\n0,,y,Bonn,3\n"
    raw = check_inputs(other, [[1, 0, 1, 2], [3, 1, 0, 9]], tmp_path, schema=schema)
    assert raw.y.tolist() == [1, 0] and raw.columns == schema.columns
    assert raw.notes == (
        "columns: ignored extra (not used by the model)",
        "columns: missing values of b (1) are replaced by 9",
    )
    coded = check_inputs("b,city,a\n2,Ulm,1\n3,Ulm,-999\n", [[1, 0, 1, 2], [-999, 0, 1, 3]], tmp_path, schema=schema)
    assert coded.notes == ("columns: a is -999 in 1 row, which may mean a missing value",)
    unlabeled = check_inputs("b,city,a\n2,Ulm,1\n", [[1, 0, 1, 2]], tmp_path, schema=schema)
    assert len(unlabeled.y) == 0
    for table, message in (
        ("city,a,x\nUlm,1,2\n", r"lacks the column 'b' \(it has: city, a, x\)"),
        ("a,city,b\n1,Ulm,2\n1,Kiel,2\n", r"column 'city', row 2 has the unknown category 'Kiel' \(known: Bonn, Ulm\)"),
        ("a,city,b\nx,Ulm,2\n", "column 'a', row 1 is not a number: 'x'"),
        (
            "a,city,b\n,Ulm,2\n",
            r"column 'a' has missing values \(1, the first in row 1\): pass --data-option missing=drop",
        ),
    ):
        check_refused("csv", write(tmp_path / "a.csv", table), message, schema=schema)
    check_refused("csv", tmp_path / "a.csv", "column 'a' has missing values", schema=schema, missing="mean")


@pytest.mark.parametrize(("scale", "noted"), [(1, False), (50, True)])
def test_large_values_of_one_scale_are_noted(tmp_path: Path, scale: int, noted: bool) -> None:
    rows = "".join(f"{scale * (1 + row % 7 / 10)},{scale * (1 + row % 5 / 10)},{row % 2}\n" for row in range(60))
    (tmp_path / "a.csv").write_text(f"a,b,label\n{rows}")
    for standardize in (False, True):
        data = load(f"csv:{tmp_path}/a.csv", clients=2, partition="iid", standardize=standardize)
        assert any("in size, which may not train" in note for note in data.notes) == (noted and not standardize)
