"""Finds the runs under a directory and tracks their state. It reads files only if they have changed."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fewer.errors import FewerError
from fewer.report.style import DARK, LineStyle, assign_styles
from fewer.runs.reader import EVENTS, METRICS, SETTINGS, RunFollower, RunReader

MAX_DEPTH = 6
"""How many directory levels below the root are searched."""
ACTIVE_INTERVAL, FULL_INTERVAL = 0.4, 3.0
"""Seconds between two checks of active runs, and of all runs."""
PAUSE_FACTOR = 20
"""After a full check, pause at least this many times as long as it took."""
RECENT = 60.0
"""Seconds since its last change during which a run counts as active."""
CLOCK_TICK = 2.0
"""Seconds for which a changed directory is read again: it may change twice within one tick of the file clock."""
CACHE_SIZE = 64
"""Number of runs whose records stay in memory."""
STATES = ("running", "starting", "stopped", "crashed", "finished", "damaged")
_FILES = (SETTINGS, METRICS, EVENTS)

FileVersions = tuple[tuple[int, int, int] | None, ...]
"""Modification time, size and inode of each file; None if it does not exist."""


@dataclass
class RunEntry:
    """A run and its last known state."""

    id: str
    name: str
    reader: RunReader
    versions: FileVersions = ()
    row: dict[str, Any] = field(default_factory=dict)
    revision: int = 0
    """Number of the last change, counted over all runs."""

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.reader.path

    @property
    def state(self) -> str:
        """One of STATES."""
        return str(self.row["state"])


class Catalog:
    """The runs under a directory. Only runs found there can be requested."""

    def __init__(self, root: Path, start_time: Callable[[Path], float | None] = lambda path: None) -> None:
        self.root = root.resolve()
        self.runs: dict[str, RunEntry] = {}
        self.styles: dict[str, LineStyle] = {}
        """Line style of each method found so far."""
        self.revision = 0
        self.discovered = 0
        """Number of runs ever found; it grows even if as many others have disappeared."""
        self._start_time = start_time
        self._lock = threading.RLock()
        self._folders: dict[Path, tuple[int, bool, list[Path]]] = {}
        self._last_active, self._last_full = -FULL_INTERVAL, -FULL_INTERVAL
        self._followers: OrderedDict[str, RunFollower] = OrderedDict()

    def refresh(self, *, now: bool = False) -> None:
        """Checks for changes, unless the last check was a moment ago."""
        with self._lock:
            clock = time.monotonic()
            if now or clock - self._last_full >= FULL_INTERVAL:
                self._find_runs()
                for run in self.runs.values():
                    self._update(run)
                end = time.monotonic()
                pause = max(0.0, PAUSE_FACTOR * (end - clock) - FULL_INTERVAL)  # for a huge directory or a slow disk
                self._last_active, self._last_full = end, end + pause
            elif clock - self._last_active >= ACTIVE_INTERVAL:
                for run in self.runs.values():
                    if run.state in ("running", "starting") or time.time() - run.row["changed"] < RECENT:
                        self._update(run)
                self._last_active = time.monotonic()

    def refresh_run(self, run: RunEntry) -> None:
        """Checks one run now."""
        with self._lock:
            self._update(run)

    def entries(self) -> list[RunEntry]:
        """All runs."""
        with self._lock:
            return list(self.runs.values())

    def follow(self, run: RunEntry) -> RunFollower:
        """The records of a run, as far as they have been read."""
        with self._lock:
            follower = self._followers.setdefault(run.id, RunFollower(run.path))
            self._followers.move_to_end(run.id)
            while len(self._followers) > CACHE_SIZE:
                self._followers.popitem(last=False)
        return follower

    # --- finding runs -------------------------------------------------------------------------------------------

    def _find_runs(self) -> None:
        names = {path: path.relative_to(self.root).as_posix() for path in self._run_directories(self.root, MAX_DEPTH)}
        by_id = {_run_id(name): (path, name if name != "." else path.name) for path, name in names.items()}
        for missing in self.runs.keys() - by_id.keys():
            del self.runs[missing]
            self.revision += 1
        for id, (path, name) in by_id.items():
            if id not in self.runs:
                self.runs[id] = RunEntry(id, name, RunReader(path))
                self.discovered += 1

    def _run_directories(self, folder: Path, depth: int) -> Iterator[Path]:
        """Run directories in a folder, or the folder itself. Symbolic links are not followed."""
        try:
            changed = folder.stat().st_mtime_ns
            cached = self._folders.get(folder)
            if cached is None or cached[0] != changed:
                with os.scandir(folder) as scan:
                    entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in scan]
                subfolders = sorted(folder / name for name, is_folder in entries if is_folder and name[0] != ".")
                settled = changed if time.time() - changed / 1e9 > CLOCK_TICK else -1
                self._folders[folder] = cached = (settled, (SETTINGS, False) in entries, subfolders)
        except OSError:
            self._folders.pop(folder, None)
            return
        _, is_run, subfolders = cached
        if is_run:
            yield folder
        elif depth:
            for subfolder in subfolders:
                yield from self._run_directories(subfolder, depth - 1)

    # --- reading runs -------------------------------------------------------------------------------------------

    def _update(self, run: RunEntry) -> None:
        versions = tuple(_file_version(run.path / name) for name in _FILES)
        active = run.row.get("state") in ("running", "starting")
        start_time = self._start_time(run.path)
        if versions == run.versions and not active and start_time is None:
            return
        if versions[:1] != run.versions[:1]:
            run.reader = RunReader(run.path)
            self._followers.pop(run.id, None)
        row = self._read_row(run, versions, start_time)
        run.versions = versions
        if row != run.row:
            self.revision += 1
            run.row, run.revision = row, self.revision

    def _read_row(self, run: RunEntry, versions: FileVersions, start_time: float | None) -> dict[str, Any]:
        changed = max((version[0] for version in versions if version), default=0) / 1e9
        row: dict[str, Any] = {"id": run.id, "name": run.name, "changed": round(changed, 3)}
        try:
            row |= self._describe(run.reader)
        except (FewerError, KeyError, TypeError, AttributeError) as error:
            return {**row, "method": "?", "data": "?", "state": "damaged", "reason": str(error)}
        state, reason, last_event = run.reader.status()
        if state in ("stopped", "crashed") and start_time and last_event < start_time:
            state, reason = "starting", ""  # the process has not written an event yet
        return {**row, **run.reader.progress(), "state": state, "reason": reason}

    def _describe(self, run: RunReader) -> dict[str, Any]:
        """The part of a row that comes from the settings."""
        settings, data, method = run.settings, run.metadata["data"], run.method_name
        self.styles = assign_styles([method], self.styles)
        style = self.styles[method]
        return {
            "method": method,
            **style._asdict(),
            "dark": DARK.get(style.color, style.color),
            "data": str(data["name"]),
            "clients": data["clients"],
            "seed": settings["seed"],
            "runtime": settings["runtime"],
            "rounds": run.rounds,
            "metric": {"name": run.metric.name, "percent": run.metric.percent},
        }


def _file_version(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _run_id(name: str) -> str:
    """The id of a run in URLs; a hash, so that no path can be requested."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:12]
