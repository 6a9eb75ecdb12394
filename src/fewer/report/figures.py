"""Figures of runs over seeds, from what metrics.jsonl has."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fewer.runs.statistics import half_width

MB = 1e6
Line = Mapping[str, Any]
History = Sequence[Line]
"""The figures of a run, one line a round, as metrics.jsonl has them."""
Histories = Mapping[str, Sequence[History]]
"""For each method the histories of its runs, one for each seed."""


class Interval(NamedTuple):
    """A mean, and half the width of its 95 % confidence interval (Student's t); None from a single value."""

    mean: float
    half: float | None


def interval(values: Sequence[float]) -> Interval:
    """The mean of the values, and how sure it is."""
    return Interval(statistics.fmean(values), half_width(values))


def percent(value: Interval | None) -> str:
    """In %, with how sure it is."""
    if value is None:
        return "–"
    return f"{100 * value.mean:.2f}" + ("" if value.half is None else f" ± {100 * value.half:.2f}")


class Point(NamedTuple):
    """One evaluated round of a method over its seeds."""

    round: int
    megabytes: float
    """Sent by then, up and down together, mean over seeds."""
    seconds: float
    """Gone by then, mean over seeds; 0 where that was not written down."""
    accuracy: Interval


def curve(histories: Sequence[History]) -> list[Point]:
    """A method's points: the rounds in which all its runs were evaluated."""
    runs = [{int(line["round"]): line for line in history if "accuracy" in line} for history in histories]
    points = []
    for number in sorted(set.intersection(*(set(run) for run in runs))) if runs else []:
        lines = [run[number] for run in runs]
        sent = statistics.fmean((line["up"] + line["down"]) / MB for line in lines)
        gone = statistics.fmean(line.get("seconds", 0.0) for line in lines)
        points.append(Point(number, sent, gone, interval([line["accuracy"] for line in lines])))
    return points


def by_client(histories: Sequence[History]) -> list[float]:
    """The last accuracies of all clients of all runs, from the worst to the best."""
    return sorted(value for history in histories if history for value in history[-1].get("clients", {}).values())
