"""Progress of a run on standard error: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fewer.runs.callbacks import Callback, Metrics, Run


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


class ProgressLines(Callback):
    """Prints one line per round, with the time left."""

    def on_run_start(self, run: Run) -> None:
        """Starts the clock."""
        self.started, self.finished_rounds, self.metrics = time.monotonic(), len(run.history), dict[str, Any]()
        self.show(run, "")

    def on_round_end(self, run: Run, metrics: Metrics) -> None:
        """Shows the metrics of the round and the time left."""
        self.metrics |= metrics
        seconds_per_round = (time.monotonic() - self.started) / (run.round - self.finished_rounds)
        parts = []
        if run.metric.name in self.metrics:
            parts.append(f"{run.metric.name} {run.metric.format(self.metrics[run.metric.name], 1)}")
        parts.append(f"up {format_megabytes(metrics['up'])}, down {format_megabytes(metrics['down'])}")
        if metrics["absent"]:
            parts.append(f"{metrics['absent']} absent")
        left = (run.method.rounds - run.round) * seconds_per_round
        parts.append(f"{format_duration(left)} left" if left else f"{format_duration(metrics['seconds'])} total")
        self.show(run, "  ".join(parts))

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Shows why the run ended early, if a callback stopped it."""
        if error is None and run.stopped:
            self.show(run, f"ends here: {run.stopped}")

    def show(self, run: Run, text: str) -> None:
        """Prints a line."""
        rounds = f"round {len(run.history)}/{run.method.rounds}"
        if text:
            print(f"{run.label}  {rounds}  {text}", file=sys.stderr, flush=True)
        elif run.history and not run.finished:
            print(f"{run.label}  resumes after {rounds}", file=sys.stderr, flush=True)


@dataclass
class ProgressBar(ProgressLines):
    """Draws a bar per run that advances with each answer. It uses no thread, so that workers can be forked."""

    bars: Any
    task: Any = None

    def on_run_start(self, run: Run) -> None:
        """Adds a bar."""
        self.task = self.bars.add_task(run.label, total=run.method.rounds, text="", done="")
        super().on_run_start(run)

    def on_answer(self, run: Run, answered: int, asked: int) -> None:
        """Advances the bar within the round."""
        self.bars.update(self.task, completed=len(run.history) + min(answered / asked, 0.99), refresh=True)

    def show(self, run: Run, text: str) -> None:
        """Draws the bar."""
        done, rounds = len(run.history), run.method.rounds
        self.bars.update(self.task, completed=done, done=f"{done}/{rounds}", text=text or "…", refresh=True)


@contextmanager
def show_progress() -> Iterator[Callback]:
    """Yields a callback that displays the progress of runs."""
    if not sys.stderr.isatty():
        yield ProgressLines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[done]}")
    text = TextColumn("{task.fields[text]}")
    with Progress(*columns, text, console=Console(stderr=True), auto_refresh=False) as bars:
        yield ProgressBar(bars)
