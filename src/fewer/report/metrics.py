"""Metrics over seeds, computed from the lines of metrics.jsonl."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fewer.runs.metric import ACCURACY, PrimaryMetric
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
    gflop: float
    """GFLOP that clients spent on training by then; 0 if not counted."""
    value: Interval
    """The primary metric."""


def metric_curve(histories: Sequence[History], metric: PrimaryMetric = ACCURACY) -> list[Point]:
    """Returns a point for each round in which all runs of a method were evaluated."""
    runs = [{int(entry["round"]): entry for entry in history if metric.name in entry} for history in histories]
    points = []
    for number in sorted(set.intersection(*(set(run) for run in runs))) if runs else []:
        entries = [run[number] for run in runs]
        megabytes = statistics.fmean((entry["up"] + entry["down"]) / MB for entry in entries)
        seconds = statistics.fmean(entry.get("seconds", 0.0) for entry in entries)
        flops = [entry["flops"] for entry in entries if "flops" in entry] or [0]
        value = interval([entry[metric.name] for entry in entries])
        points.append(Point(number, megabytes, seconds, statistics.fmean(flops) / 1e9, value))
    return points


def client_values(histories: Sequence[History], metric: PrimaryMetric = ACCURACY) -> list[float]:
    """Last primary metric of all clients of all runs, from worst to best."""
    values = [value for history in histories if history for value in history[-1].get("clients", {}).values()]
    return sorted(values, key=metric.rank)
