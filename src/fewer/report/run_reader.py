"""Reads run directories for reports and groups them by method, one run per seed."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewer.errors import FewerError, RunError
from fewer.experiments.recipes import RECIPE_FILE
from fewer.plugins import needs_import
from fewer.report.metrics import MB, Interval, interval
from fewer.runs.directory import EVENTS, RunDirectory
from fewer.runs.settings import METHOD_SETTINGS, RUNTIME_SETTINGS, Settings
from fewer.runs.statistics import half_width
from fewer.wire.ledger import EVALUATION, Entry

if TYPE_CHECKING:
    from fewer.methods import Method

_METHOD = ("method", *METHOD_SETTINGS, "method_options")
"""Settings that choose the method; the metadata has the method's options, resolved."""
_SEEDS = ("seed", "data_seed")
_EVALUATION = ("evaluate_every",)
"""Evaluation settings, which do not affect results."""
LEDGER = "ledger.csv"


@dataclass(frozen=True)
class Run:
    """The content of a run directory."""

    path: Path
    metadata: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]

    @classmethod
    def open(cls, path: Path) -> Run:
        """Reads a run directory; RunError if it is not one, or is damaged."""
        directory = RunDirectory.open(path)
        history = directory.history()
        try:
            lines = (path / EVENTS).read_text().splitlines() if history else []
        except (OSError, ValueError) as error:
            raise RunError(f"{path} is damaged: {EVENTS} cannot be read ({error})") from error
        return cls(path, directory.metadata, history, list(_parse_events(lines)))

    @property
    def method_name(self) -> str:
        """Name of the method."""
        names = (str(event["method"]) for event in self.events if event["event"] == "start" and "method" in event)
        return next(names, str(self.settings["method"]))

    @property
    def method_class(self) -> type[Method] | None:
        """Class of the method; None if it is not installed, or lives in a file: reports do not execute user files."""
        from fewer.methods import find

        name = str(self.settings["method"])
        try:
            return None if needs_import(name) else find(name)
        except FewerError:  # a plugin that is no longer installed
            return None

    @property
    def settings(self) -> Mapping[str, Any]:
        """All settings except the method's own."""
        settings: Mapping[str, Any] = self.metadata["settings"]
        return settings

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return int(self.settings["seed"])

    @property
    def data_seed(self) -> int:
        """Seed of the partition."""
        return self.seed if self.settings["data_seed"] is None else int(self.settings["data_seed"])

    @property
    def accuracy(self) -> float | None:
        """Last measured accuracy."""
        return next((entry["accuracy"] for entry in reversed(self.history) if "accuracy" in entry), None)

    @property
    def global_accuracy(self) -> float | None:
        """Accuracy of each client's model on all clients' test samples; known once a run has finished."""
        default = None if self.unfinished else self.accuracy
        accuracy: float | None = self.history[-1].get("global_accuracy", default)
        return accuracy

    @cached_property
    def traffic(self) -> Counter[tuple[str, str]]:
        """Training bytes by direction and kind, over the completed rounds."""
        traffic: Counter[tuple[str, str]] = Counter()
        for entry in self._training_messages():
            traffic[entry.direction, entry.kind] += entry.bytes
        return traffic

    @cached_property
    def hops(self) -> Counter[tuple[int, int, str]]:
        """Relayed messages by source, target and kind. A relayed message goes up, then directly down."""
        hops: Counter[tuple[int, int, str]] = Counter()
        for sent, received in pairwise(self._training_messages()):
            same_content = (sent.round, sent.kind, sent.bytes) == (received.round, received.kind, received.bytes)
            if same_content and (sent.direction, received.direction) == ("up", "down"):
                hops[sent.client, received.client, sent.kind] += 1
        return hops

    def _training_messages(self) -> Iterator[Entry]:
        """Training messages in the order they were sent; RunError if the ledger is damaged."""
        done = len(self.history)
        try:
            with (self.path / LEDGER).open(newline="") as file:
                lines = csv.reader(file)
                next(lines, None)
                for number, client, direction, kind, size in lines:
                    if int(number) > done:  # a round in progress, not complete yet
                        return
                    if not kind.startswith(EVALUATION):
                        yield Entry(int(number), int(client), "up" if direction == "up" else "down", kind, int(size))
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path} is damaged: {LEDGER} cannot be read ({error})") from error

    @property
    def interruptions(self) -> int:
        """How often the run was stopped or killed before its end and then resumed."""
        return sum(event["event"] == "resume" and event.get("round", 0) < len(self.history) for event in self.events)

    @property
    def transport_megabytes(self) -> tuple[float, float] | None:
        """MB up and down of all messages on the wire, if the runtime records them."""
        if not any("transport_up" in event for event in self.events):
            return None
        up, down = (
            sum(event.get(f"transport_{direction}", 0) for event in self.events) / MB for direction in ("up", "down")
        )
        return up, down

    @property
    def unfinished(self) -> str:
        """How far an unfinished run has come, and why it stopped; empty for a finished run."""
        planned, done = self.metadata["method"]["rounds"], len(self.history)
        if done == planned or (self.events and self.events[-1]["event"] == "finish"):  # a callback may end a run early
            return ""
        reason = self.events[-1].get("reason") if self.events else None
        return f"is at round {done} of {planned}" + (f"; it stopped: {reason}" if reason else "")

    @property
    def absences(self) -> list[Mapping[str, Any]]:
        """Events of absent answers. If a round was repeated after a resume, only its last attempt counts."""
        absences: dict[tuple[int, int | None, str | None], Mapping[str, Any]] = {}
        for event in self.events:
            if event["event"] == "absent":
                absences[event.get("round", 0), event.get("client"), event.get("handler")] = event
            elif event["event"] in ("start", "resume"):  # rounds after the last checkpoint are repeated
                done = event.get("round", 0)
                absences = {key: absence for key, absence in absences.items() if key[0] <= done}
        return list(absences.values())

    @property
    def absent_counts(self) -> Counter[str]:
        """Number of absent answers by reason."""
        return Counter(str(event.get("reason", "?")) for event in self.absences)

    @property
    def task_settings(self) -> dict[str, Any]:
        """Settings that affect results, except the method's own and the seeds."""
        hidden = (*RUNTIME_SETTINGS, *_METHOD, *_SEEDS, *_EVALUATION)
        return {key: value for key, value in self.settings.items() if key not in hidden}

    @property
    def data_settings(self) -> dict[str, Any]:
        """Settings of the data and its partition."""
        fields = Settings.model_fields
        return {
            key: value for key, value in self.task_settings.items() if key in fields and fields[key].title == "Data"
        }

    @property
    def data_summary(self) -> str:
        """Name of the data, number of clients and partition."""
        name, clients = self.metadata["data"]["name"], self.metadata["data"]["clients"]
        if "data" in self.metadata["objects"]:
            return f"{name}, {clients} clients"
        partition, alpha = self.settings["partition"], self.settings["alpha"]
        skew = f" (alpha {alpha:g})" if partition in ("dirichlet", "dirichlet-pairs", "quantity") else ""
        return f"{name}, {clients} clients, {partition}{skew}"


@dataclass(frozen=True)
class TablePosition:
    """The cell of a recipe's table that runs belong to."""

    row: str
    column: str
    paper: float | None
    """The paper's value, in %."""
    mean: str
    """What the recipe averages accuracy over: samples or clients."""
    quick: bool
    about: str

    @classmethod
    def find(cls, run: Run) -> TablePosition | None:
        """Position of a run; None if it does not belong to a recipe."""
        try:
            recipe = json.loads((run.path.resolve().parents[1] / RECIPE_FILE).read_text())
            key = f"{run.path.resolve().parent.name}/{run.path.resolve().name.rpartition('-seed')[0]}"
            about = f"{recipe['title']}. Paper: {recipe['paper']}."
            return cls(**recipe["cells"][key], mean=recipe["mean"], quick=recipe["quick"], about=about)
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return None

    def measure(self, runs: Sequence[Run]) -> Interval | None:
        """Our accuracy, averaged as the recipe says."""
        if self.mean == "samples":
            return RunGroup(self.row, runs).accuracy
        by_client = [list(run.history[-1].get("clients", {}).values()) for run in runs]
        return interval([interval(values).mean for values in by_client]) if all(by_client) else None


@dataclass(frozen=True)
class RunGroup:
    """Runs of one method with the same settings, in the order of their seeds."""

    label: str
    runs: Sequence[Run]

    @property
    def method_name(self) -> str:
        """Name of the method."""
        return self.runs[0].method_name

    @property
    def table_position(self) -> TablePosition | None:
        """Cell of a recipe's table that the runs belong to, if any."""
        return TablePosition.find(self.runs[0])

    @property
    def finished(self) -> bool:
        """True if all runs have finished."""
        return not any(run.unfinished for run in self.runs)

    @property
    def accuracy(self) -> Interval | None:
        """Accuracy over the evaluated seeds; if runs were evaluated on groups, the interval is over groups."""
        groups = [accuracy for run in self.runs for accuracy in run.history[-1].get("groups", ())]
        over_seeds = _known_interval([run.accuracy for run in self.runs])
        return Interval(over_seeds.mean, half_width(groups)) if over_seeds and groups else over_seeds

    @property
    def averaged_over(self) -> str:
        """What the accuracy is averaged over."""
        groups = sum(len(run.history[-1].get("groups", ())) for run in self.runs)
        return f"{groups} {self.units}" if groups else "1 seed" if len(self.runs) == 1 else f"{len(self.runs)} seeds"

    @property
    def units(self) -> str | None:
        """What runs were evaluated on instead of clients: "groups" or "tasks"; None for clients."""
        last = [run.history[-1] for run in self.runs if "groups" in run.history[-1]]
        return None if not last else "tasks" if "tasks" in last[0] else "groups"

    @property
    def traffic(self) -> dict[tuple[str, str], float]:
        """Training bytes by direction and kind, mean over seeds."""
        total = sum((run.traffic for run in self.runs), Counter())
        return {key: size / len(self.runs) for key, size in total.items()}

    @property
    def global_accuracy(self) -> Interval | None:
        """Global accuracy over the evaluated seeds."""
        return _known_interval([run.global_accuracy for run in self.runs])

    def last_mean(self, metric: str) -> float:
        """Mean over seeds of a metric in the last round."""
        return interval([run.history[-1][metric] for run in self.runs]).mean

    @property
    def megabytes(self) -> tuple[float, float]:
        """MB sent up and down, mean over seeds."""
        return self.last_mean("up") / MB, self.last_mean("down") / MB

    @property
    def rounds(self) -> str:
        """Number of completed rounds, and of planned rounds if there are more."""
        done = sorted({len(run.history) for run in self.runs})
        planned = self.runs[0].metadata["method"]["rounds"]
        text = f"{done[0]}" if len(done) == 1 else f"{done[0]} to {done[-1]}"
        return text if done == [planned] else f"{text} of {planned}"

    @property
    def absent_counts(self) -> Counter[str]:
        """Number of absent answers in all runs, by reason."""
        return sum((run.absent_counts for run in self.runs), Counter())


def group_runs(paths: Sequence[Path]) -> tuple[list[RunGroup], list[Path]]:
    """Groups runs by method, in order of appearance. Also returns the runs without a completed round.

    Runs in a group differ only in the seed, and a group has at most one run per seed.
    """
    opened = [Run.open(path) for path in {path.resolve(): path for path in paths}.values()]
    if not opened:
        raise RunError("no runs to report on: pass one or more run directories")
    runs = [run for run in opened if run.history]
    if not runs:
        raise RunError(f"{opened[0].path} has no completed round yet")
    groups: dict[str, list[Run]] = {}
    for run in runs:
        key = json.dumps([run.method_name, run.task_settings, run.metadata["method"]], sort_keys=True)
        number = 0
        while any(run.seed == other.seed for other in groups.get(f"{key} {number}", ())):
            number += 1
        groups.setdefault(f"{key} {number}", []).append(run)
    by_seed = [sorted(group, key=lambda run: run.seed) for group in groups.values()]
    labels = _make_labels([group[0] for group in by_seed])
    empty = [run.path for run in opened if not run.history]
    return [RunGroup(label, group) for label, group in zip(labels, by_seed, strict=True)], empty


def _make_labels(runs: Sequence[Run]) -> list[str]:
    """Names of the methods; if one appears twice, with up to two settings that differ, or else a number."""
    labels: list[str] = []
    for run in runs:
        same_method = [other for other in runs if other.method_name == run.method_name]
        same_method_settings = [{**other.task_settings, **other.metadata["method"]} for other in same_method]
        settings = {**run.task_settings, **run.metadata["method"]}
        parts = [f"{key}={settings[key]}" for key in differing_settings(same_method_settings)]
        label = " ".join([run.method_name, *parts]) if len(parts) <= 2 else run.method_name
        candidates = (label, *(f"{label} ({number})" for number in range(2, len(runs) + 1)))
        labels.append(next(candidate for candidate in candidates if candidate not in labels))
    return labels


def differing_settings(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the settings whose values are not all the same."""
    return [key for key in settings[0] if any(other.get(key) != settings[0][key] for other in settings)]


def _known_interval(values: Sequence[float | None]) -> Interval | None:
    known = [value for value in values if value is not None]
    return interval(known) if known else None


def _parse_events(lines: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Parses the events of a run. Skips lines that a kill cut short."""
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event:
            yield event
