"""Data: partitions, samples, user arrays, fingerprints, and damaged files."""

from __future__ import annotations

import gzip
import struct
import time
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from fewer.choices import Partition
from fewer.data import ArrayData, Samples, from_arrays, from_clients, load
from fewer.data.partition import PartitionSpec, Parts, Rows, hold_out_fraction, partition_labels
from fewer.errors import DataError, SettingError

torch.set_num_threads(1)


def labels(count: int, classes: int = 10, seed: int = 0) -> Rows:
    return np.random.default_rng(seed).integers(classes, size=count)


def split(
    kind: Partition = "dirichlet", clients: int = 20, seed: int = 0, alpha: float = 0.5, min_samples: int = 10
) -> tuple[Parts, Parts]:
    return partition_labels(PartitionSpec(kind, clients, alpha, min_samples), labels(3000), labels(700, seed=1), seed)


def arrays(count: int = 200, seed: int = 0) -> tuple[NDArray[np.float32], Rows]:
    """Inputs that encode their row index, and labels."""
    return np.arange(2 * count, dtype=np.float32).reshape(count, 2), labels(count, 4, seed)


def row_indices(samples: Samples) -> set[int]:
    """The row indices of samples from `arrays`."""
    return {int(x[0]) // 2 for x in samples.slice(0, len(samples))[0]}


# --- partitions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
@pytest.mark.parametrize("clients", [1, 7, 20])
def test_every_row_belongs_to_exactly_one_client(kind: Partition, clients: int) -> None:
    for parts, count in zip(split(kind, clients), (3000, 700), strict=True):
        assert len(parts.sizes) == clients and parts.sizes.sum() == count
        rows = np.concatenate([parts.rows_of(client) for client in range(clients)])
        assert np.array_equal(np.sort(rows), np.arange(count))
        assert [len(parts.rows_of(client)) for client in range(clients)] == parts.sizes.tolist()


def test_iid_shares_are_even_and_mixed() -> None:
    train, test = split("iid", 7)
    assert set(train.sizes) == {428, 429} and all(90 <= size <= 110 for size in test.sizes)
    y = labels(3000)
    for client in range(7):
        assert np.bincount(y[train.rows_of(client)], minlength=10).min() > 15
    assert not np.array_equal(np.sort(train.rows_of(0)), np.arange(len(train.rows_of(0))))


@pytest.mark.parametrize("minimum", [1, 10, 60])
def test_dirichlet_gives_each_client_the_minimum(minimum: int) -> None:
    for seed in range(5):
        assert split(min_samples=minimum, seed=seed)[0].sizes.min() >= minimum


def test_dirichlet_that_cannot_give_the_minimum_is_an_error() -> None:
    with pytest.raises(SettingError, match=r"alpha = 0\.01 leaves some of 20 clients with fewer than 100 of 3000"):
        split(min_samples=100, alpha=0.01)


def test_dirichlet_splits_test_samples_in_the_proportions_of_training() -> None:
    train, test = split(alpha=0.3)
    y, y_test = labels(3000), labels(700, seed=1)
    for label in range(10):
        train_shares = (
            np.array([(y[train.rows_of(client)] == label).sum() for client in range(20)]) / (y == label).sum()
        )
        test_shares = (
            np.array([(y_test[test.rows_of(client)] == label).sum() for client in range(20)]) / (y_test == label).sum()
        )
        tolerance = 1 / (y == label).sum() + 1 / (y_test == label).sum()  # both are rounded down to whole samples
        assert np.abs(train_shares - test_shares).max() <= tolerance
        assert train_shares.max() > 3 / 20


def test_dirichlet_assigns_the_rows_of_a_class_at_random() -> None:
    train = partition_labels(PartitionSpec("dirichlet", 2, 100.0, 1), np.zeros(1000, np.int64), labels(0), 0)[0]
    assert all(450 < train.rows_of(client).mean() < 550 for client in range(2))


def test_rows_of_an_owner_keep_their_order() -> None:
    owners = labels(1000, 3)
    parts = Parts.by_owner(np.arange(1000) * 2, owners, 4)
    assert parts.sizes[3] == 0
    for owner in range(3):
        assert np.array_equal(parts.rows_of(owner), np.flatnonzero(owners == owner) * 2)


def test_dirichlet_skew_grows_as_alpha_shrinks() -> None:
    def skew(alpha: float) -> float:
        train = split(alpha=alpha, min_samples=0)[0]
        table = [np.bincount(labels(3000)[train.rows_of(client)], minlength=10) for client in range(20)]
        return float(np.mean([counts.max() / counts.sum() for counts in table if counts.sum()]))

    assert skew(0.1) > 0.5 > skew(1) > 0.2 > skew(1000)


def test_dirichlet_proportions_have_the_expected_spread() -> None:
    """A share of Dirichlet(α) over P clients has variance (1/P) (1 − 1/P) / (P α + 1)."""
    clients, alpha = 10, 0.5
    y = np.repeat(np.arange(200), 1000)
    train = partition_labels(PartitionSpec("dirichlet", clients, alpha, 0), y, y[:0], 3)[0]
    shares = np.array([np.bincount(y[train.rows_of(client)], minlength=200) for client in range(clients)]) / 1000
    expected = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert abs(shares.var() / expected - 1) < 0.15


@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
def test_a_partition_depends_only_on_the_seed(kind: Partition) -> None:
    for first, again, other in zip(split(kind), split(kind), split(kind, seed=1), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
        assert not np.array_equal(first.rows, other.rows)


def test_partitioning_60000_samples_among_100_clients_is_fast() -> None:
    y, y_test = labels(60_000), labels(10_000)
    best = np.inf
    for _ in range(5):
        start = time.perf_counter()
        partition_labels(PartitionSpec("dirichlet", 100, 0.5, 10), y, y_test, 0)
        best = min(best, time.perf_counter() - start)
    assert best < 0.2  # 0.02 on an idle core


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clients": 0}, "clients must be >= 1, got 0"),
        ({"alpha": 0.0}, "alpha must be > 0, got 0"),
        ({"alpha": -1.0}, "alpha must be > 0, got -1"),
        ({"kind": "dirichelt"}, "unknown partition 'dirichelt', did you mean 'dirichlet'"),
    ],
)
def test_wrong_partition_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        split(**change)


def test_fewer_samples_than_clients() -> None:
    with pytest.raises(DataError, match="cannot partition 5 training samples among 6 clients"):
        partition_labels(PartitionSpec("iid", 6, 0.5, 0), labels(5), labels(5), 0)
    assert partition_labels(PartitionSpec("iid", 5, 0.5, 0), labels(5), labels(0), 0)[0].sizes.tolist() == [1] * 5


def test_classes_in_only_one_of_training_and_test_data() -> None:
    train, test = partition_labels(PartitionSpec("dirichlet", 4, 1.0, 1), np.zeros(100, np.int64), np.full(50, 3), 0)
    assert train.sizes.sum() == 100 and test.sizes.sum() == 50


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.5, 0.9])
def test_hold_out_fraction_takes_a_fraction_of_each_client(fraction: float) -> None:
    parts = split(clients=9)[0]
    remaining, taken = hold_out_fraction(parts, fraction, np.random.default_rng(0))
    assert taken.sizes.tolist() == [int(size * fraction) for size in parts.sizes]
    for client in range(9):
        rows = np.concatenate([remaining.rows_of(client), taken.rows_of(client)])
        assert np.array_equal(np.sort(rows), np.sort(parts.rows_of(client)))
    again = hold_out_fraction(parts, fraction, np.random.default_rng(0))
    other = hold_out_fraction(parts, fraction, np.random.default_rng(1))
    assert np.array_equal(again[1].rows, taken.rows) and not np.array_equal(other[1].rows, taken.rows)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5])
def test_hold_out_fraction_must_be_between_0_and_1(fraction: float) -> None:
    with pytest.raises(SettingError, match="fraction to hold out must be > 0 and < 1"):
        hold_out_fraction(split()[0], fraction, np.random.default_rng(0))


# --- samples --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["all rows", "some rows"])
def samples(request: pytest.FixtureRequest) -> Samples:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (50, 1, 3, 2), generator=generator, dtype=torch.uint8)
    rows = torch.randperm(50, generator=generator)[:23] if request.param == "some rows" else None
    return Samples(x, torch.arange(50), rows, 80.0, 0.02)


def expected_samples(samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.arange(len(samples.y)) if samples.rows is None else samples.rows
    return (samples.x[rows].float() - 80.0) * 0.02, samples.y[rows]


def equal(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_pick_is_plain_indexing(samples: Samples) -> None:
    x, y = expected_samples(samples)
    indices = torch.tensor([5, 0, 0, len(samples) - 1])
    assert equal(samples.pick(indices), (x[indices], y[indices]))


def test_batches_are_plain_indexing(samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = expected_samples(samples)
    indices = torch.randint(len(samples), (9, 4), generator=torch.Generator().manual_seed(1))
    for block in (1, 50, 1 << 20):  # gathered one by one, a few at a time, all at once
        monkeypatch.setattr("fewer.data.samples.BLOCK", block)
        batches = list(samples.batches(indices))
        assert len(batches) == 9
        assert all(equal(batch, (x[row], y[row])) for batch, row in zip(batches, indices, strict=True))


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_chunks_are_all_samples_in_order(samples: Samples, size: int) -> None:
    chunks = list(samples.chunks(size))
    assert [len(y) for _, y in chunks[:-1]] == [size] * (len(chunks) - 1)
    assert equal((torch.cat([x for x, _ in chunks]), torch.cat([y for _, y in chunks])), expected_samples(samples))


def test_slice_stops_at_the_end(samples: Samples) -> None:
    x, y = expected_samples(samples)
    assert equal(samples.slice(3, 8), (x[3:8], y[3:8]))
    assert equal(samples.slice(len(samples) - 2, 10**6), (x[-2:], y[-2:]))


def test_no_samples() -> None:
    empty = Samples(torch.zeros(5, 2), torch.zeros(5, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    assert len(empty) == 0 and list(empty.chunks()) == []


def test_floats_and_integers_are_unchanged() -> None:
    for x in (torch.randn(3, 2), torch.tensor([[1, 2]] * 3)):
        assert torch.equal(Samples(x, torch.zeros(3)).pick(torch.arange(3))[0], x)


def test_bytes_are_normalized_by_their_mean_and_standard_deviation() -> None:
    x = np.array([[0, 255], [51, 102]] * 20, np.uint8)
    mean = (0 + 1 + 0.2 + 0.4) / 4
    std = ((mean**2 + (1 - mean) ** 2 + (0.2 - mean) ** 2 + (0.4 - mean) ** 2) / 4) ** 0.5
    data = from_arrays(x, np.zeros(40, int), clients=1, test=(x[:2], [0, 0]))
    expected = (torch.tensor([[0, 1], [0.2, 0.4]]) - mean) / std
    assert torch.allclose(data.test.slice(0, 2)[0], expected, atol=1e-6)
    inputs = data.client(0).train.slice(0, 40)[0]
    assert abs(float(inputs.mean())) < 1e-6 and abs(float(inputs.std(correction=0)) - 1) < 1e-6


def test_normalization_as_given() -> None:
    x = np.array([[0, 255]] * 10, np.uint8)
    data = from_arrays(
        x, np.zeros(10, int), clients=1, min_samples_per_client=1, normalization=(0.25, 0.5), test=(x[:1], [0])
    )
    assert torch.allclose(data.test.slice(0, 1)[0], torch.tensor([[-0.5, 1.5]]))


def test_constant_bytes_do_not_divide_by_zero() -> None:
    x = np.full((20, 2), 255, np.uint8)
    data = from_arrays(x, np.zeros(20, int), clients=1, min_samples_per_client=1)
    assert data.test.slice(0, 1)[0].abs().max() < 1e-6


# --- user arrays ---------------------------------------------------------------------------------------------


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
    ({"y": np.array([0.5] * 30)}, "labels that are not class labels"),
    ({"y": np.array([-1] * 30)}, "labels that are not class labels"),
    ({"y": np.array([np.nan] * 30)}, "labels that are not class labels"),
    ({"y": np.array(["cat", "dog", "cow"] * 10)}, "labels that are not class labels"),
    ({"y": np.array([None] * 30)}, "labels that are not class labels"),
    ({"y": np.array([0, 2**40] * 15)}, "must be < 1048576, got 1099511627776"),
    ({"y": np.zeros((30, 2), int)}, r"labels of shape \(30, 2\)"),
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
def test_wrong_settings(change: dict[str, Any], message: str) -> None:
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


# --- holding out ----------------------------------------------------------------------------------------------


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
    damaged = replace(data, global_test=Samples(torch.full_like(data.global_test.x, torch.nan), data.global_test.y))
    first, second = (source.hold_out(0.3, seed=0) for source in (data, damaged))
    assert first.fingerprint() == second.fingerprint()
    assert bool(torch.isfinite(second.test.slice(0, len(second.test))[0]).all())


def test_hold_out_depends_on_its_seed() -> None:
    data = from_arrays(*arrays(), clients=4)
    rows = [row_indices(data.hold_out(0.3, seed).test) for seed in (0, 0, 1)]
    assert rows[0] == rows[1] != rows[2]


def test_hold_out_twice() -> None:
    data = from_arrays(*arrays(), clients=4)
    first = data.hold_out(0.3, 0)
    second = first.hold_out(0.3, 0)
    assert not row_indices(second.test) & row_indices(first.test)
    assert row_indices(second.test) <= set().union(*(row_indices(first.client(client).train) for client in range(4)))


# --- fingerprint ----------------------------------------------------------------------------------------------


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


# --- embedded datasets ----------------------------------------------------------------------------------------


def test_digits() -> None:
    data = load("digits", clients=10)
    assert (len(data.source), len(data.test)) == (1438, 359)
    assert data.shape == (1, 8, 8) and data.classes == 10 and data.source.x.dtype == torch.uint8
    assert len(data) == 10 and sum(data.size(client) for client in range(10)) == 1438
    x, y = load_digits(return_X_y=True)
    assert data.test.y.tolist() == y[4::5].tolist()
    assert (data.test.x[0].reshape(-1) / (255 / 16)).round().tolist() == x[4].tolist()
    assert int(data.source.x.max()) == 255 and int(data.source.x.min()) == 0
    train, test = ({tuple(row.tolist()) for row in part.x.reshape(len(part), -1)} for part in (data.source, data.test))
    assert not train & test


def test_fashion_mini() -> None:
    data = load("fashion-mini", clients=20)
    assert (len(data.source), len(data.test)) == (6000, 1000)
    assert torch.bincount(data.source.y).tolist() == [600] * 10
    assert torch.bincount(data.test.y).tolist() == [100] * 10
    assert data.shape == (1, 28, 28) and data.classes == 10
    inputs = data.source.slice(0, 6000)[0]
    assert abs(float(inputs.mean())) < 0.05 and abs(float(inputs.std()) - 1) < 0.05
    assert data.origin is not None and data.origin["name"] == "fashion-mini"


def test_the_embedded_file_is_small_and_comes_with_its_license() -> None:
    folder = files("fewer.data").joinpath("embedded")
    with folder.joinpath("fashion-mini.npz").open("rb") as file:
        assert len(file.read()) < 5_000_000
    license = folder.joinpath("LICENSE.fashion-mnist").read_text()
    assert "MIT" in license and "Zalando" in license


def test_load_is_deterministic_and_depends_on_the_seed() -> None:
    assert load("digits").fingerprint() == load("digits").fingerprint() != load("digits", seed=1).fingerprint()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("digitz", "unknown data 'digitz', did you mean 'digits'"),
        ("fashion-mni", "unknown data 'fashion-mni', did you mean 'fashion-mini'"),
        ("xyzzy", r"unknown data 'xyzzy' \(allowed: 20newsgroups, .*csv:PATH, digits, "),
        ("npx:file", "unknown data format 'npx', did you mean 'npz'"),
    ],
)
def test_unknown_data(name: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        load(name)


def test_wrong_settings_are_reported_before_anything_is_read() -> None:
    with pytest.raises(SettingError, match="unknown partition 'even'"):
        load("npz:nowhere", partition="even")
    with pytest.raises(SettingError, match="alpha must be > 0, got -1"):
        load("npz:nowhere", alpha=-1)


# --- files ----------------------------------------------------------------------------------------------------

IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx_bytes(array: NDArray[np.uint8]) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def idx_arrays() -> list[NDArray[np.uint8]]:
    rng = np.random.default_rng(0)
    x, x_test = (rng.integers(256, size=(count, 5, 4), dtype=np.uint8) for count in (60, 12))
    return [x, (np.arange(60) % 3).astype(np.uint8), x_test, (np.arange(12) % 3).astype(np.uint8)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data directory with four good idx files in mnist/."""
    (tmp_path / "mnist").mkdir()
    for name, array in zip(IDX_FILES, idx_arrays(), strict=True):
        (tmp_path / "mnist" / name).write_bytes(idx_bytes(array))
    return tmp_path


def open_idx(folder: Path) -> ArrayData:
    return load(f"idx:{folder / 'mnist'}", clients=3, min_samples_per_client=1)


def test_idx_files(folder: Path) -> None:
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


def test_named_data_is_read_from_the_data_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "mnist")
    monkeypatch.delenv("FEWER_DATA", raising=False)
    with pytest.raises(DataError, match="'mnist' does not exist, and no data directory is set: pass --data-dir"):
        load("mnist")
    loaded = load("mnist", data_dir=folder, clients=3, min_samples_per_client=1)
    assert (loaded.source.shift, loaded.source.scale) == (255 * 0.1307, 1 / (255 * 0.3081))
    monkeypatch.setenv("FEWER_DATA", str(folder))
    assert load("mnist", clients=3, min_samples_per_client=1).fingerprint() == loaded.fingerprint()
    with pytest.raises(DataError, match=f"no 'fashion-mnist' in {folder}"):
        load("fashion-mnist")


def test_npz(tmp_path: Path) -> None:
    x, y = arrays(60)
    path = tmp_path / "own.npz"
    np.savez(path, x=x, y=y)
    data = load(f"npz:{path}", clients=2)
    assert len(data.test) + data.size(0) + data.size(1) == 60
    np.savez_compressed(path, x=x, y=y, x_test=x[:7], y_test=y[:7], client=np.arange(60) % 5)
    data = load("npz:own.npz", data_dir=tmp_path, partition="natural")
    assert len(data) == 5 and len(data.test) == 7 and [data.size(client) for client in range(5)] == [12] * 5
    assert len(load(f"npz:{path}", clients=3)) == 3


def test_a_damaged_npz_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    x, y = arrays(60)
    np.savez_compressed(path, x=x, y=y)
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        damaged = np.frombuffer(good, np.uint8).copy()
        damaged[rng.integers(len(good), size=3)] ^= rng.integers(1, 256, size=3, dtype=np.uint8)
        path.write_bytes(damaged.tobytes())
        try:
            load(f"npz:{path}", clients=2, min_samples_per_client=1)
        except DataError:
            refused += 1
    assert refused > 200


def test_code_in_an_archive_is_never_executed(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return Path.touch, (tmp_path / "sprung",)  # type: ignore[return-value]

    np.savez(tmp_path / "trap.npz", x=np.array([Trap()], dtype=object), y=np.zeros(1))
    with pytest.raises(DataError):
        load("npz:trap.npz", data_dir=tmp_path)
    assert not (tmp_path / "sprung").exists()
