"""The bytes that were encoded, by round, client, direction and kind."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Direction = Literal["down", "up"]

EVALUATION = "evaluate/"
"""Kinds that begin so are traffic of measuring, not of learning: listed, but in no total."""


class Entry(NamedTuple):
    """One message: who got or sent how many bytes, in which round and for what."""

    round: int
    client: int
    direction: Direction
    kind: str
    bytes: int


@dataclass
class Ledger:
    """Counts every message once. Entries stay here until they are taken away to be written down."""

    total: Counter[Direction] = field(default_factory=Counter)
    entries: list[Entry] = field(default_factory=list)

    def add(self, round: int, client: int, direction: Direction, kind: str, size: int) -> None:
        """Count one message of `size` bytes."""
        self.entries.append(Entry(round, client, direction, kind, size))
        if not kind.startswith(EVALUATION):
            self.total[direction] += size

    def take(self) -> list[Entry]:
        """The entries since the last call; totals stay."""
        entries, self.entries = self.entries, []
        return entries
