"""The cost of reaching a target, such as an accuracy, read from the metrics of runs: rounds, bytes and FLOPs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fewer.runs.metric import ACCURACY, PrimaryMetric

History = Sequence[Mapping[str, Any]]
"""The metrics of a run, one entry per round, as in metrics.jsonl."""


@dataclass(frozen=True)
class TargetCost:
    """When the mean over seeds first reached the target, and the cost by then; None if it never did."""

    target: float
    round: int | None = None
    mb: float | None = None
    """Megabytes sent by then, up and down together."""
    gflop: float | None = None
    """GFLOP spent by clients by then, if they were counted."""


def best_value(histories: Sequence[History], metric: PrimaryMetric = ACCURACY) -> float:
    """Returns the best mean over seeds of all rounds."""
    return max((value for _, value, _ in _mean_values(histories, metric)), key=metric.rank)


def cost_to_reach(histories: Sequence[History], target: float, metric: PrimaryMetric = ACCURACY) -> TargetCost:
    """Returns the cost up to the first round whose mean over seeds is at least as good as `target`."""
    for round, value, entries in _mean_values(histories, metric):
        if metric.rank(value) >= metric.rank(target):
            mb = statistics.fmean((entry["up"] + entry["down"]) / 1e6 for entry in entries)
            gflops = [entry["flops"] / 1e9 for entry in entries if "flops" in entry]
            return TargetCost(target, round, mb, statistics.fmean(gflops) if gflops else None)
    return TargetCost(target)


def _mean_values(
    histories: Sequence[History], metric: PrimaryMetric
) -> list[tuple[int, float, list[Mapping[str, Any]]]]:
    """Returns round, mean and all entries for each round in which every run was evaluated."""
    runs = [{int(entry["round"]): entry for entry in history if metric.name in entry} for history in histories]
    rounds = sorted(set.intersection(*(set(run) for run in runs)))
    return [
        (number, statistics.fmean(run[number][metric.name] for run in runs), [run[number] for run in runs])
        for number in rounds
    ]
