"""The work that is timed, and the bare loop that does it: nothing but NumPy and torch.

FedAvg with 20 clients, Dirichlet(0.5) on half of the training images, 10 clients a round, 20 SGD steps of 32, the full
test set each round. Cohorts and batches are functions of round and client alone, so all who run it must agree.
`python -m benchmarks.work ROUNDS [DIR]` runs the bare loop as a process of its own.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

CLIENTS, DEFAULT_COHORT, STEPS, BATCH, LR, ALPHA = 20, 10, 20, 32, 0.1, 0.5
MEAN, DEVIATION = 0.1307, 0.3081
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

Array = NDArray[Any]


class Turns:
    """Progress of a run: prints each round as a line of JSON, then waits for a line, unless its input has ended."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()

    def on_run_start(self, method: str, done: int, rounds: int) -> None: ...

    def on_answer(self, round: int, done: int, asked: int) -> None: ...

    def on_round_end(self, figures: Mapping[str, Any]) -> None:
        seconds = time.perf_counter() - self.begun
        print(json.dumps({"seconds": seconds, "accuracy": figures.get("accuracy")}), flush=True)
        sys.stdin.readline()
        self.begun = time.perf_counter()


class Arrays(NamedTuple):
    """Images as bytes, labels, and the client of each training sample."""

    x: Array
    y: Array
    test_x: Array
    test_y: Array
    client_ids: Array


def arrays(directory: str | None = None) -> Arrays:
    """Half of MNIST's training images and all test images from DIR/mnist, or a synthetic set of the same shape."""
    x, y, test_x, test_y = _mnist(Path(directory) / "mnist") if directory else _synthetic()
    half = np.random.default_rng(0).permutation(len(x))[: len(x) // 2]
    return Arrays(x[half], y[half], test_x, test_y, _owners(y[half]))


def net() -> nn.Sequential:
    """Fewer's small CNN with group norm."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, 2, 1),
        nn.GroupNorm(1, 6),
        nn.ReLU(),
        nn.Conv2d(6, 16, 3, 2, 1),
        nn.GroupNorm(1, 16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(784, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def cohort(round: int) -> list[int]:
    """Who trains in this round."""
    return [int(client) for client in np.random.default_rng(round).choice(CLIENTS, DEFAULT_COHORT, replace=False)]


def batches(round: int, client: int, count: int) -> Tensor:
    """Which of its `count` samples a client trains on (steps × batch)."""
    return torch.randint(count, (STEPS, BATCH), generator=torch.Generator().manual_seed(round * 1000 + client))


def bare(given: Arrays) -> Iterator[float]:
    """The plain torch loop: the accuracy after each round, for ever."""
    x, test_x = _floats(given.x), _floats(given.test_x)
    y, test_y = (torch.from_numpy(labels.astype(np.int64)) for labels in (given.y, given.test_y))
    own = [torch.from_numpy(np.flatnonzero(given.client_ids == client)) for client in range(CLIENTS)]
    data = [(x[rows], y[rows]) for rows in own]
    del x, y
    model, local = net(), net()
    theirs, ours = list(model.parameters()), list(local.parameters())
    round = 0
    while True:
        round += 1
        asked = cohort(round)
        total = sum(len(data[client][1]) for client in asked)
        sums = [torch.zeros_like(weight) for weight in theirs]
        for client in asked:
            _copy(theirs, ours)
            _train(local, *data[client], batches(round, client, len(data[client][1])))
            with torch.no_grad():
                for sum_, weight in zip(sums, ours, strict=True):
                    sum_.add_(weight, alpha=len(data[client][1]) / total)
        _copy(sums, theirs)
        yield _test(model, test_x, test_y)


def _train(model: nn.Module, x: Tensor, y: Tensor, numbers: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for rows in numbers:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@torch.no_grad()
def _copy(source: list[Any], target: list[Any]) -> None:
    for one, other in zip(source, target, strict=True):
        other.copy_(one)


@torch.no_grad()
def _test(model: nn.Module, x: Tensor, y: Tensor) -> float:
    chunks = zip(torch.split(x, 1000), torch.split(y, 1000), strict=True)
    return sum(int((model(one).argmax(1) == labels).sum()) for one, labels in chunks) / len(y)


def _floats(images: Array) -> Tensor:
    return torch.from_numpy(((images[:, None].astype(np.float32) / 255) - MEAN) / DEVIATION)


def _owners(y: Array) -> Array:
    """The client of each sample: each class in proportions from Dirichlet(0.5), at least ten samples a client."""
    draw = np.random.default_rng(0)
    while True:
        owners = np.empty(len(y), np.int64)
        for label in range(10):
            rows = draw.permutation(np.flatnonzero(y == label))
            shares = np.cumsum(draw.dirichlet([ALPHA] * CLIENTS))[:-1]
            for client, part in enumerate(np.split(rows, (shares * len(rows)).astype(int))):
                owners[part] = client
        if np.bincount(owners, minlength=CLIENTS).min() >= 10:
            return owners


def _mnist(folder: Path) -> list[Array]:
    found = []
    for name in FILES:
        raw = gzip.decompress((folder / f"{name}.gz").read_bytes())
        shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
        found.append(np.frombuffer(bytearray(raw), np.uint8, offset=4 + 4 * raw[3]).reshape(shape))
    return found


def _synthetic() -> list[Array]:
    """Ten bright patterns on black, of which each image has some pixels: as well conditioned as MNIST."""
    draw = np.random.default_rng(1)
    patterns = (draw.random((10, 28, 28)) < 0.2).astype(np.uint8) * 200
    found: list[Array] = []
    for count in (60000, 10000):
        y = draw.integers(0, 10, count, np.uint8)
        found += [patterns[y] * (draw.integers(0, 256, (count, 28, 28), np.uint8) < 30), y]
    return found


def main() -> None:
    """The bare loop, round by round."""
    torch.set_num_threads(1)
    rounds, *directory = sys.argv[1:]
    turns = Turns()
    for accuracy in islice(bare(arrays(*directory)), int(rounds)):
        turns.round({"accuracy": accuracy})


if __name__ == "__main__":
    main()
