"""What the last evaluation of a run measured by class and by client, as plain rows. It needs no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fewer.runs.metric import PrimaryMetric

Metrics = Mapping[str, Any]
"""The metrics of one round: a line of metrics.jsonl."""
LABELS = {"majority_baseline": "majority baseline", "macro_f1": "macro F1", "ece": "ECE"}
"""Metrics next to the accuracy of a task with classes, and how people read them."""
CLASS_METRICS = tuple(LABELS)
PERCENT = (*CLASS_METRICS, "f1", "exact-match")
"""Metrics other than the primary one that people read in percent."""


def class_rows(metrics: Metrics) -> list[dict[str, Any]]:
    """Returns name, support, recall, precision and F1 of each class; empty if they were not recorded."""
    classes = metrics.get("classes", {})
    columns = zip(*(classes.get(name, ()) for name in ("names", "support", "recall", "precision", "f1")), strict=True)
    return [dict(zip(("class", "support", "recall", "precision", "f1"), row, strict=True)) for row in columns]


def client_rows(metrics: Metrics) -> list[dict[str, Any]]:
    """Returns test samples and metrics of each client; empty if they were not recorded."""
    return [{"client": int(client), **values} for client, values in metrics.get("client_metrics", {}).items()]


def describe_baseline(lines: Sequence[Metrics], metric: PrimaryMetric) -> str:
    """Says that the accuracy is at or below the majority baseline; empty if it is above, or if there is no baseline.

    `lines` are the last evaluations of one method, one for each seed.
    """
    if metric.name != "accuracy" or not all({"accuracy", "majority_baseline"} <= line.keys() for line in lines):
        return ""
    value, baseline = (statistics.fmean(line[name] for line in lines) for name in ("accuracy", "majority_baseline"))
    if value > baseline:
        return ""
    digits = next((d for d in (1, 2, 3) if f"{value:.{d}%}" != f"{baseline:.{d}%}"), 1)
    ours, theirs = (f"{100 * number:.{digits}f} %" for number in (value, baseline))
    predicted = {_majority_class(line) for line in lines}
    choice = predicted.pop() if len(predicted) == 1 else "the most frequent class"
    if value == baseline:
        return f"{ours} is no better than the majority baseline: always predicting {choice} scores the same."
    return f"{ours} is below the majority baseline: always predicting {choice} scores {theirs}."


def _majority_class(line: Metrics) -> str:
    """What the baseline predicts: one class, or each client's own most frequent one."""
    classes = line.get("classes")
    if not classes:
        return "the most frequent class"
    support = classes["support"]
    largest = max(support)
    if largest / sum(support) != line["majority_baseline"]:
        return "each client's most frequent class"
    return repr(classes["names"][support.index(largest)])
