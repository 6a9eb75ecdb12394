"""Reads a run directory without torch and without its lock."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

from fewer.errors import RunError

FORMAT = 2
PARTS = {"settings", "hash", "objects", "method", "data", "environment"}
"""Entries that settings.json must have."""
SETTINGS = "settings.json"
EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"
LEDGER = "ledger.csv"
LOCK = "lock"
RECORDS = (METRICS, LEDGER)
"""The files whose lengths a checkpoint stores."""


def read_metadata(path: Path) -> dict[str, Any]:
    """The content of settings.json; RunError if the directory is not a run or has another format."""
    try:
        metadata: dict[str, Any] = json.loads((path / "settings.json").read_text())
        version = metadata["format"]
        if version == FORMAT and (missing := PARTS - metadata.keys()):
            raise ValueError(f"'{min(missing)}' is missing")
    except FileNotFoundError:
        problem = "has no settings.json" if path.is_dir() else "does not exist"
        raise RunError(f"{path} is not a run directory: it {problem}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged: settings.json cannot be read ({error})") from error
    if version != FORMAT:
        raise RunError(f"{path} has format {version}; this version of Fewer reads format {FORMAT}")
    return metadata


def in_use(path: Path) -> bool:
    """True if a process is writing to this run."""
    try:
        with (path / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released at once; a process that wants it now retries
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def writer_pid(path: Path) -> int:
    """The id of the process that writes a run; RunError if it cannot be identified on this machine.

    The id in the lock file may be from another machine, or reused. So the process must have the lock file open.
    """
    if not in_use(path):
        raise RunError(f"{path} is not running")
    lock = path / LOCK
    try:
        pid = int(lock.read_text())
        files = list(Path(f"/proc/{pid}/fd").iterdir())
    except (OSError, ValueError):
        raise RunError(f"{path} is written by a process that is not on this machine: stop it there") from None
    if not any(_is_same_file(file, lock) for file in files):
        raise RunError(f"{path} is written by a process other than {pid}, the one in its lock file")
    return pid


def _is_same_file(file: Path, lock: Path) -> bool:
    try:
        return file.samefile(lock)
    except OSError:  # closed in the meantime
        return False
