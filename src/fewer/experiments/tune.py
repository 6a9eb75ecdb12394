"""Choosing a method's rates on held-out training data, with the same number of trials for every method."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fewer.errors import QuorumLost, RunError
from fewer.runs.engine import Progress, start
from fewer.runs.experiment import Experiment
from fewer.runs.result import Result
from fewer.runtime.store import write_durably

TRIALS = 8
SHARE = 0.2
"""Share of each client's training samples that trials are judged on; the test samples are never looked at."""

Point = dict[str, float]


@dataclass(frozen=True)
class Trial:
    """One try: settings, and the accuracy they reached on held-out data (None: training broke down)."""

    settings: Point
    accuracy: float | None


def pooled(result: Result) -> float:
    """Accuracy over all samples that were judged."""
    return result.accuracy


def by_client(result: Result) -> float:
    """The mean over clients of the accuracy of each one's own model on its own samples."""
    return statistics.fmean(result.scores["clients"].values())


def tune(
    experiment: Experiment,
    trials: int = TRIALS,
    notes: Path | None = None,
    progress: Progress | None = None,
    measure: Callable[[Result], float] = pooled,
) -> tuple[Experiment, list[Trial]]:
    """The job with the best settings found in exactly `trials` runs, and all that was tried.

    `notes` is a file that keeps finished trials, so that a search that was stopped goes on where it was.
    """
    search_space = experiment.method.search_space()
    if not search_space:
        return experiment, []
    method, data = experiment.method.tuning_split(experiment.data, SHARE, experiment.settings.seed)
    held = replace(experiment, method=method, data=data)
    task = f"{experiment.hash} {experiment.data.fingerprint()}"
    done = _noted(notes, task) if notes and notes.exists() else []
    known = {_key(trial.settings): trial.accuracy for trial in done}

    def judge(point: Point) -> float:
        if _key(point) not in known:
            try:
                accuracy: float | None = measure(start(_with(held, point), None, progress))
            except QuorumLost:  # every answer was refused: the weights are no longer finite
                accuracy = None
            known[_key(point)] = accuracy
            done.append(Trial(point, accuracy))
            if notes:
                write_durably(notes, json.dumps({"task": task, "trials": [asdict(one) for one in done]}).encode())
        found = known[_key(point)]
        return -math.inf if found is None else found

    first = {name: float(getattr(experiment.method, name)) for name in search_space}
    best = search(judge, search_space, first, trials, lambda point: _allowed(experiment, point))
    return _with(experiment, best), done


def _allowed(experiment: Experiment, point: Point) -> bool:
    """Whether the method takes these settings: a share, say, may go no further than 1."""
    try:
        type(experiment.method)(**{**experiment.method.model_dump(), **point})
    except ValidationError:
        return False
    return True


def _noted(notes: Path, task: str) -> list[Trial]:
    """The trials that were finished before, if they were of this task."""
    try:
        found = json.loads(notes.read_text())
        trials = [Trial(**trial) for trial in found["trials"]]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{notes} is damaged ({error}): remove it, and the search begins anew") from error
    if found["task"] != task:
        raise RunError(f"{notes} is of another task or other settings (another --out)")
    return trials


def search(
    judge: Callable[[Point], float],
    search_space: Mapping[str, Sequence[float]],
    first: Point,
    trials: int,
    allowed: Callable[[Point], bool] = lambda point: True,
) -> Point:
    """Coordinate search: each setting in turn over its grid, then ever finer round the best, for `trials` points."""
    scores: dict[tuple[tuple[str, float], ...], float] = {}

    def best() -> Point:
        return dict(max(scores.items(), key=lambda item: item[1])[0]) if scores else first

    for change in _changes(search_space, best, scores):
        point = {**best(), **change}
        if _key(point) not in scores and allowed(point):
            scores[_key(point)] = judge(point)
        if len(scores) >= trials:
            break
    return best()


def _changes(
    search_space: Mapping[str, Sequence[float]], best: Callable[[], Point], scores: Mapping[Any, float]
) -> Iterator[Point]:
    for name, grid in search_space.items():
        for value in grid:
            yield {name: value}
    for _ in range(len(search_space) * 20):  # far finer than any rate matters
        for name in search_space:
            center = best()[name]
            tried = sorted({dict(key)[name] for key in scores})
            place = tried.index(center)
            for near in (place - 1, place + 1):
                if 0 <= near < len(tried):  # between two that were tried, in the middle on a log scale
                    yield {name: _round(math.sqrt(center * tried[near]))}
                elif len(tried) > 1:  # the best is at the end: go further
                    other = tried[1] if near < 0 else tried[-2]
                    yield {name: _round(center * center / other)}


def _round(value: float) -> float:
    return float(f"{value:.3g}")


def _key(point: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(point.items()))


def _with(experiment: Experiment, point: Point) -> Experiment:
    """The same job with these settings of its method."""
    settings = experiment.settings.model_copy(
        update={"method_options": {**experiment.settings.method_options, **point}}
    )
    return replace(experiment, method=experiment.method.model_copy(update=point), settings=settings)
