"""Trackers: where else the figures of a run go while it goes on. Nothing that a run does depends on them.

A tracker is anything in the entry-point group `fewer.trackers` that is called as `kind(about, history)` when a run
begins or goes on, with the figures of the rounds that are over, and then has `round(figures)` and `close(reason)`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fewer.errors import SettingError, unknown
from fewer.registry import TRACKERS

_LOG = logging.getLogger("fewer")

Figures = Mapping[str, Any]
"""Of one round, as a line of metrics.jsonl has them."""


@dataclass(frozen=True)
class About:
    """What a tracker is told of a run."""

    path: Path
    """Its directory."""
    method: str
    hash: str
    """Of all settings on which the numbers depend."""
    settings: Mapping[str, Any]
    """All settings, those of the method among them."""


class Tracker(Protocol):
    """Follows one run."""

    def round(self, figures: Figures) -> None:
        """A round has ended."""

    def close(self, reason: str) -> None:
        """The run has ended; why it stopped before its last round, if it did."""


Kind = Callable[[About, Sequence[Figures]], Tracker]


def names() -> list[str]:
    """All trackers that are known: plug-ins add theirs to the entry-point group `fewer.trackers`."""
    return list(TRACKERS)


def find(chosen: Sequence[str]) -> dict[str, Kind]:
    """The trackers of these names; SettingError where one is not known or what it needs is not installed."""
    found: dict[str, Kind] = {}
    for name in chosen:
        if name not in TRACKERS:
            raise unknown("tracker", name, names())
        try:
            found[name] = TRACKERS[name]
        except ImportError as error:
            raise SettingError(
                f"tracker '{name}' needs {error.name}, which is not installed (pip install 'fewer[track]')"
            ) from error
    return found


def kept(chosen: Sequence[str]) -> dict[str, Kind]:
    """The trackers that followed a run before. One that is no longer to be had is left behind: the run goes on."""
    found: dict[str, Kind] = {}
    for name in chosen:
        try:
            found |= find([name])
        except SettingError as error:
            _LOG.warning(f"tracker '{name}' follows no longer: {error}")
    return found


@contextmanager
def following(
    kinds: Mapping[str, Kind], about: About, history: Sequence[Figures], asked: bool = True
) -> Iterator[Callable[[Figures], None]]:
    """Whom to tell of each round. A tracker that fails is told of no more; the run goes on.

    Only where it was `asked` for by name just now, it is a mistake if it cannot even begin.
    """
    there: dict[str, Tracker] = {}
    for name, kind in kinds.items():
        try:
            there[name] = kind(about, history)
        except Exception as error:
            if asked:
                raise SettingError(f"tracker '{name}' cannot begin: {_reason(error)}") from error
            _LOG.warning(f"tracker '{name}' follows no longer: {_reason(error)}")

    def tell(what: Callable[[Tracker], None]) -> None:
        for name, tracker in list(there.items()):
            try:
                what(tracker)
            except Exception as error:
                del there[name]
                _LOG.warning(f"tracker '{name}' follows no longer: {_reason(error)}")

    reason = ""
    try:
        yield lambda figures: tell(lambda tracker: tracker.round(figures))
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        raise
    finally:
        tell(lambda tracker: tracker.close(reason))


def scalars(figures: Figures) -> dict[str, float]:
    """The plain numbers among the figures of a round, and those of named parts as `part/name`; not those by client."""
    found: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, int | float) and name != "round":
            found[name] = float(value)
        elif isinstance(value, Mapping) and not any(str(key).isdigit() for key in value):
            found |= {f"{name}/{key}": each for key, each in scalars(value).items()}
    return found


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
