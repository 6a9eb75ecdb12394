"""Byte counts of all messages, by round, client, direction and kind."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Direction = Literal["down", "up"]

EVALUATION = "evaluate/"
"""Prefix of kinds that belong to evaluation. The ledger lists such messages, but leaves them out of the totals."""


class Entry(NamedTuple):
    """One message: its round, client, direction, kind and size."""

    round: int
    client: int
    direction: Direction
    kind: str
    bytes: int

    @classmethod
    def parse(cls, line: str) -> Entry:
        """Parses a line of ledger.csv; ValueError if it is not a message."""
        round, client, direction, kind, size = line.rstrip("\n").split(",")
        return cls(int(round), int(client), "up" if direction == "up" else "down", kind, int(size))

    @property
    def is_training(self) -> bool:
        """False for messages of evaluation."""
        return not self.kind.startswith(EVALUATION)


@dataclass
class Ledger:
    """Counts every message once. Entries stay here until `drain` removes them."""

    total: Counter[Direction] = field(default_factory=Counter)
    entries: list[Entry] = field(default_factory=list)

    def add(self, round: int, client: int, direction: Direction, kind: str, size: int) -> None:
        """Counts one message of `size` bytes."""
        self.entries.append(entry := Entry(round, client, direction, kind, size))
        if entry.is_training:
            self.total[direction] += size

    def drain(self) -> list[Entry]:
        """Removes and returns the entries since the last call. The totals stay."""
        entries, self.entries = self.entries, []
        return entries
