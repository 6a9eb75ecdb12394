"""An episode of FRL through Fewer, and the bare forward and backward passes that it needs.

`python -m benchmarks.episode SIDE EPISODES` runs one side (inline, pool or bare) in a separate process and prints a
line of JSON per episode. Ten clients have 300 samples of two classes each; Conv-4 on 3×32×32, R = 3, GPAL. In each
round a client computes prototypes by a forward pass over its 150 support samples, and trains on them in batches of 60.
At the end it computes the gradient on its 150 queries.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import fewer
from benchmarks import work
from benchmarks.federated import PrintRounds
from fewer.data import ArrayData, Data, from_clients
from fewer.methods import Scores
from fewer.methods.frl import FRL
from fewer.models.images import Conv4

CLIENTS, SAMPLES, CLASSES, ROUNDS, BATCH_SIZE = 10, 300, 20, 3, 60
SIDES: dict[str, dict[str, Any]] = {"inline": {}, "pool": {"runtime": "pool", "workers": 2}}


class UnevaluatedFRL(FRL):
    """FRL without evaluation groups: only training is timed."""

    name: ClassVar[str] = "timed"

    def prepare_data(self, data: Data) -> Data:
        return data

    def evaluate(self, state: Any, clients: fewer.Clients, data: Data) -> Scores:
        return Scores({"accuracy": 0.0})


class PrintEpisodes(PrintRounds):
    """Prints one line per episode instead of one per round."""

    def on_round_end(self, run: fewer.Run, metrics: Mapping[str, Any]) -> None:
        if run.round % (ROUNDS + 1) == 0:
            super().on_round_end(run, metrics)


def make_data() -> ArrayData:
    """Makes noise images with two classes per client; accuracy does not matter here."""
    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (CLIENTS, SAMPLES, 3, 32, 32), np.uint8)
    pairs = [(x[client], 2 * client + np.arange(SAMPLES) % 2) for client in range(CLIENTS)]
    return from_clients(pairs, test=(x[0][:10], np.zeros(10, np.int64)))


def run_bare_passes(x: Tensor, y: Tensor, clients: int = CLIENTS) -> None:
    """Runs only the forward and backward passes of one episode."""
    net, x = Conv4((3, 32, 32), CLASSES).train(), x.to(memory_format=torch.channels_last)
    parameters = list(net.encoder.parameters())
    half = SAMPLES // 2

    def compute_gradient(batch: Tensor, labels: Tensor) -> None:
        features = net.encoder(batch)
        torch.autograd.grad(F.cross_entropy(features[:, :2], labels), parameters)

    for _ in range(clients):
        for _ in range(ROUNDS):
            with torch.no_grad():
                net.encoder(x[:half])
            for start in range(0, half, BATCH_SIZE):
                end = min(start + BATCH_SIZE, half)
                compute_gradient(x[start:end], y[start:end])
        compute_gradient(x[half:], y[half:])


def measure_peak(repeats: int = 20, size: int = 1024) -> float:
    """Measures the best speed of a matrix product on one thread, in GFLOP/s."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return 2e-9 * size**3 / min(times)


def main() -> None:
    """Runs one side and prints each episode."""
    torch.set_num_threads(1)
    side, count = sys.argv[1], int(sys.argv[2])
    if side == "bare":
        x, y = torch.randn(SAMPLES, 3, 32, 32), torch.arange(SAMPLES) % 2
        printer = work.RoundPrinter()
        for _ in range(count):
            run_bare_passes(x, y)
            printer.print_round({"accuracy": 0.0})
        return
    method = UnevaluatedFRL(rounds=count * (ROUNDS + 1), cohort=CLIENTS, group_rounds=ROUNDS, batch_size=BATCH_SIZE)
    fewer.run(method, make_data(), model="conv4", callbacks=[PrintEpisodes()], **SIDES[side])


if __name__ == "__main__":
    main()
