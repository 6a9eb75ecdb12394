"""Scores: what an evaluation returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch

from fewer.errors import SettingError
from fewer.learning import Evaluation
from fewer.learning.classes import count_majority, summarize_classes, tabulate_classes
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
    client_metrics: Mapping[int, Metrics] = field(default_factory=dict)
    """All metrics and the number of samples by client."""
    classes: Metrics = field(default_factory=dict)
    """Figures by class; see `tabulate_classes`."""

    def __post_init__(self) -> None:
        """Raises SettingError for a unit or a metric that cannot be recorded."""
        if self.unit not in get_args(Unit):
            raise SettingError(f"Scores: unit = {self.unit!r} (allowed: {', '.join(get_args(Unit))})")
        for name, value in self.metrics.items():
            if name in RUN_RECORDS:
                raise SettingError(f"Scores: metric '{name}' needs another name: the run records its own '{name}'")
            if not isinstance(value, int | float | str | list | tuple | Mapping | None):
                raise SettingError(f"Scores: metric '{name}' must be a number, got {type(value).__name__}")

    def as_dict(self, is_last: bool = True) -> Metrics:
        """Returns all scores for metrics.jsonl. Only the last evaluation of a run has figures by class."""
        parts: Metrics = {"unit": self.unit} if self.metrics else {}
        if len(self.values):
            parts["groups"] = [float(value) for value in self.values]
        if self.clients:
            parts["clients"] = {str(client): value for client, value in self.clients.items()}
        if self.client_metrics:
            parts["client_metrics"] = {str(client): values for client, values in self.client_metrics.items()}
        if self.classes and is_last:
            parts["classes"] = self.classes
        return {**self.metrics, **parts}


def pool_evaluations(evaluations: Sequence[Evaluation], top_k: int = 1) -> Scores:
    """Returns the metrics and the mean loss over all samples of all evaluations.

    The majority baseline predicts the most frequent class, or the `top_k` most frequent, of each evaluation.
    """
    if not any(evaluation.total for evaluation in evaluations):
        raise SettingError("there are no test samples to evaluate on")
    pooled = add_evaluations(evaluations)
    metrics: Metrics = pooled.values()
    if pooled.class_counts.tensors:
        correct = sum(count_majority(part.class_counts, top_k) for part in evaluations if part.total)
        metrics |= summarize_classes(pooled.class_counts) | {"majority_baseline": correct / pooled.total}
    return Scores(metrics, classes=tabulate_classes(pooled.class_counts))


def score_clients(scores: Scores, evaluations: Mapping[int, Evaluation], top_k: int = 1) -> Scores:
    """Adds the metrics of each client that has samples, and their number."""
    by_client: dict[int, Metrics] = {}
    for client, evaluation in evaluations.items():
        if evaluation.total:
            by_client[client] = {"samples": evaluation.total, **evaluation.values()}
            if evaluation.class_counts.tensors:
                by_client[client]["majority_baseline"] = (
                    count_majority(evaluation.class_counts, top_k) / evaluation.total
                )
    name = primary_metric(list(evaluations.values()))
    return replace(scores, clients={client: by_client[client][name] for client in by_client}, client_metrics=by_client)


def primary_metric(evaluations: Sequence[Evaluation]) -> str:
    """Returns the name of the primary metric."""
    return evaluations[0].metrics.partition(",")[0]


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
