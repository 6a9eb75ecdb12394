"""Progress of runs: a bar on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from importlib import import_module
from typing import Any

from fewer.runs.callbacks import Callback, Metrics, Run, check_callbacks
from fewer.statistics import format_duration, format_megabytes

REFRESH_SECONDS = 0.1
"""A bar is drawn at most this often within a round."""


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
        if "epsilon" in metrics:
            parts.append(f"ε {metrics['epsilon']:.3g} (δ {metrics['delta']:g})")
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


class _Bar(ProgressLines, ABC):
    """A bar that also advances within a round. It uses no thread, so that workers can be forked."""

    drawn = 0.0

    def on_answer(self, run: Run, answered: int, asked: int) -> None:
        """Advances the bar within the round."""
        if (now := time.monotonic()) - self.drawn >= REFRESH_SECONDS:
            self.drawn = now
            self.draw(run, len(run.history) + min(answered / asked, 0.99))

    def show(self, run: Run, text: str) -> None:
        """Draws the bar after a round."""
        self.text = text or "…"
        self.draw(run, len(run.history))

    @abstractmethod
    def draw(self, run: Run, completed: float) -> None:
        """Draws the bar; `completed` counts rounds."""


@dataclass
class TerminalBar(_Bar):
    """A bar per run on a terminal."""

    bars: Any
    task: Any = None

    def on_run_start(self, run: Run) -> None:
        """Adds a bar."""
        self.task = self.bars.add_task(run.label, total=run.method.rounds, text="", done="")
        super().on_run_start(run)

    def draw(self, run: Run, completed: float) -> None:
        """Draws the bar."""
        done = f"{len(run.history)}/{run.method.rounds}"
        self.bars.update(self.task, completed=completed, done=done, text=self.text, refresh=True)


class NotebookBar(_Bar):
    """A bar in the output of a notebook's cell. The bar of the next run replaces it."""

    handle: Any = None

    def draw(self, run: Run, completed: float) -> None:
        """Draws the bar, as HTML and as plain text."""
        rounds = run.method.rounds
        line = f"{run.label}  {len(run.history)}/{rounds}  {self.text}"
        bar = f'<progress value="{completed:.2f}" max="{rounds}"></progress>'
        content = {"text/plain": line, "text/html": f"{bar} <code>{escape(line)}</code>"}
        if self.handle is None:
            self.handle = import_module("IPython.display").display(content, raw=True, display_id=True)
        else:
            self.handle.update(content, raw=True)


def in_notebook() -> bool:
    """True if this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


@contextmanager
def show_progress(progress: bool | None, callbacks: Sequence[Callback] = ()) -> Iterator[Sequence[Callback]]:
    """Yields the callbacks, and one more that displays the progress of runs unless `progress` is False.

    None displays a bar on a terminal and in a notebook, and nothing elsewhere; True displays lines there.
    """
    check_callbacks(callbacks)
    if progress is False:
        yield callbacks
    elif in_notebook():
        yield [*callbacks, NotebookBar()]
    elif not sys.stderr.isatty():
        yield [*callbacks, ProgressLines()] if progress else callbacks
    else:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        label, done, text = (f"{{task.{name}}}" for name in ("description", "fields[done]", "fields[text]"))
        columns = TextColumn(label, markup=False), BarColumn(24), TextColumn(done), TextColumn(text, markup=False)
        same_terminal = sys.stdout.isatty()  # otherwise, what the user prints must not appear among the bars
        options: dict[str, Any] = {"auto_refresh": False, "redirect_stdout": same_terminal}
        with Progress(*columns, console=Console(stderr=True), **options) as bars:
            yield [*callbacks, TerminalBar(bars)]
