"""Groups runs by method for reports, one run per seed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewer.errors import FewerError, RunError
from fewer.experiments.recipes import RECIPE_FILE
from fewer.methods import Method, find
from fewer.plugins import needs_import
from fewer.report.metrics import MB
from fewer.runs.metric import PrimaryMetric
from fewer.runs.reader import RunReader
from fewer.statistics import Interval, half_width, interval


def find_method(run: RunReader) -> type[Method] | None:
    """The method of a run; None if it is not installed, or lives in a file: reports do not execute user files."""
    name = str(run.settings["method"])
    try:
        return None if needs_import(name) else find(name)
    except FewerError:  # a plugin that is no longer installed
        return None


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
    def find(cls, run: RunReader) -> TablePosition | None:
        """Position of a run; None if it does not belong to a recipe."""
        try:
            recipe = json.loads((run.path.resolve().parents[1] / RECIPE_FILE).read_text())
            key = f"{run.path.resolve().parent.name}/{run.path.resolve().name.rpartition('-seed')[0]}"
            about = f"{recipe['title']}. Paper: {recipe['paper']}."
            return cls(**recipe["cells"][key], mean=recipe["mean"], quick=recipe["quick"], about=about)
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return None

    def measure(self, runs: Sequence[RunReader]) -> Interval | None:
        """Our accuracy, averaged as the recipe says."""
        if self.mean == "samples":
            return RunGroup(self.row, runs).value
        by_client = [list(run.history[-1].get("clients", {}).values()) for run in runs]
        return interval([interval(values).mean for values in by_client]) if all(by_client) else None


@dataclass(frozen=True)
class RunGroup:
    """Runs of one method with the same settings, in the order of their seeds."""

    label: str
    runs: Sequence[RunReader]

    @property
    def method_name(self) -> str:
        """Name of the method."""
        return self.runs[0].method_name

    @property
    def finished(self) -> bool:
        """True if all runs have finished."""
        return not any(run.unfinished for run in self.runs)

    @property
    def metric(self) -> PrimaryMetric:
        """The metric that ranks methods."""
        return self.runs[0].metric

    @property
    def value(self) -> Interval | None:
        """The primary metric over seeds; if runs were evaluated on groups, the interval is over groups."""
        groups = [value for run in self.runs for value in run.history[-1].get("groups", ())]
        over_seeds = _known_interval([run.value for run in self.runs])
        return Interval(over_seeds.mean, half_width(groups)) if over_seeds and groups else over_seeds

    @property
    def averaged_over(self) -> str:
        """What the primary metric is averaged over."""
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
    def global_value(self) -> Interval | None:
        """The primary metric on all clients' test samples, over the evaluated seeds."""
        return _known_interval([run.global_value for run in self.runs])

    @property
    def last_metrics(self) -> list[dict[str, Any]]:
        """The metrics of the last round, for each seed."""
        return [run.history[-1] for run in self.runs]

    def mean_if_known(self, metric: str) -> float | None:
        """Mean over seeds of a metric in the last round; None if a run lacks it."""
        values = [value for metrics in self.last_metrics if isinstance(value := metrics.get(metric), int | float)]
        return interval(values).mean if len(values) == len(self.runs) else None

    def last_mean(self, metric: str) -> float:
        """Mean over seeds of a metric in the last round."""
        return interval([run.history[-1][metric] for run in self.runs]).mean

    @property
    def epsilon(self) -> float | None:
        """The largest ε over seeds; None without differential privacy."""
        return max((run.history[-1]["epsilon"] for run in self.runs if "epsilon" in run.history[-1]), default=None)

    @property
    def megabytes(self) -> tuple[float, float]:
        """MB sent up and down, mean over seeds."""
        return self.last_mean("up") / MB, self.last_mean("down") / MB

    @property
    def rounds(self) -> str:
        """Number of completed rounds, and of planned rounds if there are more."""
        done = sorted({len(run.history) for run in self.runs})
        planned = self.runs[0].rounds
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
    opened = [RunReader(path) for path in {path.resolve(): path for path in paths}.values()]
    if not opened:
        raise RunError("no runs to report on: pass one or more run directories")
    runs = [run for run in opened if run.metadata and run.history]  # metadata first: is it a run directory at all?
    if not runs:
        raise RunError(f"{opened[0].path} has no completed round yet")
    groups: dict[str, list[RunReader]] = {}
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


def _make_labels(runs: Sequence[RunReader]) -> list[str]:
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
