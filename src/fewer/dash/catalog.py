"""Which runs lie under a directory, and how each is doing: looked up again only where a file has changed."""

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

from fewer.dash.records import Curve, EventTally, newest, read_line
from fewer.errors import FewerError
from fewer.report.style import DARK, look
from fewer.runs.files import EVENTS, METRICS, SETTINGS, describe, in_use

T = TypeVar("T")

DEPTH = 6
"""Directories below the first that are looked into."""
OFTEN, SELDOM = 0.4, 3.0
"""Seconds between two looks: at runs that go on, and at all."""
SHARE = 20
"""Looking at all takes one second of so many at most."""
WARM = 60.0
"""Seconds since its last change for which a run is looked at often."""
FRESH = 2.0
"""Seconds for which a changed directory is read again: it may change twice within one tick of the clock."""
OPENED = 64
"""Runs of which curve and tally are remembered."""
STATES = ("running", "starting", "stopped", "broken", "finished", "damaged")
_FILES = (SETTINGS, METRICS, EVENTS)

Sizes = tuple[tuple[int, int, int] | None, ...]


@dataclass
class RunEntry:
    """A run and what was last seen of it."""

    id: str
    name: str
    path: Path
    sizes: Sizes = ()
    row: dict[str, Any] = field(default_factory=dict)
    revision: int = 0
    """Larger than that of any run that changed before."""
    description: Mapping[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """One of STATES."""
        return str(self.row["state"])


class Catalog:
    """The runs under a directory. Only what it has found there can be asked for."""

    def __init__(self, root: Path, started: Callable[[Path], float | None] = lambda path: None) -> None:
        self.root = root.resolve()
        self.runs: dict[str, RunEntry] = {}
        self.revision = 0
        self.came = 0
        """How many have ever been found: of as many as before, some may be others."""
        self._started = started
        self._lock = threading.RLock()
        self._folders: dict[Path, tuple[int, bool, list[Path]]] = {}
        self._looked = {"often": -SELDOM, "seldom": -SELDOM}
        self._curves: OrderedDict[str, Curve] = OrderedDict()
        self._tallies: OrderedDict[str, EventTally] = OrderedDict()

    def refresh(self, *, now: bool = False) -> None:
        """Look whether anything has changed, unless that was done just now."""
        with self._lock:
            clock = time.monotonic()
            if now or clock - self._looked["seldom"] >= SELDOM:
                self._find()
                for run in self.runs.values():
                    self._look(run)
                end = time.monotonic()
                pause = max(0.0, SHARE * (end - clock) - SELDOM)  # of a whole home directory, or a slow disk
                self._looked = {"often": end, "seldom": end + pause}
            elif clock - self._looked["often"] >= OFTEN:
                for run in self.runs.values():
                    if run.state in ("running", "starting") or time.time() - run.row["changed"] < WARM:
                        self._look(run)
                self._looked["often"] = time.monotonic()

    def look_at(self, run: RunEntry) -> None:
        """Look at one run now."""
        with self._lock:
            self._look(run)

    def rows(self) -> list[RunEntry]:
        """All runs."""
        with self._lock:
            return list(self.runs.values())

    def counts(self) -> Counter[str]:
        """How many runs there are in each state."""
        return Counter(run.state for run in self.rows())

    def curve(self, run: RunEntry) -> list[dict[str, Any]]:
        """Its figures by round."""
        with self._lock:
            curve = _remembered(self._curves, run.id, lambda: Curve.of(run.path))
        return curve.points()

    def tally(self, run: RunEntry) -> dict[str, Any]:
        """What its faults and messages add up to, as far as they have been read."""
        with self._lock:
            tally = _remembered(self._tallies, run.id, lambda: EventTally.of(run.path))
        return tally.more()

    # --- finding ------------------------------------------------------------------------------------------------

    def _find(self) -> None:
        found = {path: path.relative_to(self.root).as_posix() for path in self._below(self.root, DEPTH)}
        ids = {_id(name): (path, name if name != "." else path.name) for path, name in found.items()}
        for gone in self.runs.keys() - ids.keys():
            del self.runs[gone]
            self.revision += 1
        for id, (path, name) in ids.items():
            if id not in self.runs:
                self.runs[id] = RunEntry(id, name, path)
                self.came += 1

    def _below(self, folder: Path, depth: int) -> Iterator[Path]:
        """Run directories in a folder, or the folder itself. Links are not followed: they may lead anywhere."""
        try:
            changed = folder.stat().st_mtime_ns
            known = self._folders.get(folder)
            if known is None or known[0] != changed:
                with os.scandir(folder) as entries:
                    all = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
                is_run = (SETTINGS, False) in all
                inside = (
                    [] if is_run else sorted(folder / name for name, is_folder in all if is_folder and name[0] != ".")
                )
                known = (changed if time.time() - changed / 1e9 > FRESH else -1, is_run, inside)
                self._folders[folder] = known
        except OSError:
            self._folders.pop(folder, None)
            return
        _, is_run, inside = known
        if is_run:
            yield folder
        elif depth:
            for each in inside:
                yield from self._below(each, depth - 1)

    # --- looking ------------------------------------------------------------------------------------------------

    def _look(self, run: RunEntry) -> None:
        sizes = tuple(_size(run.path / name) for name in _FILES)
        going = run.row.get("state") in ("running", "starting")
        started = self._started(run.path)
        if sizes == run.sizes and not going and started is None:
            return
        if sizes[:1] != run.sizes[:1]:
            self._curves.pop(run.id, None)
            self._tallies.pop(run.id, None)
        row = self._row(run, sizes, started)
        run.sizes = sizes
        if row != run.row:
            self.revision += 1
            run.row, run.revision = row, self.revision

    def _row(self, run: RunEntry, sizes: Sizes, started: float | None) -> dict[str, Any]:
        changed = max((size[0] for size in sizes if size), default=0) / 1e9
        row: dict[str, Any] = {"id": run.id, "name": run.name, "changed": round(changed, 3)}
        try:
            if not run.description or sizes[:1] != run.sizes[:1]:
                run.description = describe(run.path)
            row |= _told(run.description, _name(run.path))
        except (FewerError, KeyError, TypeError, AttributeError) as error:
            return {**row, "method": "?", "data": "?", "state": "damaged", "reason": str(error)}
        row |= _progress(run.path)
        last = next((event for line in newest(run.path / EVENTS, 5).lines if (event := read_line(line))), {})
        if in_use(run.path):
            state = "running"
        elif last.get("event") == "finish" or (last.get("event") == "resume" and last.get("round") == row["rounds"]):
            state = "finished"
        elif started and last.get("time", 0.0) < started:  # it has not said a word yet
            state = "starting"
        else:
            state = "stopped" if last.get("event") == "stop" else "broken"
        return {**row, "state": state, "reason": str(last.get("reason", "")) if state == "stopped" else ""}


def _name(path: Path) -> str:
    """What the method calls itself, as reports do; empty where the run has not begun."""
    try:
        with (path / EVENTS).open("rb") as file:
            return str(read_line(file.readline(1 << 16)).get("method", ""))
    except OSError:
        return ""


def _told(description: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What settings tell of a run in a list."""
    settings, data = description["settings"], description["data"]
    given = str(settings["method"])
    method = name or given.rpartition(":")[2]
    color, marker, dash = look(method)  # a comparison has other markers and dashes, but no other colors
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
        "rounds": description["method"]["rounds"],
    }


def _progress(path: Path) -> dict[str, Any]:
    """How far a run has come: its last line, and the last accuracy where that was not measured in every round."""
    found: dict[str, Any] = {"round": 0, "accuracy": None, "up": 0, "down": 0, "seconds": 0.0}
    lines, before = newest(path / METRICS, 1)
    for line in lines:
        read = read_line(line)
        found |= {name: read[name] for name in found if isinstance(read.get(name), int | float)}
    if found["round"] and found["accuracy"] is None:
        older = map(read_line, newest(path / METRICS, 200, before).lines)
        found["accuracy"] = next((read["accuracy"] for read in older if "accuracy" in read), None)
    return found


def _size(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _id(name: str) -> str:
    """A run's name in addresses: nobody can write a path with it."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:12]


def _remembered(kept: OrderedDict[str, T], id: str, make: Callable[[], T]) -> T:
    found = kept.pop(id, None) or make()
    kept[id] = found
    while len(kept) > OPENED:
        kept.popitem(last=False)
    return found
