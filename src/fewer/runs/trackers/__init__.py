"""Trackers send the metrics of a run elsewhere, such as to TensorBoard. They do not affect results.

A tracker class is called as `Tracker(run_info, history)` when a run starts or resumes, with the metrics of the finished
rounds. The engine then calls `round(metrics)` after each round, and `close(reason)` at the end. Other packages add
trackers through the entry-point group `fewer.trackers`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fewer.errors import SettingError, unknown_name
from fewer.registry import TRACKERS

_LOG = logging.getLogger("fewer")

Metrics = Mapping[str, Any]
"""The metrics of one round: a line of metrics.jsonl."""


@dataclass(frozen=True)
class RunInfo:
    """What a tracker knows about a run."""

    path: Path
    """The run directory."""
    method: str
    hash: str
    """The hash of all settings that affect results."""
    settings: Mapping[str, Any]
    """All settings, including the method's options."""


class Tracker(Protocol):
    """Follows one run."""

    def round(self, metrics: Metrics) -> None:
        """Called after each round."""

    def close(self, reason: str) -> None:
        """Called at the end; `reason` says why a run stopped early, and is empty otherwise."""


TrackerClass = Callable[[RunInfo, Sequence[Metrics]], Tracker]


def names() -> list[str]:
    """All registered trackers."""
    return list(TRACKERS)


def find(requested: Sequence[str]) -> dict[str, TrackerClass]:
    """The tracker classes with these names; SettingError if one is unknown or needs a missing package."""
    classes: dict[str, TrackerClass] = {}
    for name in requested:
        if name not in TRACKERS:
            raise unknown_name("tracker", name, names())
        try:
            classes[name] = TRACKERS[name]
        except ImportError as error:
            raise SettingError(
                f"tracker '{name}' needs {error.name}, which is not installed (pip install 'fewer[track]')"
            ) from error
    return classes


def find_installed(recorded: Sequence[str]) -> dict[str, TrackerClass]:
    """The tracker classes that a run used before. A missing one is skipped with a warning."""
    classes: dict[str, TrackerClass] = {}
    for name in recorded:
        try:
            classes |= find([name])
        except SettingError as error:
            _LOG.warning(f"tracker '{name}' is no longer used: {error}")
    return classes


@contextmanager
def open_trackers(
    classes: Mapping[str, TrackerClass], info: RunInfo, history: Sequence[Metrics], requested: bool = True
) -> Iterator[Callable[[Metrics], None]]:
    """Starts trackers and yields a function to call with the metrics of each round.

    A tracker that fails is dropped with a warning, and the run continues. If the user `requested` the trackers just
    now, one that cannot start is an error.
    """
    active: dict[str, Tracker] = {}
    for name, tracker_class in classes.items():
        try:
            active[name] = tracker_class(info, history)
        except Exception as error:
            if requested:
                raise SettingError(f"tracker '{name}' cannot start: {_describe_error(error)}") from error
            _LOG.warning(f"tracker '{name}' is no longer used: {_describe_error(error)}")

    def call_all(action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(active.items()):
            try:
                action(tracker)
            except Exception as error:
                del active[name]
                _LOG.warning(f"tracker '{name}' is no longer used: {_describe_error(error)}")

    reason = ""
    try:
        yield lambda metrics: call_all(lambda tracker: tracker.round(metrics))
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        raise
    finally:
        call_all(lambda tracker: tracker.close(reason))


def scalars(metrics: Metrics) -> dict[str, float]:
    """Returns the metrics that are numbers, nested ones as `group/name`, without per-client metrics."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, int | float) and name != "round":
            numbers[name] = float(value)
        elif isinstance(value, Mapping) and not any(str(key).isdigit() for key in value):
            numbers |= {f"{name}/{key}": number for key, number in scalars(value).items()}
    return numbers


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
