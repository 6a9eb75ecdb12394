"""Run directories as a report sees them: put together by method, one run for each seed."""

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
from fewer.experiments.recipes import RECIPE
from fewer.plugins import in_file
from fewer.report.figures import MB, Interval, interval
from fewer.runs.directory import EVENTS, RunDirectory
from fewer.runs.settings import OUTSIDE, Settings
from fewer.runs.statistics import half_width
from fewer.wire.ledger import EVALUATION, Entry

if TYPE_CHECKING:
    from fewer.methods import Method

_METHOD = ("method", "rounds", "cohort", "method_options")
"""Settings that say which method, and of it what; the method's own settings tell the same, resolved."""
_SEEDS = ("seed", "data_seed")
_LOOKING = ("evaluate_every",)
"""Settings of how a run is watched, on which no figure depends."""
LEDGER = "ledger.csv"


@dataclass(frozen=True)
class Run:
    """What a run directory tells."""

    path: Path
    description: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]

    @classmethod
    def open(cls, path: Path) -> Run:
        """RunError where the directory is no run, or is damaged."""
        directory = RunDirectory.open(path)
        history = directory.history()
        try:
            lines = (path / EVENTS).read_text().splitlines() if history else []
        except (OSError, ValueError) as error:
            raise RunError(f"{path} is damaged: {EVENTS} cannot be read ({error})") from error
        return cls(path, directory.description, history, list(_events(lines)))

    @property
    def name(self) -> str:
        """The name of the method."""
        told = (str(event["method"]) for event in self.events if event["event"] == "start" and "method" in event)
        return next(told, str(self.settings["method"]))

    @property
    def kind(self) -> type[Method] | None:
        """The method's class; None where it is gone, or in a file: whoever looks at a run does not run its code."""
        from fewer.methods import find

        name = str(self.settings["method"])
        try:
            return None if in_file(name) else find(name)
        except FewerError:  # a plug-in that is gone
            return None

    @property
    def settings(self) -> Mapping[str, Any]:
        """All settings but the method's own."""
        settings: Mapping[str, Any] = self.description["settings"]
        return settings

    @property
    def seed(self) -> int:
        """Of everything random."""
        return int(self.settings["seed"])

    @property
    def data_seed(self) -> int:
        """Of the division of the data."""
        return self.seed if self.settings["data_seed"] is None else int(self.settings["data_seed"])

    @property
    def accuracy(self) -> float | None:
        """The last that was measured."""
        return next((line["accuracy"] for line in reversed(self.history) if "accuracy" in line), None)

    @property
    def global_accuracy(self) -> float | None:
        """The same, with each client's model judged on all clients' test samples; known when a run has finished."""
        found: float | None = self.history[-1].get("global_accuracy", None if self.unfinished else self.accuracy)
        return found

    @cached_property
    def traffic(self) -> Counter[tuple[str, str]]:
        """Bytes of learning by direction and kind, in the rounds that have ended."""
        found: Counter[tuple[str, str]] = Counter()
        for entry in self._messages():
            found[entry.direction, entry.kind] += entry.bytes
        return found

    @cached_property
    def hops(self) -> Counter[tuple[int, int, str]]:
        """How often a message of a kind went on from one client to another: it is sent, and right then received."""
        found: Counter[tuple[int, int, str]] = Counter()
        for one, other in pairwise(self._messages()):
            alike = (one.round, one.kind, one.bytes) == (other.round, other.kind, other.bytes)
            if alike and (one.direction, other.direction) == ("up", "down"):
                found[one.client, other.client, one.kind] += 1
        return found

    def _messages(self) -> Iterator[Entry]:
        """The messages of learning, in the order in which they went; RunError where the ledger is damaged."""
        done = len(self.history)
        try:
            with (self.path / LEDGER).open(newline="") as file:
                lines = csv.reader(file)
                next(lines, None)
                for number, client, way, kind, size in lines:
                    if int(number) > done:  # a round under way, of which not all is there yet
                        return
                    if not kind.startswith(EVALUATION):
                        yield Entry(int(number), int(client), "up" if way == "up" else "down", kind, int(size))
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path} is damaged: {LEDGER} cannot be read ({error})") from error

    @property
    def breaks(self) -> int:
        """How often the run was stopped or killed before its end, and went on."""
        return sum(event["event"] == "resume" and event.get("round", 0) < len(self.history) for event in self.events)

    @property
    def packed(self) -> tuple[float, float] | None:
        """MB up and down that the carrier made of all messages, where it says so."""
        if not any("packed_up" in event for event in self.events):
            return None
        up, down = (sum(event.get(f"packed_{way}", 0) for event in self.events) / MB for way in ("up", "down"))
        return up, down

    @property
    def unfinished(self) -> str:
        """How far a run has come and why it stopped, if it did; empty for a finished one."""
        planned, done = self.description["method"]["rounds"], len(self.history)
        if done == planned:
            return ""
        reason = self.events[-1].get("reason") if self.events else None
        return f"has come to round {done} of {planned}" + (f", then stopped: {reason}" if reason else "")

    @property
    def missing(self) -> list[Mapping[str, Any]]:
        """The answers that were absent. Of a round that was begun anew, what happened last."""
        found: dict[tuple[int, int | None, str | None], Mapping[str, Any]] = {}
        for event in self.events:
            if event["event"] == "absent":
                found[event.get("round", 0), event.get("client"), event.get("handler")] = event
            elif event["event"] in ("start", "resume"):  # rounds after the last checkpoint are done again
                found = {key: one for key, one in found.items() if key[0] <= event.get("round", 0)}
        return list(found.values())

    @property
    def absent(self) -> Counter[str]:
        """How many answers were absent, by reason."""
        return Counter(str(event.get("why", "?")) for event in self.missing)

    @property
    def facts(self) -> dict[str, Any]:
        """The settings on which the figures depend, but for the method's own and the seeds."""
        hidden = (*OUTSIDE, *_METHOD, *_SEEDS, *_LOOKING)
        return {key: value for key, value in self.settings.items() if key not in hidden}

    @property
    def division(self) -> dict[str, Any]:
        """The settings that say what data there is and how it is divided."""
        fields = Settings.model_fields
        return {key: value for key, value in self.facts.items() if key in fields and fields[key].title == "Data"}

    @property
    def data(self) -> str:
        """The data, how many clients it is divided among, and how."""
        name, clients = self.description["data"]["name"], self.description["data"]["clients"]
        if "data" in self.description["own"]:
            return f"{name}, {clients} clients"
        partition, alpha = self.settings["partition"], self.settings["alpha"]
        skew = f" (alpha {alpha:g})" if partition in ("dirichlet", "dirichlet-pairs", "quantity") else ""
        return f"{name}, {clients} clients, {partition}{skew}"


@dataclass(frozen=True)
class TablePosition:
    """Where runs stand in the table of a recipe."""

    row: str
    column: str
    paper: float | None
    """The paper's figure, in %."""
    mean: str
    """What the recipe's accuracy is the mean over: samples or clients."""
    quick: bool
    about: str

    @classmethod
    def of(cls, run: Run) -> TablePosition | None:
        """None where a run is not of a recipe."""
        try:
            told = json.loads((run.path.resolve().parents[1] / RECIPE).read_text())
            key = f"{run.path.resolve().parent.name}/{run.path.resolve().name.rpartition('-seed')[0]}"
            cell = told["cells"][key]
            return cls(
                **cell, mean=told["mean"], quick=told["quick"], about=f"{told['title']}. Paper: {told['paper']}."
            )
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return None

    def measured(self, runs: Sequence[Run]) -> Interval | None:
        """Our figure, as the recipe has it."""
        if self.mean == "samples":
            return RunGroup(self.row, runs).accuracy
        ends = [list(run.history[-1].get("clients", {}).values()) for run in runs]
        return interval([interval(each).mean for each in ends]) if all(ends) else None


@dataclass(frozen=True)
class RunGroup:
    """The runs of one method with the same settings, in the order of their seeds."""

    label: str
    runs: Sequence[Run]

    @property
    def name(self) -> str:
        """The name of the method."""
        return self.runs[0].name

    @property
    def place(self) -> TablePosition | None:
        """Where its runs stand in the table of a recipe, if they are of one."""
        return TablePosition.of(self.runs[0])

    @property
    def finished(self) -> bool:
        """Whether all of its runs have come to their ends."""
        return not any(run.unfinished for run in self.runs)

    @property
    def accuracy(self) -> Interval | None:
        """Over the seeds that were evaluated; its interval is over groups where runs were judged on groups."""
        groups = [accuracy for run in self.runs for accuracy in run.history[-1].get("groups", ())]
        found = _over([run.accuracy for run in self.runs])
        return Interval(found.mean, half_width(groups)) if found and groups else found

    @property
    def over(self) -> str:
        """What the accuracy is the mean of."""
        groups = sum(len(run.history[-1].get("groups", ())) for run in self.runs)
        return f"{groups} {self.units}" if groups else "1 seed" if len(self.runs) == 1 else f"{len(self.runs)} seeds"

    @property
    def units(self) -> str | None:
        """What its runs were judged on one by one and is no client, if there is such a thing: groups, or tasks."""
        judged = [run.history[-1] for run in self.runs if "groups" in run.history[-1]]
        return None if not judged else "tasks" if "tasks" in judged[0] else "groups"

    @property
    def traffic(self) -> dict[tuple[str, str], float]:
        """Bytes of learning by direction and kind, mean over seeds."""
        total = sum((run.traffic for run in self.runs), Counter())
        return {key: size / len(self.runs) for key, size in total.items()}

    @property
    def global_accuracy(self) -> Interval | None:
        """Over the seeds that were evaluated."""
        return _over([run.global_accuracy for run in self.runs])

    def mean(self, figure: str) -> float:
        """The mean of a figure of the last round."""
        return interval([run.history[-1][figure] for run in self.runs]).mean

    @property
    def megabytes(self) -> tuple[float, float]:
        """Sent up and down, mean over seeds."""
        return self.mean("up") / MB, self.mean("down") / MB

    @property
    def rounds(self) -> str:
        """How many rounds were run, and of how many where that is fewer."""
        done = sorted({len(run.history) for run in self.runs})
        planned = self.runs[0].description["method"]["rounds"]
        text = f"{done[0]}" if len(done) == 1 else f"{done[0]} to {done[-1]}"
        return text if done == [planned] else f"{text} of {planned}"

    @property
    def absent(self) -> Counter[str]:
        """How many answers were absent in all runs, by reason."""
        return sum((run.absent for run in self.runs), Counter())


def gather(paths: Sequence[Path]) -> tuple[list[RunGroup], list[Path]]:
    """Runs by method, in the order in which the methods first appear; and the runs in which no round has ended yet.

    Runs whose settings differ in more than the seed are never put together, nor are two runs with the same seed.
    """
    all = [Run.open(path) for path in {path.resolve(): path for path in paths}.values()]
    if not all:
        raise RunError("no runs to report on (expected: run directories)")
    runs = [run for run in all if run.history]
    if not runs:
        raise RunError(f"{all[0].path} has no figures yet: no round has ended")
    groups: dict[str, list[Run]] = {}
    for run in runs:
        what = json.dumps([run.name, run.facts, run.description["method"]], sort_keys=True)
        again = 0
        while any(run.seed == other.seed for other in groups.get(f"{what} {again}", ())):
            again += 1
        groups.setdefault(f"{what} {again}", []).append(run)
    found = [sorted(group, key=lambda run: run.seed) for group in groups.values()]
    labels = _labels([group[0] for group in found])
    early = [run.path for run in all if not run.history]
    return [RunGroup(label, group) for label, group in zip(labels, found, strict=True)], early


def _labels(runs: Sequence[Run]) -> list[str]:
    """The methods' names; where one is there twice, with a setting or two by which they differ, or else a number."""
    labels: list[str] = []
    for run in runs:
        same = [{**other.facts, **other.description["method"]} for other in runs if other.name == run.name]
        told = {**run.facts, **run.description["method"]}
        parts = [f"{key}={told[key]}" for key in differing(same)]
        label = " ".join([run.name, *parts]) if len(parts) <= 2 else run.name
        numbered = (label, *(f"{label} ({number})" for number in range(2, len(runs) + 1)))
        labels.append(next(each for each in numbered if each not in labels))
    return labels


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the settings that are not the same in all."""
    return [key for key in settings[0] if any(each.get(key) != settings[0][key] for each in settings)]


def _over(values: Sequence[float | None]) -> Interval | None:
    known = [value for value in values if value is not None]
    return interval(known) if known else None


def _events(lines: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """What happened; a line that a kill cut short is left out."""
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event:
            yield event
