"""Progress of a run on standard error: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fewer.runs import Progress


def format_megabytes(count: float) -> str:
    """Formats bytes as MB with three significant digits."""
    return f"{count / 1e6:.3g} MB" if count < 1e9 else f"{count / 1e6:,.0f} MB"


def format_duration(seconds: float) -> str:
    """Formats seconds as hours, minutes or seconds."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    return f"{total // 3600} h {total % 3600 // 60:02d} min"


@dataclass
class ProgressLines:
    """Prints one line per round, with the time left."""

    label: str
    rounds: int = 0
    started: float = 0.0
    done_before: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)

    def on_run_start(self, method: str, done: int, rounds: int) -> None:
        """Starts the clock."""
        self.rounds, self.done_before, self.started = rounds, done, time.monotonic()
        self.show(done, "")

    def on_answer(self, round: int, done: int, asked: int) -> None:
        """Prints nothing."""

    def on_round_end(self, metrics: Mapping[str, Any]) -> None:
        """Shows the metrics of the round and the time left."""
        self.metrics |= metrics
        done = metrics["round"]
        seconds_per_round = (time.monotonic() - self.started) / (done - self.done_before)
        parts = []
        if "accuracy" in self.metrics:
            parts.append(f"accuracy {self.metrics['accuracy']:.1%}")
        parts.append(f"up {format_megabytes(metrics['up'])}, down {format_megabytes(metrics['down'])}")
        if metrics["absent"]:
            parts.append(f"{metrics['absent']} absent")
        left = (self.rounds - done) * seconds_per_round
        parts.append(f"{format_duration(left)} left" if left else f"{format_duration(metrics['seconds'])} total")
        self.show(done, "  ".join(parts))

    def show(self, done: int, text: str) -> None:
        """Prints a line."""
        if text:
            print(f"{self.label}  round {done}/{self.rounds}  {text}", file=sys.stderr, flush=True)
        elif done:
            print(f"{self.label}  resumes after round {done}/{self.rounds}", file=sys.stderr, flush=True)


@dataclass
class ProgressBar(ProgressLines):
    """Draws a bar that advances with each answer. It uses no thread, so that workers can be forked."""

    bars: Any = None
    task: Any = None
    done: int = 0

    def show(self, done: int, text: str) -> None:
        """Draws the bar."""
        self.done = done
        if self.task is None:
            self.task = self.bars.add_task(self.label, total=self.rounds, text="", done="")
        self.bars.update(self.task, completed=done, done=f"{done}/{self.rounds}", text=text or "…", refresh=True)

    def on_answer(self, round: int, done: int, asked: int) -> None:
        """Advances the bar within the round."""
        self.bars.update(self.task, completed=min(self.done + done / asked, self.done + 0.99), refresh=True)


@contextmanager
def show_progress() -> Iterator[Any]:
    """Yields a function that makes the progress display of a run from its label."""
    if not sys.stderr.isatty():
        yield ProgressLines
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[done]}")
    with Bars(*columns, TextColumn("{task.fields[text]}"), console=Console(stderr=True), auto_refresh=False) as bars:
        yield lambda label: ProgressBar(label, bars=bars)


__all__ = ["Progress", "format_duration", "format_megabytes", "show_progress"]
