"""Metrics over seeds, computed from the lines of metrics.jsonl."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fewer.statistics import Interval, interval

MB = 1e6
History = Sequence[Mapping[str, Any]]
"""The metrics of a run, one entry per round, as in metrics.jsonl."""
Histories = Mapping[str, Sequence[History]]
"""For each method, the histories of its runs, one per seed."""


class Point(NamedTuple):
    """One evaluated round of a method, over its seeds."""

    round: int
    megabytes: float
    """Megabytes sent by then, up and down together, mean over seeds."""
    seconds: float
    """Seconds by then, mean over seeds; 0 if not recorded."""
    accuracy: Interval


def accuracy_curve(histories: Sequence[History]) -> list[Point]:
    """Returns a point for each round in which all runs of a method were evaluated."""
    runs = [{int(entry["round"]): entry for entry in history if "accuracy" in entry} for history in histories]
    points = []
    for number in sorted(set.intersection(*(set(run) for run in runs))) if runs else []:
        entries = [run[number] for run in runs]
        megabytes = statistics.fmean((entry["up"] + entry["down"]) / MB for entry in entries)
        seconds = statistics.fmean(entry.get("seconds", 0.0) for entry in entries)
        points.append(Point(number, megabytes, seconds, interval([entry["accuracy"] for entry in entries])))
    return points


def client_accuracies(histories: Sequence[History]) -> list[float]:
    """Last accuracies of all clients of all runs, in ascending order."""
    return sorted(value for history in histories if history for value in history[-1].get("clients", {}).values())
