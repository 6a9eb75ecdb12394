"""Trackers send the metrics of a run elsewhere, such as to TensorBoard. They do not affect results.

A tracker is a subclass of `Tracker`, a callback. `track=["NAME"]` makes one for each run. Other packages add trackers
through the entry-point group `fewer.trackers`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fewer.errors import SettingError, unknown_name
from fewer.registry import TRACKERS
from fewer.runs.callbacks import Tracker

_LOG = logging.getLogger("fewer")


def find(requested: Sequence[str]) -> list[Tracker]:
    """Makes the trackers with these names; SettingError if one is unknown or needs a missing package."""
    trackers: list[Tracker] = []
    for name in requested:
        if name not in TRACKERS:
            raise unknown_name("tracker", name, list(TRACKERS))
        try:
            tracker_class = TRACKERS[name]
        except ImportError as error:
            advice = "pip install 'fewer[track]'"
            raise SettingError(f"tracker '{name}' needs {error.name}, which is not installed ({advice})") from error
        if not (isinstance(tracker_class, type) and issubclass(tracker_class, Tracker)):
            raise SettingError(f"tracker '{name}' is not a subclass of fewer.runs.trackers.Tracker")
        trackers.append(tracker_class())
        trackers[-1].name = name
    return trackers


def find_installed(recorded: Sequence[str]) -> list[Tracker]:
    """Makes the trackers that a run used before. A missing one is skipped with a warning."""
    trackers: list[Tracker] = []
    for name in recorded:
        try:
            trackers += find([name])
            trackers[-1].required = False
        except SettingError as error:
            _LOG.warning(f"tracker '{name}' is no longer used: {error}")
    return trackers
