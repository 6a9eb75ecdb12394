"""The run directory: settings, append-only records, and a checkpoint that is whole at any moment.

    settings.json            what was run, resolved, with its hash; fingerprints of environment and data
    events.jsonl             what happened, line by line: start, absent answers, resume, stop, finish
    metrics.jsonl            one line a round
    ledger.csv               one line a message: round, client, direction, kind, bytes
    checkpoint.safetensors   state after the last whole round, and how long the records were then
    prepared.safetensors     the model that the run prepared for groups, if that is what it does
    start.safetensors        the prepared model that a group began from, if that is what it is
    hops/                    what was passed from client to client in the round under way, if the method does that
    clients/                 what each client remembers (where clients are simulated)
    lock                     held by the process that writes, with its number

A checkpoint names the lengths of metrics and ledger. What was written after it belongs to a round that did not end,
and is cut off when the run goes on: so a resumed run leaves the same figures as an unbroken one. Events are never cut:
they tell what happened, the stop and the resumption too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import IO, Any

from fewer.errors import RunError
from fewer.runs.files import EVENTS as EVENTS
from fewer.runs.files import FIGURES, FORMAT, LOCK, SETTINGS, describe
from fewer.runtime.ring import Journal
from fewer.runtime.store import forget_after, hold, write_durably
from fewer.wire import Tree, pack, unpack
from fewer.wire.ledger import Entry

HOPS = "hops"


class RunDirectory:
    """One run on disk. Only the process that holds the lock writes."""

    def __init__(self, path: Path, description: Mapping[str, Any]) -> None:
        self.path = path
        self.description = description
        self._lock: IO[str] | None = None
        self._records: dict[str, FileIO] = {}

    @classmethod
    def create(cls, path: Path, description: Mapping[str, Any]) -> RunDirectory:
        """A new directory for a run that has not begun."""
        must_be_new(path)
        try:
            (path / "clients").mkdir(parents=True, exist_ok=True)
            _describe(path, {"format": FORMAT, **description})
        except OSError as error:
            raise RunError(f"{path} cannot be made: {error.strerror}") from error
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """A directory that a run left; RunError where it is none."""
        return cls(path, describe(path))

    @property
    def clients(self) -> Path:
        """Where the clients' own state lies."""
        return self.path / "clients"

    @property
    def journal(self) -> Journal:
        """Where the hops of an unfinished pass lie."""
        return Journal(self.path / HOPS)

    # --- writing --------------------------------------------------------------------------------------------

    def __enter__(self) -> RunDirectory:
        self._lock = hold(self.path / LOCK)
        if self._lock is None:
            raise RunError(f"{self.path} is in use by another process")
        try:
            self._lock.truncate(0)
            self._lock.write(f"{os.getpid()}\n")
            self._lock.flush()
        except OSError as error:
            self._lock.close()
            raise self._full(error) from error
        return self

    def __exit__(self, *_: object) -> None:
        for record in self._records.values():
            record.close()
        self._records = {}
        if self._lock:
            self._lock.close()

    def go_back(self) -> dict[str, Any] | None:
        """The last checkpoint, with everything that was written after it removed; None before the first round."""
        path = self.path / "checkpoint.safetensors"
        try:
            kept = unpack(path.read_bytes()) if path.exists() else None
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path} is damaged: checkpoint.safetensors cannot be read ({error})") from error
        for name in FIGURES:
            file = self._records[name] = (self.path / name).open("ab", buffering=0)
            length = kept["lengths"][name] if kept else 0
            if file.tell() < length:
                raise RunError(f"{self.path} is damaged: {name} is shorter than the checkpoint says")
            file.truncate(length)
            file.seek(0, os.SEEK_END)
        if not self._records["ledger.csv"].tell():
            self._write("ledger.csv", ",".join(Entry._fields) + "\n")
        self._records[EVENTS] = (self.path / EVENTS).open("ab", buffering=0)
        round = kept["round"] if kept else 0
        forget_after(self.clients, round, self.journal.finished(round + 1))
        return kept

    def describe(self, **parts: Any) -> None:
        """Tell something else in settings.json, of what no number depends on."""
        self.description = {**self.description, **parts}
        try:
            _describe(self.path, self.description)
        except OSError as error:
            raise self._full(error) from error

    def event(self, what: str, **details: Any) -> None:
        """Write down that something happened."""
        self._write(EVENTS, json.dumps({"time": round(time.time(), 3), "event": what, **details}) + "\n")

    def metrics(self, line: Mapping[str, Any]) -> None:
        """Write down the figures of a round."""
        self._write("metrics.jsonl", json.dumps(line) + "\n")

    def messages(self, entries: Iterable[Entry]) -> None:
        """Write down the messages of a round."""
        self._write("ledger.csv", "".join(",".join(map(str, entry)) + "\n" for entry in entries))

    def checkpoint(self, **content: Tree) -> None:
        """Make a finished round last: the records first, then the state that names their length."""
        try:
            for name in FIGURES:
                os.fsync(self._records[name].fileno())
            lengths = {name: self._records[name].tell() for name in FIGURES}
            write_durably(self.path / "checkpoint.safetensors", pack({**content, "lengths": lengths}))
            self.journal.clear()
        except OSError as error:
            raise self._full(error) from error

    def _write(self, name: str, text: str) -> None:
        left = memoryview(text.encode())
        try:
            while left:
                left = left[self._records[name].write(left) :]
        except OSError as error:
            raise self._full(error) from error

    def _full(self, error: OSError) -> RunError:
        return RunError(
            f"{self.path} cannot be written ({error.strerror}); the checkpoint before is whole. "
            f"Mend that, then: fewer resume {self.path}"
        )

    # --- reading --------------------------------------------------------------------------------------------

    def read(self) -> dict[str, Any]:
        """The last checkpoint, for whoever only looks."""
        path = self.path / "checkpoint.safetensors"
        try:
            kept: dict[str, Any] = unpack(path.read_bytes())
        except FileNotFoundError:
            raise RunError(f"{self.path} has no checkpoint yet: no round has ended") from None
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path} is damaged: checkpoint.safetensors cannot be read ({error})") from error
        return kept

    def history(self) -> list[dict[str, Any]]:
        """The figures of all rounds so far; half a line, which a full disk or a kill left, is none."""
        file = self.path / "metrics.jsonl"
        if not file.exists() and not (self.path / "checkpoint.safetensors").exists():  # it has only just begun
            return []
        try:
            *lines, _ = file.read_text().split("\n")
            return [json.loads(line) for line in lines]
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path} is damaged: metrics.jsonl cannot be read ({error})") from error


def must_be_new(path: Path) -> None:
    """RunError where a run cannot begin here, since something is there."""
    if path.exists() and not _unused(path):
        raise RunError(f"{path} is there already (another --out, or: fewer resume {path})")


def _describe(path: Path, description: Mapping[str, Any]) -> None:
    write_durably(path / SETTINGS, json.dumps(description, indent=2, default=str).encode())


def _unused(path: Path) -> bool:
    """Whether a directory is empty, or has only what a run leaves that was killed before it began."""
    if not path.is_dir():
        return False
    found = {entry.name for entry in path.iterdir()}
    return found <= {"clients", "settings.json.part"} and not any((path / "clients").glob("*"))
