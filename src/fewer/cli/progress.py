"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere. Both on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fewer.runs import Progress


def megabytes(count: float) -> str:
    """Bytes as MB with three digits that count."""
    return f"{count / 1e6:.3g} MB" if count < 1e9 else f"{count / 1e6:,.0f} MB"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return (
        f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    )


@dataclass
class Clock:
    """Knows how many rounds are left and how long one takes."""

    what: str
    rounds: int = 0
    begun: float = 0.0
    first: int = 0
    figures: dict[str, Any] = field(default_factory=dict)

    def begin(self, method: str, done: int, rounds: int) -> None:
        """Start counting."""
        self.rounds, self.first, self.begun = rounds, done, time.monotonic()
        self.show(done, "")

    def answer(self, round: int, done: int, asked: int) -> None:
        """An answer came in."""

    def round(self, figures: Mapping[str, Any]) -> None:
        """A round ended."""
        self.figures |= figures
        done = figures["round"]
        a_round = (time.monotonic() - self.begun) / (done - self.first)
        parts = []
        if "accuracy" in self.figures:
            parts.append(f"accuracy {self.figures['accuracy']:.1%}")
        parts.append(f"up {megabytes(figures['up'])}, down {megabytes(figures['down'])}")
        if figures["absent"]:
            parts.append(f"{figures['absent']} absent")
        left = (self.rounds - done) * a_round
        parts.append(f"{duration(left)} left" if left else f"{duration(figures['seconds'])} in all")
        self.show(done, "  ".join(parts))

    def show(self, done: int, text: str) -> None:
        """Bring it before the user's eyes."""
        if text:
            print(f"{self.what}  round {done}/{self.rounds}  {text}", file=sys.stderr, flush=True)
        elif done:
            print(f"{self.what}  goes on after round {done}/{self.rounds}", file=sys.stderr, flush=True)


@dataclass
class Bar(Clock):
    """A line with a bar, drawn anew as answers come in. No thread draws it, so that workers can be forked."""

    bars: Any = None
    task: Any = None
    done: int = 0

    def show(self, done: int, text: str) -> None:
        """Draw the bar."""
        self.done = done
        if self.task is None:
            self.task = self.bars.add_task(self.what, total=self.rounds, text="", done="")
        self.bars.update(self.task, completed=done, done=f"{done}/{self.rounds}", text=text or "…", refresh=True)

    def answer(self, round: int, done: int, asked: int) -> None:
        """Move the bar a little."""
        self.bars.update(self.task, completed=min(self.done + done / asked, self.done + 0.99), refresh=True)


@contextmanager
def shown() -> Iterator[Any]:
    """A function that gives each run its progress display."""
    if not sys.stderr.isatty():
        yield Clock
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[done]}")
    with Bars(*columns, TextColumn("{task.fields[text]}"), console=Console(stderr=True), auto_refresh=False) as bars:
        yield lambda what: Bar(what, bars=bars)


__all__ = ["Progress", "duration", "megabytes", "shown"]
