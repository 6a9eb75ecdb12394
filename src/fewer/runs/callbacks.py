"""Callbacks follow a run, and may end it early: `fewer.run(…, callbacks=[EarlyStopping(patience=3)])`."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fewer.errors import SettingError
from fewer.privacy import PrivacyLedger
from fewer.runs.result import Result, scalars
from fewer.runs.settings import METHOD_SETTINGS
from fewer.runtime import Absent
from fewer.wire import Ledger

_LOG = logging.getLogger("fewer")

Metrics = Mapping[str, Any]
"""The metrics of one round: a line of metrics.jsonl."""


@dataclass(repr=False, kw_only=True)
class Run(Result):
    """A run under way, as callbacks see it: the `Result` so far. `fewer.run` returns it."""

    path: Path | None = None
    """The run directory, if there is one."""
    label: str = ""
    """The name in progress displays: the method, or the run directory."""
    group: str = ""
    """The runs of a comparison that share a row in progress displays; the label by default."""
    group_size: int = 1
    """The number of runs in the group."""
    round: int = 0
    """The number of the current round."""
    absent: list[Absent] = field(default_factory=list)
    """The clients without a usable answer in the current round."""
    ledger: Ledger = field(default_factory=Ledger)
    """The bytes of all messages."""
    privacy: PrivacyLedger | None = None
    """The noise, and all that it protected; None without differential privacy."""
    transport_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes as the transport packs them; known at the end, if the runtime counts them."""
    evaluates_again: bool = False
    """True if the latest round is to be evaluated again, since it was the last one before the run was extended."""
    stop_request: str = ""
    """The reason of the first call of `stop`."""

    def stop(self, reason: str) -> None:
        """Ends the run after this round, or after the next one if this round is not evaluated."""
        self.stop_request = self.stop_request or reason or "a callback stopped the run"

    @property
    def finished(self) -> bool:
        """True if the run needs no further round."""
        return bool(self.stopped) or len(self.history) == self.method.rounds

    def end_reason(self, error: BaseException | None) -> str:
        """Why the run ended early: the error that interrupted it, or what a callback said; empty if it did not."""
        return self.stopped if error is None else f"{type(error).__name__}: {error}"

    def hyperparameters(self) -> dict[str, Any]:
        """All settings with the method's options, as plain values."""
        repeated = {"method_options", *METHOD_SETTINGS}  # they are among the method's fields
        settings = self.settings.model_dump(mode="json", exclude={*repeated, "data_dir"})
        return {**self.method.model_dump(mode="json"), **settings}


class Callback:
    """Follows a run. Override the hooks you need; each gets the `Run` first.

    A callback may follow several runs in turn, so `on_run_start` resets what it keeps. An exception in a hook stops the
    run; it can be resumed.
    """

    def on_run_start(self, run: Run) -> None:
        """Called before the first round, and on resume. `run.history` has the metrics of the finished rounds."""

    def on_round_start(self, run: Run) -> None:
        """Called before round `run.round`."""

    def on_answer(self, run: Run, answered: int, asked: int) -> None:
        """Called after each answer: `answered` of `asked` clients have answered this question."""

    def on_absent(self, run: Run, absent: Absent, handler: str) -> None:
        """Called for each client without a usable answer: `absent.client`, `absent.reason`, `absent.detail`."""

    def on_round_end(self, run: Run, metrics: Metrics) -> None:
        """Called after each round, before it is recorded. `metrics` is also `run.history[-1]`."""

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Called at the end. `error` is what interrupted the run, and None if the run is finished."""


class Tracker(Callback):
    """A callback that `track=NAME` finds in the entry-point group `fewer.trackers`.

    It needs a run directory. It is called after a round is recorded. If it fails, it is dropped with a warning.
    """

    name = ""
    required = True
    """True if the user requested it just now; then it must start."""


@dataclass
class EarlyStopping(Callback):
    """Ends a run when a metric has not improved by more than `min_delta` in `patience` evaluations.

    `metric` is a name in the metrics of a round, such as "loss"; by default the primary metric. `mode` says whether
    "max" or "min" is better; by default it follows from the metric. A resumed run makes the same decision as an
    uninterrupted one.
    """

    metric: str | None = None
    patience: int = 3
    min_delta: float = 0.0
    mode: Literal["max", "min"] | None = None

    def __post_init__(self) -> None:
        if self.patience < 1 or self.min_delta < 0 or self.mode not in (None, "max", "min"):
            raise SettingError(
                "EarlyStopping needs patience >= 1, min_delta >= 0 and mode = max or min, "
                f"got {self.patience}, {self.min_delta} and {self.mode!r}"
            )

    def on_run_start(self, run: Run) -> None:
        """Counts the finished rounds."""
        self.name = self.metric or run.metric.name
        directions = {metric.name: metric.higher_is_better for metric in run.task.metrics}
        higher_is_better = (
            directions.get(self.name, self.name not in ("loss", "ece")) if self.mode is None else self.mode == "max"
        )
        self.sign = 1 if higher_is_better else -1
        self.best, self.since_best = -math.inf, 0
        for metrics in run.history:
            self._count(metrics)

    def on_round_end(self, run: Run, metrics: Metrics) -> None:
        """Stops the run after `patience` evaluations without improvement."""
        if self.name not in (numbers := scalars(metrics)) and run.round % run.settings.evaluate_every == 0:
            problem = f"{run.method.name} has no metric '{self.name}'"
            raise SettingError(f"EarlyStopping: {problem} (allowed: {', '.join(numbers)})")
        self._count(metrics)
        if self.since_best >= self.patience:
            best = self.sign * self.best
            run.stop(f"{self.name} has not improved on {best:.4g} in {self.patience} evaluations")

    def _count(self, metrics: Metrics) -> None:
        value = scalars(metrics).get(self.name)
        if value is None:  # the round was not evaluated
            return
        if self.sign * value > self.best + self.min_delta:
            self.best, self.since_best = self.sign * value, 0
        else:
            self.since_best += 1


@dataclass
class Label(Callback):
    """Names a run, and the group of runs that it belongs to, in progress displays."""

    label: str
    group: str = ""
    group_size: int = 1

    def on_run_start(self, run: Run) -> None:
        """Sets the label and the group."""
        run.label, run.group, run.group_size = self.label, self.group, self.group_size


@dataclass
class Observers:
    """All callbacks of a run. `recorders` write down what happens; `callbacks` may also stop the run."""

    run: Run
    recorders: Sequence[Callback]
    callbacks: Sequence[Callback]
    _active: set[int] = field(default_factory=set)
    """The ids of the callbacks that have started and not failed."""

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Calls `on_run_start` now and `on_run_end` at the end, in the same order."""
        error: BaseException | None = None
        try:
            for callback in (*self.recorders, *self.callbacks):
                self._active.add(id(callback))
                self._call(callback, "on_run_start")
            yield
        except BaseException as caught:  # Ctrl-C, too
            error = caught
            raise
        finally:
            self.notify("on_run_end", error)

    def notify(self, hook: str, *arguments: Any, among: Sequence[Callback] | None = None) -> None:
        """Calls a hook of all callbacks, or of those `among` them."""
        for callback in (*self.recorders, *self.callbacks) if among is None else among:
            self._call(callback, hook, *arguments)

    def _call(self, callback: Callback, hook: str, *arguments: Any) -> None:
        """Calls one hook. A tracker that fails is dropped."""
        if id(callback) not in self._active:
            return
        try:
            getattr(callback, hook)(self.run, *arguments)
        except BaseException as error:
            if hook == "on_run_start":
                self._active.remove(id(callback))  # it has not started, so it does not end
            if not isinstance(callback, Tracker) or not isinstance(error, Exception):
                raise
            self._active.discard(id(callback))
            problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if hook == "on_run_start" and callback.required:
                raise SettingError(f"tracker '{callback.name}' cannot start: {problem}") from error
            _LOG.warning(f"tracker '{callback.name}' is no longer used: {problem}")


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raises SettingError if one is not a callback."""
    if not isinstance(callbacks, list | tuple):
        raise SettingError(f"callbacks must be a list, such as [EarlyStopping()], got {type(callbacks).__name__}")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            kind = f"the class {callback.__name__}" if isinstance(callback, type) else type(callback).__name__
            raise SettingError(f"callbacks must be objects of type fewer.Callback, got {kind}")
