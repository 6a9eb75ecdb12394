"""Fewer's FedAvg with the harness's cohorts, batches, model and data; --procs 2 uses a pool of 2 workers.

Fewer keeps images as bytes, as they are on disk, and normalizes each batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import common as C  # type: ignore[import-not-found]
import numpy as np

import fewer

if TYPE_CHECKING:
    from torch import Tensor


MEAN, STD = 0.1307, 0.3081
"""The harness's normalization."""


class HarnessFedAvg(fewer.FedAvg):
    """FedAvg with the harness's cohorts and batches."""

    name: ClassVar[str] = "drawn"

    def sample_cohort(self, clients: fewer.Clients) -> list[int]:
        return list(C.cohort(clients.round - 1))

    def batch_indices(self, client: fewer.Client) -> Tensor:
        indices: Tensor = C.batches(client.round - 1, client.id, len(client.train))
        return indices

    def count_on_clients(self, *arguments: Any, **options: Any) -> dict[int, Any]:
        """Counts nothing: the workload evaluates only the global model."""
        return {}


class Clock(fewer.Callback):
    def __init__(self, log: Any) -> None:
        self.log = log

    def on_run_start(self, run: fewer.Run) -> None:
        self.log.start()

    def on_round_end(self, run: fewer.Run, metrics: Mapping[str, Any]) -> None:
        self.log.round(metrics["accuracy"])


def load_data(directory: str | None) -> fewer.data.Data:
    """Loads the harness's samples and converts its normalized images back to bytes."""
    x, y, test_x, test_y = C.load(directory)
    client_ids = np.empty(len(y), np.int64)
    for number, rows in enumerate(C.split(y)):
        client_ids[rows] = number
    for images in (x, test_x):
        images *= 255 * STD
        images += 255 * MEAN
    x, test_x = (np.rint(images, out=images).astype(np.uint8) for images in (x, test_x))
    return fewer.data.from_arrays(x, y, test=(test_x, test_y), client_ids=client_ids, normalization=(MEAN, STD))


def main() -> None:
    args, log = C.args(), C.Log()
    data = load_data(args.data)
    method = HarnessFedAvg(rounds=args.rounds, cohort=C.COHORT, lr=C.LR, local_steps=C.STEPS, batch_size=C.BATCH)
    runtime = "pool" if args.procs > 1 else "inline"
    fewer.run(method, data, model=C.net(), runtime=runtime, workers=args.procs, callbacks=[Clock(log)])
    log.done()


if __name__ == "__main__":
    main()
