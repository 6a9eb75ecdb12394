"""The workload through Fewer's public API, and a population of any size, each in a separate process.

`python -m benchmarks.federated work ROUNDS SETTINGS [DIR]` or `… population ROUNDS SETTINGS COUNT METHOD`, with the
settings of the run as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

import fewer
from benchmarks import work
from fewer.data import ArrayData, ClientData, Data, Samples
from fewer.methods import find


class WorkloadFedAvg(fewer.FedAvg):
    """FedAvg with the cohorts and batches of `work`."""

    name: ClassVar[str] = "drawn"

    def sample_cohort(self, clients: fewer.Clients) -> list[int]:
        return work.sample_cohort(clients.round)

    def batch_indices(self, client: fewer.Client) -> Tensor:
        return work.sample_batches(client.round, client.id, len(client.train))


def load_workload(directory: str | None = None) -> ArrayData:
    """Loads the arrays of `work` as Fewer data."""
    x, y, test_x, test_y, client_ids = work.load_arrays(directory)
    normalization = (work.MEAN, work.STD)
    return fewer.data.from_arrays(
        x, y, test=(test_x, test_y), client_ids=client_ids, normalization=normalization, name="work"
    )


class Population(Data):
    """Any number of clients. A client's samples are generated from its id on request."""

    name = "population"
    shape = (1, 28, 28)
    classes = 10

    def __init__(self, count: int) -> None:
        self.count = count
        self.test = self.make_samples(count)

    def make_samples(self, number: int) -> Samples:
        draw = np.random.default_rng(number)
        x = draw.standard_normal((100, *self.shape), np.float32)
        return Samples(torch.from_numpy(x), torch.from_numpy(draw.integers(0, self.classes, 100)))

    def __len__(self) -> int:
        return self.count

    def size(self, number: int) -> int:
        return 100

    def client(self, number: int) -> ClientData:
        samples = self.make_samples(number)
        return ClientData(samples, samples, self.test)

    def fingerprint(self) -> str:
        return str(self.count)


class PrintRounds(fewer.Callback):
    """Prints each round."""

    def on_run_start(self, run: fewer.Run) -> None:
        self.printer = work.RoundPrinter()

    def on_round_end(self, run: fewer.Run, metrics: Mapping[str, Any]) -> None:
        self.printer.print_round(metrics)


def main() -> None:
    """Runs the workload or the population and prints each round."""
    callbacks = [PrintRounds()]
    task, rounds, text, *rest = sys.argv[1:]
    settings: dict[str, Any] = json.loads(text)
    if task == "work":
        method = WorkloadFedAvg(
            rounds=int(rounds), cohort=work.COHORT, lr=work.LR, local_steps=work.LOCAL_STEPS, batch_size=work.BATCH_SIZE
        )
        fewer.run(method, load_workload(*rest), model=work.build_net(), callbacks=callbacks, **settings)
    else:
        small = find(rest[1])(rounds=int(rounds), cohort=work.COHORT, local_steps=5)  # type: ignore[call-arg]
        fewer.run(small, Population(int(rest[0])), evaluate_every=int(rounds), callbacks=callbacks, **settings)


if __name__ == "__main__":
    main()
