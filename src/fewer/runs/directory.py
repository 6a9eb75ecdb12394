"""The run directory: settings, append-only records, and a checkpoint that is valid at any moment.

docs/how-to/runs.md lists its files. A checkpoint stores the lengths of metrics.jsonl and ledger.csv. Resuming truncates
both files to these lengths, because later lines belong to an unfinished round. A resumed run therefore leaves the same
records as an uninterrupted one. events.jsonl is never truncated: it also records when the run stopped and resumed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import IO, Any

from fewer.errors import RunError, RunInterrupted
from fewer.ledger import Entry
from fewer.runs.reader import CHECKPOINT, CLIENTS, EVENTS, FORMAT, LEDGER, LOCK, METRICS, SCHEMA, SETTINGS, RunReader
from fewer.runtime.ring import Journal
from fewer.runtime.store import delete_state_after, is_disk_full, lock_file, write_durably
from fewer.wire import Tree, pack

HOPS = "hops"
RECORDS = (METRICS, LEDGER)
"""The files whose lengths a checkpoint stores."""


@dataclass(repr=False)
class RunDirectory(RunReader):
    """One run on disk. Only the process that holds the lock writes to it."""

    _lock: IO[str] | None = None
    _records: dict[str, FileIO] = field(default_factory=dict)

    @classmethod
    def create(cls, path: Path, metadata: Mapping[str, Any]) -> RunDirectory:
        """Creates the directory of a new run."""
        check_unused(path)
        try:
            (path / CLIENTS).mkdir(parents=True, exist_ok=True)
            _write_metadata(path, {"format": FORMAT, **metadata})
        except OSError as error:
            raise RunError(f"{path} cannot be created: {error.strerror}") from error
        return cls(path)

    @property
    def clients(self) -> Path:
        """The folder of the clients' private state."""
        return self.path / CLIENTS

    @property
    def journal(self) -> Journal:
        """The record of messages relayed in the current round."""
        return Journal(self.path / HOPS)

    # --- writing --------------------------------------------------------------------------------------------

    def __enter__(self) -> RunDirectory:
        with self.explain_errors():
            self._lock = lock_file(self.path / LOCK)
        if self._lock is None:
            raise RunError(f"{self.path} is in use by another process")
        try:
            with self.explain_errors():
                self._lock.truncate(0)
                self._lock.write(f"{os.getpid()}\n")
                self._lock.flush()
        except RunError:
            self._lock.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for record in self._records.values():
            record.close()
        self._records = {}
        if self._lock:
            self._lock.close()

    def rewind_to_checkpoint(self) -> dict[str, Any] | None:
        """Returns the last checkpoint, or None, after removing everything that was written since."""
        checkpoint = self.read_checkpoint()
        for name in RECORDS:
            file = self._records[name] = (self.path / name).open("ab", buffering=0)
            length = checkpoint["lengths"][name] if checkpoint else 0
            if file.tell() < length:
                raise RunError(f"{self.path} is damaged: {name} is shorter than the checkpoint says")
            file.truncate(length)
            file.seek(0, os.SEEK_END)
        if not self._records[LEDGER].tell():
            self._write(LEDGER, ",".join(Entry._fields) + "\n")
        self._records[EVENTS] = (self.path / EVENTS).open("ab", buffering=0)
        if (events := (self.path / EVENTS).read_bytes()) and not events.endswith(b"\n"):
            self._write(EVENTS, "\n")  # a kill or a full disk cut the last line short
        round = checkpoint["round"] if checkpoint else 0
        delete_state_after(self.clients, round, self.journal.finished_clients(round + 1))
        return checkpoint

    def take_back_evaluation(self, checkpoint: Mapping[str, Any]) -> None:
        """Removes the evaluation of the latest round from the records, so that resuming evaluates it again.

        After the last round, an evaluation is more detailed. This is for a run whose last round is no longer the last.
        """
        lengths = {name: int(length) for name, length in checkpoint["lengths"].items()}
        metrics = (self.path / METRICS).read_bytes()[: lengths[METRICS]]
        *_, last_line = metrics.splitlines(keepends=True)
        lengths[METRICS] -= len(last_line)
        for line in reversed((self.path / LEDGER).read_bytes()[: lengths[LEDGER]].splitlines(keepends=True)[1:]):
            entry = Entry.parse(line.decode())
            if entry.is_training or entry.round != checkpoint["round"]:
                break
            lengths[LEDGER] -= len(line)
        taken_back = {name: value for name, value in checkpoint.items() if name != "stopped"}
        taken_back |= {"lengths": lengths, "taken_back": last_line.decode()}
        with self.explain_errors():
            write_durably(self.path / CHECKPOINT, pack(taken_back))

    def update_metadata(self, **parts: Any) -> None:
        """Changes entries of settings.json."""
        self.metadata.update(parts)
        with self.explain_errors():
            _write_metadata(self.path, self.metadata)

    def write_schema(self, schema: Mapping[str, Any]) -> None:
        """Writes the schema of the data, so that the model can be used without the data."""
        with self.explain_errors():
            write_durably(self.path / SCHEMA, json.dumps(schema, indent=2, default=str).encode())
        self.schema = dict(schema)

    def log_event(self, what: str, **details: Any) -> None:
        """Appends a line to events.jsonl."""
        self._write(EVENTS, json.dumps({"time": round(time.time(), 3), "event": what, **details}) + "\n")

    def log_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Appends the metrics of a round to metrics.jsonl."""
        self._write(METRICS, json.dumps(metrics) + "\n")

    def log_messages(self, entries: Iterable[Entry]) -> None:
        """Appends the messages of a round to ledger.csv."""
        self._write(LEDGER, "".join(",".join(map(str, entry)) + "\n" for entry in entries))

    def save_checkpoint(self, **content: Tree) -> None:
        """Saves a finished round: first the records, then the checkpoint, which stores their lengths."""
        with self.explain_errors():
            for name in RECORDS:
                os.fsync(self._records[name].fileno())
            lengths = {name: self._records[name].tell() for name in RECORDS}
            write_durably(self.path / CHECKPOINT, pack({**content, "lengths": lengths}))
            self.journal.clear()

    def _write(self, name: str, text: str) -> None:
        remaining = memoryview(text.encode())
        with self.explain_errors():
            while remaining:
                remaining = remaining[self._records[name].write(remaining) :]

    @contextmanager
    def explain_errors(self, full_disk_only: bool = False) -> Iterator[None]:
        """Raises RunInterrupted if the block fails to write, or only if it fails because the disk is full."""
        try:
            yield
        except OSError as error:
            if full_disk_only and not is_disk_full(error):
                raise
            problem = f"{self.path} cannot be written: {error.strerror}"
            raise RunInterrupted(f"{problem}. The last checkpoint is intact. Fix the cause, then resume it") from error


@contextmanager
def explain_full_disk(folder: Path) -> Iterator[None]:
    """Raises RunError if the block fails because the disk with this temporary folder is full."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise RunError(f"{folder} cannot be written: {error.strerror}. Free some space, or set TMPDIR") from error


def check_unused(path: Path) -> None:
    """Raises RunError if `path` exists and is not empty."""
    entries = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    leftovers = {CLIENTS, f"{SETTINGS}.part"}  # of a run that was killed at its start
    unused = path.is_dir() and entries <= leftovers and not any((path / CLIENTS).glob("*"))
    if path.exists() and not unused:
        raise RunError(f"{path} exists already: choose another --out{_resume_advice(RunReader(path))}")


def _resume_advice(run: RunReader) -> str:
    """How to resume a run, for the end of an error; empty if that cannot help, or if it is not a run."""
    try:
        return f", or run {run.resume_command}" if run.can_resume else ""
    except RunError:
        return ""


def _write_metadata(path: Path, metadata: Mapping[str, Any]) -> None:
    write_durably(path / SETTINGS, json.dumps(metadata, indent=2, default=str).encode())
