"""Finds the runs under a directory and tracks their state. It reads files only if they have changed."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fewer.dash.records import Curve, EventTally, parse_line, read_last_lines
from fewer.errors import FewerError
from fewer.report.style import DARK, LineStyle, assign_styles
from fewer.runs.files import EVENTS, METRICS, SETTINGS, in_use, read_metadata

T = TypeVar("T")

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
"""Number of runs whose curve and tally stay in memory."""
STATES = ("running", "starting", "stopped", "crashed", "finished", "damaged")
_FILES = (SETTINGS, METRICS, EVENTS)

FileVersions = tuple[tuple[int, int, int] | None, ...]
"""Modification time, size and inode of each file; None if it does not exist."""


@dataclass
class RunEntry:
    """A run and its last known state."""

    id: str
    name: str
    path: Path
    versions: FileVersions = ()
    row: dict[str, Any] = field(default_factory=dict)
    revision: int = 0
    """Number of the last change, counted over all runs."""
    metadata: Mapping[str, Any] = field(default_factory=dict)

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
        self._curves: OrderedDict[str, Curve] = OrderedDict()
        self._tallies: OrderedDict[str, EventTally] = OrderedDict()

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

    def counts(self) -> Counter[str]:
        """Number of runs by state."""
        return Counter(run.state for run in self.entries())

    def curve(self, run: RunEntry) -> list[dict[str, Any]]:
        """Metrics of a run by round."""
        with self._lock:
            curve = _get_cached(self._curves, run.id, lambda: Curve.open(run.path))
        return curve.points()

    def tally(self, run: RunEntry) -> dict[str, Any]:
        """Totals of a run's faults and messages, as far as they have been read."""
        with self._lock:
            tally = _get_cached(self._tallies, run.id, lambda: EventTally.open(run.path))
        return tally.update()

    # --- finding runs -------------------------------------------------------------------------------------------

    def _find_runs(self) -> None:
        names = {path: path.relative_to(self.root).as_posix() for path in self._run_directories(self.root, MAX_DEPTH)}
        by_id = {_run_id(name): (path, name if name != "." else path.name) for path, name in names.items()}
        for missing in self.runs.keys() - by_id.keys():
            del self.runs[missing]
            self.revision += 1
        for id, (path, name) in by_id.items():
            if id not in self.runs:
                self.runs[id] = RunEntry(id, name, path)
                self.discovered += 1

    def _run_directories(self, folder: Path, depth: int) -> Iterator[Path]:
        """Run directories in a folder, or the folder itself. Symbolic links are not followed."""
        try:
            changed = folder.stat().st_mtime_ns
            cached = self._folders.get(folder)
            if cached is None or cached[0] != changed:
                with os.scandir(folder) as scan:
                    entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in scan]
                is_run = (SETTINGS, False) in entries
                subfolders = (
                    []
                    if is_run
                    else sorted(folder / name for name, is_folder in entries if is_folder and name[0] != ".")
                )
                cached = (changed if time.time() - changed / 1e9 > CLOCK_TICK else -1, is_run, subfolders)
                self._folders[folder] = cached
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
            self._curves.pop(run.id, None)
            self._tallies.pop(run.id, None)
        row = self._read_row(run, versions, start_time)
        run.versions = versions
        if row != run.row:
            self.revision += 1
            run.row, run.revision = row, self.revision

    def _read_row(self, run: RunEntry, versions: FileVersions, start_time: float | None) -> dict[str, Any]:
        changed = max((version[0] for version in versions if version), default=0) / 1e9
        row: dict[str, Any] = {"id": run.id, "name": run.name, "changed": round(changed, 3)}
        try:
            if not run.metadata or versions[:1] != run.versions[:1]:
                run.metadata = read_metadata(run.path)
            row |= self._describe(run.metadata, _read_method_name(run.path))
        except (FewerError, KeyError, TypeError, AttributeError) as error:
            return {**row, "method": "?", "data": "?", "state": "damaged", "reason": str(error)}
        row |= _read_progress(run.path)
        lines = read_last_lines(run.path / EVENTS, 5).lines
        last = next((event for line in lines if (event := parse_line(line))), {})
        if in_use(run.path):
            state = "running"
        elif last.get("event") == "finish" or (last.get("event") == "resume" and last.get("round") == row["rounds"]):
            state = "finished"
        elif start_time and last.get("time", 0.0) < start_time:  # the process has not written an event yet
            state = "starting"
        else:
            state = "stopped" if last.get("event") == "stop" else "crashed"
        return {**row, "state": state, "reason": str(last.get("reason", "")) if state == "stopped" else ""}

    def _describe(self, metadata: Mapping[str, Any], method_name: str) -> dict[str, Any]:
        """The part of a row that comes from the settings."""
        settings, data = metadata["settings"], metadata["data"]
        method = method_name or str(settings["method"]).rpartition(":")[2]
        self.styles = assign_styles([method], self.styles)
        color, marker, dash = self.styles[method]
        return {
            "method": method,
            "color": color,
            "dark": DARK.get(color, color),
            "marker": marker,
            "dash": dash,
            "data": str(data["name"]),
            "clients": data["clients"],
            "seed": settings["seed"],
            "runtime": settings["runtime"],
            "rounds": metadata["method"]["rounds"],
        }


def _read_method_name(path: Path) -> str:
    """The method's name, as in reports; empty if the run has not started."""
    try:
        with (path / EVENTS).open("rb") as file:
            return str(parse_line(file.readline(1 << 16)).get("method", ""))
    except OSError:
        return ""


def _read_progress(path: Path) -> dict[str, Any]:
    """Metrics of the last round; the accuracy is the last one measured."""
    progress: dict[str, Any] = {"round": 0, "accuracy": None, "up": 0, "down": 0, "seconds": 0.0}
    lines, before = read_last_lines(path / METRICS, 1)
    for line in lines:
        metrics = parse_line(line)
        progress |= {name: metrics[name] for name in progress if isinstance(metrics.get(name), int | float)}
    if progress["round"] and progress["accuracy"] is None:
        older = map(parse_line, read_last_lines(path / METRICS, 200, before).lines)
        progress["accuracy"] = next((metrics["accuracy"] for metrics in older if "accuracy" in metrics), None)
    return progress


def _file_version(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _run_id(name: str) -> str:
    """The id of a run in URLs; a hash, so that no path can be requested."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:12]


def _get_cached(cache: OrderedDict[str, T], id: str, create: Callable[[], T]) -> T:
    value = cache.pop(id, None) or create()
    cache[id] = value
    while len(cache) > CACHE_SIZE:
        cache.popitem(last=False)
    return value
