"""Records that grow while they are read. Nothing here reads a whole file at once, and nothing reads a part twice."""

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
"""Bytes that are read for one answer at most, but for a line that is longer."""
POINTS = 500
"""Points of a curve that are sent at most: no screen shows more."""
FIGURES = ("round", "accuracy", "loss", "up", "down", "seconds", "absent")


class Page(NamedTuple):
    """Some lines, the newest first, and where the older ones end: 0 where there are none."""

    lines: list[bytes]
    before: int


def newest(path: Path, count: int, before: int | None = None) -> Page:
    """The last whole lines of a file, or the last that end at `before`."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            at = end = size if before is None else max(0, min(before, size))
            text = b""
            while at and text.count(b"\n") <= count and end - at < SLICE:
                step = min(BLOCK, at)
                at -= step
                file.seek(at)
                text = file.read(step) + text
    except OSError:
        return Page([], 0)
    if at:  # the first of these lines began before them
        cut = text.find(b"\n") + 1
        at, text = at + cut, text[cut:]
    *lines, _ = text.split(b"\n")  # what has no end yet is still being written
    kept = lines[-count:]
    at += sum(len(line) + 1 for line in lines[: len(lines) - len(kept)])
    return Page(kept[::-1], at if kept else 0)


def read_line(line: bytes) -> dict[str, Any]:
    """A line of JSON; empty where a kill cut it short."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _number(event: Mapping[str, Any]) -> int:
    """The round of an event; 0 where it does not tell."""
    found = event.get("round")
    return found if isinstance(found, int) else 0


@dataclass
class Growing:
    """A file of which the first `offset` bytes are known. Cut and written anew, it is read from the beginning."""

    path: Path
    offset: int = 0
    size: int = 0
    _last: bytes = b""
    """What stood right before the offset, to see that it still does."""

    def more(self) -> tuple[list[bytes], bool]:
        """Whole lines that have come since, as many as one answer may read; and whether all before are void."""
        try:
            with self.path.open("rb") as file:
                self.size = file.seek(0, os.SEEK_END)
                file.seek(max(0, self.offset - len(self._last)))
                void = self.size < self.offset or file.read(len(self._last)) != self._last
                if void:
                    self.offset = 0
                file.seek(self.offset)
                text = file.read(SLICE)
                while text and b"\n" not in text and (more := file.read(SLICE)):
                    text += more
        except OSError:
            return [], False
        text = text[: text.rfind(b"\n") + 1]
        self.offset += len(text)
        self._last = text[-64:] or (b"" if void else self._last)
        return text.splitlines(), void

    @property
    def whole(self) -> bool:
        """Whether it has been read to the end that it had."""
        return self.size - self.offset < BLOCK


@dataclass
class Curve:
    """The figures of a run, round by round."""

    source: Growing
    rows: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, run: Path) -> Curve:
        """Of a run of which nothing is known yet."""
        return cls(Growing(run / METRICS))

    def points(self) -> list[dict[str, Any]]:
        """The rounds so far, thinned out evenly where there are very many; the last is always there."""
        with self.lock:
            while True:
                lines, void = self.source.more()
                if void:
                    self.rows = []
                if not lines:
                    break
                for line in lines:
                    read = read_line(line)
                    self.rows.append({name: read[name] for name in FIGURES if name in read})
            step = -(-len(self.rows) // POINTS) or 1
            return self.rows[::-1][::step][::-1]


@dataclass
class EventTally:
    """What events and ledger add up to, read slice by slice: `done` tells how much of them is in it."""

    events: Growing
    ledger: Growing
    absent: dict[int, Counter[str]] = field(default_factory=dict)
    """Absent answers by round and reason."""
    traffic: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """Messages and bytes by direction and kind."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, run: Path) -> EventTally:
        """Of a run of which nothing is known yet."""
        return cls(Growing(run / EVENTS), Growing(run / LEDGER))

    def more(self) -> dict[str, Any]:
        """Read on, and tell what is known by now."""
        with self.lock:
            lines, void = self.events.more()
            if void:
                self.absent.clear()
            for line in lines:
                self._event(read_line(line))
            lines, void = self.ledger.more()
            if void:
                self.traffic.clear()
            for line in lines:
                self._message(line)
            return self._told()

    def _told(self) -> dict[str, Any]:
        size = self.events.size + self.ledger.size
        kinds = sorted(self.traffic.items(), key=lambda item: -item[1][1])
        return {
            "absent": dict(sum(self.absent.values(), Counter[str]()).most_common()),
            "traffic": [
                {"direction": way, "kind": kind, "messages": messages, "bytes": count}
                for (way, kind), (messages, count) in kinds
            ],
            "done": (self.events.offset + self.ledger.offset) / size if size else 1.0,
            "whole": self.events.whole and self.ledger.whole,
        }

    def _event(self, event: Mapping[str, Any]) -> None:
        what = event.get("event")
        if what == "absent":
            self.absent.setdefault(_number(event), Counter())[str(event.get("why", "?"))] += 1
        elif what in ("start", "resume"):  # rounds after the last checkpoint are done again
            done = _number(event)
            self.absent = {number: counts for number, counts in self.absent.items() if number <= done}

    def _message(self, line: bytes) -> None:
        cells = line.decode(errors="replace").split(",")
        if len(cells) == 5 and cells[-1].isdecimal():  # neither the heads nor half a line
            known = self.traffic.setdefault((cells[2], cells[3]), [0, 0])
            known[0] += 1
            known[1] += int(cells[-1])
