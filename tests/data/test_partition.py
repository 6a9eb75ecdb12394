"""Partitions: which client holds which rows, no row twice, no row lost."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fewer.choices import Partition
from fewer.data.federated import federate, from_arrays
from fewer.data.federations import group_clients
from fewer.data.partition import PARTITIONERS, PartitionSpec, Parts, hold_out_fraction, partition_labels
from fewer.data.raw_dataset import RawDataset
from fewer.errors import DataError, SettingError
from tests.data.arrays import labels


def split(
    kind: Partition = "dirichlet", clients: int = 20, seed: int = 0, alpha: float = 0.5, min_samples: int = 10
) -> tuple[Parts, Parts]:
    return partition_labels(PartitionSpec(kind, clients, alpha, min_samples), labels(3000), labels(700, seed=1), seed)


# --- partitions -------------------------------------------------------------------------------------------------


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
def test_wrong_partition_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        split(**change)


def test_fewer_samples_than_clients_are_refused() -> None:
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


Y: NDArray[np.int64] = np.random.default_rng(0).integers(10, size=4000)
T: NDArray[np.int64] = np.random.default_rng(1).integers(10, size=900)


@pytest.mark.parametrize("kind", PARTITIONERS)
@pytest.mark.parametrize("clients", [1, 7, 20])
def test_every_row_belongs_to_one_client(kind: str, clients: int) -> None:
    spec = PartitionSpec(kind, clients, classes=10 if clients == 1 else 4)  # type: ignore[arg-type]
    for parts, y in zip(partition_labels(spec, Y, T, 3), (Y, T), strict=True):
        assert len(parts.sizes) == clients
        assert np.array_equal(np.sort(parts.rows), np.arange(len(y)))
    same_seed, other_seed = partition_labels(spec, Y, T, 3)[0], partition_labels(spec, Y, T, 4)[0]
    assert np.array_equal(same_seed.rows, partition_labels(spec, Y, T, 3)[0].rows)
    assert clients == 1 or not np.array_equal(same_seed.rows, other_seed.rows)


def class_counts(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.bincount(labels, minlength=10)


def classes_in(rows: NDArray[np.int64]) -> set[int]:
    return set(Y[rows].tolist())


def test_pathological_clients_hold_the_given_number_of_classes() -> None:
    train, test = partition_labels(PartitionSpec("pathological", 20, classes=5), Y, T, 0)
    for client in range(20):
        assert len(classes_in(train.rows_of(client))) == 5
        assert set(T[test.rows_of(client)].tolist()) <= classes_in(train.rows_of(client))
    holders = np.array(
        [[label in classes_in(train.rows_of(client)) for client in range(20)] for label in range(10)]
    ).sum(axis=1)
    assert holders.tolist() == [10] * 10  # each class goes to the same number of clients
    with pytest.raises(SettingError, match=r"classes_per_client must be 1 to 10 \(the classes in the data\), got 11"):
        partition_labels(PartitionSpec("pathological", 20, classes=11), Y, T, 0)
    with pytest.raises(SettingError, match="cannot hold all 10 classes"):
        partition_labels(PartitionSpec("pathological", 4, classes=2), Y, T, 0)


def test_shards_are_of_one_class_and_nearly_one_size() -> None:
    train, _ = partition_labels(PartitionSpec("shards", 20, shards=2), Y, T, 0)
    assert max(len(classes_in(train.rows_of(client))) for client in range(20)) == 2
    assert train.sizes.min() > 180 and train.sizes.max() < 220 and sorted(train.rows) == list(range(len(Y)))
    skewed = np.repeat([1, 4, 6], [5, 45, 150])  # in shares of 20: 0.5, 4.5 and 15
    for clients, sizes in ((20, [5, *[11] * 3, 12, *[10] * 15]), (3, [5, 45, 150]), (4, [5, 45, 75, 75])):
        parts, _ = partition_labels(PartitionSpec("shards", clients, shards=1), skewed, skewed, 0)
        assert sorted(parts.sizes) == sorted(sizes)
        assert all(len(np.unique(skewed[parts.rows_of(client)])) == 1 for client in range(clients))


def test_fewer_shards_than_classes_may_span_classes() -> None:
    train, _ = partition_labels(PartitionSpec("shards", 3, shards=1), Y, T, 0)
    assert train.sizes.max() - train.sizes.min() <= 1
    assert sorted(label for client in range(3) for label in classes_in(train.rows_of(client))) == [
        *range(4),
        *range(3, 7),
        *range(6, 10),
    ]


def test_quantity_skews_sizes_only() -> None:
    train, _ = partition_labels(PartitionSpec("quantity", 10, alpha=0.5), Y, T, 0)
    assert train.sizes.min() >= 10 and train.sizes.max() > 3 * np.median(train.sizes)
    largest = train.rows_of(int(train.sizes.argmax()))
    assert np.abs(np.bincount(Y[largest], minlength=10) / len(largest) - 0.1).max() < 0.04


def test_pairs_have_equal_sizes_and_their_clients_do_not() -> None:
    train, _ = partition_labels(PartitionSpec("dirichlet-pairs", 20, alpha=0.3), Y, T, 0)
    pairs = train.sizes.reshape(10, 2).sum(axis=1)
    assert set(pairs.tolist()) == {400} and train.sizes.min() >= 10
    assert np.abs(np.diff(train.sizes.reshape(10, 2), axis=1)).max() > 60


def test_test_samples_are_partitioned_like_training_samples() -> None:
    train, test = partition_labels(PartitionSpec("dirichlet", 10, alpha=0.3), Y, T, 0)
    for label in range(10):
        train_shares = (
            np.array([np.sum(Y[train.rows_of(client)] == label) for client in range(10)]) / class_counts(Y)[label]
        )
        test_counts = np.array([np.sum(T[test.rows_of(client)] == label) for client in range(10)])
        assert np.abs(test_counts - train_shares * class_counts(T)[label]).max() <= 1


def test_time_ordered_data_is_split_by_time() -> None:
    x = np.arange(100, dtype=np.float32)[:, None]
    raw = RawDataset(x, np.arange(100) % 2, client_ids=np.repeat([0, 1], 50), time_ordered=True)
    data = federate(raw, partition="natural", validation=0.25)
    for client, start in ((0, 0), (1, 50)):
        client_data = data.client(client)
        parts = [
            part.slice(0, 99)[0][:, 0].tolist()
            for part in (client_data.train, client_data.validation, client_data.test)
        ]
        assert parts[0] + parts[1] + parts[2] == list(range(start, start + 50))
        assert [len(part) for part in parts] == [30, 10, 10]
    remaining, taken = hold_out_fraction(data.train, 0.5, None)
    assert remaining.rows_of(0).max() < taken.rows_of(0).min()


def test_clients_of_the_test_set_get_their_test_samples() -> None:
    x, y = np.zeros((6, 2), np.float32), np.array([0, 1, 0, 1, 0, 1])
    same = RawDataset(x, y, (x[:3], y[:3]), np.array(["a", "a", "b", "b", "c", "c"]), np.array(["b", "c", "c"]))
    data = federate(same, partition="natural")
    assert [len(data.client(n).test) for n in range(3)] == [0, 1, 2]
    other = RawDataset(x, y, (x[:5], y[:5]), np.array(["a"] * 6), np.array(["z"] * 5))
    data = federate(other, partition="natural")  # new client ids become clients too
    assert [(len(data.client(n).train), len(data.client(n).test)) for n in range(2)] == [(5, 1), (4, 1)]


def test_windows_without_an_owner_are_left_out() -> None:
    flat = torch.arange(50, dtype=torch.uint8)
    x = flat.unfold(0, 5, 1)
    client_ids = np.array([0] * 20 + [-1] * 6 + [1] * 20)
    raw = RawDataset(x, np.arange(46) % 3, client_ids=client_ids, tokens=tuple("abc" * 20), time_ordered=True)
    data = federate(raw, partition="natural", fraction=0.5)
    assert data.vocab_size == 60 and data.source.x.data_ptr() == flat.data_ptr()  # not copied
    # half of 32 for training; 2 of 8 test windows do not overlap
    assert data.size(0) + data.size(1) == 16 and len(data.test) == 2
    batch, _ = data.client(1).train.slice(0, 2)
    assert batch.dtype == torch.int64 and (batch[:, 1] - batch[:, 0]).tolist() == [1, 1]


# --- episodes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "shards", "quantity", "natural"])
def test_time_windows_do_not_leak_into_the_test_set(kind: str) -> None:
    """Under every partition, the test samples of a client come after its training samples."""
    x = np.arange(1000, dtype=np.float32)[:, None]
    client_ids = np.repeat(np.arange(4), 250)
    raw = RawDataset(x, np.arange(1000) % 2, client_ids=client_ids, time_ordered=True)
    data = federate(raw, clients=5, partition=kind, validation=0.25)  # type: ignore[arg-type]
    test_rows = set(data.test.slice(0, 9999)[0][:, 0].long().tolist())
    assert test_rows == {start + n for start in range(0, 1000, 250) for n in range(200, 250)}
    all_clients = [data.client(client) for client in range(len(data))]
    train, validation = (
        torch.cat([getattr(client_data, part).slice(0, 9999)[0][:, 0].long() for client_data in all_clients])
        for part in ("train", "validation")
    )
    assert not test_rows & {*train.tolist(), *validation.tolist()} and len(train) + len(validation) == 800
    for owner in range(4):  # validation rows come last
        assert train[train // 250 == owner].max() < validation[validation // 250 == owner].min()
    for client_data in all_clients:
        assert 0 < len(client_data.validation) < len(client_data.train)
    tuning_data = data.hold_out(0.2, 0)
    train_rows, held_out = tuning_data.train.rows, tuning_data.test.rows.numpy()  # type: ignore[union-attr]
    assert len(train_rows) == 480 and sorted([*train_rows, *held_out]) == sorted(data.train.rows)
    for owner in range(4):  # tuning uses the same clients, later in time
        assert train_rows[train_rows // 250 == owner].max() < held_out[held_out // 250 == owner].min()


@pytest.mark.parametrize("kind", ["dirichlet", "natural"])
def test_windows_that_overlap_with_held_out_ones_are_left_out_of_tuning(kind: str) -> None:
    labels = np.tile(np.repeat([0, 1, 2], 50), 2)
    raw = RawDataset(
        np.zeros((300, 1), np.float32), labels, client_ids=np.repeat([0, 1], 150), time_ordered=True, class_gap=2
    )
    data = federate(raw, clients=3, partition=kind).hold_out(0.2, 0)  # type: ignore[arg-type]
    train, held_out = set(data.train.rows.tolist()), data.test.rows.tolist()  # type: ignore[union-attr]
    assert len(held_out) > 10
    for row in held_out:
        assert not any(row - gap in train and labels[row - gap] == labels[row] for gap in (1, 2))
    assert any(row - 3 in train for row in held_out)


def test_natural_clients_hold_out_their_last_rows_of_any_class() -> None:
    labels = np.repeat([0, 1, 2], 20)  # one class after the other, in blocks
    raw = RawDataset(
        np.zeros((120, 1), np.float32), np.tile(labels, 2), client_ids=np.repeat([0, 1], 60), time_ordered=True
    )
    data = federate(raw, partition="natural", validation=0.25)
    assert [data.train.rows_of(client).tolist() for client in range(2)] == [[*range(36)], [*range(60, 96)]]
    tuning_data = data.hold_out(0.2, 0)
    assert [tuning_data.train.rows_of(client).tolist() for client in range(2)] == [[*range(29)], [*range(60, 89)]]
    assert tuning_data.test.rows.tolist() == [*range(29, 36), *range(89, 96)]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
def test_time_ordered_clients_hold_out_the_last_rows_of_each_class(kind: str) -> None:
    """The last rows of a client could be all its rows of a class, and no client would train on that class."""
    labels = np.tile(np.repeat([0, 1, 2, 3], [50, 5, 40, 5]), 3)
    raw = RawDataset(
        np.zeros((300, 1), np.float32), labels, client_ids=np.repeat(["b", "c", "a"], 100), time_ordered=True
    )
    data = federate(replace(raw, test=(raw.x[:8], labels[:8])), clients=4, partition=kind)  # type: ignore[arg-type]
    tuning_data = data.hold_out(0.2, 0)
    rows = tuning_data.test.rows.numpy()  # type: ignore[union-attr]
    last = [*range(40, 50), 54, *range(87, 95), 99]
    assert sorted(rows) == [start + row for start in (0, 100, 200) for row in last]
    for client in range(4):
        assert (
            sorted([*tuning_data.train.rows_of(client), *rows[tuning_data.tests.rows_of(client)]])
            == data.train.rows_of(client).tolist()
        )
    again = group_clients(data, 2).hold_out(0.2, 0)
    assert sorted(again.test.rows.tolist()) == sorted(rows)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["dirichlet", "natural"])
@pytest.mark.parametrize("stride", [3, 2])
def test_windows_are_split_in_time_within_each_class_and_never_overlap(kind: Partition, stride: int) -> None:
    """Two clients, and for each two blocks of three activities one after the other; windows of 6 readings."""
    starts = np.concatenate([np.arange(block * 100, block * 100 + 100 - 5, stride) for block in range(12)])
    activity, client_ids = starts // 100 % 3, starts // 600
    raw = RawDataset(
        starts[:, None] + np.arange(6.0), activity, client_ids=client_ids, time_ordered=True, class_gap=5 // stride
    )
    data = federate(raw, clients=3, partition=kind, validation=0.3, seed=1)
    parts = [starts[rows] for rows in (data.train.rows, data.validation.rows, data.test.rows.numpy())]  # type: ignore[union-attr]
    readings = [set((part[:, None] + np.arange(6)).ravel().tolist()) for part in parts]
    assert not readings[0] & readings[1] and not readings[0] & readings[2] and not readings[1] & readings[2]
    size = len(starts) // 6  # of an activity of a client
    for client in range(2):
        for label in range(3):
            train, validation, test = (np.sort(p[(p // 600 == client) & (p // 100 % 3 == label)]) for p in parts)
            assert train.max() < validation.min() and validation.max() < test.min()
            assert len(test) == size // 5 and len(validation) == int((size - size // 5 - 5 // stride) * 0.3)
            assert len(train) == size - len(test) - len(validation) - 2 * (5 // stride)
    held_out = starts[data.hold_out(0.2, 0).test.rows]
    assert all(
        ((held_out // 600 == client) & (held_out // 100 % 3 == label)).any() for client in (0, 1) for label in range(3)
    )


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "shards", "natural"])
@pytest.mark.parametrize("sensors", [True, False])
def test_clients_are_tested_on_the_same_samples_whatever_the_validation_share(kind: Partition, sensors: bool) -> None:
    raw = RawDataset(
        np.arange(600.0)[:, None], np.arange(600) // 10 % 3, client_ids=np.arange(600) // 200,
        time_ordered=sensors, class_gap=1 if sensors else None,
    )  # fmt: skip
    shares = [federate(raw, clients=4, partition=kind, fraction=0.5, validation=share) for share in (0.0, 0.2, 0.43)]
    for client in range(len(shares[0])):
        tests = [data.client(client).test.slice(0, 999) for data in shares]
        assert len(tests[0][1]) and all(torch.equal(test[0], tests[0][0]) for test in tests)
        assert len(shares[1].client(client).validation) < len(shares[2].client(client).validation)


def test_the_test_split_ignores_the_seed_and_does_not_affect_normalization() -> None:
    x = np.random.default_rng(0).integers(0, 200, (300, 4, 4), np.uint8)
    first, second = (from_arrays(x, np.arange(300) % 3, clients=3, seed=seed) for seed in (0, 1))
    assert first.test.rows is not None and second.test.rows is not None
    assert torch.equal(first.test.rows, second.test.rows) and not np.array_equal(first.train.rows, second.train.rows)
    brighter = x.copy()
    brighter[first.test.rows.numpy()] = 255
    other = from_arrays(brighter, np.arange(300) % 3, clients=3)
    assert (other.source.shift, other.source.scale) == (first.source.shift, first.source.scale)
