"""The ledger counts each message once."""

from __future__ import annotations

from fewer.wire import (
    Ledger,
)


def test_ledger_totals_by_direction_without_evaluation() -> None:
    ledger = Ledger()
    ledger.add(1, 0, "down", "train", 100)
    ledger.add(1, 3, "down", "train", 100)
    ledger.add(1, 3, "up", "train", 70)
    ledger.add(1, 3, "down", "evaluate/score", 1000)
    ledger.add(1, 3, "up", "evaluate/score", 10)
    ledger.add(2, 3, "up", "evaluated", 5)
    assert ledger.total == {"down": 200, "up": 75}
    assert len(ledger.entries) == 6


def test_ledger_drain_gives_each_entry_once_and_keeps_totals() -> None:
    ledger = Ledger()
    assert ledger.drain() == [] and ledger.total["up"] == 0
    ledger.add(1, 2, "up", "train", 7)
    ledger.add(1, 4, "up", "evaluate/score", 9)
    first = ledger.drain()
    assert first == [(1, 2, "up", "train", 7), (1, 4, "up", "evaluate/score", 9)]
    assert (first[0].round, first[0].client, first[0].direction, first[0].kind, first[0].bytes) == (
        1,
        2,
        "up",
        "train",
        7,
    )
    ledger.add(2, 2, "up", "train", 8)
    assert ledger.drain() == [(2, 2, "up", "train", 8)]
    assert ledger.drain() == []
    assert ledger.total["up"] == 15


def test_ledgers_share_nothing() -> None:
    Ledger().add(1, 0, "up", "train", 1)
    assert Ledger().total["up"] == 0 and Ledger().entries == []
