"""Reads files that grow. It never reads a whole file at once, nor any part twice."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fewer.runs.files import EVENTS, LEDGER, METRICS

BLOCK = 1 << 16
SLICE = 1 << 22
"""Maximum number of bytes read for one response, unless a single line is longer."""
MAX_POINTS = 500
"""Maximum number of points of a curve in a response."""
CURVE_METRICS = ("round", "accuracy", "loss", "up", "down", "seconds", "absent")


class LinePage(NamedTuple):
    """Lines, newest first, and the offset where older lines end; 0 if there are none."""

    lines: list[bytes]
    before: int


def read_last_lines(path: Path, count: int, before: int | None = None) -> LinePage:
    """Reads the last complete lines of a file, or the last ones that end at offset `before`."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = end = size if before is None else max(0, min(before, size))
            text = b""
            while start and text.count(b"\n") <= count and end - start < SLICE:
                step = min(BLOCK, start)
                start -= step
                file.seek(start)
                text = file.read(step) + text
    except OSError:
        return LinePage([], 0)
    if start:  # the first line may be incomplete
        cut = text.find(b"\n") + 1
        start, text = start + cut, text[cut:]
    *lines, _ = text.split(b"\n")  # the last part has no end yet: it is still being written
    last_lines = lines[-count:]
    start += sum(len(line) + 1 for line in lines[: len(lines) - len(last_lines)])
    return LinePage(last_lines[::-1], start if last_lines else 0)


def parse_line(line: bytes) -> dict[str, Any]:
    """Parses a line of JSON; empty if a kill cut it short."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _event_round(event: Mapping[str, Any]) -> int:
    """The round of an event; 0 if it has none."""
    number = event.get("round")
    return number if isinstance(number, int) else 0


@dataclass
class GrowingFile:
    """A file whose first `offset` bytes have been read. If it was truncated, it is read again from the start."""

    path: Path
    offset: int = 0
    size: int = 0
    _tail: bytes = b""
    """The bytes right before the offset, to detect that the file was rewritten."""

    def read_new_lines(self) -> tuple[list[bytes], bool]:
        """Reads new complete lines, at most one slice; also returns whether all earlier lines are invalid."""
        try:
            with self.path.open("rb") as file:
                self.size = file.seek(0, os.SEEK_END)
                file.seek(max(0, self.offset - len(self._tail)))
                rewritten = self.size < self.offset or file.read(len(self._tail)) != self._tail
                if rewritten:
                    self.offset = 0
                file.seek(self.offset)
                text = file.read(SLICE)
                while text and b"\n" not in text and (more := file.read(SLICE)):
                    text += more
        except OSError:
            return [], False
        text = text[: text.rfind(b"\n") + 1]
        self.offset += len(text)
        self._tail = text[-64:] or (b"" if rewritten else self._tail)
        return text.splitlines(), rewritten

    @property
    def complete(self) -> bool:
        """True if the file has been read to its last known end."""
        return self.size - self.offset < BLOCK


@dataclass
class Curve:
    """The metrics of a run by round."""

    source: GrowingFile
    rows: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, run: Path) -> Curve:
        """Creates the empty curve of a run."""
        return cls(GrowingFile(run / METRICS))

    def points(self) -> list[dict[str, Any]]:
        """The rounds so far, thinned out evenly if there are many; the last round is always included."""
        with self.lock:
            while True:
                lines, rewritten = self.source.read_new_lines()
                if rewritten:
                    self.rows = []
                if not lines:
                    break
                for line in lines:
                    metrics = parse_line(line)
                    self.rows.append({name: metrics[name] for name in CURVE_METRICS if name in metrics})
            step = -(-len(self.rows) // MAX_POINTS) or 1
            return self.rows[::-1][::step][::-1]


@dataclass
class EventTally:
    """Totals of the events and the ledger of a run, read slice by slice."""

    events: GrowingFile
    ledger: GrowingFile
    absent: dict[int, Counter[str]] = field(default_factory=dict)
    """Absent answers by round and reason."""
    traffic: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """Messages and bytes by direction and kind."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, run: Path) -> EventTally:
        """Creates the empty tally of a run."""
        return cls(GrowingFile(run / EVENTS), GrowingFile(run / LEDGER))

    def update(self) -> dict[str, Any]:
        """Reads the next slice and returns the totals so far."""
        with self.lock:
            lines, rewritten = self.events.read_new_lines()
            if rewritten:
                self.absent.clear()
            for line in lines:
                self._add_event(parse_line(line))
            lines, rewritten = self.ledger.read_new_lines()
            if rewritten:
                self.traffic.clear()
            for line in lines:
                self._add_message(line)
            return self._totals()

    def _totals(self) -> dict[str, Any]:
        size = self.events.size + self.ledger.size
        by_size = sorted(self.traffic.items(), key=lambda item: -item[1][1])
        return {
            "absent": dict(sum(self.absent.values(), Counter[str]()).most_common()),
            "traffic": [
                {"direction": direction, "kind": kind, "messages": messages, "bytes": count}
                for (direction, kind), (messages, count) in by_size
            ],
            "fraction_read": (self.events.offset + self.ledger.offset) / size if size else 1.0,
            "complete": self.events.complete and self.ledger.complete,
        }

    def _add_event(self, event: Mapping[str, Any]) -> None:
        kind = event.get("event")
        if kind == "absent":
            self.absent.setdefault(_event_round(event), Counter())[str(event.get("reason", "?"))] += 1
        elif kind in ("start", "resume"):  # rounds after the last checkpoint are repeated
            done = _event_round(event)
            self.absent = {number: counts for number, counts in self.absent.items() if number <= done}

    def _add_message(self, line: bytes) -> None:
        cells = line.decode(errors="replace").split(",")
        if len(cells) == 5 and cells[-1].isdecimal():  # skips the header and incomplete lines
            totals = self.traffic.setdefault((cells[2], cells[3]), [0, 0])
            totals[0] += 1
            totals[1] += int(cells[-1])
