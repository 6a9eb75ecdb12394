"""Errors that a user can fix. Each message is one line: what is wrong, where, and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class FewerError(Exception):
    """Base class. The message is written for the user."""

    resumable = False
    """True if a run that this error stopped may succeed when it resumes."""


class SettingError(FewerError):
    """A setting is unknown, out of range, or conflicts with another."""


class DataError(FewerError):
    """Data is unreadable or unsuitable for training."""


class RunError(FewerError):
    """A run cannot start, continue or be read, for example because a file is missing, damaged or in use."""


class RunInterrupted(RunError):
    """Something outside of a run stopped it, such as a full disk. Once that is fixed, the run can resume."""

    resumable = True


class QuorumLost(FewerError):
    """Too few clients answered for the round to count."""

    def __init__(self, text: str, unable: bool = False, resumable: bool = True) -> None:
        super().__init__(text)
        self.unable = unable
        """True if every missing client reported that it is unable to answer. Retrying is pointless."""
        self.resumable = resumable


SYNONYMS = {
    "learning_rate": "lr",
    "eta": "lr",
    "epochs": "local_steps",
    "clients_per_round": "cohort",
    "fraction_fit": "cohort",
}
"""Names that other frameworks use, and ours."""


def nearest_name(name: str, allowed: Iterable[str]) -> str | None:
    """Returns the allowed name that was probably meant, if there is one."""
    names = list(allowed)
    if (synonym := SYNONYMS.get(name)) in names:
        return synonym
    return next(iter(get_close_matches(name, names, n=1)), None)


def unknown_name(kind: str, name: str, allowed: Iterable[str]) -> SettingError:
    """Returns an error for an unknown name, with the nearest known name as a suggestion."""
    return SettingError(f"unknown {kind} '{name}'{_suggest(name, allowed)}")


def unknown_option(owner: str, name: str, allowed: Iterable[str]) -> SettingError:
    """Returns an error for an option that its owner does not have, with the nearest one as a suggestion."""
    return SettingError(f"{owner} has no option '{name}'{_suggest(name, allowed)}")


def _suggest(name: str, allowed: Iterable[str]) -> str:
    names = sorted(allowed)
    nearest = nearest_name(name, names)
    return (f", did you mean '{nearest}'?" if nearest else "") + f" (allowed: {', '.join(names)})"


COMPARISONS = {"greater than or equal to": ">=", "less than or equal to": "<=", "greater than": ">", "less than": "<"}
"""Pydantic's words, and the signs that replace them in error messages."""


def setting_error(error: ValidationError, prefix: str, known: list[str]) -> SettingError:
    """Returns the first problem as one line. Unknown names come before missing ones."""
    first = min(error.errors(), key=lambda problem: problem["type"] == "missing")
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return unknown_option(prefix.rstrip(": "), name, known) if prefix else unknown_name("setting", name, known)
    if first["type"] == "missing":
        return SettingError(f"{prefix}{name} is missing")
    message = first["msg"].replace("Input should", "must")
    for words, sign in COMPARISONS.items():
        message = message.replace(words, sign)
    if message == first["msg"]:  # the message of a method's own validator
        return SettingError(f"{prefix}{name} = {first['input']!r}: {message}")
    if first["type"] != "literal_error":
        message = message.partition(",")[0]
    return SettingError(f"{prefix}{name} {message}, got {first['input']!r}")
