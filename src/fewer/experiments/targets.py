"""The cost of reaching a target accuracy, read from the metrics of runs: rounds, bytes and FLOPs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


def best_accuracy(histories: Sequence[History]) -> float:
    """Returns the highest mean accuracy over seeds of all rounds."""
    return max(accuracy for _, accuracy, _ in _mean_accuracies(histories))


def cost_to_reach(histories: Sequence[History], target: float) -> TargetCost:
    """Returns the cost up to the first round whose mean accuracy over seeds is at least `target`."""
    for round, accuracy, entries in _mean_accuracies(histories):
        if accuracy >= target:
            mb = statistics.fmean((entry["up"] + entry["down"]) / 1e6 for entry in entries)
            gflops = [entry["flops"] / 1e9 for entry in entries if "flops" in entry]
            return TargetCost(target, round, mb, statistics.fmean(gflops) if gflops else None)
    return TargetCost(target)


def _mean_accuracies(histories: Sequence[History]) -> list[tuple[int, float, list[Mapping[str, Any]]]]:
    """Returns round, mean accuracy and all entries for each round in which every run was evaluated."""
    runs = [{int(entry["round"]): entry for entry in history if "accuracy" in entry} for history in histories]
    rounds = sorted(set.intersection(*(set(run) for run in runs)))
    return [
        (number, statistics.fmean(run[number]["accuracy"] for run in runs), [run[number] for run in runs])
        for number in rounds
    ]
