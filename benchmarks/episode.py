"""An episode of FRL through Fewer, and the bare passes over the net that it needs.

`python -m benchmarks.episode SIDE EPISODES` runs one side (inline, pool or bare) in a process of its own and prints a
line of JSON for each episode. Ten clients with 300 samples of two classes each, Conv-4 on 3×32×32, R = 3, GPAL: in each
round a client passes forward over its support of 150 for the prototypes and forward and backward over it in steps of 60;
at the end forward and backward over its 150 queries.
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
from fewer.data import ArrayData, Data, from_clients
from fewer.methods.base import Scores
from fewer.methods.frl import FRL
from fewer.models.images import Conv4

CLIENTS, SAMPLES, CLASSES, ROUNDS, BATCH = 10, 300, 20, 3, 60
SIDES: dict[str, dict[str, Any]] = {"inline": {}, "pool": {"runtime": "pool", "workers": 2}}


class Timed(FRL):
    """FRL without groups to be judged on."""

    name: ClassVar[str] = "timed"

    def prepare_data(self, data: Data) -> Data:
        return data

    def evaluate(self, state: Any, clients: fewer.Clients, data: Data) -> Scores:
        return {"accuracy": 0.0}


class Episodes(work.Turns):
    """One line for each episode, not for each round."""

    def on_round_end(self, figures: Mapping[str, Any]) -> None:
        if figures["round"] % (ROUNDS + 1) == 0:
            super().on_round_end(figures)


def federation() -> ArrayData:
    """Two classes a client, as noise: what is learned does not matter here."""
    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (CLIENTS, SAMPLES, 3, 32, 32), np.uint8)
    pairs = [(x[client], 2 * client + np.arange(SAMPLES) % 2) for client in range(CLIENTS)]
    return from_clients(pairs, test=(x[0][:10], np.zeros(10, np.int64)))


def bare(x: Tensor, y: Tensor, clients: int = CLIENTS) -> None:
    """The passes of one episode of so many clients, with nothing around them."""
    net, x = Conv4((3, 32, 32), CLASSES).train(), x.to(memory_format=torch.channels_last)
    parameters = list(net.encoder.parameters())
    half = SAMPLES // 2

    def step(batch: Tensor, labels: Tensor) -> None:
        features = net.encoder(batch)
        torch.autograd.grad(F.cross_entropy(features[:, :2], labels), parameters)

    for _ in range(clients):
        for _ in range(ROUNDS):
            with torch.no_grad():
                net.encoder(x[:half])
            for at in range(0, half, BATCH):
                step(x[at : min(at + BATCH, half)], y[at : min(at + BATCH, half)])
        step(x[half:], y[half:])


def peak(repeats: int = 20, size: int = 1024) -> float:
    """What one thread gets out of a matrix product here, in GFLOP/s: the best of some."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - begun)
    return 2e-9 * size**3 / min(times)


def main() -> None:
    """One side, episode by episode."""
    torch.set_num_threads(1)
    side, count = sys.argv[1], int(sys.argv[2])
    turns = Episodes()
    if side == "bare":
        x, y = torch.randn(SAMPLES, 3, 32, 32), torch.arange(SAMPLES) % 2
        for number in range(1, count + 1):
            bare(x, y)
            turns.round({"round": number * (ROUNDS + 1), "accuracy": 0.0})
        return
    method = Timed(rounds=count * (ROUNDS + 1), cohort=CLIENTS, group_rounds=ROUNDS, batch_size=BATCH)
    fewer.run(method, federation(), model="conv4", progress=turns, **SIDES[side])


if __name__ == "__main__":
    main()
