"""Standardization of tables before the first round: mean 0 and standard deviation 1 in each column.

Each client sends the number of its training samples, and the sum and the sum of squares of each column. The server adds
them up. Mean and standard deviation go back to every client, and no row leaves one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fewer.data import Data
from fewer.data.schema import Column, Schema
from fewer.errors import SettingError
from fewer.methods.context import Client
from fewer.methods.scores import MAX_SAMPLES
from fewer.runtime import Clients, on_client
from fewer.wire import Number, Shaped, decode, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MIN_SAMPLES = 5
"""A client with fewer training samples sends zeros: few sums would reveal its samples."""
CONSTANT = 1e-14
"""A column is constant if its variance is below this fraction of its mean square. Double precision sees no less."""
SCALE = "column_scale"
"""The kind of the messages with mean and standard deviation."""


class SendsColumnSums:
    """The handler that every method inherits."""

    @on_client(exact=("sums", "squares"))
    def column_sums(self, client: Client) -> dict[str, Any]:
        """Counts the client's training samples, and sums up each column and its squares."""
        samples = replace(client.data.train, shift=0.0, scale=1.0)
        sums, squares = torch.zeros(2, *client.task.shape, dtype=torch.float64, device=client.task.device)
        count = len(samples) if len(samples) >= MIN_SAMPLES else 0
        for x, _ in samples.chunks() if count else ():
            sums += x.double().sum(0)
            squares += x.double().square().sum(0)
        return {"count": count, "sums": sums, "squares": squares}


def standardize(method: SendsColumnSums, clients: Clients, data: Data) -> Schema:
    """Asks all clients for the sums of their columns. Returns the schema with mean and 1 / standard deviation.

    Clients that do not answer have no part in the mean. Constant columns and one-hot inputs are not scaled.
    """
    vector = Shaped(data.shape, torch.float64)
    count_range = Number(int, 0, MAX_SAMPLES)
    everyone = range(len(clients))
    with clients.training_round(0):
        answers = clients.ask(
            everyone, method.column_sums, returns={"count": count_range, "sums": vector, "squares": vector}
        )
    count = sum(answer["count"] for answer in answers)
    if not count:
        raise SettingError(f"standardize: no client has {MIN_SAMPLES} or more training samples; pass fewer --clients")
    sums, squares = (torch.stack([answer[name] for answer in answers]).sum(0) for name in ("sums", "squares"))
    mean, mean_square = sums / count, squares / count
    variance = mean_square - mean.square()
    scaled = (variance > CONSTANT * mean_square) & ~_one_hot_inputs(data.columns, len(mean))
    std = variance.sqrt().where(scaled, 1.0)
    mean = mean.where(~_one_hot_inputs(data.columns, len(mean)), 0.0)
    message = encode(SCALE, {"shift": mean, "scale": 1 / std})
    for client in everyone:
        clients.ledger.add(0, client, "down", SCALE, len(message))
    _, received = decode(message)
    shift, scale = (tuple(received[name].tolist()) for name in ("shift", "scale"))
    return replace(data.schema, shift=shift, scale=scale)


def _one_hot_inputs(columns: Sequence[Column], inputs: int) -> Tensor:
    """True for each input that is a category of a column."""
    flags = [bool(column.categories) for column in columns for _ in column.categories or [column.name]]
    return torch.tensor(flags if len(flags) == inputs else [False] * inputs)
