"""User arrays as federated data, held-out samples, and fingerprints."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from fewer.data import ArrayData, Samples, from_arrays, from_clients
from fewer.data.partition import Parts
from fewer.errors import DataError, SettingError
from tests.data.arrays import arrays, labels


def row_indices(samples: Samples) -> set[int]:
    """The row indices of samples from `arrays`."""
    return {int(x[0]) // 2 for x in samples.slice(0, len(samples))[0]}


# --- user arrays ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("validation", [0.0, 0.25])
def test_a_fifth_of_the_samples_is_for_testing(validation: float) -> None:
    x, y = arrays()
    data = from_arrays(x, y, clients=4, validation=validation)
    seen: list[int] = []
    for client in range(4):
        train, validation_samples, test = data.client(client)
        total = len(train) + len(validation_samples) + len(test)
        assert abs(len(test) - total / 5) <= 4 and len(validation_samples) == int((total - len(test)) * validation)
        assert data.size(client) == len(train)
        for part in (train, validation_samples, test):
            seen += row_indices(part)
            inputs, targets = part.slice(0, len(part))
            assert targets.tolist() == [y[int(row[0]) // 2] for row in inputs]
    assert sorted(seen) == list(range(200))
    assert row_indices(data.test) == set().union(*(row_indices(data.client(client).test) for client in range(4)))
    assert data.shape == (2,) and data.classes == 4 and len(data) == 4 and data.origin is None


def test_client_ids_assign_samples_to_clients() -> None:
    x, y = arrays(30)
    client_ids = np.array([f"client {row % 3}" for row in range(30)])
    data = from_arrays(x, y, client_ids=client_ids, partition="natural")
    assert len(data) == 3
    for client in range(3):
        client_data = data.client(client)
        assert row_indices(client_data.train) | row_indices(client_data.test) == set(range(client, 30, 3))
        assert (len(client_data.train), len(client_data.test)) == (8, 2)


def test_client_ids_with_a_separate_test_set() -> None:
    x, y = arrays(30)
    data = from_arrays(x, y, client_ids=np.arange(30) % 3, test=(x[:9] + 1000, y[:9]))
    assert [len(data.client(client).train) for client in range(3)] == [10, 10, 10]
    assert sum(len(data.client(client).test) for client in range(3)) == 9
    assert row_indices(data.test) == set(range(500, 509))


def test_natural_needs_clients() -> None:
    with pytest.raises(SettingError, match="partition = natural needs client ids"):
        from_arrays(*arrays(), partition="natural")


def test_from_clients_keeps_order_and_a_client_without_samples() -> None:
    x, y = arrays(30)
    empty = (np.zeros((0, 2), np.float32), np.zeros(0, int))
    pairs = [empty, (x[:10], y[:10]), empty, (x[10:25], y[10:25]), (x[25:], y[25:]), ([], [])]
    data = from_clients(pairs, validation=0.5)
    assert len(data) == 6
    assert [sum(map(len, data.client(client))) for client in range(6)] == [0, 10, 0, 15, 5, 0]
    assert [data.size(client) for client in range(6)] == [0, 4, 0, 6, 2, 0]
    rows = [set().union(*map(row_indices, data.client(client))) for client in range(6)]
    assert rows == [set(), set(range(10)), set(), set(range(10, 25)), set(range(25, 30)), set()]


def test_from_clients_takes_tensors_and_mixed_floats() -> None:
    pairs = [(torch.ones(5, 2), torch.ones(5).long()), (np.zeros((5, 2), np.float64), [0] * 5)]
    data = from_clients(pairs)
    assert data.source.x.dtype == torch.float32 and data.classes == 2
    assert data.client(0).train.slice(0, 1)[0].tolist() == [[1, 1]]


def test_fraction_keeps_that_share_of_the_samples() -> None:
    x, y = arrays()
    data = from_arrays(x, y, clients=2, fraction=0.5, test=(x, y))
    assert data.size(0) + data.size(1) == 100 and len(data.test) == 200
    train_rows = row_indices(data.client(0).train) | row_indices(data.client(1).train)
    assert len(train_rows) == 100 and train_rows != set(range(100))
    data = from_arrays(x, y, client_ids=np.arange(200) % 2, fraction=0.5, test=(x, y))
    assert data.size(0) + data.size(1) == 100
    for client in range(2):
        assert {row % 2 for row in row_indices(data.client(client).train)} == {client}


def test_a_client_that_fraction_leaves_without_samples_remains_a_client() -> None:
    x, y = arrays(55)
    pairs = [(x[:3], y[:3]), (x[3:53], y[3:53]), (x[53:], y[53:])]
    for fraction in (0.5, 0.1, 0.03):
        data = from_clients(pairs, fraction=fraction, test=(x, y))
        assert len(data) == 3 and sum(data.size(client) for client in range(3)) == round(55 * fraction)
        for client, rows in enumerate((range(3), range(3, 53), range(53, 55))):
            assert row_indices(data.client(client).train) <= set(rows)
    assert data.size(0) == 0


def test_images_get_a_channel_and_labels_may_be_a_column() -> None:
    data = from_arrays(np.zeros((40, 5, 6), np.uint8), np.zeros((40, 1)), clients=2)
    assert data.shape == (1, 5, 6) and data.source.y.dtype == torch.int64


BAD = [
    (
        {"x": np.array([[0, 1], [np.nan, 1], [2, 3]] * 10, np.float32)},
        r"NaN or infinity in sample 1 \(10 samples in total\)",
    ),
    ({"x": np.full((30, 2), np.inf)}, "NaN or infinity in sample 0"),
    ({"x": np.full((30, 2), 1e300)}, "NaN or infinity in sample 0"),
    ({"x": np.zeros((29, 2))}, "has 29 inputs and 30 labels"),
    ({"x": np.zeros((0, 2)), "y": []}, "has no samples"),
    ({"x": np.float32(3)}, "has 1 inputs and 30 labels"),
    ({"x": np.array(["a"] * 30)}, "not an array of numbers"),
    ({"x": np.array([None] * 30)}, "not an array of numbers"),
    ({"x": [[1.0]] * 29 + [[1.0, 2.0]]}, "not an array of numbers"),
    ({"x": np.zeros((30, 2), ">f4")}, "not an array of numbers"),
    ({"x": np.zeros((30, 2), np.complex64)}, "complex inputs"),
    ({"y": np.array([np.nan] * 30)}, "NaN or infinity among its targets"),
    ({"y": np.array([None] * 30)}, r"missing labels \(30; the first is None, in sample 0\)"),
    ({"y": [0, 1, None] * 10}, r"missing labels \(10; the first is None, in sample 2\)"),
    ({"y": ["a", "b", ""] * 10}, r"missing labels \(10; the first is empty, in sample 2\)"),
    ({"y": ["a", "b", "nan"] * 10}, "missing labels"),
    ({"y": ["a", "b", "NA"] * 10}, "missing labels"),
    ({"y": ["a", "b", "None"] * 10}, "missing labels"),
    ({"y": ["a", "b", "?"] * 10}, "missing labels"),
    ({"y": ["a", "b"] * 15, "test": (np.zeros((2, 2)), ["a", ""])}, "missing labels"),
    ({"class_names": ["x", "x", "y"]}, "two classes with the same name 'x'"),
    ({"client_ids": ["a", None] * 15}, r"no client id for 15 samples \(the first: sample 1\)"),
    ({"client_ids": [1.0, float("nan")] * 15}, "no client id for 15 samples"),
    ({"client_ids": np.array(["a", 1] * 15, dtype=object)}, "client ids of several types"),
    ({"y": np.array([0, 2**40] * 15)}, "must be < 1048576, got 1099511627776"),
    ({"y": np.full((30, 2), 2)}, r"labels of shape \(30, 2\)"),
    ({"y": np.zeros((30, 2, 2))}, r"labels of shape \(30, 2, 2\)"),
    ({"y": np.full(30, 0.5), "test": (np.zeros((3, 2)), np.zeros((3, 2)))}, "1 training targets per sample, but 2"),
    ({"client_ids": [0] * 29}, "has 30 samples and 29 client ids"),
    ({"test": (np.zeros((3, 2)), [0, 1])}, r"\(test\)' has 3 inputs and 2 labels"),
    ({"test": (np.full((1, 2), np.nan), [0])}, r"\(test\)' has NaN"),
    ({"test": (np.zeros((1, 3)), [0])}, r"training inputs of float32 \(2,\), but test inputs of float32 \(3,\)"),
    ({"test": (np.zeros((1, 2), np.uint8), [0])}, r"training inputs of float32 \(2,\), but test inputs of uint8"),
    ({"clients": 31}, "cannot partition 24 training samples among 31 clients"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
@pytest.mark.filterwarnings("error")
def test_invalid_arrays_are_errors(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"x": np.zeros((30, 2)), "y": np.arange(30) % 3, "clients": 2, "min_samples_per_client": 1}
    assert len(from_arrays(**good)) == 2
    with pytest.raises(DataError, match=message):
        from_arrays(**good | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fraction": 0.0}, "fraction must be > 0 and <= 1, got 0"),
        ({"fraction": 1.1}, "fraction must be > 0 and <= 1, got 1.1"),
        ({"fraction": 0.001}, "keeps none of 160 samples"),
        ({"fraction": 0.001, "client_ids": np.zeros(200)}, "keeps none of 160 samples"),
        ({"validation": 1.5}, "fraction to hold out must be > 0 and < 1"),
        ({"partition": "idd"}, "unknown partition 'idd', did you mean 'iid'"),
        ({"alpha": -1.0}, "alpha must be > 0, got -1"),
        ({"min_samples_per_client": 300}, "fewer than 300 of 160 samples"),
    ],
)
def test_wrong_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        from_arrays(*arrays(), **{"clients": 2, **change})


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "no client in the list has samples"),
        ([([], []), ([], [])], "no client in the list has samples"),
        ([(np.zeros((3, 2)), [0, 1])], "client 0' has 3 inputs and 2 labels"),
        (
            [(np.zeros((3, 2)), [0] * 3), (np.zeros((3, 4)), [0] * 3)],
            r"client 1 has inputs of float64 \(4,\), but other clients",
        ),
        ([(np.zeros((3, 2)), [0] * 3), (np.zeros((3, 2), np.uint8), [0] * 3)], r"client 1 has inputs of uint8 \(2,\)"),
        ([(np.zeros((3, 2)), [0] * 3), (np.full((3, 2), np.nan), [0] * 3)], "NaN or infinity in sample 3"),
    ],
)
def test_incompatible_clients_are_errors(pairs: list[tuple[Any, Any]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_clients(pairs)


# --- holding out ------------------------------------------------------------------------------------------------


def test_hold_out_takes_test_samples_from_training_alone() -> None:
    x, y = arrays()
    data = from_arrays(x, y, clients=4, validation=0.2)
    tuning_data = data.hold_out(0.25, seed=5)
    test_rows = row_indices(data.test)
    assert len(tuning_data) == 4 and tuning_data.origin is None
    for client in range(4):
        before, after = data.client(client), tuning_data.client(client)
        train, held_out = row_indices(after.train), row_indices(after.test)
        assert not train & held_out and train | held_out == row_indices(before.train)
        assert len(held_out) == len(before.train) // 4
        assert row_indices(after.validation) == row_indices(before.validation)
        assert not (train | held_out) & test_rows
        inputs, targets = after.test.slice(0, len(after.test))
        assert targets.tolist() == [y[int(row[0]) // 2] for row in inputs]
    assert row_indices(tuning_data.test) == set().union(
        *(row_indices(tuning_data.client(client).test) for client in range(4))
    )
    assert not row_indices(tuning_data.test) & test_rows
    assert row_indices(data.test) == test_rows


def test_hold_out_never_reads_the_test_samples() -> None:
    x, y = arrays()
    data = from_arrays(x, y, clients=4, test=(x + 10_000, y))
    damaged = replace(data, test=Samples(torch.full_like(data.test.x, torch.nan), data.test.y))
    first, second = (source.hold_out(0.3, seed=0) for source in (data, damaged))
    assert first.fingerprint() == second.fingerprint()
    assert bool(torch.isfinite(second.test.slice(0, len(second.test))[0]).all())


def test_hold_out_depends_on_its_seed() -> None:
    data = from_arrays(*arrays(), clients=4)
    rows = [row_indices(data.hold_out(0.3, seed).test) for seed in (0, 0, 1)]
    assert rows[0] == rows[1] != rows[2]


def test_a_second_hold_out_takes_other_samples() -> None:
    data = from_arrays(*arrays(), clients=4)
    first = data.hold_out(0.3, 0)
    second = first.hold_out(0.3, 0)
    assert not row_indices(second.test) & row_indices(first.test)
    assert row_indices(second.test) <= set().union(*(row_indices(first.client(client).train) for client in range(4)))


# --- fingerprint ------------------------------------------------------------------------------------------------


def make_data(**change: Any) -> ArrayData:
    x = np.random.default_rng(0).integers(256, size=(80, 3, 3), dtype=np.uint8)
    y = labels(80, 4)
    options: dict[str, Any] = {
        "x": x,
        "y": y,
        "test": (x[:20].copy(), y[:20].copy()),
        "clients": 3,
        "min_samples_per_client": 1,
        "normalization": (0.5, 0.5),
    }
    return from_arrays(**options | change)


def test_fingerprint_depends_on_the_content() -> None:
    data = make_data()
    assert data.fingerprint() == make_data().fingerprint() == data.to(torch.device("cpu")).fingerprint()
    assert len(data.fingerprint()) == 8


def increment_at(array: Any, index: Any) -> Any:
    copied = np.array(array)
    copied[index] = (copied[index] + 1) % 4
    return copied


@pytest.mark.parametrize(
    "what",
    ["pixel", "label", "test pixel", "test label", "seed", "alpha", "clients", "validation", "normalization", "shape"],
)
def test_fingerprint_changes_with(what: str) -> None:
    x, y = np.random.default_rng(0).integers(256, size=(80, 3, 3), dtype=np.uint8), labels(80, 4)
    test = x[:20], y[:20]
    change: dict[str, Any] = {
        "pixel": {"x": increment_at(x, (40, 1, 2))},
        "label": {"y": increment_at(y, 40), "partition": "iid"},
        "test pixel": {"test": (increment_at(test[0], (7, 0, 0)), test[1])},
        "test label": {"test": (test[0], increment_at(test[1], 7)), "partition": "iid"},
        "seed": {"seed": 1},
        "alpha": {"alpha": 5.0},
        "clients": {"clients": 4},
        "validation": {"validation": 0.2},
        "normalization": {"normalization": (0.5, 0.25)},
        "shape": {"x": x.reshape(80, 9), "test": (test[0].reshape(20, 9), test[1])},
    }[what]
    common = {"partition": "iid"} if "partition" in change else {}
    assert make_data(**change).fingerprint() != make_data(**common).fingerprint()


def test_fingerprint_changes_when_a_row_moves_to_another_client() -> None:
    data = make_data()
    offsets = data.train.offsets.copy()
    offsets[1] += 1
    assert replace(data, train=Parts(data.train.rows, offsets)).fingerprint() != data.fingerprint()


# --- names of classes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["list", "array", "object", "categorical", "string"])
def test_labels_may_be_names(kind: str) -> None:
    names = ["wolf", "cat", "dog", "cat"] * 10
    labels: Any = {
        "list": names,
        "array": np.array(names),
        "object": np.array(names, dtype=object),
        "categorical": pandas.Categorical(names, categories=["wolf", "dog", "cat"]),
        "string": pandas.Series(names, dtype="string"),
    }[kind]
    x = np.arange(80, dtype=np.float32).reshape(40, 2)
    data = from_arrays(x, labels, clients=2, partition="iid")
    numbers = from_arrays(x, [2, 0, 1, 0] * 10, clients=2, partition="iid")
    assert data.class_names == ("cat", "dog", "wolf") and data.classes == 3
    assert data.fingerprint() == numbers.fingerprint()


def test_names_of_classes_cover_the_test_set_and_clients() -> None:
    x = np.zeros((20, 2), np.float32)
    data = from_arrays(x, ["a", "c"] * 10, test=(x[:2], ["b", "c"]), clients=2, partition="iid")
    assert data.class_names == ("a", "b", "c") and data.test.labels.tolist() == [1, 2]
    ordered = from_arrays(x, ["a", "c"] * 10, class_names=["c", "b", "a"], clients=2, partition="iid")
    assert ordered.class_names == ("c", "b", "a") and set(ordered.source.y.tolist()) == {0, 2}
    with pytest.raises(DataError, match=r"'arrays' has label 'c' \(allowed: a, b\)"):
        from_arrays(x, ["a", "c"] * 10, class_names=["a", "b"])
    by_client = from_clients([(x, ["a"] * 20), (x, ["b"] * 20)])
    assert by_client.class_names == ("a", "b") and set(by_client.client(1).train.labels.tolist()) == {1}


def test_a_label_that_is_no_name_is_refused() -> None:
    labels = np.array(["a", "b", 3, "a"], dtype=object)
    assert from_arrays(np.zeros((20, 2)), np.array([0, 1] * 10, dtype=object), clients=2, partition="iid").classes == 2
    with pytest.raises(DataError, match=r"'arrays' has label 3 in sample 2 \(expected: names or integers\)"):
        from_arrays(np.zeros((4, 2), np.float32), labels)
    with pytest.raises(DataError, match="label 0 in sample 0"):
        from_arrays(np.zeros((2, 2), np.float32), ["a", "b"], test=(np.zeros((1, 2), np.float32), [0]))


def test_classes_may_have_names_that_look_missing() -> None:
    x = np.zeros((20, 2), np.float32)
    settings: dict[str, Any] = {"clients": 2, "partition": "iid"}
    assert from_arrays(x, ["NA", "US"] * 10, class_names=["NA", "US"], **settings).class_names == ("NA", "US")
    assert from_arrays(x, ["none", "some"] * 10, **settings).class_names == ("none", "some")


@pytest.mark.parametrize("labels", [np.array([-1, 1] * 10), torch.tensor([[-1], [1]] * 10), [-1, 1] * 10])
def test_negative_integers_are_names_of_classes(labels: Any) -> None:
    data = from_arrays(np.zeros((20, 2), np.float32), labels, clients=2, partition="iid")
    assert data.class_names == ("-1", "1") and data.source.y[:4].tolist() == [0, 1, 0, 1]
    assert data.schema.map_labels(np.array([1, 1]))[0].tolist() == [1, 1]
    assert data.as_numbers().source.y[:2].tolist() == [[-1], [1]]


@pytest.mark.parametrize("kind", ["int64", "int32", "uint16", "bool"])
def test_integer_inputs_become_floats(kind: str) -> None:
    x = (np.arange(60).reshape(20, 3) % 2).astype(kind)
    data = from_arrays(x, np.arange(20) % 2, clients=2, partition="iid", test=(x[:4], [0, 1, 0, 1]))
    assert data.source.x.dtype == data.test.x.dtype == torch.float32
    assert np.array_equal(data.source.x.numpy(), x)


# --- DataFrames ---------------------------------------------------------------------------------------------------


def make_frame(count: int = 40) -> Any:
    x = np.random.default_rng(0).normal(size=(count, 2))
    return pandas.DataFrame(x, columns=["a", "b"])


def test_clients_with_frames_are_matched_by_column_name() -> None:
    frame, y = make_frame(), np.arange(20) % 2
    data = from_clients([(frame[:20], y), (frame[20:][["b", "a"]], y), ([], [])])
    same = from_clients([(frame[:20], y), (frame[20:], y), ([], [])])
    assert data.fingerprint() == same.fingerprint() and [column.name for column in data.columns] == ["a", "b"]
    assert np.array_equal(data.source.x.numpy(), frame.to_numpy(np.float32))
    for other, message in (
        (frame.rename(columns={"b": "c"}), "client 1 has the column c, but client 0 has: a, b"),
        (frame[["a"]], r"data 'client 1' lacks the column 'b' \(it has: a\)"),
        (frame.to_numpy(), "client 1 has no DataFrame, but client 0 has one"),
    ):
        with pytest.raises(DataError, match=message):
            from_clients([(frame[:20], y), (other[20:], y)])


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (["m", "f"] * 20, "column 'c' has no numbers, but values such as 'm'"),
        (["1", "2"] * 20, "column 'c' has no numbers, but values such as '1'"),
        ([True, False] * 20, "column 'c' has no numbers, but True and False"),
        (pandas.Timestamp("2024-01-01"), "column 'c' has no numbers, but dates"),
        ([1.0, None] * 20, r"column 'c' has missing values \(20, the first in row 1\)"),
        (pandas.array([1, None] * 20, dtype="Int64"), r"column 'c' has missing values \(20, the first in row 1\)"),
    ],
)
def test_columns_that_are_no_numbers_are_refused(column: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"data 'arrays', {message}"):
        from_arrays(make_frame().assign(c=column), np.arange(40) % 2, clients=2, partition="iid")


def test_columns_of_a_frame_are_checked() -> None:
    frame, y = make_frame(), np.arange(40) % 2
    settings: dict[str, Any] = {"clients": 2, "partition": "iid"}
    odd = frame.assign(id=range(40), same=1, code=np.where(np.arange(40) % 20 == 0, -999, frame.a))
    data = from_arrays(odd.astype({"a": object}), y, **settings)
    assert data.notes == (
        "columns: id may be an identifier, but it is an input",
        "columns: same has the same value in all rows",
        "columns: code is -999 in 2 rows, which may mean a missing value",
        "columns: code varies 179 times as much as a; --standardize brings all to one scale",
    )
    with pytest.raises(DataError, match="two columns with the same name 'a'"):
        from_arrays(pandas.concat([frame, frame], axis=1), y, **settings)
    with pytest.raises(DataError, match="labels with another index than its inputs"):
        from_arrays(frame.sample(frac=1, random_state=0), pandas.Series(y), **settings)
    with pytest.raises(DataError, match="inputs are a types table: pass a pandas DataFrame"):
        from_arrays(SimpleNamespace(columns=["a"]), y)
    assert not from_arrays(frame[::-1], pandas.Series(y)[::-1], **settings).notes
