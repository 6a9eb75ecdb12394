"""Samples are picked, batched and normalized like plain arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from fewer.data import Samples, from_arrays


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


def test_no_samples_give_no_chunks() -> None:
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


def test_a_given_normalization_is_used() -> None:
    x = np.array([[0, 255]] * 10, np.uint8)
    data = from_arrays(
        x, np.zeros(10, int), clients=1, min_samples_per_client=1, normalization=(0.25, 0.5), test=(x[:1], [0])
    )
    assert torch.allclose(data.test.slice(0, 1)[0], torch.tensor([[-0.5, 1.5]]))


def test_constant_bytes_do_not_divide_by_zero() -> None:
    x = np.full((20, 2), 255, np.uint8)
    data = from_arrays(x, np.zeros(20, int), clients=1, min_samples_per_client=1)
    assert data.test.slice(0, 1)[0].abs().max() < 1e-6


def test_a_data_loader_takes_samples() -> None:
    x, y = torch.arange(14, dtype=torch.uint8).reshape(7, 2), torch.arange(7) % 3
    samples = Samples(x, y, torch.tensor([6, 1, 2, 5]), shift=1.0, scale=2.0)
    loaded = list(DataLoader(samples, batch_size=3))  # type: ignore[arg-type]
    expected = list(samples.chunks(3))
    assert len(loaded) == len(expected) == 2
    for (loaded_x, loaded_y), (x, y) in zip(loaded, expected, strict=True):
        assert torch.equal(loaded_x, x) and torch.equal(loaded_y, y)
    assert torch.equal(samples[-1][0], samples[3][0]) and samples[1][1].item() == 1
    with pytest.raises(IndexError):
        samples[4]
