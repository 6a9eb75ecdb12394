"""Trackers: they record the metrics of a run and do not change the run."""

import json
import shutil
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import fewer
from fewer import FedAvg
from fewer.data import Data
from fewer.errors import SettingError
from fewer.registry import TRACKERS
from fewer.runs.callbacks import Metrics, Tracker
from fewer.runs.directory import RunDirectory
from fewer.runs.result import scalars
from tests.helpers import DIGITS, Stop, Stopping, call


@pytest.fixture
def data() -> Data:
    return fewer.data.load("digits", clients=4, alpha=1.0)


def test_scalars_are_tracked_and_metrics_by_client_are_not() -> None:
    metrics = {"round": 3, "accuracy": 0.5, "up": 7, "clients": {"0": 0.1}, "fairness": {"mean": 0.2}, "groups": [0.1]}
    assert scalars(metrics) == {"accuracy": 0.5, "up": 7.0, "fairness/mean": 0.2}


def test_tensorboard_reads_back_what_a_run_wrote(tmp_path: Path, data: Data) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    method, run = FedAvg(rounds=3, cohort=4, local_steps=2), tmp_path / "run"
    with pytest.raises(Stop):
        fewer.run(method, data, out=run, callbacks=[Stopping()], track=["tensorboard"])
    result = fewer.resume(run, track=["tensorboard"])
    read = EventAccumulator(str(run / "tensorboard")).Reload()
    assert len(list((run / "tensorboard").iterdir())) == 2  # one file from before the interruption, one with all rounds
    for name in ("accuracy", "up", "down", "seconds"):
        points = [(event.step, event.value) for event in read.Scalars(name)]
        assert points == [(line["round"], pytest.approx(line[name])) for line in result.history]
    assert "clients" not in " ".join(read.Tags()["scalars"])
    (settings,) = read.Tensors("settings")
    text = settings.tensor_proto.string_val[0].decode()
    assert "lr = 0.1" in text and json.loads((run / "settings.json").read_text())["hash"] in text
    plain = fewer.run(method, data, out=tmp_path / "plain")  # tracking changes nothing
    assert [line["accuracy"] for line in plain.history] == [line["accuracy"] for line in result.history]
    described = [json.loads((path / "settings.json").read_text()) for path in (run, tmp_path / "plain")]
    assert described[0]["hash"] == described[1]["hash"] and described[0]["settings"] == described[1]["settings"]


def test_mlflow_reads_back_what_a_run_wrote(tmp_path: Path, data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = tmp_path / "it's a run"
    with pytest.raises(Stop):
        fewer.run(FedAvg(rounds=3, cohort=4, local_steps=2), data, out=run, callbacks=[Stopping()], track=["mlflow"])
    from mlflow import MlflowClient
    from mlflow.telemetry.utils import is_telemetry_disabled

    assert is_telemetry_disabled()
    mlflow_client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = mlflow_client.get_experiment_by_name("fewer")
    assert experiment
    (interrupted,) = mlflow_client.search_runs([experiment.experiment_id])
    assert interrupted.info.status == "KILLED" and interrupted.data.tags["fewer.stopped"] == "Stop: "
    result = fewer.resume(run, track=["mlflow"])
    again = fewer.resume(run, track=["mlflow"])  # resuming a finished run logs nothing twice
    assert again.history == result.history
    (finished,) = mlflow_client.search_runs([experiment.experiment_id])
    assert finished.info.run_id == interrupted.info.run_id and finished.info.status == "FINISHED"
    for name in ("accuracy", "up", "seconds"):
        points = [
            (metric.step, metric.value) for metric in mlflow_client.get_metric_history(finished.info.run_id, name)
        ]
        assert points == [(line["round"], line[name]) for line in result.history]
    assert finished.data.params["lr"] == "0.1" and finished.data.params["data"] == "digits"
    assert finished.data.tags["fewer.hash"] == json.loads((run / "settings.json").read_text())["hash"]
    shutil.rmtree(run)
    fewer.run(FedAvg(rounds=1, cohort=4, local_steps=2, lr=0.7), data, out=run, track=["mlflow"])  # a new run
    tracked_runs = mlflow_client.search_runs([experiment.experiment_id])
    assert {tracked.data.params["lr"] for tracked in tracked_runs} == {"0.1", "0.7"} and len(tracked_runs) == 2


class RecordingTracker(Tracker):
    """A user's tracker that records its calls and can fail."""

    calls: list[Any] = []  # noqa: RUF012
    fails = ""

    def on_run_start(self, run: fewer.Run) -> None:
        if self.fails == "start":
            raise ValueError("no\nroom")
        assert run.path
        self.calls.append((run.path.name, run.method.name, len(run.history)))

    def on_round_end(self, run: fewer.Run, metrics: Metrics) -> None:
        if self.fails == "round":
            raise ValueError("full")
        self.calls.append(metrics["round"])

    def on_run_end(self, run: fewer.Run, error: BaseException | None) -> None:
        self.calls.append(run.end_reason(error))


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[RecordingTracker]]:
    entries = [
        EntryPoint("noted", f"{__name__}:RecordingTracker", TRACKERS.group),
        EntryPoint("absent", "nowhere_installed:Tracker", TRACKERS.group),
    ]
    monkeypatch.setattr(TRACKERS, "_plugins", {entry.name: entry for entry in entries})
    RecordingTracker.calls, RecordingTracker.fails = [], ""
    yield RecordingTracker


def test_a_plug_in_tracks_every_run_of_a_comparison(tmp_path: Path, tracker: type[RecordingTracker]) -> None:
    settings: dict[str, Any] = {
        "data": "digits",
        "clients": 4,
        "rounds": 1,
        "cohort": 2,
        "method_options": {"local_steps": 1},
    }
    table = fewer.compare(["fedavg", "local"], seeds=2, out=tmp_path, track=["noted"], **settings)
    assert [row.method for row in table.rows] == ["fedavg", "local"]
    runs = [(f"{method}-seed{seed}", method, 0) for method in ("fedavg", "local") for seed in (0, 1)]
    assert tracker.calls == [entry for run in runs for entry in (run, 1, "")]


def test_a_recipe_is_tracked(tmp_path: Path, tracker: type[RecordingTracker]) -> None:
    file = tmp_path / "one.toml"
    file.write_text(
        'title = "T"\npaper = "P"\nseeds = 1\n[settings]\ndata = "digits"\nclients = 4\nrounds = 1\n'
        '[[column]]\nname = "C"\n[[row]]\nname = "R"\nmethod = "fedavg"\nmethod_options = { local_steps = 1 }\n'
    )
    call("reproduce", file, "--out", tmp_path / "runs", "--results", tmp_path, "--track", "noted")
    assert tracker.calls == [("r-seed0", "fedavg", 0), 1, ""]


def test_a_resumed_run_is_tracked_without_repeated_rounds(
    tmp_path: Path, data: Data, tracker: type[RecordingTracker], caplog: pytest.LogCaptureFixture
) -> None:
    def interrupted_run(name: str) -> Path:
        tracker.calls.clear()
        with pytest.raises(Stop):
            fewer.run(
                FedAvg(rounds=3, cohort=2, local_steps=1),
                data,
                out=tmp_path / name,
                callbacks=[Stopping()],
                track=["noted"],
            )
        return tmp_path / name

    def saved_trackers(run: Path) -> list[str]:
        trackers: list[str] = json.loads((run / "settings.json").read_text())["track"]
        return trackers

    run = interrupted_run("run")
    assert saved_trackers(run) == ["noted"] and tracker.calls == [("run", "fedavg", 0), 1, 2, "Stop: "]
    tracker.calls.clear()
    fewer.resume(run)
    assert tracker.calls == [("run", "fedavg", 2), 3, ""]
    tracker.calls.clear()
    fewer.resume(run)  # the run is finished, and its tracker is closed
    assert not tracker.calls
    run = interrupted_run("other")
    before = json.loads((run / "settings.json").read_text())
    tracker.calls.clear()
    fewer.resume(run, track=[])  # replaces the saved trackers permanently
    assert not tracker.calls and json.loads((run / "settings.json").read_text()) == {**before, "track": []}
    run = interrupted_run("lost")
    RunDirectory(run).update_metadata(track=["absent", "gone", "noted"])
    tracker.calls.clear()
    tracker.fails = "start"
    assert len(fewer.resume(run).history) == 3 and not tracker.calls
    messages = [record.getMessage().partition(": ")[0] for record in caplog.records]
    assert messages == [f"tracker '{name}' is no longer used" for name in ("absent", "gone", "noted")]


def test_a_server_tracks_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr")
    from fewer.runs import machines
    from fewer.runtime.flower.superlink import SuperLinkLost

    calls: list[tuple[str, Any]] = []

    def start_run(experiment: object, out: Path, callbacks: object, connect: object, track: Sequence[str]) -> str:
        calls.append(("start", track))
        raise SuperLinkLost("gone")

    def resume_run(out: Path, **options: Any) -> str:
        calls.append(("resume", options.get("track")))
        return "over"

    monkeypatch.setattr(machines, "run_experiment", start_run)
    monkeypatch.setattr(machines, "resume", resume_run)
    monkeypatch.setattr(machines.FlowerServer, "check_experiment", lambda self, experiment: None)
    unused: Any = None
    server = machines.FlowerServer(unused, track=["tensorboard"])
    assert server.start(unused, tmp_path) == "over"  # type: ignore[comparison-overlap]
    server.resume(tmp_path)
    machines.FlowerServer(unused).resume(tmp_path)
    assert calls == [("start", ["tensorboard"]), ("resume", None), ("resume", ["tensorboard"]), ("resume", None)]
    with pytest.raises(SettingError, match="unknown tracker 'odd'"):
        machines.FlowerServer(unused, track=["odd"]).__enter__()


def test_a_tracker_that_fails_does_not_stop_a_run(
    tmp_path: Path, data: Data, tracker: type[RecordingTracker], caplog: pytest.LogCaptureFixture
) -> None:
    tracker.fails = "round"
    result = fewer.run(FedAvg(rounds=2, cohort=2, local_steps=1), data, out=tmp_path / "run", track=["noted"])
    assert len(result.history) == 2 and tracker.calls == [("run", "fedavg", 0)]
    assert [r.getMessage() for r in caplog.records] == ["tracker 'noted' is no longer used: ValueError: full"]
    tracker.fails = "start"
    with pytest.raises(SettingError, match="^tracker 'noted' cannot start: ValueError: no$"):
        fewer.run(FedAvg(rounds=2, cohort=2, local_steps=1), data, out=tmp_path / "other", track=["noted"])


def test_tracker_errors_are_reported_before_the_run(
    tmp_path: Path, data: Data, tracker: type[RecordingTracker]
) -> None:
    method = FedAvg(rounds=1, cohort=2, local_steps=1)
    with pytest.raises(SettingError, match=r"tracker 'absent' needs nowhere_installed.*pip install 'fewer\[track\]'"):
        fewer.run(method, data, out=tmp_path / "run", track=["absent"])
    with pytest.raises(SettingError, match=r"unknown tracker 'notted', did you mean 'noted'\?"):
        fewer.run(method, data, out=tmp_path / "run", track=["notted"])
    with pytest.raises(SettingError, match=r"needs a run directory: pass out=DIR"):
        fewer.run(method, data, track=["noted"])
    assert not (tmp_path / "run").exists() and not tracker.calls


def test_track_on_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    options = [*DIGITS, "--rounds", "1", "--no-report"]
    call("compare", "fedavg", *options, "--track", "tensorboard", "--out", tmp_path / "both")
    assert list((tmp_path / "both/fedavg-seed0/tensorboard").iterdir())
    for command in (["run", "fedavg", "--tune"], ["compare", "fedavg", "--tune"], ["local-cluster", "2", "fedavg"]):
        if command[0] == "local-cluster":
            pytest.importorskip("flwr")
            options = ["--data", "digits"]
        wrong = call(*command, *options, "--track", "tensorbord", "--out", tmp_path / "run", code=2)
        assert "did you mean 'tensorboard'?" in wrong.stderr and [path.name for path in tmp_path.iterdir()] == ["both"]
