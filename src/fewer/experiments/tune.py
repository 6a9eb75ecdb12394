"""Tunes a method's learning rates on held-out training data, with the same number of trials for every method."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fewer.data import Data
from fewer.errors import QuorumLost, RunError, SettingError, unknown_name
from fewer.methods import Method
from fewer.methods.capabilities import HasSearchSpace, HasTuningSplit
from fewer.runs.callbacks import Callback, Label
from fewer.runs.engine import experiment_from_arguments, run_experiment
from fewer.runs.experiment import Experiment, Model
from fewer.runs.progress import show_progress
from fewer.runs.result import Result
from fewer.runs.views import to_data_frame
from fewer.runtime.store import write_durably
from fewer.statistics import half_width

TRIALS = 8
TUNING_FRACTION = 0.2
"""Fraction of each client's training samples that trials are evaluated on. Tuning never uses the test samples."""

Point = dict[str, float]
"""One value for each tuned setting."""


@dataclass(frozen=True)
class Trial:
    """The settings of one trial and its result on held-out data."""

    settings: Point
    accuracy: float | None
    """The primary metric: accuracy, unless the task has no classes. None if training diverged."""
    ci95: float | None = None
    """Half-width of its 95 % confidence interval over the evaluated samples, groups or tasks, if it is known."""
    diverged_later: bool = False
    """Whether the settings were the best, and then diverged with one of the seeds."""

    @property
    def usable(self) -> bool:
        """Whether the settings have not diverged."""
        return self.accuracy is not None and not self.diverged_later


@dataclass(frozen=True)
class Tuning:
    """The outcome of `fewer.tune`."""

    method: Method
    """The method with the best options found."""
    trials: list[Trial]
    """All trials, in order."""
    metric: str = "accuracy"
    """The name of the primary metric."""

    def to_pandas(self) -> Any:
        """The trials as a pandas DataFrame: one column per option, and the primary metric."""
        return to_data_frame([{**trial.settings, self.metric: trial.accuracy} for trial in self.trials])


def tune(
    method: Method | str,
    data: Data | str = "fashion-mini",
    *,
    model: Model | None = None,
    trials: int = TRIALS,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    **settings: Any,
) -> Tuning:
    """Chooses a method's options on held-out training data: `fewer.tune(FedAvg(), data, model=MyNet).method`.

    It takes the arguments of `fewer.run`, and runs exactly `trials` trials. Test data is never used.
    """
    experiment = experiment_from_arguments(method, data, model, settings)
    with show_progress(progress, callbacks, many=True) as callbacks:
        best, done = tune_experiment(experiment, trials, callbacks=callbacks)
    return Tuning(best.method, done, best.metric.name)


def pooled_value(result: Result) -> float:
    """Returns the primary metric over all evaluated samples."""
    return result.value


def mean_client_value(result: Result) -> float:
    """Returns the mean over clients of the primary metric of each client's model on its own samples."""
    return statistics.fmean(result.metrics["clients"].values())


def tune_experiment(
    experiment: Experiment,
    trials: int = TRIALS,
    trials_file: Path | None = None,
    callbacks: Sequence[Callback] = (),
    measure: Callable[[Result], float] = pooled_value,
    options: Sequence[str] | None = None,
    label: str = "",
    rounds: int | None = None,
) -> tuple[Experiment, list[Trial]]:
    """Runs exactly `trials` trials; returns the experiment with the best settings, and all trials.

    `trials_file` stores finished trials, so an interrupted search resumes where it stopped. `options` are those to
    tune, by default all that the method tunes. `label` names the experiment in progress displays; by default, it is
    the method's name. `rounds` shortens the trials of a long experiment.
    """
    search_space = find_search_space(experiment.method)
    if options is not None:
        for wrong in [option for option in options if option not in search_space]:
            raise unknown_name(f"option to tune of {experiment.method.name}", wrong, search_space)
        search_space = {option: search_space[option] for option in options}
    if not search_space:
        return experiment, []
    tuning_experiment, metric = _hold_out(experiment), experiment.metric
    task = " ".join([experiment.hash, experiment.data.fingerprint(), *(options or ())])
    if rounds is not None and rounds < experiment.method.rounds:
        shorter = type(experiment.method)(**{**tuning_experiment.method.model_dump(), "rounds": rounds})
        tuning_experiment, task = replace(tuning_experiment, method=shorter), f"{task} {rounds} rounds"
    done = _load_trials(trials_file, task) if trials_file and trials_file.exists() else []
    accuracies = {_point_key(trial.settings): trial.accuracy for trial in done}

    def evaluate(point: Point) -> float:
        if _point_key(point) not in accuracies:
            try:
                name = label or experiment.method.name
                trial_label = Label(f"{name} trial {len(done) + 1}/{trials}", f"{name}, tuning", trials)
                result = run_experiment(_apply_point(tuning_experiment, point), None, [trial_label, *callbacks])
                trial = Trial(point, measure(result), _half_width(result, measure))
            except QuorumLost:  # all answers were refused: the weights are no longer finite
                trial = Trial(point, None)
            accuracies[_point_key(point)] = trial.accuracy
            done.append(trial)
            _store_trials(trials_file, task, done)
        accuracy = accuracies[_point_key(point)]
        return -math.inf if accuracy is None else metric.rank(accuracy)

    first = {name: float(getattr(experiment.method, name) or grid[0]) for name, grid in search_space.items()}
    best = coordinate_search(evaluate, search_space, first, trials, lambda point: _is_valid(experiment, point))
    if any(trial.diverged_later for trial in done):
        return _choose_best(experiment, done), done
    return _apply_point(experiment, best), done


def choose_next_best(
    experiment: Experiment, trials: Sequence[Trial], trials_file: Path | None = None, reason: str = ""
) -> tuple[Experiment, list[Trial]]:
    """Returns the experiment with the next best settings after those of `experiment`, which diverged with a seed.

    The trials file remembers it. Raises RunError, with the `reason` why the last run ended, if no settings are left.
    """
    diverged = {name: getattr(experiment.method, name) for name in trials[0].settings}
    trials = [replace(trial, diverged_later=trial.diverged_later or trial.settings == diverged) for trial in trials]
    if trials_file:
        _store_trials(trials_file, json.loads(trials_file.read_text())["task"], trials)
    return _choose_best(experiment, trials, reason), list(trials)


def _choose_best(experiment: Experiment, trials: Sequence[Trial], reason: str = "") -> Experiment:
    usable = [trial for trial in trials if trial.usable]
    if not usable:
        last = f" (the last: {reason})" if reason else ""
        raise RunError(
            f"{experiment.method.name} diverged with all settings that were tried{last}; lower its learning rate"
        )
    best = max(usable, key=lambda trial: experiment.metric.rank(trial.accuracy or 0.0))
    return _apply_point(experiment, best.settings)


def _store_trials(trials_file: Path | None, task: str, trials: Sequence[Trial]) -> None:
    if trials_file:
        content = {"task": task, "trials": [asdict(trial) for trial in trials]}
        write_durably(trials_file, json.dumps(content).encode())


def _half_width(result: Result, measure: Callable[[Result], float]) -> float | None:
    """Half-width of the 95 % confidence interval of a trial: over its groups, tasks or clients, or over its samples."""
    if groups := result.metrics.get("groups"):
        return half_width(groups)
    if measure is mean_client_value:
        return half_width(list(result.metrics["clients"].values()))
    if not result.task.has_classes:
        return None
    by_client = result.metrics.get("client_metrics") or {}
    samples = sum(metrics["samples"] for metrics in by_client.values())
    if not by_client:
        samples = sum(len(result.data.client(client).test) for client in range(len(result.data)))
    return 1.96 * math.sqrt(result.value * (1 - result.value) / samples) if samples else None


def settings_at_edge(
    trials: Sequence[Trial], chosen: Mapping[str, Any], method: type[Method] | None = None
) -> list[str]:
    """Returns the tuned settings whose chosen value is the smallest or largest tried: the best may lie beyond.

    A value that the method does not allow to go further, such as a fraction of 1, is not at an edge. If only one value
    of a setting was tried, it is.
    """
    at_edge = []
    for name in trials[0].settings if trials else ():
        values = sorted({trial.settings[name] for trial in trials})
        beyond = _extend(values, values.index(chosen[name]))
        further = {beyond, None if beyond is None else float(round(beyond))} - {None, *values}
        if len(values) == 1 or any(method is None or _accepts(method, {**chosen, name: value}) for value in further):
            at_edge.append(name)
    return at_edge


def find_search_space(method: Method) -> Mapping[str, Sequence[float]]:
    """Returns the hyperparameters that are tuned, with starting values."""
    return method.search_space() if isinstance(method, HasSearchSpace) else method.tunable


def _hold_out(experiment: Experiment) -> Experiment:
    """Returns the experiment of the trials. Part of the training samples replaces the test data, unless the method
    tunes on other data."""
    method, data, seed = experiment.method, experiment.data, experiment.settings.seed
    if not isinstance(method, HasTuningSplit):
        return replace(experiment, data=data.hold_out(TUNING_FRACTION, seed))
    tuned, data = method.tuning_split(data, TUNING_FRACTION, seed)
    return replace(experiment, method=tuned, data=data)


def _is_valid(experiment: Experiment, point: Point) -> bool:
    """Returns True if the method accepts these settings: a fraction, for example, must be at most 1."""
    return _accepts(type(experiment.method), {**experiment.method.model_dump(), **point})


def _accepts(method: type[Method], options: Mapping[str, Any]) -> bool:
    try:
        method(**options)
    except SettingError:
        return False
    return True


def _load_trials(trials_file: Path, task: str) -> list[Trial]:
    """Loads the finished trials of this task."""
    try:
        content = json.loads(trials_file.read_text())
        trials = [Trial(**trial) for trial in content["trials"]]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{trials_file} is damaged ({error}); delete it to restart the search") from error
    if content["task"] != task:
        raise RunError(f"{trials_file} belongs to another task or other settings; use another --out")
    return trials


def coordinate_search(
    evaluate: Callable[[Point], float],
    search_space: Mapping[str, Sequence[float]],
    first: Point,
    trials: int,
    is_valid: Callable[[Point], bool] = lambda point: True,
) -> Point:
    """Evaluates `trials` points and returns the best.

    Each setting runs over its grid, and beyond the grid's end as long as the best value is there. Then finer values
    around the best follow.
    """
    scores: dict[tuple[tuple[str, float], ...], float] = {}

    def best() -> Point:
        return dict(max(scores.items(), key=lambda item: item[1])[0]) if scores else first

    for change in _propose_changes(search_space, best, scores):
        point = {**best(), **change}
        if not is_valid(point):  # the method may take whole numbers only
            point |= {name: float(round(value)) for name, value in change.items()}
        if _point_key(point) not in scores and is_valid(point):
            scores[_point_key(point)] = evaluate(point)
        if len(scores) >= trials:
            break
    return best()


def _propose_changes(
    search_space: Mapping[str, Sequence[float]], best: Callable[[], Point], scores: Mapping[Any, float]
) -> Iterator[Point]:
    def tried(name: str) -> tuple[list[float], int]:
        values = sorted({dict(key)[name] for key in scores})
        return values, values.index(best()[name])

    for name, grid in search_space.items():
        for value in grid:
            yield {name: value}
        last = None
        while (beyond := _extend(*tried(name))) not in (None, last):  # an invalid value is proposed only once
            last = beyond
            yield {name: beyond}
    for _ in range(len(search_space) * 20):  # far finer than any learning rate needs
        for name in search_space:
            values, index = tried(name)
            if (beyond := _extend(values, index)) is not None:
                yield {name: beyond}
            for neighbor in values[max(0, index - 1) : index] + values[index + 1 : index + 2]:
                yield {name: _round_to_3_digits(math.sqrt(values[index] * neighbor))}  # halfway on a log scale


def _extend(values: Sequence[float], position: int) -> float | None:
    """Returns the next value beyond the end of the tried values, one step on a log scale; None if not at an end."""
    if len(values) < 2 or 0 < position < len(values) - 1:
        return None
    inner = values[1] if position == 0 else values[-2]
    return _round_to_3_digits(values[position] ** 2 / inner)


def _round_to_3_digits(value: float) -> float:
    return float(f"{value:.3g}")


def _point_key(point: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(point.items()))


def _apply_point(experiment: Experiment, point: Point) -> Experiment:
    """Returns the experiment with these settings of its method."""
    settings = experiment.settings.model_copy(
        update={"method_options": {**experiment.settings.method_options, **point}}
    )
    method = experiment.method
    return replace(experiment, method=type(method)(**{**method.model_dump(), **point}), settings=settings)
