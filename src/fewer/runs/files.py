"""What lies in a run directory, for whoever only looks: found without torch, and without the lock."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

from fewer.errors import RunError

FORMAT = 1
PARTS = {"settings", "hash", "own", "method", "data", "environment"}
"""What settings.json tells of a run."""
SETTINGS = "settings.json"
EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"
LEDGER = "ledger.csv"
LOCK = "lock"
FIGURES = (METRICS, LEDGER)


def describe(path: Path) -> dict[str, Any]:
    """What settings.json tells; RunError where the directory is no run, or of another version."""
    try:
        description: dict[str, Any] = json.loads((path / "settings.json").read_text())
        found = description["format"]
        if found == FORMAT and (missing := PARTS - description.keys()):
            raise ValueError(f"no '{min(missing)}' in it")
    except FileNotFoundError:
        what = "has no settings.json" if path.is_dir() else "does not exist"
        raise RunError(f"{path} is not a run of Fewer: it {what}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged: settings.json cannot be read ({error})") from error
    if found != FORMAT:
        raise RunError(f"{path} has format {found}; this version of Fewer reads format {FORMAT}")
    return description


def in_use(path: Path) -> bool:
    """Whether a process writes this run, or has just begun to."""
    try:
        with (path / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back at once; who wants it now asks again
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def writer(path: Path) -> int:
    """The process of this machine that writes a run; RunError where there is none that is surely it.

    The number in the lock may be of another machine, or of a process that is gone and whose number is another's now:
    so the process must have that very file open.
    """
    if not in_use(path):
        raise RunError(f"{path} is not going on")
    lock = path / LOCK
    try:
        number = int(lock.read_text())
        files = list(Path(f"/proc/{number}/fd").iterdir())
    except (OSError, ValueError):
        raise RunError(f"{path} is written by a process that cannot be found here: stop it where it runs") from None
    if not any(_same(file, lock) for file in files):
        raise RunError(f"{path} is written by another process than {number}, which its lock names")
    return number


def _same(file: Path, lock: Path) -> bool:
    try:
        return file.samefile(lock)
    except OSError:  # closed meanwhile
        return False
