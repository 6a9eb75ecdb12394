"""A run gets more rounds: it equals a run that had them from the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fewer
from fewer.errors import SettingError
from fewer.methods import ModelState, names
from fewer.methods.fedavg import FedAvg
from fewer.runs.engine import run_experiment
from fewer.runs.reader import RunReader
from fewer.runtime import Clients
from tests.helpers import (
    FEW_SHOT_METHODS,
    FRL_SETTINGS,
    SMALL,
    Interrupt,
    client_count,
    experiment,
    run_contents,
    without_outgoing,
)

FASTER: dict[str, dict[str, Any]] = {
    "alone": {"local_steps": 2},
    "fedgen": {"generator_steps": 5},
    "fedmk-paper": {**SMALL["fedmk-paper"]["method_options"], "outer_steps": 5},
    "metafed": {"stages": "accumulate"},
    **{name: SMALL[name]["method_options"] | {"validate_every": 1} for name in FEW_SHOT_METHODS},
}
"""Options that make a method still faster, or its rounds independent of their number."""


def run_method(method: str, out: Path, rounds: int, **settings: Any) -> fewer.Result:
    settings = {"runtime": "inline", "fraction": 0.5, **settings, "rounds": rounds}
    return run_experiment(experiment(client_count(method), method, **settings), out)


def without_command(run: Path) -> dict[str, Any]:
    metadata = json.loads((run / "settings.json").read_text())
    return {name: value for name, value in metadata.items() if name != "command"}


def assert_same_runs(extended: Path, unbroken: Path) -> None:
    contents = [run_contents(run) for run in (extended, unbroken)]
    for content in contents:
        content["clients"] = without_outgoing(content["clients"])
    assert contents[0] == contents[1]
    assert without_command(extended) == without_command(unbroken)


@pytest.mark.parametrize("method", names())
def test_an_extended_run_equals_an_unbroken_one(method: str, tmp_path: Path) -> None:
    settings = dict(SMALL.get(method, {}))
    if method in FASTER:
        settings["method_options"] = FASTER[method]
    if method == "frl-deploy":
        run_method("frl-scratch", tmp_path / "prepared", **FRL_SETTINGS)
        settings = {"method_options": {"prepared": str(tmp_path / "prepared")}}
    first = settings.pop("rounds", 2 if method in (*FEW_SHOT_METHODS, "alone") else 1)  # alone sends nothing in a round
    more = first + (4 if method.startswith(("frl", "coprefl")) else 1)
    run_method(method, tmp_path / "unbroken", more, **settings)
    run_method(method, tmp_path / "extended", first, **settings)
    result = fewer.resume(tmp_path / "extended", rounds=more)
    assert len(result.history) == more
    assert_same_runs(tmp_path / "extended", tmp_path / "unbroken")


class Decaying(FedAvg):
    """The learning rate decays over all rounds, in a function within a function."""

    def round(self, state: ModelState, clients: Clients) -> ModelState:
        def lr() -> float:
            return self.lr * (1 - clients.round / self.rounds)

        return FedAvg(lr=lr() or 1e-3, local_steps=1).round(state, clients)


@pytest.mark.parametrize(
    ("method", "settings", "reason"),
    [
        ("metafed", {"validation": 0.2}, "round 1 was Stage II, the last one"),
        (
            "fl-proto",
            {**SMALL["fl-proto"], "rounds": 2},
            r"round 2 is validated in only one of them \(validate_every = 2",
        ),
        (f"{__file__}:Decaying", {}, "its round depends on rounds"),
        ("frl", FRL_SETTINGS, "rounds must be a multiple of 4"),
    ],
)
def test_a_method_whose_rounds_depend_on_their_number_is_not_extended(
    method: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    run_method(method, tmp_path / "run", **{"rounds": 1, **settings})
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").glob("*.*")}
    with pytest.raises(SettingError, match=reason):
        fewer.resume(tmp_path / "run", rounds=7)
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").glob("*.*")} == before


def test_a_deployment_is_extended_only_from_a_scheduled_evaluation(tmp_path: Path) -> None:
    run_method("frl-scratch", tmp_path / "prepared", **FRL_SETTINGS)
    options = {"method_options": {"prepared": str(tmp_path / "prepared")}, "evaluate_every": 2}
    run_method("frl-deploy", tmp_path / "run", 1, **options)
    with pytest.raises(SettingError, match="its round depends on will_evaluate; start a new run"):
        fewer.resume(tmp_path / "run", rounds=2)
    fedavg = [run_method("fedavg", tmp_path / f"fedavg-{rounds}", rounds, evaluate_every=3) for rounds in (1, 2)]
    assert "accuracy" in fedavg[0].history[0] and "accuracy" not in fedavg[1].history[0]
    fewer.resume(tmp_path / "fedavg-1", rounds=2)
    assert_same_runs(tmp_path / "fedavg-1", tmp_path / "fedavg-2")


def test_a_kill_while_a_run_is_extended_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Kill(BaseException):
        pass

    def kill(*_: Any, **__: Any) -> None:
        raise Kill

    for rounds in (1, 2, 3):
        run_method("fedbn", tmp_path / f"{rounds}", rounds, norm="batch")
    run = tmp_path / "1"
    with monkeypatch.context() as patch, pytest.raises(Kill):
        patch.setattr("fewer.runs.directory.RunDirectory.update_metadata", kill)
        fewer.resume(run, rounds=3)
    assert len(fewer.resume(run).history) == 1  # as before: evaluated as the last round
    run_method("fedbn", tmp_path / "same", 1, norm="batch")
    assert_same_runs(run, tmp_path / "same")
    for place in ("_evaluate_again", "_run_round"):
        with monkeypatch.context() as patch, pytest.raises(Kill):
            patch.setattr(f"fewer.runs.engine.{place}", kill)
            fewer.resume(run, rounds=3)
    fewer.resume(run)
    assert_same_runs(run, tmp_path / "3")
    fewer.resume(tmp_path / "2", rounds=3, runtime="pool")
    assert run_contents(tmp_path / "2") == run_contents(tmp_path / "3")


def test_a_run_that_a_callback_ended_or_a_user_stopped_gets_another_number_of_rounds(tmp_path: Path) -> None:
    class StopAfterOne(fewer.Callback):
        def on_round_end(self, run: fewer.Run, metrics: Any) -> None:
            run.stop("enough")

    run_method("local", tmp_path / "unbroken", 3)
    small = experiment(3, "local", runtime="inline", rounds=5, fraction=0.5)
    assert run_experiment(small, tmp_path / "ended", [StopAfterOne()]).stopped
    assert not fewer.resume(tmp_path / "ended", rounds=3).stopped
    assert_same_runs(tmp_path / "ended", tmp_path / "unbroken")
    with pytest.raises(KeyboardInterrupt):
        run_experiment(small, tmp_path / "stopped", [Interrupt(1)])
    fewer.resume(tmp_path / "stopped", rounds=3)
    assert_same_runs(tmp_path / "stopped", tmp_path / "unbroken")


def test_the_method_of_an_extended_run_may_be_an_object(tmp_path: Path) -> None:
    for rounds in (1, 2):
        fewer.run(FedAvg(rounds=rounds, local_steps=1), "digits", out=tmp_path / f"{rounds}", count_flops=True)
    fewer.resume(tmp_path / "1", rounds=2, method=FedAvg(rounds=1, local_steps=1))
    assert_same_runs(tmp_path / "1", tmp_path / "2")
    assert RunReader(tmp_path / "1").interruptions == 0


def test_rounds_that_are_done_stay(tmp_path: Path) -> None:
    run_method("fedavg", tmp_path / "run", 2)
    for rounds in (1, 0):
        with pytest.raises(
            SettingError, match=rf"rounds = {rounds}, but .* has done 2 \(allowed: more than 2\)|rounds must be > 0"
        ):
            fewer.resume(tmp_path / "run", rounds=rounds)
    assert len(fewer.resume(tmp_path / "run", rounds=2).history) == 2  # it has as many already


def test_a_run_that_ended_early_continues_to_its_planned_rounds(tmp_path: Path) -> None:
    class StopAfterOne(fewer.Callback):
        def on_round_end(self, run: fewer.Run, metrics: Any) -> None:
            run.stop("enough")

    small = experiment(3, runtime="inline", rounds=2)
    run_experiment(small, tmp_path / "run", [StopAfterOne()])
    assert len(fewer.resume(tmp_path / "run").history) == 1
    assert len(fewer.resume(tmp_path / "run", rounds=2).history) == 2
