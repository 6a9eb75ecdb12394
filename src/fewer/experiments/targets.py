"""What it costs to reach an accuracy: rounds, bytes and floating-point operations, from the figures of runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

History = Sequence[Mapping[str, Any]]
"""The figures of a run, one line a round, as metrics.jsonl has them."""


@dataclass(frozen=True)
class Reached:
    """When the mean over seeds first reached the target, and what it had cost by then; None where it never did."""

    target: float
    round: int | None = None
    mb: float | None = None
    """Sent by then, up and down together."""
    gflop: float | None = None
    """Done by clients by then, where that was counted."""


def best(histories: Sequence[History]) -> float:
    """The highest accuracy of all rounds, mean over seeds."""
    return max(accuracy for _, accuracy, _ in _means(histories))


def reach(histories: Sequence[History], target: float) -> Reached:
    """The first round in which the mean accuracy over seeds is the target or more."""
    for round, accuracy, lines in _means(histories):
        if accuracy >= target:
            mb = statistics.fmean((line["up"] + line["down"]) / 1e6 for line in lines)
            counted = [line["flops"] / 1e9 for line in lines if "flops" in line]
            return Reached(target, round, mb, statistics.fmean(counted) if counted else None)
    return Reached(target)


def _means(histories: Sequence[History]) -> list[tuple[int, float, list[Mapping[str, Any]]]]:
    """Round, mean accuracy and all lines of the rounds in which every run was evaluated."""
    runs = [{int(line["round"]): line for line in history if "accuracy" in line} for history in histories]
    rounds = sorted(set.intersection(*(set(run) for run in runs)))
    return [
        (number, statistics.fmean(run[number]["accuracy"] for run in runs), [run[number] for run in runs])
        for number in rounds
    ]
