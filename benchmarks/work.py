"""The workload, and a bare loop in NumPy and torch that runs it.

FedAvg with 20 clients, Dirichlet(0.5) on half of the training images, a cohort of 10, 20 local steps with batches of
32, and the full test set each round. Cohorts and batches depend on round and client only, so all implementations must
agree.

`python -m benchmarks.work ROUNDS [DIR]` runs the bare loop in a separate process.
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

CLIENTS, COHORT, LOCAL_STEPS, BATCH_SIZE, LR, ALPHA = 20, 10, 20, 32, 0.1, 0.5
MEAN, STD = 0.1307, 0.3081
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

Array = NDArray[Any]


class RoundPrinter:
    """Prints each round as a line of JSON, then waits for a line until stdin is closed."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def print_round(self, metrics: Mapping[str, Any]) -> None:
        """Prints the time since the last round, and the accuracy."""
        seconds = time.perf_counter() - self.start
        print(json.dumps({"seconds": seconds, "accuracy": metrics.get("accuracy")}), flush=True)
        sys.stdin.readline()
        self.start = time.perf_counter()


class Arrays(NamedTuple):
    """Images as uint8, labels, and the client of each training sample."""

    x: Array
    y: Array
    test_x: Array
    test_y: Array
    client_ids: Array


def load_arrays(directory: str | None = None) -> Arrays:
    """Loads half of MNIST's training images and all test images from DIR/mnist, or synthetic ones of that shape."""
    x, y, test_x, test_y = _load_mnist(Path(directory) / "mnist") if directory else _make_synthetic()
    half = np.random.default_rng(0).permutation(len(x))[: len(x) // 2]
    return Arrays(x[half], y[half], test_x, test_y, _assign_clients(y[half]))


def build_net() -> nn.Sequential:
    """Builds Fewer's small CNN with group norm."""
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


def sample_cohort(round: int) -> list[int]:
    """Samples the clients of a round."""
    return [int(client) for client in np.random.default_rng(round).choice(CLIENTS, COHORT, replace=False)]


def sample_batches(round: int, client: int, count: int) -> Tensor:
    """Samples the indices of a client's batches (steps × batch size) among its `count` samples."""
    return torch.randint(
        count, (LOCAL_STEPS, BATCH_SIZE), generator=torch.Generator().manual_seed(round * 1000 + client)
    )


def run_bare_loop(arrays: Arrays) -> Iterator[float]:
    """Runs FedAvg as an endless plain torch loop and yields the accuracy after each round."""
    x, test_x = _normalize(arrays.x), _normalize(arrays.test_x)
    y, test_y = (torch.from_numpy(labels.astype(np.int64)) for labels in (arrays.y, arrays.test_y))
    rows = [torch.from_numpy(np.flatnonzero(arrays.client_ids == client)) for client in range(CLIENTS)]
    data = [(x[indices], y[indices]) for indices in rows]
    del x, y
    global_net, local_net = build_net(), build_net()
    global_weights, local_weights = list(global_net.parameters()), list(local_net.parameters())
    round = 0
    while True:
        round += 1
        cohort = sample_cohort(round)
        total = sum(len(data[client][1]) for client in cohort)
        sums = [torch.zeros_like(weight) for weight in global_weights]
        for client in cohort:
            _copy(global_weights, local_weights)
            _train(local_net, *data[client], sample_batches(round, client, len(data[client][1])))
            with torch.no_grad():
                for weighted_sum, weight in zip(sums, local_weights, strict=True):
                    weighted_sum.add_(weight, alpha=len(data[client][1]) / total)
        _copy(sums, global_weights)
        yield _test(global_net, test_x, test_y)


def _train(net: nn.Module, x: Tensor, y: Tensor, batches: Tensor) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for rows in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@torch.no_grad()
def _copy(sources: list[Any], targets: list[Any]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


@torch.no_grad()
def _test(net: nn.Module, x: Tensor, y: Tensor) -> float:
    chunks = zip(torch.split(x, 1000), torch.split(y, 1000), strict=True)
    return sum(int((net(images).argmax(1) == labels).sum()) for images, labels in chunks) / len(y)


def _normalize(images: Array) -> Tensor:
    return torch.from_numpy(((images[:, None].astype(np.float32) / 255) - MEAN) / STD)


def _assign_clients(y: Array) -> Array:
    """Assigns each sample to a client: each class by Dirichlet(0.5), with at least ten samples per client."""
    draw = np.random.default_rng(0)
    while True:
        clients = np.empty(len(y), np.int64)
        for label in range(10):
            rows = draw.permutation(np.flatnonzero(y == label))
            fractions = np.cumsum(draw.dirichlet([ALPHA] * CLIENTS))[:-1]
            for client, part in enumerate(np.split(rows, (fractions * len(rows)).astype(int))):
                clients[part] = client
        if np.bincount(clients, minlength=CLIENTS).min() >= 10:
            return clients


def _load_mnist(folder: Path) -> list[Array]:
    arrays = []
    for name in FILES:
        raw = gzip.decompress((folder / f"{name}.gz").read_bytes())
        shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
        arrays.append(np.frombuffer(bytearray(raw), np.uint8, offset=4 + 4 * raw[3]).reshape(shape))
    return arrays


def _make_synthetic() -> list[Array]:
    """Makes images with some pixels of one of ten bright patterns on black. A net learns them as well as MNIST."""
    draw = np.random.default_rng(1)
    patterns = (draw.random((10, 28, 28)) < 0.2).astype(np.uint8) * 200
    arrays: list[Array] = []
    for count in (60000, 10000):
        y = draw.integers(0, 10, count, np.uint8)
        arrays += [patterns[y] * (draw.integers(0, 256, (count, 28, 28), np.uint8) < 30), y]
    return arrays


def main() -> None:
    """Runs the bare loop and prints each round."""
    torch.set_num_threads(1)
    rounds, *directory = sys.argv[1:]
    printer = RoundPrinter()
    for accuracy in islice(run_bare_loop(load_arrays(*directory)), int(rounds)):
        printer.print_round({"accuracy": accuracy})


if __name__ == "__main__":
    main()
