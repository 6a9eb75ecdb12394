"""Errors that a user can fix. Each message is one line: what is wrong, where, and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class FewerError(Exception):
    """Base class. The message is written for the user."""


class SettingError(FewerError):
    """A setting is unknown, out of range, or conflicts with another."""


class DataError(FewerError):
    """Data is unreadable or unsuitable for training."""


class RunError(FewerError):
    """A run cannot start, continue or be read, for example because a file is missing, damaged or in use."""


class QuorumLost(FewerError):
    """Too few clients answered for the round to count."""

    def __init__(self, text: str, unable: bool = False) -> None:
        super().__init__(text)
        self.unable = unable
        """True if every missing client reported that it is unable to answer. Retrying is pointless."""


def unknown_name(kind: str, name: str, allowed: Iterable[str]) -> SettingError:
    """Returns an error for an unknown name, with the closest known name as a suggestion."""
    names = sorted(allowed)
    matches = get_close_matches(name, names, n=1)
    hint = f", did you mean '{matches[0]}'?" if matches else ""
    return SettingError(f"unknown {kind} '{name}'{hint} (allowed: {', '.join(names)})")
