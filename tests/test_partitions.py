"""Partitions: which client holds which rows, no row twice, no row lost."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fewer.data import Samples
from fewer.data.episodes import sample_episode, select_classes, split_classes, split_clients, split_support_query
from fewer.data.federated import federate, from_arrays
from fewer.data.federations import group_clients
from fewer.data.partition import PARTITIONERS, PartitionSpec, hold_out_fraction, partition_labels
from fewer.data.raw_dataset import RawDataset
from fewer.data.text import build_vocabulary, encode, load_word_vectors
from fewer.errors import DataError, SettingError

Y: NDArray[np.int64] = np.random.default_rng(0).integers(10, size=4000)
T: NDArray[np.int64] = np.random.default_rng(1).integers(10, size=900)


@pytest.mark.parametrize("kind", PARTITIONERS)
@pytest.mark.parametrize("clients", [1, 7, 20])
def test_every_row_belongs_to_one_client(kind: str, clients: int) -> None:
    spec = PartitionSpec(kind, clients, classes=10 if clients == 1 else 4)  # type: ignore[arg-type]
    for parts, labels in zip(partition_labels(spec, Y, T, 3), (Y, T), strict=True):
        assert len(parts.sizes) == clients
        assert np.array_equal(np.sort(parts.rows), np.arange(len(labels)))
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


def test_clients_of_the_test_set() -> None:
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


# --- texts --------------------------------------------------------------------------------------------------------


def test_the_vocabulary_is_built_from_training_text_only() -> None:
    texts = [f"common word{n % 3} it's" for n in range(40)]
    data = from_arrays(
        texts, np.arange(40) % 2, test=(["secret secret common"] * 4, [0, 1, 0, 1]), clients=2, partition="iid"
    )
    assert data.vocab_size == 2 + 5  # padding, unknown, common, it's, word0, word1, word2
    assert data.shape == (30,)
    row = data.test.slice(0, 1)[0][0].tolist()
    assert row[:2] == [1, 1] and row[2] > 1 and set(row[3:]) == {0}


def test_the_vocabulary_keeps_the_most_frequent_words() -> None:
    tokens = build_vocabulary(["b b a", "a b c"], max_size=4, min_count=1)
    assert tokens == ("<pad>", "<unknown>", "b", "a")
    assert encode(["a x b a", ""], tokens, 3).tolist() == [[3, 1, 2], [0, 0, 0]]


def test_word_vectors(tmp_path: object) -> None:
    from pathlib import Path

    file = Path(str(tmp_path)) / "v.txt"
    file.write_text("2 3\nhello 1 2 3\nworld 4 5 6\n")
    vectors = load_word_vectors(file, ("<pad>", "<unknown>", "world"))
    assert vectors[2].tolist() == [4, 5, 6] and vectors[0].tolist() == [0, 0, 0]
    file.write_text("hello 1 2 3\nworld 4 5\n")
    with pytest.raises(DataError, match="line 2 has 2 values, expected 3"):
        load_word_vectors(file, ("<pad>",))
    with pytest.raises(DataError, match="No such file"):
        load_word_vectors(file.with_name("none"), ("<pad>",))


# --- episodes -----------------------------------------------------------------------------------------------------


def samples(count: int = 200, classes: int = 8) -> Samples:
    return Samples(torch.arange(count).float()[:, None], torch.arange(count) % classes)


def test_clients_and_classes_are_disjoint() -> None:
    groups = split_clients(50, seed=1)
    assert [len(group) for group in groups] == [40, 5, 5]
    assert sorted([*groups[0], *groups[1], *groups[2]]) == list(range(50))
    assert groups != split_clients(50, seed=2)
    with pytest.raises(SettingError, match="a group is empty"):
        split_clients(4)
    base, validation, novel = split_classes(41, 20, 5, 16, seed=0)
    assert len(set(base) | set(validation) | set(novel)) == 41
    assert split_classes(20, 8, 5, 7).test == list(range(13, 20))
    with pytest.raises(SettingError, match="must sum to at most 10"):
        split_classes(10, 8, 2, 1)


@pytest.mark.parametrize("support", [0.05, 0.2, 0.5, 0.9])
def test_support_and_query_are_disjoint(support: float) -> None:
    for by_class in (False, True):
        support_set, query_set = split_support_query(samples(), support, torch.Generator().manual_seed(0), by_class)
        a, b = (set(part.slice(0, 999)[0][:, 0].tolist()) for part in (support_set, query_set))
        assert not a & b and len(a | b) == 200 and abs(len(a) - 200 * support) <= 8
        if by_class:
            assert set(support_set.slice(0, 999)[1].tolist()) == set(range(8))
    first, last = split_support_query(samples(), support)  # in time order
    assert first.slice(0, 999)[0].max() < last.slice(0, 999)[0].min()
    tiny = split_support_query(samples(2), support)
    assert [len(part) for part in tiny] == [1, 1]


def test_an_episode() -> None:
    novel = select_classes(samples(), [1, 3, 4, 5, 6])
    episode = sample_episode(novel, 5, 3, 4, torch.Generator().manual_seed(0))
    assert episode.support_x.shape == (15, 1) and episode.query_x.shape == (20, 1)
    assert sorted(episode.classes.tolist()) == [1, 3, 4, 5, 6]
    for x, y in ((episode.support_x, episode.support_y), (episode.query_x, episode.query_y)):
        assert torch.equal(x[:, 0].long() % 8, episode.classes[y])  # labels are those of the samples, renumbered
    assert not set(episode.support_x[:, 0].tolist()) & set(episode.query_x[:, 0].tolist())
    other = sample_episode(novel, 5, 3, 4, torch.Generator().manual_seed(1))
    assert not torch.equal(other.support_x, episode.support_x)
    with pytest.raises(DataError, match="6-way 3-shot needs 6 classes with 3 \\+ 4 samples each, got 5"):
        sample_episode(novel, 6, 3, 4, torch.Generator())
    with pytest.raises(DataError, match="needs 2 classes with 20 \\+ 10 samples each, got 0"):
        sample_episode(novel, 2, 20, 10, torch.Generator())


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
    train_rows, held_out = tuning_data.train.rows, tuning_data.global_test.rows.numpy()  # type: ignore[union-attr]
    assert len(train_rows) == 480 and sorted([*train_rows, *held_out]) == sorted(data.train.rows)
    for owner in range(4):  # tuning uses the same clients, later in time
        assert train_rows[train_rows // 250 == owner].max() < held_out[held_out // 250 == owner].min()


def test_natural_clients_hold_out_their_last_rows_of_any_class() -> None:
    labels = np.repeat([0, 1, 2], 20)  # one class after the other, in blocks
    raw = RawDataset(
        np.zeros((120, 1), np.float32), np.tile(labels, 2), client_ids=np.repeat([0, 1], 60), time_ordered=True
    )
    data = federate(raw, partition="natural", validation=0.25)
    assert [data.train.rows_of(client).tolist() for client in range(2)] == [[*range(36)], [*range(60, 96)]]
    tuning_data = data.hold_out(0.2, 0)
    assert [tuning_data.train.rows_of(client).tolist() for client in range(2)] == [[*range(29)], [*range(60, 89)]]
    assert tuning_data.global_test.rows.tolist() == [*range(29, 36), *range(89, 96)]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
def test_time_ordered_clients_hold_out_the_last_rows_of_each_class(kind: str) -> None:
    """The last rows of a client could be all its rows of a class, and no client would train on that class."""
    labels = np.tile(np.repeat([0, 1, 2, 3], [50, 5, 40, 5]), 3)
    raw = RawDataset(
        np.zeros((300, 1), np.float32), labels, client_ids=np.repeat(["b", "c", "a"], 100), time_ordered=True
    )
    data = federate(replace(raw, test=(raw.x[:8], labels[:8])), clients=4, partition=kind)  # type: ignore[arg-type]
    tuning_data = data.hold_out(0.2, 0)
    rows = tuning_data.global_test.rows.numpy()  # type: ignore[union-attr]
    last = [*range(40, 50), 54, *range(87, 95), 99]
    assert sorted(rows) == [start + row for start in (0, 100, 200) for row in last]
    for client in range(4):
        assert (
            sorted([*tuning_data.train.rows_of(client), *rows[tuning_data.tests.rows_of(client)]])
            == data.train.rows_of(client).tolist()
        )
    again = group_clients(data, 2).hold_out(0.2, 0)
    assert sorted(again.global_test.rows.tolist()) == sorted(rows)  # type: ignore[union-attr]


def test_the_test_split_ignores_the_seed_and_does_not_affect_normalization() -> None:
    x = np.random.default_rng(0).integers(0, 200, (300, 4, 4), np.uint8)
    first, second = (from_arrays(x, np.arange(300) % 3, clients=3, seed=seed) for seed in (0, 1))
    assert first.test.rows is not None and second.test.rows is not None
    assert torch.equal(first.test.rows, second.test.rows) and not np.array_equal(first.train.rows, second.train.rows)
    brighter = x.copy()
    brighter[first.test.rows.numpy()] = 255
    other = from_arrays(brighter, np.arange(300) % 3, clients=3)
    assert (other.source.shift, other.source.scale) == (first.source.shift, first.source.scale)
