"""What a model predicts: classes with their probabilities, sets of labels, or numbers."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from fewer.data import Samples
from fewer.data.schema import Schema
from fewer.learning.evaluate import EVAL_BATCH_SIZE, add_evaluations, measure_outputs
from fewer.models import Task
from fewer.runs.metric import PrimaryMetric
from fewer.runs.views import to_data_frame

MAX_COLUMNS = 100
"""Probabilities are listed for at most this many classes."""


@dataclass(frozen=True, repr=False)
class Predictions:
    """The outputs of a model for samples, in their order."""

    outputs: Tensor
    """Samples × outputs: logits of classes or labels, or numbers."""
    task: Task
    schema: Schema
    numbers: Sequence[int] = ()
    """The number of each sample in its file; empty if these are 0, 1, 2, …"""

    def __len__(self) -> int:
        return len(self.outputs)

    def __repr__(self) -> str:
        """Three lines: the number of samples, what is predicted, and how to get it."""
        if self.task.has_classes:
            kind, content = "classes", "classes, probabilities"
            counts = Counter(self.classes).most_common()
            confidence = float(self.probabilities.amax(1).mean())
            line = f"{_list_counts(counts)}; mean confidence {confidence:.2f}"
        elif self.task.kind == "multi-label":
            kind, content = "labels", "names, probabilities"
            line = _list_counts(list(zip(self.names, (self.outputs > 0).sum(0).tolist(), strict=True)))
        else:
            kind, content = "outputs", "outputs"
            line = f"{float(self.outputs.min()):.6g} to {float(self.outputs.max()):.6g}"
        title = f"Predictions: {len(self):,} samples, {self.outputs.shape[1]:,} {kind}"
        return f"{title}\n  {line}\n  see {content}, to_pandas(), to_csv()"

    @property
    def names(self) -> list[str]:
        """The name of each output: of its class or label, or its number."""
        names = self.schema.labels
        return [names[output] if output < len(names) else str(output) for output in range(self.outputs.shape[1])]

    @property
    def probabilities(self) -> Tensor:
        """The probability of each class or label (samples × outputs)."""
        return self.outputs.softmax(1) if self.task.has_classes else self.outputs.sigmoid()

    @property
    def classes(self) -> list[str]:
        """The name of the most probable class of each sample."""
        names = self.names
        return [names[label] for label in self.outputs.argmax(1).tolist()]

    @property
    def heads(self) -> list[str]:
        """Names of the values in a row. With more than 100 classes, their probabilities are left out."""
        if self.task.kind == "regression":
            return [f"value_{output}" for output in range(self.outputs.shape[1])]
        if self.task.kind == "multi-label":
            return ["labels"]
        listed = self.names if self.outputs.shape[1] <= MAX_COLUMNS else []
        return ["class", "confidence", *(f"p_{name}" for name in listed)]

    def rows(self) -> Iterator[list[Any]]:
        """Yields one row per sample: class, confidence and probabilities; its labels; or its numbers."""
        names = self.names
        if self.task.kind == "regression":
            yield from self.outputs.tolist()
        elif self.task.kind == "multi-label":
            for logits in self.outputs.tolist():
                yield [" ".join(name for name, logit in zip(names, logits, strict=True) if logit > 0)]
        else:
            listed = len(self.heads) - 2
            for name, probabilities in zip(self.classes, self.probabilities, strict=True):
                yield [name, float(probabilities.max()), *probabilities[:listed].tolist()]

    def to_pandas(self) -> Any:
        """The rows as a pandas DataFrame."""
        return to_data_frame([dict(zip(self.heads, row, strict=True)) for row in self.rows()])

    def to_csv(self) -> str:
        """The rows as CSV, with the number of each sample."""
        text = StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["sample", *self.heads])
        digits = ".6g" if self.task.kind == "regression" else ".6f"
        for number, row in zip(self.numbers or range(len(self)), self.rows(), strict=True):
            table.writerow([number, *(format(value, digits) if isinstance(value, float) else value for value in row)])
        return text.getvalue()

    def measure(self, targets: Tensor) -> str:
        """The metrics of the task on these targets, as text."""
        parts = (torch.split(part, EVAL_BATCH_SIZE) for part in (self.outputs, targets))
        evaluations = [measure_outputs(outputs, y, self.task) for outputs, y in zip(*parts, strict=True)]
        values = add_evaluations(evaluations).values()
        metrics = (PrimaryMetric(metric.name, percent=metric.percent) for metric in self.task.metrics)
        return ", ".join(f"{metric.name} {metric.format(values[metric.name])}" for metric in metrics)


def _list_counts(counts: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{name}: {count:,}" for name, count in counts[:5]) + (", …" if len(counts) > 5 else "")


def predict_samples(net: nn.Module, samples: Samples, task: Task, schema: Schema) -> Predictions:
    """The predictions of a net for samples."""
    with torch.no_grad():
        outputs = [net(x.to(task.device)).cpu() for x, _ in samples.chunks(EVAL_BATCH_SIZE)]
    return Predictions(torch.cat(outputs), task, schema)
