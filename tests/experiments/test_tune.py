"""Tuning: the search finds the best value in the allowed range and never sees test data."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from fewer import FedAvg, FedProx
from fewer.data import Data
from fewer.errors import QuorumLost, RunError, SettingError
from fewer.experiments.compare import SeedRunner
from fewer.experiments.tune import (
    Point,
    Trial,
    _apply_point,
    _hold_out,
    choose_next_best,
    coordinate_search,
    mean_client_value,
    settings_at_edge,
    tune_experiment,
)
from fewer.methods import SearchSpace
from fewer.methods.fedmeta import FedMeta
from fewer.methods.frl import FRL
from fewer.methods.local import Local
from fewer.methods.metafed import MetaFed
from fewer.runs.engine import run_experiment
from fewer.runs.experiment import Experiment, build_experiment, parse_settings
from fewer.runs.result import Result
from fewer.runs.settings import Settings
from fewer.statistics import half_width
from tests.methods.frl_harness import GROUPS, load_digits


def test_a_finer_search_stays_in_the_allowed_range(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []

    def run_trial(experiment: Any, *_: Any) -> Any:
        tried.append(experiment.method.gamma)
        return SimpleNamespace(value=experiment.method.gamma, metrics={"groups": [0.5, 0.6]})

    monkeypatch.setattr(sys.modules[tune_experiment.__module__], "run_experiment", run_trial)
    experiment = build_experiment(
        parse_settings({"method": "frl", "method_options": {**GROUPS, "way": 1}}),
        FRL(**{**GROUPS, "way": 1}),
        load_digits(),
    )
    assert len(tune_experiment(experiment, 30)[1]) == 30 and len(set(tried)) > 2 and 5 / 6 <= max(tried) <= 1


def test_numbers_of_steps_are_tuned_as_integers(monkeypatch: pytest.MonkeyPatch, digits: Data) -> None:
    tried: list[tuple[Any, Any]] = []

    def run_trial(experiment: Any, *_: Any) -> Any:
        tried.append((experiment.method.local_steps, experiment.method.mu))
        return SimpleNamespace(value=experiment.method.local_steps, metrics={"groups": [0.5, 0.6]})

    class Stepwise(FedProx):
        mu: float | None = None  # type: ignore[assignment]
        tunable: ClassVar[SearchSpace] = {"local_steps": (5, 20), "mu": (0.1, 1.0)}

    monkeypatch.setattr(sys.modules[tune_experiment.__module__], "run_experiment", run_trial)
    experiment = build_experiment(parse_settings({"method": "fedprox"}), Stepwise(), digits)
    best, _ = tune_experiment(experiment, 6)
    steps = [steps for steps, _ in tried]
    assert steps[:2] == [5, 20] and max(steps) > 20 and all(isinstance(value, int) for value in steps)
    assert best.method.model_dump()["local_steps"] == max(steps)
    assert {mu for _, mu in tried} == {0.1}  # not yet tuned: the grid's first value stands for null


def test_only_the_listed_options_are_tuned(digits: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[float, float]] = []

    def run_trial(experiment: Any, *_: Any) -> Any:
        tried.append((experiment.method.lr, experiment.method.mu))
        return SimpleNamespace(value=experiment.method.lr, metrics={"groups": [0.5, 0.6]})

    monkeypatch.setattr(sys.modules[tune_experiment.__module__], "run_experiment", run_trial)
    experiment = build_experiment(parse_settings({"method": "fedprox"}), FedProx(mu=0.2), digits)
    best, trials = tune_experiment(experiment, 5, options=["lr"])
    assert len(trials) == len({lr for lr, _ in tried}) == 5 and {mu for _, mu in tried} == {0.2}
    assert best.method.lr == max(lr for lr, _ in tried) and best.method.mu == 0.2  # type: ignore[attr-defined]
    with pytest.raises(SettingError, match="unknown option to tune of fedprox 'lt' .allowed: lr, mu"):
        tune_experiment(experiment, 5, options=["lt"])


def test_trials_can_be_shorter_than_the_run(digits: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def run_trial(experiment: Any, *_: Any) -> Any:
        lengths.append(experiment.method.rounds)
        return SimpleNamespace(value=experiment.method.lr, metrics={"groups": [0.5, 0.6]})

    monkeypatch.setattr(sys.modules[tune_experiment.__module__], "run_experiment", run_trial)
    experiment = build_experiment(parse_settings({"method": "fedavg"}), FedAvg(rounds=9), digits)
    best, trials = tune_experiment(experiment, 3, tmp_path / "trials.json", rounds=2)
    assert lengths == [2, 2, 2] and best.method.rounds == 9
    assert best.method.lr == max(trial.settings["lr"] for trial in trials)  # type: ignore[attr-defined]
    with pytest.raises(RunError, match=r"trials.json belongs to another task"):
        tune_experiment(experiment, 3, tmp_path / "trials.json", rounds=4)
    tune_experiment(experiment, 1, rounds=20)
    assert lengths[3:] == [9]  # never longer than the run


def objective(optimum: Point, evaluated: list[Point]) -> Callable[[Point], float]:
    def evaluate(point: Point) -> float:
        evaluated.append(point)
        return -sum(math.log(point[name] / value) ** 2 for name, value in optimum.items())

    return evaluate


GRID = (0.01, 0.03, 0.1, 0.3)


@pytest.mark.parametrize("best", [0.05, 0.17, 0.9, 0.003])
def test_search_converges_to_the_best_value(best: float) -> None:
    evaluated: list[Point] = []
    chosen = coordinate_search(objective({"lr": best}, evaluated), {"lr": GRID}, {"lr": 0.1}, 10)
    assert len(evaluated) == 10 and len({point["lr"] for point in evaluated}) == 10
    assert [point["lr"] for point in evaluated[:4]] == list(GRID)
    assert chosen["lr"] == pytest.approx(best, rel=0.35)


def test_search_varies_one_setting_at_a_time() -> None:
    evaluated: list[Point] = []
    search_space = {"lr": GRID, "mu": (0.001, 1.0)}
    chosen = coordinate_search(objective({"lr": 0.1, "mu": 1.0}, evaluated), search_space, {"lr": 0.3, "mu": 0.01}, 8)
    assert len(evaluated) == 8
    assert all(point["mu"] == 0.01 for point in evaluated[:4]) and all(point["lr"] == 0.1 for point in evaluated[4:6])
    assert chosen["lr"] == pytest.approx(0.1, rel=0.8) and chosen["mu"] == pytest.approx(1.0, rel=0.5)


def test_the_range_is_extended_before_another_setting_is_tried() -> None:
    evaluated: list[Point] = []
    search_space = {"lr": GRID, "mu": (0.001, 0.01, 0.1)}
    chosen = coordinate_search(objective({"lr": 2.7, "mu": 0.01}, evaluated), search_space, {"lr": 0.3, "mu": 0.01}, 9)
    assert [point["lr"] for point in evaluated[:7]] == [*GRID, 0.9, 2.7, 8.1] and chosen["lr"] == 2.7
    assert [point["mu"] for point in evaluated[7:]] == [0.001, 0.1]


def test_a_best_value_at_the_end_of_the_tried_ones_is_marked() -> None:
    def trials(*rates: float) -> list[Trial]:
        return [Trial({"lr": rate}, rate) for rate in rates]

    assert settings_at_edge(trials(0.1, 0.3, 0.9), {"lr": 0.9}) == ["lr"]
    assert settings_at_edge(trials(0.1, 0.3, 0.9), {"lr": 0.1}) == ["lr"]
    assert settings_at_edge(trials(0.1, 0.3, 0.9), {"lr": 0.3}) == []
    assert settings_at_edge(trials(0.1), {"lr": 0.1}) == ["lr"]  # no other value was tried
    steps = [Trial({"local_steps": value}, value) for value in (5.0, 10.0)]
    assert settings_at_edge(steps, {"lr": 0.1, "local_steps": 5.0}, FedAvg) == ["local_steps"]  # 2.5 is rounded
    one = [Trial({"local_steps": value}, value) for value in (1.0, 5.0)]
    assert settings_at_edge(one, {"lr": 0.1, "local_steps": 1.0}, FedAvg) == []  # there are no fewer steps than one
    threshold = [Trial({"distill_threshold": value}, value) for value in (0.6, 1.0)]
    assert settings_at_edge(threshold, {"distill_threshold": 0.6}, MetaFed) == ["distill_threshold"]


def test_a_trial_has_the_interval_of_its_evaluation(digits: Data) -> None:
    experiment = build_experiment(parse_settings({"seed": 1}), FedAvg(rounds=1, cohort=3), digits)
    (trial,) = tune_experiment(experiment, 1)[1]
    samples, p = len(digits.hold_out(0.2, 1).test), trial.accuracy or 0
    assert trial.ci95 == pytest.approx(1.96 * math.sqrt(p * (1 - p) / samples), rel=0.01)


def test_the_interval_of_a_trial_is_over_what_it_evaluates() -> None:
    """Trials of FedMeta evaluate validation clients only; those over clients have the spread of clients."""
    settings = parse_settings({"data": "glyphs", "partition": "natural", "model": "logistic", "cohort": 2})
    method = FedMeta(rounds=1, cohort=2, support_fraction=0.2)
    experiment = build_experiment(settings, method)
    (trial,) = tune_experiment(experiment, 1)[1]
    p, queries = trial.accuracy or 0, 12 * 159
    assert trial.ci95 == pytest.approx(1.96 * math.sqrt(p * (1 - p) / queries), rel=0.01)
    personal = build_experiment(parse_settings({"data": "digits", "clients": 5}), Local(rounds=1))
    (trial,) = tune_experiment(personal, 1, measure=mean_client_value)[1]
    values = run_experiment(_apply_point(_hold_out(personal), trial.settings)).metrics["clients"].values()
    assert trial.ci95 == pytest.approx(half_width(list(values)))


def test_whole_numbers_are_extended_to_whole_numbers() -> None:
    evaluated: list[Point] = []
    whole = lambda point: point["steps"] >= 1 and point["steps"] == round(point["steps"])  # noqa: E731
    coordinate_search(objective({"steps": 1}, evaluated), {"steps": (5, 10)}, {"steps": 5}, 3, whole)
    assert [point["steps"] for point in evaluated] == [5, 10, 2]


def test_tuning_never_sees_the_test_data(digits: Data) -> None:
    experiment = build_experiment(parse_settings({"seed": 1}), FedAvg(rounds=1, cohort=3), digits)
    held_out = digits.hold_out(0.2, 1)
    rows = {tuple(x.flatten().tolist()) for x in held_out.test.slice(0, len(held_out.test))[0]}
    train = {tuple(x.flatten().tolist()) for client in range(6) for x in digits.client(client).train.slice(0, 9999)[0]}
    assert rows <= train
    tuned, trials = tune_experiment(experiment, 5)
    assert len(trials) == 5
    best = max(trials, key=lambda trial: trial.accuracy or 0)
    assert tuned.method.lr == best.settings["lr"] == tuned.settings.method_options["lr"]  # type: ignore[attr-defined]
    assert tuned.data is experiment.data


def test_search_ends_when_no_points_are_left() -> None:
    evaluated: list[Point] = []
    coordinate_search(objective({"lr": 0.1}, evaluated), {"lr": GRID}, {"lr": 0.1}, 500)
    assert 14 < len(evaluated) <= 500


def test_trials_of_another_task_are_not_reused(digits: Data, tmp_path: Path) -> None:
    file = tmp_path / "trials.json"
    experiment = build_experiment(parse_settings({"seed": 1}), FedAvg(rounds=1, cohort=3), digits)
    _, first = tune_experiment(experiment, 4, file)
    assert tune_experiment(experiment, 4, file)[1] == first
    with pytest.raises(RunError, match="belongs to another task or other settings"):
        tune_experiment(build_experiment(parse_settings({"seed": 1}), FedAvg(rounds=2, cohort=3), digits), 4, file)
    file.write_text("{")
    with pytest.raises(RunError, match="is damaged"):
        tune_experiment(experiment, 4, file)


def test_settings_that_diverge_with_a_seed_give_way_to_the_next_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[int, float]] = []

    def diverge_at_the_best_lr(experiment: Experiment, *arguments: Any, **keys: Any) -> Result:
        tried.append((experiment.settings.seed, experiment.method.lr))  # type: ignore[attr-defined]
        result = run_experiment(experiment, *arguments, **keys)
        if tried[-1] == (1, tried[0][1]):
            raise QuorumLost("round 2: 0 of 3 clients answered")
        return result

    monkeypatch.setattr(sys.modules[SeedRunner.__module__], "run_experiment", diverge_at_the_best_lr)
    settings = Settings(data="digits", clients=3, rounds=1, method="fedavg")
    for _ in range(2):  # the second time, all runs are finished, and the trials file remembers the choice
        runner = SeedRunner(2, 3, tmp_path)
        row = runner.run(settings, "fedavg")
        ranked = sorted(row.trials, key=lambda trial: -(trial.accuracy or 0.0))
        assert [trial.diverged_later for trial in ranked] == [True, False, False]
        best, second = ranked[0].settings["lr"], ranked[1].settings["lr"]
        assert row.settings["lr"] == second
        assert tried == [(0, best), (1, best), (0, second), (1, second)]
        assert runner.paths == [tmp_path / "fedavg-seed0", tmp_path / "fedavg-seed1"]


def test_the_error_says_why_the_last_run_diverged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*arguments: Any, **keys: Any) -> Result:
        run_experiment(*arguments, **keys)
        raise QuorumLost("round 1: 0 of 3 clients answered")

    monkeypatch.setattr(sys.modules[SeedRunner.__module__], "run_experiment", diverge)
    with pytest.raises(RunError, match=r"diverged with all settings .*the last: round 1: 0 of 3 clients answered"):
        SeedRunner(1, 2, tmp_path).run(Settings(data="digits", clients=3, rounds=1, method="fedavg"), "fedavg")


def test_a_method_that_diverges_with_all_settings_is_an_error(digits: Data) -> None:
    experiment = build_experiment(parse_settings({"method": "fedavg", "rounds": 1}), data=digits)
    trials = [Trial({"lr": experiment.method.lr}, 0.5)]  # type: ignore[attr-defined]
    with pytest.raises(RunError, match=r"fedavg diverged with all settings .* \(the last: round 1: 3 refused\); lower"):
        choose_next_best(experiment, trials, reason="round 1: 3 refused")
