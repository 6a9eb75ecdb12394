"""Trackers: what they wrote is what the run has, and the run is the same without them."""

import json
import shutil
import sys
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
from fewer.runs.directory import RunDirectory
from fewer.runs.trackers import Metrics, RunInfo, scalars
from tests.examples import Stop, Stopping
from tests.test_cli import DIGITS, call


@pytest.fixture
def four() -> Data:
    return fewer.data.load("digits", clients=4, alpha=1.0)


def test_numbers_are_told_and_figures_by_client_are_not() -> None:
    figures = {"round": 3, "accuracy": 0.5, "up": 7, "clients": {"0": 0.1}, "fairness": {"mean": 0.2}, "groups": [0.1]}
    assert scalars(figures) == {"accuracy": 0.5, "up": 7.0, "fairness/mean": 0.2}


def test_tensorboard_reads_back_what_a_run_wrote(tmp_path: Path, four: Data) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    method, run = FedAvg(rounds=3, cohort=4, local_steps=2), tmp_path / "run"
    with pytest.raises(Stop):
        fewer.run(method, four, out=run, progress=Stopping(), track=["tensorboard"])
    result = fewer.resume(run, track=["tensorboard"])
    read = EventAccumulator(str(run / "tensorboard")).Reload()
    assert len(list((run / "tensorboard").iterdir())) == 2  # one file before the break, one with all rounds after it
    for name in ("accuracy", "up", "down", "seconds"):
        told = [(event.step, event.value) for event in read.Scalars(name)]
        assert told == [(line["round"], pytest.approx(line[name])) for line in result.history]
    assert "clients" not in " ".join(read.Tags()["scalars"])
    (settings,) = read.Tensors("settings")
    text = settings.tensor_proto.string_val[0].decode()
    assert "lr = 0.1" in text and json.loads((run / "settings.json").read_text())["hash"] in text
    plain = fewer.run(method, four, out=tmp_path / "plain")  # tracking changes nothing
    assert [line["accuracy"] for line in plain.history] == [line["accuracy"] for line in result.history]
    described = [json.loads((path / "settings.json").read_text()) for path in (run, tmp_path / "plain")]
    assert described[0]["hash"] == described[1]["hash"] and described[0]["settings"] == described[1]["settings"]


def test_mlflow_reads_back_what_a_run_wrote(tmp_path: Path, four: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = tmp_path / "it's a run"
    with pytest.raises(Stop):
        fewer.run(FedAvg(rounds=3, cohort=4, local_steps=2), four, out=run, progress=Stopping(), track=["mlflow"])
    from mlflow import MlflowClient
    from mlflow.telemetry.utils import is_telemetry_disabled

    assert is_telemetry_disabled()
    mlflow_client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = mlflow_client.get_experiment_by_name("fewer")
    assert experiment
    (broken,) = mlflow_client.search_runs([experiment.experiment_id])
    assert broken.info.status == "KILLED" and broken.data.tags["fewer.stopped"] == "Stop: "
    result = fewer.resume(run, track=["mlflow"])
    again = fewer.resume(run, track=["mlflow"])  # a finished run leaves nothing twice
    assert again.history == result.history
    (whole,) = mlflow_client.search_runs([experiment.experiment_id])
    assert whole.info.run_id == broken.info.run_id and whole.info.status == "FINISHED"
    for name in ("accuracy", "up", "seconds"):
        told = [(metric.step, metric.value) for metric in mlflow_client.get_metric_history(whole.info.run_id, name)]
        assert told == [(line["round"], line[name]) for line in result.history]
    assert whole.data.params["lr"] == "0.1" and whole.data.params["data"] == "digits"
    assert whole.data.tags["fewer.hash"] == json.loads((run / "settings.json").read_text())["hash"]
    shutil.rmtree(run)
    fewer.run(FedAvg(rounds=1, cohort=4, local_steps=2, lr=0.7), four, out=run, track=["mlflow"])  # another, there
    found = mlflow_client.search_runs([experiment.experiment_id])
    assert {one.data.params["lr"] for one in found} == {"0.1", "0.7"} and len(found) == 2


class Noted:
    """A tracker of a user's own, which can fail."""

    told: list[Any] = []  # noqa: RUF012
    fails = ""

    def __init__(self, about: RunInfo, history: Sequence[Metrics]) -> None:
        if self.fails == "begin":
            raise ValueError("no\nroom")
        self.told.append((about.path.name, about.method, len(history)))

    def round(self, figures: Metrics) -> None:
        if self.fails == "round":
            raise ValueError("full")
        self.told.append(figures["round"])

    def close(self, reason: str) -> None:
        self.told.append(reason)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Noted]]:
    entries = [
        EntryPoint("noted", f"{__name__}:Noted", TRACKERS.group),
        EntryPoint("absent", "nowhere_installed:Tracker", TRACKERS.group),
    ]
    monkeypatch.setattr(TRACKERS, "_plugins", {entry.name: entry for entry in entries})
    Noted.told, Noted.fails = [], ""
    yield Noted


def test_a_plug_in_is_told_of_every_run_of_a_comparison(tmp_path: Path, noted: type[Noted]) -> None:
    given: dict[str, Any] = {
        "data": "digits",
        "clients": 4,
        "rounds": 1,
        "cohort": 2,
        "method_options": {"local_steps": 1},
    }
    table = fewer.compare(["fedavg", "local"], seeds=2, out=tmp_path, track=["noted"], **given)
    assert [row.method for row in table.rows] == ["fedavg", "local"]
    runs = [(f"{method}-seed{seed}", method, 0) for method in ("fedavg", "local") for seed in (0, 1)]
    assert noted.told == [each for run in runs for each in (run, 1, "")]


def test_a_recipe_is_followed(tmp_path: Path, noted: type[Noted]) -> None:
    file = tmp_path / "one.toml"
    file.write_text(
        'title = "T"\npaper = "P"\nseeds = 1\n[settings]\ndata = "digits"\nclients = 4\nrounds = 1\n'
        '[[column]]\nname = "C"\n[[row]]\nname = "R"\nmethod = "fedavg"\nmethod_options = { local_steps = 1 }\n'
    )
    call("reproduce", file, "--out", tmp_path / "runs", "--results", tmp_path, "--track", "noted")
    assert noted.told == [("r-seed0", "fedavg", 0), 1, ""]


def test_a_run_that_goes_on_is_followed_without_being_told_again(
    tmp_path: Path, four: Data, noted: type[Noted], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(name: str) -> Path:
        noted.told.clear()
        with pytest.raises(Stop):
            fewer.run(
                FedAvg(rounds=3, cohort=2, local_steps=1),
                four,
                out=tmp_path / name,
                progress=Stopping(),
                track=["noted"],
            )
        return tmp_path / name

    def kept(run: Path) -> list[str]:
        found: list[str] = json.loads((run / "settings.json").read_text())["track"]
        return found

    run = broken("run")
    assert kept(run) == ["noted"] and noted.told == [("run", "fedavg", 0), 1, "Stop: "]
    noted.told.clear()
    fewer.resume(run)
    assert noted.told == [("run", "fedavg", 2), 3, ""]
    noted.told.clear()
    fewer.resume(run)  # it is over, and its tracker knows
    assert not noted.told
    run = broken("other")
    before = json.loads((run / "settings.json").read_text())
    noted.told.clear()
    fewer.resume(run, track=[])  # takes the place of what was kept, for good
    assert not noted.told and json.loads((run / "settings.json").read_text()) == {**before, "track": []}
    run = broken("lost")
    RunDirectory.open(run).update_metadata(track=["absent", "gone", "noted"])
    noted.told.clear()
    noted.fails = "begin"
    assert len(fewer.resume(run).history) == 3 and not noted.told
    told = [record.getMessage().partition(": ")[0] for record in caplog.records]
    assert told == [f"tracker '{name}' is no longer used" for name in ("absent", "gone", "noted")]


def test_a_server_follows_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr")
    from fewer.runs import machines
    from fewer.runtime.flower.superlink import SuperLinkLost

    asked: list[tuple[str, Any]] = []

    def begin(experiment: object, out: Path, progress: object, connect: object, track: Sequence[str]) -> str:
        asked.append(("start", track))
        raise SuperLinkLost("gone")

    def go_on(out: Path, **given: Any) -> str:
        asked.append(("resume", given.get("track")))
        return "over"

    monkeypatch.setattr(machines, "run_experiment", begin)
    monkeypatch.setattr(machines, "resume", go_on)
    monkeypatch.setattr(machines.FlowerServer, "check_experiment", lambda self, experiment: None)
    nobody: Any = None
    followed = machines.FlowerServer(nobody, track=["tensorboard"])
    assert followed.start(nobody, tmp_path) == "over"  # type: ignore[comparison-overlap]
    followed.resume(tmp_path)
    machines.FlowerServer(nobody).resume(tmp_path)
    assert asked == [("start", ["tensorboard"]), ("resume", None), ("resume", ["tensorboard"]), ("resume", None)]
    with pytest.raises(SettingError, match="unknown tracker 'odd'"):
        machines.FlowerServer(nobody, track=["odd"]).__enter__()


def test_a_tracker_that_fails_does_not_stop_a_run(
    tmp_path: Path, four: Data, noted: type[Noted], caplog: pytest.LogCaptureFixture
) -> None:
    noted.fails = "round"
    result = fewer.run(FedAvg(rounds=2, cohort=2, local_steps=1), four, out=tmp_path / "run", track=["noted"])
    assert len(result.history) == 2 and noted.told == [("run", "fedavg", 0)]
    assert [r.getMessage() for r in caplog.records] == ["tracker 'noted' is no longer used: ValueError: full"]
    noted.fails = "begin"
    with pytest.raises(SettingError, match="^tracker 'noted' cannot start: ValueError: no$"):
        fewer.run(FedAvg(rounds=2, cohort=2, local_steps=1), four, out=tmp_path / "other", track=["noted"])


def test_what_cannot_be_tracked_is_told_before_the_run(tmp_path: Path, four: Data, noted: type[Noted]) -> None:
    method = FedAvg(rounds=1, cohort=2, local_steps=1)
    with pytest.raises(SettingError, match=r"tracker 'absent' needs nowhere_installed.*pip install 'fewer\[track\]'"):
        fewer.run(method, four, out=tmp_path / "run", track=["absent"])
    with pytest.raises(SettingError, match=r"unknown tracker 'notted', did you mean 'noted'\?"):
        fewer.run(method, four, out=tmp_path / "run", track=["notted"])
    with pytest.raises(SettingError, match=r"needs a run directory: pass out=DIR"):
        fewer.run(method, four, track=["noted"])
    assert not (tmp_path / "run").exists() and not noted.told


def test_track_on_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    short = [*DIGITS, "--rounds", "1", "--no-report"]
    call("compare", "fedavg", *short, "--track", "tensorboard", "--out", tmp_path / "both")
    assert list((tmp_path / "both/fedavg-seed0/tensorboard").iterdir())
    for command in (["run", "fedavg", "--tune"], ["compare", "fedavg", "--tune"], ["local-cluster", "2", "fedavg"]):
        if command[0] == "local-cluster":
            pytest.importorskip("flwr")
            short = ["--data", "digits"]
        wrong = call(*command, *short, "--track", "tensorbord", "--out", tmp_path / "run", code=2)
        assert "did you mean 'tensorboard'?" in wrong.stderr and [path.name for path in tmp_path.iterdir()] == ["both"]


# --- results that show themselves -----------------------------------------------------------------------------


def test_a_result_shows_itself(four: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    result = fewer.run(FedAvg(rounds=2, cohort=2, local_steps=1), four)
    page = result._repr_html_()
    assert "fedavg on digits, round 2 of 2" in page and f"{100 * result.accuracy:.2f}" in page
    assert 'src="data:image/svg+xml;base64,' in page and "script" not in page and 'alt="Line chart' in page
    axes = result.plot().axes[0]
    assert axes.get_xlabel() == "round"
    assert list(axes.lines[0].get_ydata()) == pytest.approx(  # type: ignore[arg-type]
        [100 * line["accuracy"] for line in result.history]
    )
    assert result.plot("megabytes").axes[0].get_xlabel().startswith("MB")
    assert result.plot("client").axes[0].get_xlabel().startswith("clients")
    with pytest.raises(SettingError, match="by must be one of round, megabytes, seconds, client, got 'week'"):
        result.plot("week")  # type: ignore[arg-type]
    frame = pytest.importorskip("pandas") and result.to_pandas()
    assert frame["accuracy"].tolist() == [line["accuracy"] for line in result.history]
    assert frame["round"].tolist() == [1, 2] and "clients" not in frame
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(SettingError, match=r"to_pandas needs pandas: pip install 'fewer\[notebook\]'"):
        result.to_pandas()
    result.history.clear()
    assert "no round has been evaluated yet" in result._repr_html_()


def test_a_comparison_shows_itself() -> None:
    given: dict[str, Any] = {
        "data": "digits",
        "clients": 4,
        "rounds": 1,
        "cohort": 2,
        "method_options": {"local_steps": 1},
    }
    table = fewer.compare(["fedavg", "local"], seeds=2, **given)
    page = table._repr_html_()
    assert "digits, 4 clients" in page and "fedavg" in page and "local" in page and "±" in page
    assert len(table.plot("seconds").legends[0].get_texts()) == 2
    assert len(table.plot("client").legends[0].get_texts()) == 2
    frame = pytest.importorskip("pandas") and table.to_pandas()
    assert frame["method"].tolist() == ["fedavg", "local"] and frame["seeds"].tolist() == [2, 2]
    assert frame["accuracy"].tolist() == [row.accuracy for row in table.rows]
    with pytest.raises(SettingError, match="there are no methods to compare"):
        fewer.compare([], data="digits")
