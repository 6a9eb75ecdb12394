"""The same task for several methods and seeds, and one table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from fewer.data import Data
from fewer.errors import RunError, SettingError
from fewer.experiments.tune import Trial, pooled, tune
from fewer.methods import Method, find
from fewer.runs import trackers
from fewer.runs.directory import RunDirectory
from fewer.runs.engine import Progress, resume, start
from fewer.runs.experiment import Experiment, build_experiment, load_data, parse_settings
from fewer.runs.result import Result
from fewer.runs.settings import Settings
from fewer.runs.statistics import half_width
from fewer.runs.views import Shown

MB = 1e6
KEPT = 3
"""Divisions of data that are kept in memory for the next run."""


@dataclass(frozen=True)
class Row:
    """One method over all seeds: means, and the half-width of the 95 % confidence interval of the accuracy."""

    method: str
    """The method's name."""
    accuracy: float
    """Mean over seeds: each test sample judged by the model of the client that it belongs to."""
    ci95: float | None
    """Half of the width of its 95 % interval; None with one seed."""
    global_accuracy: float
    """The same, with each client's model judged on all clients' test samples."""
    rounds: int
    """Rounds of each run."""
    mb_up: float
    """Megabytes that clients sent, mean over seeds."""
    mb_down: float
    """Megabytes that clients got, mean over seeds."""
    seconds: float
    """Of a run, mean over seeds."""
    seeds: list[int]
    """The seeds that were run."""
    accuracies: list[float]
    """One for each seed."""
    curves: list[list[dict[str, Any]]]
    """For each seed the rounds that were evaluated: round, accuracy, bytes up and down and seconds by then."""
    settings: dict[str, Any]
    """The method's own settings."""
    hash: str
    """Of all settings of the run with the first seed."""
    trials: list[Trial] = field(default_factory=list)
    """What was tried to choose them."""
    groups: int = 0
    """Groups that all runs together were judged on, where that is how a method is judged: the interval is over them."""
    units: str = "groups"
    """What they are: groups of clients, or tasks."""
    judged: list[dict[str, float]] = field(default_factory=list)
    """For each seed the accuracies of these groups or, where there are none, of the clients, by their numbers."""


@dataclass(frozen=True)
class Comparison(Shown):
    """Rows in the order in which the methods were named, and what they share. It shows itself in a notebook."""

    view: ClassVar[str] = "comparison"

    rows: list[Row]
    settings: dict[str, Any]
    clients: int

    def records(self) -> list[dict[str, Any]]:
        """The figures of each method."""
        names = ("method", "accuracy", "ci95", "global_accuracy", "rounds", "mb_up", "mb_down", "seconds")
        return [{name: getattr(row, name) for name in names} | {"seeds": len(row.seeds)} for row in self.rows]

    def as_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return asdict(self)


Watch = Callable[[str], Progress | None]
"""Given what is about to run ('fedavg seed 1'), whom to tell about it."""


def compare(
    methods: Sequence[str],
    settings: Settings | None = None,
    *,
    seeds: int = 1,
    trials: int = 0,
    out: str | Path | None = None,
    watch: Watch = lambda what: None,
    track: Sequence[str] = (),
    **given: Any,
) -> Comparison:
    """Run each method with each of `seeds` seeds; with `trials`, choose its rates first by that many trials.

    `fewer.compare(["local", "fedavg"], data="fashion-mini", rounds=5, seeds=3)`: the settings that all runs share are
    those of the command line, with underscores, or a `Settings` object. In `out`, runs that are there already are not
    run again and broken ones go on. Trackers in `track` get all runs.
    """
    if settings is not None and given:
        raise SettingError(f"{next(iter(given))} is given beside a whole Settings object: put it in there")
    settings = parse_settings(given) if settings is None else settings
    out = None if out is None else Path(out)
    kinds = [find(name) for name in methods]
    own = own_settings(kinds, settings.method_options)
    series = Series(seeds, trials, out, watch, track=track)
    chosen = [
        settings.model_copy(update={"method": name, "method_options": own[kind.name]})
        for name, kind in zip(methods, kinds, strict=True)
    ]
    for one in chosen:
        series.experiment(one)  # what is wrong with any of them shows before the first runs
    rows = [series.run(one, kind.name) for one, kind in zip(chosen, kinds, strict=True)]
    shared = settings.model_dump(mode="json", exclude={"method", "rounds", "cohort"})
    return Comparison(rows, {**shared, "seeds": seeds, "trials": trials}, len(series.experiment(chosen[0]).data))


class Series:
    """Runs settings with several seeds, after choosing rates if there are trials; data is read once for all of them."""

    def __init__(
        self,
        seeds: int,
        trials: int,
        out: Path | None,
        watch: Watch,
        measure: Callable[[Result], float] = pooled,
        track: Sequence[str] = (),
    ) -> None:
        if seeds < 1:
            raise SettingError(f"seeds = {seeds} (allowed: 1 or more)")
        trackers.find(track)  # before the first trial
        self.seeds, self.trials, self.out, self.watch, self.measure = seeds, trials, out, watch, measure
        self._data: dict[str, Data] = {}
        self._run = partial(_run, track=track)
        if out:
            out.mkdir(parents=True, exist_ok=True)

    def experiment(self, settings: Settings) -> Experiment:
        """What the settings name, on data that may be in memory already."""
        key = settings.model_dump_json(
            exclude={"method", "method_options", "rounds", "cohort", "model", "norm", "model_options"}
        )
        if key not in self._data:
            while len(self._data) >= KEPT:
                self._data.pop(next(iter(self._data)))
            self._data[key] = load_data(settings)
        return build_experiment(settings, data=self._data[key])

    def run(self, settings: Settings, label: str, tuned: bool = True) -> Row:
        """All seeds of one method."""
        experiment, done = self.experiment(settings), list[Trial]()
        if self.trials and tuned:
            notes = self.out and self.out / f"{label}-trials.json"
            experiment, done = tune(experiment, self.trials, notes, self.watch(f"{label} tuning"), self.measure)
        results = []
        for seed in range(settings.seed, settings.seed + self.seeds):
            again = self.experiment(experiment.settings.model_copy(update={"seed": seed}))
            progress = self.watch(f"{label} seed {seed}" if self.seeds > 1 else label)
            results.append(self._run(again, self.out and self.out / f"{label}-seed{seed}", progress))
        return _row(experiment, results, [self.measure(result) for result in results], done)


def _run(experiment: Experiment, where: Path | None, progress: Progress | None, track: Sequence[str]) -> Result:
    """Begin, go on with, or take over the run in this directory."""
    if where is None or not (where / "settings.json").exists():
        return start(experiment, where, progress, track=track)
    found = RunDirectory.open(where).description["hash"]
    if found != experiment.hash:
        raise RunError(f"{where} holds a run with other settings (another --out)")
    return resume(where, progress=progress, track=track or None)


def own_settings(kinds: Sequence[type[Method]], given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What of `-o` is for whom: `mu=0.1` for every method that has it, `fedprox.mu=0.1` for one."""
    own: dict[str, dict[str, Any]] = {kind.name: {} for kind in kinds}
    for key, value in given.items():
        whose, _, name = key.rpartition(".")
        takers = [kind for kind in kinds if (kind.name == whose if whose else name in kind.model_fields)]
        if not takers:
            raise SettingError(f"-o {key}: none of the methods compared has it ({', '.join(own)})")
        for kind in takers:
            own[kind.name][name] = value
    return own


def _judged(scores: Mapping[str, Any]) -> dict[str, float]:
    if "groups" in scores:
        return {str(number): accuracy for number, accuracy in enumerate(scores["groups"])}
    return dict(scores.get("clients", {}))


def _row(experiment: Experiment, results: Sequence[Result], accuracies: list[float], trials: list[Trial]) -> Row:
    method = experiment.method
    last = [result.scores for result in results]
    groups = [accuracy for scores in last for accuracy in scores.get("groups", ())]
    return Row(
        method=method.name,
        accuracy=statistics.fmean(accuracies),
        ci95=half_width(groups or accuracies),
        global_accuracy=statistics.fmean(scores.get("global_accuracy", scores["accuracy"]) for scores in last),
        rounds=method.rounds,
        mb_up=statistics.fmean(scores["up"] for scores in last) / MB,
        mb_down=statistics.fmean(scores["down"] for scores in last) / MB,
        seconds=statistics.fmean(result.seconds for result in results),
        seeds=[result.settings.seed for result in results],
        accuracies=accuracies,
        curves=[
            [
                {name: line[name] for name in ("round", "accuracy", "up", "down", "seconds")}
                for line in result.history
                if "accuracy" in line
            ]
            for result in results
        ],
        settings=method.model_dump(mode="json"),
        hash=experiment.hash,
        trials=trials,
        groups=len(groups),
        units="tasks" if "tasks" in last[0] else "groups",
        judged=[_judged(scores) for scores in last],
    )
