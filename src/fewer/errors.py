"""Errors that a user can mend: one line that says what, where and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class FewerError(Exception):
    """A mistake in settings, data or a run directory; its text is meant for the user."""


class SettingError(FewerError):
    """A setting is unknown, out of range, or does not fit the others."""


class DataError(FewerError):
    """Data cannot be read, or is not what a method can learn from."""


class RunError(FewerError):
    """A run directory is foreign, damaged, in use, or cannot be written."""


class QuorumLost(FewerError):
    """Too few clients answered for the round to count."""

    def __init__(self, text: str, unable: bool = False) -> None:
        super().__init__(text)
        self.unable = unable
        """Whether all that are missing said that they cannot: asking again is no use."""


def unknown(kind: str, name: str, allowed: Iterable[str]) -> SettingError:
    """An error for a name that does not exist, with the nearest one that does."""
    names = sorted(allowed)
    near = get_close_matches(name, names, n=1)
    hint = f", did you mean '{near[0]}'?" if near else ""
    return SettingError(f"unknown {kind} '{name}'{hint} (allowed: {', '.join(names)})")
