"""Progress of runs: a bar or a table on a terminal, a bar in a notebook, plain lines elsewhere."""

from __future__ import annotations

import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from typing import Any

from fewer.runs.callbacks import Callback, Metrics, Run, check_callbacks
from fewer.statistics import format_duration, format_megabytes

REFRESH_SECONDS = 0.1
"""A bar is drawn at most this often within a round."""
LINE_SECONDS = 60.0
"""Time between two lines of the same run, if there are many runs."""


@dataclass
class ProgressLines(Callback):
    """Prints one line per round, with the time left."""

    min_seconds: float = 0.0
    """Rounds that end sooner after the last line get no line of their own, unless they are the last ones."""
    printed: float = 0.0

    def on_run_start(self, run: Run) -> None:
        """Starts the clock."""
        self.started, self.finished_rounds, self.metrics = time.monotonic(), len(run.history), dict[str, Any]()
        self.printed = self.started
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
        rounds, now = f"round {len(run.history)}/{run.method.rounds}", time.monotonic()
        if not text:
            line = f"resumes after {rounds}" if run.history and not run.finished else ""
        else:
            is_due = run.finished or now - self.printed >= self.min_seconds
            line = f"{rounds}  {text}" if is_due else ""
        if line:
            self.printed = now
            print(f"{run.label}  {line}", file=sys.stderr, flush=True)


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


class TerminalBar(_Bar):
    """A bar per run on a terminal."""

    task: Any = None

    def __init__(self, bars: Any) -> None:
        super().__init__()
        self.bars = bars

    def on_run_start(self, run: Run) -> None:
        """Adds a bar."""
        self.task = self.bars.add_task(run.label, total=run.method.rounds, text="", done="")
        super().on_run_start(run)

    def draw(self, run: Run, completed: float) -> None:
        """Draws the bar."""
        done = f"{len(run.history)}/{run.method.rounds}"
        self.bars.update(self.task, completed=completed, done=done, text=self.text, refresh=True)


@dataclass
class _TableRow:
    """A group of runs in the table: one value and one time per run, with the current run last."""

    task: Any
    ended_rounds: int = 0
    values: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


@dataclass
class TerminalTable(Callback):
    """A live table on a terminal, with a row for each group of runs: for all seeds of a method, or all its trials."""

    table: Any
    rows: dict[str, _TableRow] = field(default_factory=dict)
    drawn: float = 0.0

    def on_run_start(self, run: Run) -> None:
        """Adds a row, unless the run belongs to one."""
        name, rounds = run.group or run.label, run.method.rounds
        if name not in self.rows:
            texts = dict.fromkeys(("runs", "metric", "sent", "time"), "")
            self.rows[name] = _TableRow(self.table.add_task(name, total=rounds * run.group_size, **texts))
        self.row, self.in_round = self.rows[name], 0.0
        self.row.seconds.append(0.0)
        self.number = len(self.row.seconds)
        for metrics in run.history:  # of a run that is resumed or reused
            self._add(run, metrics)
        self._draw(run)

    def on_answer(self, run: Run, answered: int, asked: int) -> None:
        """Advances the bar within the round."""
        self.in_round = min(answered / asked, 0.99)
        if time.monotonic() - self.drawn >= REFRESH_SECONDS:
            self._draw(run)

    def on_round_end(self, run: Run, metrics: Metrics) -> None:
        """Shows the metrics of the round."""
        self.in_round = 0.0
        self._add(run, metrics)
        self._draw(run)

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Counts a run that ended early as complete."""
        if error is None:
            self.row.ended_rounds += run.method.rounds
            self._draw(run, ended=True)

    def _add(self, run: Run, metrics: Metrics) -> None:
        if run.metric.name in metrics:
            self.row.values[self.number - 1 :] = [metrics[run.metric.name]]
        self.row.seconds[-1] = metrics["seconds"]

    def _draw(self, run: Run, ended: bool = False) -> None:
        row, self.drawn = self.row, time.monotonic()
        last = run.history[-1] if run.history else {}
        texts = {"runs": f"{self.number}/{run.group_size}", "time": format_duration(sum(row.seconds))}
        if row.values:
            texts["metric"] = f"{run.metric.name} {run.metric.format(statistics.fmean(row.values), 1)}"
        if last:
            texts["sent"] = format_megabytes(last["up"] + last["down"])
            texts["sent"] += f", ε {last['epsilon']:.3g}" if "epsilon" in last else ""
        completed = row.ended_rounds + (0 if ended else len(run.history) + self.in_round)
        self.table.update(row.task, completed=completed, refresh=True, **texts)


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
def show_progress(
    progress: bool | None, callbacks: Sequence[Callback] = (), many: bool = False
) -> Iterator[Sequence[Callback]]:
    """Yields the callbacks, and one more that displays the progress of runs unless `progress` is False.

    None displays a bar on a terminal and in a notebook, and nothing elsewhere; True displays lines there. If there are
    `many` runs, a terminal shows a table instead of a bar per run, and there are fewer lines.
    """
    check_callbacks(callbacks)
    if progress is False:
        yield callbacks
    elif in_notebook():
        yield [*callbacks, NotebookBar()]
    elif not sys.stderr.isatty():
        yield [*callbacks, ProgressLines(LINE_SECONDS if many else 0.0)] if progress else callbacks
    else:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
        from rich.table import Table

        console = Console(stderr=True)

        class ProgressTable(Progress):
            """Bars below a line of titles. If not all rows fit on the terminal, it shows the last ones."""

            def make_tasks_table(self, tasks: Iterable[Any]) -> Table:
                """Builds the table."""
                table = Table(*_TITLES, box=None, pad_edge=False)
                for task in list(tasks)[-max(1, console.height - 3) :]:
                    table.add_row(*(column(task) for column in self.columns if isinstance(column, ProgressColumn)))
                return table

        def text(name: str) -> TextColumn:
            return TextColumn(f"{{task.{name}}}", markup=False)

        same_terminal = sys.stdout.isatty()  # otherwise, what the user prints must not appear among the bars
        options: dict[str, Any] = {"console": console, "auto_refresh": False, "redirect_stdout": same_terminal}
        bar, names = BarColumn(24), ("runs", "metric", "sent", "time") if many else ("done", "text")
        columns = text("description"), bar, *(text(f"fields[{name}]") for name in names)
        with (ProgressTable if many else Progress)(*columns, **options) as bars:
            yield [*callbacks, TerminalTable(bars) if many else TerminalBar(bars)]


_TITLES = "method", "progress", "runs", "mean so far", "sent by a run", "time"
