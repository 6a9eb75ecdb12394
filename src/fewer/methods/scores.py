"""Scores: what an evaluation returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from fewer.errors import SettingError
from fewer.learning import Evaluation
from fewer.learning.evaluate import add_evaluations
from fewer.models.objective import RUN_RECORDS
from fewer.runtime import Absent, Clients
from fewer.wire import Number, Schema, Shaped

MAX_SAMPLES = 10**9
"""The largest number of samples that a client may report."""
COUNTS_SCHEMA: Schema = {"correct": Number(int, 0), "total": Number(int, 0, MAX_SAMPLES), "loss": float}
"""What a client returns that counts correct predictions."""
EVALUATION_SCHEMA: Schema = {
    "total": Number(int, 0, MAX_SAMPLES),
    "loss": float,
    "metrics": str,
    "sums": Shaped((None, None), torch.float64),
}
"""What a client returns that evaluates a model."""
Metrics = dict[str, Any]
"""Metrics by name: a line of metrics.jsonl."""
Unit = Literal["samples", "clients", "groups", "tasks"]


@dataclass(frozen=True)
class Scores:
    """The metrics of an evaluation, and what they are a mean over."""

    metrics: Metrics
    """The metrics of the task, `loss` and any further metrics; empty if nothing was evaluated."""
    unit: Unit = "samples"
    """What the metrics are the mean over."""
    values: Sequence[float] = ()
    """The primary metric of every group or task."""
    clients: Mapping[int, float] = field(default_factory=dict)
    """The primary metric by client."""

    def __post_init__(self) -> None:
        """Raises SettingError for a unit or a metric that cannot be recorded."""
        if self.unit not in get_args(Unit):
            raise SettingError(f"Scores: unit = {self.unit!r} (allowed: {', '.join(get_args(Unit))})")
        for name, value in self.metrics.items():
            if name in RUN_RECORDS:
                raise SettingError(f"Scores: metric '{name}' needs another name: the run records its own '{name}'")
            if not isinstance(value, int | float | str | list | tuple | Mapping | None):
                raise SettingError(f"Scores: metric '{name}' must be a number, got {type(value).__name__}")

    def as_dict(self) -> Metrics:
        """Returns all scores for metrics.jsonl."""
        parts: Metrics = {"unit": self.unit} if self.metrics else {}
        if len(self.values):
            parts["groups"] = [float(value) for value in self.values]
        if self.clients:
            parts["clients"] = {str(client): value for client, value in self.clients.items()}
        return {**self.metrics, **parts}


def pool_evaluations(evaluations: Sequence[Evaluation]) -> Scores:
    """Returns the metrics and the mean loss over all samples of all evaluations."""
    if not any(evaluation.total for evaluation in evaluations):
        raise SettingError("there are no test samples to evaluate on")
    return Scores(add_evaluations(evaluations).values())


def primary_metric(evaluations: Sequence[Evaluation]) -> str:
    """Returns the name of the primary metric."""
    return evaluations[0].metrics.partition(",")[0]


def primary_by_client(evaluations: Mapping[int, Evaluation]) -> dict[int, float]:
    """Returns the primary metric of each client that has samples."""
    return {
        client: evaluation.values()[primary_metric([evaluation])]
        for client, evaluation in evaluations.items()
        if evaluation.total
    }


def ask_evaluations(
    clients: Clients, cohort: Sequence[int], handler: Callable[..., Any], **fields: Any
) -> dict[int, Evaluation]:
    """Returns the evaluation of each client. Impossible ones, and those of other metrics than most, are refused."""
    answers = clients.ask(cohort, handler, returns=EVALUATION_SCHEMA, **fields)
    evaluations = {answer.client: Evaluation(**answer.fields) for answer in answers}
    forms = {client: (part.metrics, part.sums.shape) for client, part in evaluations.items() if part.is_possible()}
    common = Counter(forms.values()).most_common(1)
    valid = {client for client, form in forms.items() if form == common[0][0]}
    for client in evaluations.keys() - valid:
        reason = "impossible metrics, or not those of the other clients"
        clients.on_absent(Absent(client, "refused", reason), handler.__name__)
    return {client: evaluation for client, evaluation in evaluations.items() if client in valid}
