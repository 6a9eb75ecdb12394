"""Evaluation: the loss and the metrics of a net, as sums that can be pooled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewer.learning.classes import add_counts, count_classes
from fewer.models import Task
from fewer.models.objective import ACCURACY, count_top_k, find_metric
from fewer.runtime.handlers import Unsent

EVAL_BATCH_SIZE = 1000
"""Samples in one forward pass of evaluation."""
MAX_LOSS = 1e30
"""The loss of a net whose scores are not finite. It counts as a very bad loss, not as a missing one."""


class Evaluation(NamedTuple):
    """Sums over the evaluated samples, from which all metrics follow. Those of disjoint samples can be added."""

    total: int
    """Number of samples."""
    loss: float
    """Summed loss."""
    metrics: str
    """Names of the metrics, separated by commas."""
    sums: Tensor
    """The sums of all metrics, one below the other (rows × outputs, float64)."""
    class_counts: Unsent = Unsent()
    """Counts by class (see `count_classes`). Empty without classes, and for the answers of remote clients."""

    def values(self) -> dict[str, float]:
        """The metrics by name, and the mean loss."""
        values, first = {}, 0
        for metric in map(find_metric, self.metrics.split(",")):
            values[metric.name] = float(metric.value(self.sums[first : first + metric.rows], self.total))
            first += metric.rows
        return {**values, "loss": self.loss / self.total}

    def is_possible(self) -> bool:
        """True if there is a sum for every metric, and every metric is in its range."""
        metrics = list(map(find_metric, self.metrics.split(",")))
        if len(self.sums) != sum(metric.rows for metric in metrics) or not self.sums.shape[1]:
            return False
        values = self.values() if self.total else {}
        return all(metric.low <= values.get(metric.name, metric.low) <= metric.high for metric in metrics)


def add_evaluations(evaluations: Sequence[Evaluation]) -> Evaluation:
    """The evaluation of all samples. The metrics must be the same."""
    return Evaluation(
        sum(evaluation.total for evaluation in evaluations),
        sum(evaluation.loss for evaluation in evaluations),
        evaluations[0].metrics,
        torch.stack([evaluation.sums for evaluation in evaluations]).sum(0),
        add_counts([evaluation.class_counts for evaluation in evaluations if evaluation.total]),
    )


@torch.no_grad()
def measure_net(net: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], task: Task, top_k: int = 1) -> Evaluation:
    """Evaluates the net by the metrics of the task. Accuracy counts labels among the `top_k` highest scores."""
    net.eval()
    return add_evaluations([empty_evaluation(task), *(measure_outputs(net(x), y, task, top_k) for x, y in batches)])


def empty_evaluation(task: Task) -> Evaluation:
    """The evaluation of no samples."""
    columns = 1 if task.has_classes else task.classes
    sums = torch.zeros(sum(metric.rows for metric in task.metrics), columns, dtype=torch.float64)
    return Evaluation(0, 0.0, ",".join(metric.name for metric in task.metrics), sums)


def measure_outputs(outputs: Tensor, y: Tensor, task: Task, top_k: int = 1) -> Evaluation:
    """Evaluates the outputs for a batch with targets `y`."""
    evaluation = empty_evaluation(task)
    blocks = torch.split(evaluation.sums, [metric.rows for metric in task.metrics])
    for metric, block in zip(task.metrics, blocks, strict=True):
        sums = torch.tensor([[count_top_k(outputs, y, top_k)]]) if metric is ACCURACY else metric.sums(outputs, y)
        block[:, : sums.shape[1]] = sums.double().nan_to_num(MAX_LOSS).clamp(-MAX_LOSS, MAX_LOSS)
    class_counts = count_classes(outputs, y, task.classes) if task.has_classes else Unsent()
    return evaluation._replace(total=len(y), loss=sum_loss(task, outputs, y), class_counts=class_counts)


def sum_loss(task: Task, outputs: Tensor, y: Tensor) -> float:
    """The loss summed over the samples of a batch."""
    if task.loss is F.cross_entropy:
        return sum_cross_entropy(outputs, y)
    return _limit_loss(task.loss(outputs, y) * len(y))


class Counts(NamedTuple):
    """Correct predictions, number of samples and summed loss. Counts of disjoint samples can be added."""

    correct: int
    total: int
    loss: float

    @property
    def accuracy(self) -> float:
        """The fraction of correct predictions."""
        return self.correct / self.total


@torch.no_grad()
def evaluate_net(net: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Counts:
    """Evaluates a classifier in evaluation mode."""
    net.eval()
    sums = Counts(0, 0, 0.0)
    for x, y in batches:
        counts = count_correct(net(x), y)
        sums = Counts(sums.correct + counts.correct, sums.total + counts.total, sums.loss + counts.loss)
    return sums


def count_correct(scores: Tensor, y: Tensor) -> Counts:
    """Evaluates scores (samples × classes)."""
    return Counts(count_top_k(scores, y), len(y), sum_cross_entropy(scores, y))


def sum_cross_entropy(scores: Tensor, y: Tensor) -> float:
    """The summed cross-entropy. A sample whose class has the score −∞ adds no loss; it would be infinite."""
    possible = scores.gather(1, y[:, None])[:, 0] != -torch.inf
    if not bool(possible.all()):
        scores, y = scores[possible], y[possible]
    return _limit_loss(F.cross_entropy(scores, y, reduction="sum"))


def _limit_loss(loss: Tensor) -> float:
    return min(float(loss.nan_to_num(nan=MAX_LOSS)), MAX_LOSS)
