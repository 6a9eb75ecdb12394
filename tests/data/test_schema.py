"""Schemas: what inputs and labels mean, and labels by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fewer.data import Column, RawDataset, Schema, from_arrays, load
from fewer.data.sources import read, read_inputs
from fewer.errors import DataError, SettingError


def make_schema(class_names: tuple[str, ...] = (), classes: int = 3) -> Schema:
    return Schema("features", (2,), "float32", classes, class_names)


def test_a_schema_survives_json() -> None:
    columns = (Column("age", fill=3.5), Column("sex", ("f", "m")))
    schema = Schema("features", (3,), "float32", 2, ("a", "b"), columns, (), (1.0, 2.0, 0.0), (1.0, 0.1, 1.0), {"n": 1})
    assert Schema.from_dict(json.loads(json.dumps(schema.to_dict()))) == schema


@pytest.mark.parametrize(
    ("known", "labels", "names", "expected", "unknown"),
    [
        (("cold", "flu", "well"), [0, 1, 0], ("flu", "well"), [1, 2, 1], []),
        (("cold", "flu", "well"), [0, 1], ("flu", "gout"), [1, -1], ["gout"]),
        (("cold", "flu", "well"), [1, 1], ("flu", "gout"), [-1, -1], ["gout"]),  # names without samples do not count
        (("cold", "flu", "well"), [0, 2], (), [0, 2], []),  # positions
        (("cold", "flu", "well"), [3, -1], (), [-1, -1], ["-1", "3"]),
        (("3", "7", "9"), [3, 9], (), [0, 2], []),  # numbers are names if the names are numbers
        (("3", "7", "9"), [1], (), [-1], ["1"]),
        (("-1", "1"), [1], (), [1], []),
        ((), [0, 1], ("2", "0"), [2, 0], []),
        ((), [0], ("flu",), [-1], ["flu"]),
        ((), [2, 3], (), [2, -1], ["3"]),
        (("a", "b"), [2], (), [2], []),  # the third class has no name
    ],
)
def test_labels_are_mapped_by_name(
    known: tuple[str, ...], labels: list[int], names: tuple[str, ...], expected: list[int], unknown: list[str]
) -> None:
    mapped, missing = make_schema(known).map_labels(np.array(labels), names)
    assert mapped.tolist() == expected and missing == unknown


def test_data_has_a_schema() -> None:
    digits = load("digits", clients=2).schema
    assert (digits.kind, digits.shape, digits.dtype, digits.classes) == ("images", (1, 8, 8), "uint8", 10)
    assert digits.class_names == tuple("0123456789") and digits.shift[0] > 1 > digits.scale[0]
    text = from_arrays(["good day", "bad day"] * 20, [0, 1] * 20, partition="iid", clients=2, max_length=3).schema
    assert text.kind == "text" and text.shape == (3,) and {"good", "bad", "day"} <= {*text.tokens}
    assert load("shakespeare-mini", partition="natural", fraction=0.1).schema.kind == "tokens"
    x = np.random.default_rng(0).normal(size=(60, 3))
    assert from_arrays(x, x.sum(1), partition="iid").schema.targets == "numbers"
    assert from_arrays(x, (x > 0).astype(int), partition="iid").schema.targets == "labels"
    assert from_arrays(x[:, None], x.argmax(1), partition="iid").schema.kind == "series"


def test_files_are_read_as_the_schema_says(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b,kind\n" + "1,2,x\n3,4,y\n" * 20)
    options = {"label": "kind"}
    schema = load(f"csv:{tmp_path / 'a.csv'}", data_options=options, clients=2, partition="iid").schema
    assert schema.options == options and [column.name for column in schema.columns] == ["a", "b"]
    (tmp_path / "b.csv").write_text("kind,b,a,c\ny,2,1,9\n")
    raw = read(f"csv:{tmp_path / 'b.csv'}", schema=schema)
    assert np.asarray(raw.x).tolist() == [[1, 2]] and raw.y.tolist() == [1] and raw.class_names == ("x", "y")
    (tmp_path / "b.csv").write_text("b,a\n2,1\n")
    assert len(read_inputs(f"csv:{tmp_path / 'b.csv'}", None, schema).y) == 0
    with pytest.raises(DataError, match="has no labels"):
        read(f"csv:{tmp_path / 'b.csv'}", schema=schema)
    np.savez(tmp_path / "c.npz", x=np.ones((2, 2), np.float32))
    assert len(read_inputs(f"npz:{tmp_path / 'c.npz'}", None, schema).y) == 0
    with pytest.raises(DataError, match="has no array 'y'"):
        read(f"npz:{tmp_path / 'c.npz'}")
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n{"text": "b", "kind": 1}\n')
    with pytest.raises(DataError, match="line 2 has a 'kind', and lines before it have none"):
        read_inputs(f"jsonl:{tmp_path / 'd.jsonl'}", None, schema)
    with pytest.raises(SettingError, match="schema is not an option of data 'csv:"):
        load(f"csv:{tmp_path / 'a.csv'}", data_options={"schema": 1, **options})


def test_numbers_in_a_text_are_not_positions_of_named_classes(tmp_path: Path) -> None:
    schema = make_schema(("ill", "well"), 2)
    (tmp_path / "a.csv").write_text("a,label\n1,1\n2,0\n")
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": 0}\n{"text": "b", "label": 1}\n')
    np.savez(tmp_path / "a.npz", x=np.ones((2, 1), np.float32), y=[1, 0])
    for format in ("csv", "jsonl"):
        with pytest.raises(
            DataError, match=r"has labels 0, 1, but the run's classes have names \(ill, well\): use these"
        ):
            read(f"{format}:{tmp_path}/a.{format}", schema=schema)
        assert read_inputs(f"{format}:{tmp_path}/a.{format}", None, schema).class_names == ("0", "1")
    arrays = read(f"npz:{tmp_path}/a.npz", schema=schema)
    assert arrays.y.tolist() == [1, 0] and arrays.notes == ("labels: 0 is read as ill, 1 is read as well",)
    for names, expected in ((("0", "1"), [1, 0]), ((), [1, 0]), (("1", "0", "x"), [0, 1])):
        assert read(f"csv:{tmp_path}/a.csv", schema=make_schema(names)).y.tolist() == expected


def test_other_vocabularies_are_refused() -> None:
    raw = RawDataset(np.zeros((3, 2), np.int64), np.zeros(3, np.int64), tokens=("a", "b"))
    with pytest.raises(DataError, match="data 'x' has another vocabulary than the run"):
        raw.use_tokens_of(Schema("tokens", (2,), "int64", 2, tokens=("b", "a")), "x")
    texts = RawDataset(["some words"], np.zeros(1, np.int64))
    with pytest.raises(DataError, match=r"data 'x' is text; the model was trained on inputs of shape \(2,\)"):
        texts.use_tokens_of(make_schema(), "x")
