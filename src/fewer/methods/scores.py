"""Scores: what an evaluation returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fewer.errors import SettingError
from fewer.learning import Counts
from fewer.wire import Number, Schema

MAX_SAMPLES = 10**9
"""The largest number of samples that a client may report."""
COUNTS_SCHEMA: Schema = {"correct": Number(int, 0), "total": Number(int, 0, MAX_SAMPLES), "loss": float}
"""What a client returns that evaluates a model."""
Metrics = dict[str, Any]
"""Metrics by name: a line of metrics.jsonl."""


@dataclass(frozen=True)
class Scores:
    """The metrics of an evaluation, and what they are a mean over."""

    metrics: Metrics
    """`accuracy`, `loss` and any further metrics; empty if nothing was evaluated."""
    unit: Literal["samples", "clients", "groups", "tasks"] = "samples"
    """What accuracy is the mean over."""
    values: Sequence[float] = ()
    """The accuracy of every group or task."""
    clients: Mapping[int, float] = field(default_factory=dict)
    """Accuracy by client."""

    def as_dict(self) -> Metrics:
        """Returns all scores for metrics.jsonl."""
        parts: Metrics = {"unit": self.unit} if self.metrics else {}
        if self.values:
            parts["groups"] = list(self.values)
        if self.clients:
            parts["clients"] = {str(client): accuracy for client, accuracy in self.clients.items()}
        return {**self.metrics, **parts}


def pool_counts(counts: Sequence[Counts]) -> Scores:
    """Returns accuracy and mean loss over all samples of all counts."""
    total = sum(count.total for count in counts)
    if not total:
        raise SettingError("there are no test samples to evaluate on")
    accuracy, loss = sum(count.correct for count in counts) / total, sum(count.loss for count in counts) / total
    return Scores({"accuracy": accuracy, "loss": loss})


def accuracy_by_client(counts: Mapping[int, Counts]) -> dict[int, float]:
    """Returns the accuracy of each client that has samples."""
    return {client: count.correct / count.total for client, count in counts.items() if count.total}
