"""Reads files that grow. It never reads a whole file at once, nor any part twice."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

BLOCK = 1 << 16
SLICE = 1 << 22
"""Maximum number of bytes read for one response, unless a single line is longer."""


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
