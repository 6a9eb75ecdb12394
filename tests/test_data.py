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
    """Inputs that say which row they are, and labels."""
    return np.arange(2 * count, dtype=np.float32).reshape(count, 2), labels(count, 4, seed)


def own_rows(samples: Samples) -> set[int]:
    """Row indices of samples that `arrays` made."""
    return {int(x[0]) // 2 for x in samples.slice(0, len(samples))[0]}


# --- partitions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
@pytest.mark.parametrize("clients", [1, 7, 20])
def test_every_row_belongs_to_exactly_one_client(kind: Partition, clients: int) -> None:
    for parts, count in zip(split(kind, clients), (3000, 700), strict=True):
        assert len(parts.sizes) == clients and parts.sizes.sum() == count
        together = np.concatenate([parts.rows_of(client) for client in range(clients)])
        assert np.array_equal(np.sort(together), np.arange(count))
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


def test_dirichlet_that_cannot_give_the_minimum_says_so() -> None:
    with pytest.raises(SettingError, match=r"alpha = 0\.01 leaves some of 20 clients with fewer than 100 of 3000"):
        split(min_samples=100, alpha=0.01)


def test_dirichlet_divides_test_samples_in_the_proportions_of_training() -> None:
    train, test = split(alpha=0.3)
    y, y_test = labels(3000), labels(700, seed=1)
    for label in range(10):
        mine = np.array([(y[train.rows_of(client)] == label).sum() for client in range(20)]) / (y == label).sum()
        theirs = (
            np.array([(y_test[test.rows_of(client)] == label).sum() for client in range(20)]) / (y_test == label).sum()
        )
        most = 1 / (y == label).sum() + 1 / (y_test == label).sum()  # each of both is cut down to whole samples
        assert np.abs(mine - theirs).max() <= most
        assert mine.max() > 3 / 20


def test_dirichlet_deals_the_rows_of_a_class_at_random() -> None:
    train = partition_labels(PartitionSpec("dirichlet", 2, 100.0, 1), np.zeros(1000, np.int64), labels(0), 0)[0]
    assert all(450 < train.rows_of(client).mean() < 550 for client in range(2))


def test_rows_of_an_owner_keep_their_order() -> None:
    owners = labels(1000, 3)
    parts = Parts.by_owner(np.arange(1000) * 2, owners, 4)
    assert parts.sizes[3] == 0
    for owner in range(3):
        assert np.array_equal(parts.rows_of(owner), np.flatnonzero(owners == owner) * 2)


def test_dirichlet_is_the_more_skewed_the_smaller_alpha_is() -> None:
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
def test_division_depends_on_the_seed_alone(kind: Partition) -> None:
    for one, again, other in zip(split(kind), split(kind), split(kind, seed=1), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
        assert not np.array_equal(one.rows, other.rows)


def test_dividing_sixty_thousand_among_a_hundred_is_quick() -> None:
    y, y_test = labels(60_000), labels(10_000)
    best = np.inf
    for _ in range(5):
        begun = time.perf_counter()
        partition_labels(PartitionSpec("dirichlet", 100, 0.5, 10), y, y_test, 0)
        best = min(best, time.perf_counter() - begun)
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
def test_wrong_settings_of_a_division(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        split(**change)


def test_fewer_samples_than_clients() -> None:
    with pytest.raises(DataError, match="cannot partition 5 training samples among 6 clients"):
        partition_labels(PartitionSpec("iid", 6, 0.5, 0), labels(5), labels(5), 0)
    assert partition_labels(PartitionSpec("iid", 5, 0.5, 0), labels(5), labels(0), 0)[0].sizes.tolist() == [1] * 5


def test_classes_that_only_one_part_has() -> None:
    train, test = partition_labels(PartitionSpec("dirichlet", 4, 1.0, 1), np.zeros(100, np.int64), np.full(50, 3), 0)
    assert train.sizes.sum() == 100 and test.sizes.sum() == 50


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5, 0.9])
def test_hold_out_fraction_takes_a_fraction_of_each_client(share: float) -> None:
    parts = split(clients=9)[0]
    left, taken = hold_out_fraction(parts, share, np.random.default_rng(0))
    assert taken.sizes.tolist() == [int(size * share) for size in parts.sizes]
    for client in range(9):
        both = np.concatenate([left.rows_of(client), taken.rows_of(client)])
        assert np.array_equal(np.sort(both), np.sort(parts.rows_of(client)))
    again = hold_out_fraction(parts, share, np.random.default_rng(0))
    other = hold_out_fraction(parts, share, np.random.default_rng(1))
    assert np.array_equal(again[1].rows, taken.rows) and not np.array_equal(other[1].rows, taken.rows)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 1.5])
def test_hold_out_fraction_must_be_between_0_and_1(share: float) -> None:
    with pytest.raises(SettingError, match="fraction to hold out must be > 0 and < 1"):
        hold_out_fraction(split()[0], share, np.random.default_rng(0))


# --- samples --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["all rows", "some rows"])
def samples(request: pytest.FixtureRequest) -> Samples:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (50, 1, 3, 2), generator=draw, dtype=torch.uint8)
    rows = torch.randperm(50, generator=draw)[:23] if request.param == "some rows" else None
    return Samples(x, torch.arange(50), rows, 80.0, 0.02)


def plainly(samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.arange(len(samples.y)) if samples.rows is None else samples.rows
    return (samples.x[rows].float() - 80.0) * 0.02, samples.y[rows]


def equal(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_pick_is_plain_indexing(samples: Samples) -> None:
    x, y = plainly(samples)
    which = torch.tensor([5, 0, 0, len(samples) - 1])
    assert equal(samples.pick(which), (x[which], y[which]))


def test_batches_are_plain_indexing(samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = plainly(samples)
    numbers = torch.randint(len(samples), (9, 4), generator=torch.Generator().manual_seed(1))
    for block in (1, 50, 1 << 20):  # gathered one by one, a few at a time, all at once
        monkeypatch.setattr("fewer.data.samples.BLOCK", block)
        batches = list(samples.batches(numbers))
        assert len(batches) == 9
        assert all(equal(batch, (x[row], y[row])) for batch, row in zip(batches, numbers, strict=True))


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_chunks_are_all_samples_in_order(samples: Samples, size: int) -> None:
    chunks = list(samples.chunks(size))
    assert [len(y) for _, y in chunks[:-1]] == [size] * (len(chunks) - 1)
    assert equal((torch.cat([x for x, _ in chunks]), torch.cat([y for _, y in chunks])), plainly(samples))


def test_slice_stops_at_the_end(samples: Samples) -> None:
    x, y = plainly(samples)
    assert equal(samples.slice(3, 8), (x[3:8], y[3:8]))
    assert equal(samples.slice(len(samples) - 2, 10**6), (x[-2:], y[-2:]))


def test_no_samples() -> None:
    none = Samples(torch.zeros(5, 2), torch.zeros(5, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    assert len(none) == 0 and list(none.chunks()) == []


def test_floats_and_integers_are_left_alone() -> None:
    for x in (torch.randn(3, 2), torch.tensor([[1, 2]] * 3)):
        assert torch.equal(Samples(x, torch.zeros(3)).pick(torch.arange(3))[0], x)


def test_normalization_of_bytes_by_their_own_mean_and_spread() -> None:
    x = np.array([[0, 255], [51, 102]] * 20, np.uint8)
    mean = (0 + 1 + 0.2 + 0.4) / 4
    spread = ((mean**2 + (1 - mean) ** 2 + (0.2 - mean) ** 2 + (0.4 - mean) ** 2) / 4) ** 0.5
    data = from_arrays(x, np.zeros(40, int), clients=1, test=(x[:2], [0, 0]))
    expected = (torch.tensor([[0, 1], [0.2, 0.4]]) - mean) / spread
    assert torch.allclose(data.test.slice(0, 2)[0], expected, atol=1e-6)
    everything = data.client(0).train.slice(0, 40)[0]
    assert abs(float(everything.mean())) < 1e-6 and abs(float(everything.std(correction=0)) - 1) < 1e-6


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


# --- a user's own arrays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("validation", [0.0, 0.25])
def test_a_fifth_is_for_testing(validation: float) -> None:
    x, y = arrays()
    data = from_arrays(x, y, clients=4, validation=validation)
    seen: list[int] = []
    for number in range(4):
        train, held, test = data.client(number)
        whole = len(train) + len(held) + len(test)
        assert abs(len(test) - whole / 5) <= 4 and len(held) == int((whole - len(test)) * validation)
        assert data.size(number) == len(train)
        for part in (train, held, test):
            seen += own_rows(part)
            inputs, targets = part.slice(0, len(part))
            assert targets.tolist() == [y[int(row[0]) // 2] for row in inputs]
    assert sorted(seen) == list(range(200))
    assert own_rows(data.test) == set().union(*(own_rows(data.client(number).test) for number in range(4)))
    assert data.shape == (2,) and data.classes == 4 and len(data) == 4 and data.origin is None


def test_client_says_whose_a_sample_is() -> None:
    x, y = arrays(30)
    client_ids = np.array([f"client {row % 3}" for row in range(30)])
    data = from_arrays(x, y, client_ids=client_ids, partition="natural")
    assert len(data) == 3
    for number in range(3):
        mine = data.client(number)
        assert own_rows(mine.train) | own_rows(mine.test) == set(range(number, 30, 3))
        assert (len(mine.train), len(mine.test)) == (8, 2)


def test_client_with_a_test_set_of_its_own() -> None:
    x, y = arrays(30)
    data = from_arrays(x, y, client_ids=np.arange(30) % 3, test=(x[:9] + 1000, y[:9]))
    assert [len(data.client(number).train) for number in range(3)] == [10, 10, 10]
    assert sum(len(data.client(number).test) for number in range(3)) == 9
    assert own_rows(data.test) == set(range(500, 509))


def test_natural_needs_clients() -> None:
    with pytest.raises(SettingError, match="partition = natural needs client ids"):
        from_arrays(*arrays(), partition="natural")


def test_from_clients_keeps_order_and_a_client_without_samples() -> None:
    x, y = arrays(30)
    none = (np.zeros((0, 2), np.float32), np.zeros(0, int))
    pairs = [none, (x[:10], y[:10]), none, (x[10:25], y[10:25]), (x[25:], y[25:]), ([], [])]
    data = from_clients(pairs, validation=0.5)
    assert len(data) == 6
    assert [sum(map(len, data.client(number))) for number in range(6)] == [0, 10, 0, 15, 5, 0]
    assert [data.size(number) for number in range(6)] == [0, 4, 0, 6, 2, 0]
    found = [set().union(*map(own_rows, data.client(number))) for number in range(6)]
    assert found == [set(), set(range(10)), set(), set(range(10, 25)), set(range(25, 30)), set()]


def test_from_clients_takes_tensors_and_mixed_floats() -> None:
    pairs = [(torch.ones(5, 2), torch.ones(5).long()), (np.zeros((5, 2), np.float64), [0] * 5)]
    data = from_clients(pairs)
    assert data.source.x.dtype == torch.float32 and data.classes == 2
    assert data.client(0).train.slice(0, 1)[0].tolist() == [[1, 1]]


def test_fraction_keeps_only_so_much() -> None:
    x, y = arrays()
    data = from_arrays(x, y, clients=2, fraction=0.5, test=(x, y))
    assert data.size(0) + data.size(1) == 100 and len(data.test) == 200
    half = own_rows(data.client(0).train) | own_rows(data.client(1).train)
    assert len(half) == 100 and half != set(range(100))
    data = from_arrays(x, y, client_ids=np.arange(200) % 2, fraction=0.5, test=(x, y))
    assert data.size(0) + data.size(1) == 100
    for number in range(2):
        assert {row % 2 for row in own_rows(data.client(number).train)} == {number}


def test_a_client_that_fraction_leaves_nothing_stays_a_client() -> None:
    x, y = arrays(55)
    pairs = [(x[:3], y[:3]), (x[3:53], y[3:53]), (x[53:], y[53:])]
    for fraction in (0.5, 0.1, 0.03):
        data = from_clients(pairs, fraction=fraction, test=(x, y))
        assert len(data) == 3 and sum(data.size(number) for number in range(3)) == round(55 * fraction)
        for number, theirs in enumerate((range(3), range(3, 53), range(53, 55))):
            assert own_rows(data.client(number).train) <= set(theirs)
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
def test_arrays_that_nothing_can_be_learned_from(change: dict[str, Any], message: str) -> None:
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
        ([(np.zeros((3, 2)), [0] * 3), (np.zeros((3, 4)), [0] * 3)], r"client 1 has inputs of float64 \(4,\), others"),
        ([(np.zeros((3, 2)), [0] * 3), (np.zeros((3, 2), np.uint8), [0] * 3)], r"client 1 has inputs of uint8 \(2,\)"),
        ([(np.zeros((3, 2)), [0] * 3), (np.full((3, 2), np.nan), [0] * 3)], "NaN or infinity in sample 3"),
    ],
)
def test_clients_that_do_not_fit_together(pairs: list[tuple[Any, Any]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_clients(pairs)


# --- holding out ----------------------------------------------------------------------------------------------


def test_hold_out_takes_test_samples_from_training_alone() -> None:
    x, y = arrays()
    data = from_arrays(x, y, clients=4, validation=0.2)
    within = data.hold_out(0.25, seed=5)
    tests = own_rows(data.test)
    assert len(within) == 4 and within.origin is None
    for number in range(4):
        before, after = data.client(number), within.client(number)
        train, held = own_rows(after.train), own_rows(after.test)
        assert not train & held and train | held == own_rows(before.train)
        assert len(held) == len(before.train) // 4
        assert own_rows(after.validation) == own_rows(before.validation)
        assert not (train | held) & tests
        inputs, targets = after.test.slice(0, len(after.test))
        assert targets.tolist() == [y[int(row[0]) // 2] for row in inputs]
    assert own_rows(within.test) == set().union(*(own_rows(within.client(number).test) for number in range(4)))
    assert not own_rows(within.test) & tests
    assert own_rows(data.test) == tests


def test_hold_out_never_reads_the_test_samples() -> None:
    x, y = arrays()
    data = from_arrays(x, y, clients=4, test=(x + 10_000, y))
    damaged = replace(data, global_test=Samples(torch.full_like(data.global_test.x, torch.nan), data.global_test.y))
    one, other = (each.hold_out(0.3, seed=0) for each in (data, damaged))
    assert one.fingerprint() == other.fingerprint()
    assert bool(torch.isfinite(other.test.slice(0, len(other.test))[0]).all())


def test_hold_out_depends_on_its_seed() -> None:
    data = from_arrays(*arrays(), clients=4)
    rows = [own_rows(data.hold_out(0.3, seed).test) for seed in (0, 0, 1)]
    assert rows[0] == rows[1] != rows[2]


def test_hold_out_twice() -> None:
    data = from_arrays(*arrays(), clients=4)
    first = data.hold_out(0.3, 0)
    second = first.hold_out(0.3, 0)
    assert not own_rows(second.test) & own_rows(first.test)
    assert own_rows(second.test) <= set().union(*(own_rows(first.client(number).train) for number in range(4)))


# --- fingerprint ----------------------------------------------------------------------------------------------


def made(**change: Any) -> ArrayData:
    x = np.random.default_rng(0).integers(256, size=(80, 3, 3), dtype=np.uint8)
    y = labels(80, 4)
    given: dict[str, Any] = {
        "x": x,
        "y": y,
        "test": (x[:20].copy(), y[:20].copy()),
        "clients": 3,
        "min_samples_per_client": 1,
        "normalization": (0.5, 0.5),
    }
    return from_arrays(**given | change)


def test_fingerprint_is_that_of_the_content() -> None:
    one = made()
    assert one.fingerprint() == made().fingerprint() == one.to(torch.device("cpu")).fingerprint()
    assert len(one.fingerprint()) == 8


def changed(array: Any, place: Any) -> Any:
    copied = np.array(array)
    copied[place] = (copied[place] + 1) % 4
    return copied


@pytest.mark.parametrize(
    "what",
    ["pixel", "label", "test pixel", "test label", "seed", "alpha", "clients", "validation", "normalization", "shape"],
)
def test_fingerprint_changes_with(what: str) -> None:
    x, y = np.random.default_rng(0).integers(256, size=(80, 3, 3), dtype=np.uint8), labels(80, 4)
    test = x[:20], y[:20]
    change: dict[str, Any] = {
        "pixel": {"x": changed(x, (40, 1, 2))},
        "label": {"y": changed(y, 40), "partition": "iid"},
        "test pixel": {"test": (changed(test[0], (7, 0, 0)), test[1])},
        "test label": {"test": (test[0], changed(test[1], 7)), "partition": "iid"},
        "seed": {"seed": 1},
        "alpha": {"alpha": 5.0},
        "clients": {"clients": 4},
        "validation": {"validation": 0.2},
        "normalization": {"normalization": (0.5, 0.25)},
        "shape": {"x": x.reshape(80, 9), "test": (test[0].reshape(20, 9), test[1])},
    }[what]
    common = {"partition": "iid"} if "partition" in change else {}
    assert made(**change).fingerprint() != made(**common).fingerprint()


def test_fingerprint_changes_when_one_row_changes_hands() -> None:
    data = made()
    offsets = data.train.offsets.copy()
    offsets[1] += 1
    assert replace(data, train=Parts(data.train.rows, offsets)).fingerprint() != data.fingerprint()


# --- embedded sets --------------------------------------------------------------------------------------------


def test_digits() -> None:
    data = load("digits", clients=10)
    assert (len(data.source), len(data.test)) == (1438, 359)
    assert data.shape == (1, 8, 8) and data.classes == 10 and data.source.x.dtype == torch.uint8
    assert len(data) == 10 and sum(data.size(number) for number in range(10)) == 1438
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


def test_embedded_file_is_small_and_has_its_licence_beside_it() -> None:
    folder = files("fewer.data").joinpath("embedded")
    with folder.joinpath("fashion-mini.npz").open("rb") as file:
        assert len(file.read()) < 5_000_000
    license = folder.joinpath("LICENSE.fashion-mnist").read_text()
    assert "MIT" in license and "Zalando" in license


def test_load_gives_the_same_again_and_another_for_another_seed() -> None:
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


def test_wrong_settings_are_seen_before_anything_is_read() -> None:
    with pytest.raises(SettingError, match="unknown partition 'even'"):
        load("npz:nowhere", partition="even")
    with pytest.raises(SettingError, match="alpha must be > 0, got -1"):
        load("npz:nowhere", alpha=-1)


# --- files ----------------------------------------------------------------------------------------------------

FOUR = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx_bytes(array: NDArray[np.uint8]) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def idx_arrays() -> list[NDArray[np.uint8]]:
    draw = np.random.default_rng(0)
    x, x_test = (draw.integers(256, size=(count, 5, 4), dtype=np.uint8) for count in (60, 12))
    return [x, (np.arange(60) % 3).astype(np.uint8), x_test, (np.arange(12) % 3).astype(np.uint8)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data directory with four good idx files in mnist/."""
    (tmp_path / "mnist").mkdir()
    for name, array in zip(FOUR, idx_arrays(), strict=True):
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


def test_idx_files_may_be_packed(folder: Path) -> None:
    expected = open_idx(folder).fingerprint()
    for name in FOUR[:3]:
        path = folder / "mnist" / name
        path.with_name(name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert open_idx(folder).fingerprint() == expected


def test_named_data_lies_in_the_data_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "mnist")
    monkeypatch.delenv("FEWER_DATA", raising=False)
    with pytest.raises(DataError, match="no 'mnist' here, and no data directory: pass --data-dir or set FEWER_DATA"):
        load("mnist")
    given = load("mnist", directory=folder, clients=3, min_samples_per_client=1)
    assert (given.source.shift, given.source.scale) == (255 * 0.1307, 1 / (255 * 0.3081))
    monkeypatch.setenv("FEWER_DATA", str(folder))
    assert load("mnist", clients=3, min_samples_per_client=1).fingerprint() == given.fingerprint()
    with pytest.raises(DataError, match=f"no 'fashion-mnist' in {folder}"):
        load("fashion-mnist")


def packed(raw: bytes) -> bytes:
    return gzip.compress(raw)


LABELS = idx_bytes(np.zeros(60, np.uint8))


def test_npz(tmp_path: Path) -> None:
    x, y = arrays(60)
    path = tmp_path / "own.npz"
    np.savez(path, x=x, y=y)
    data = load(f"npz:{path}", clients=2)
    assert len(data.test) + data.size(0) + data.size(1) == 60
    np.savez_compressed(path, x=x, y=y, x_test=x[:7], y_test=y[:7], client=np.arange(60) % 5)
    data = load("npz:own.npz", directory=tmp_path, partition="natural")
    assert len(data) == 5 and len(data.test) == 7 and [data.size(number) for number in range(5)] == [12] * 5
    assert len(load(f"npz:{path}", clients=3)) == 3


def test_a_damaged_npz_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    x, y = arrays(60)
    np.savez_compressed(path, x=x, y=y)
    good = path.read_bytes()
    draw = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        damaged = np.frombuffer(good, np.uint8).copy()
        damaged[draw.integers(len(good), size=3)] ^= draw.integers(1, 256, size=3, dtype=np.uint8)
        path.write_bytes(damaged.tobytes())
        try:
            load(f"npz:{path}", clients=2, min_samples_per_client=1)
        except DataError:
            refused += 1
    assert refused > 200


def test_an_archive_with_code_in_it_is_never_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return Path.touch, (tmp_path / "sprung",)  # type: ignore[return-value]

    np.savez(tmp_path / "trap.npz", x=np.array([Trap()], dtype=object), y=np.zeros(1))
    with pytest.raises(DataError):
        load("npz:trap.npz", directory=tmp_path)
    assert not (tmp_path / "sprung").exists()
