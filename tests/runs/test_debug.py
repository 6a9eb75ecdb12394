"""Debug mode raises a client's exception. Without a run directory, the log has the traceback."""

import traceback
from pathlib import Path
from typing import Any

import pytest

import fewer
from fewer import FedAvg, Unable, on_client, on_server
from fewer.data import Data
from fewer.errors import RunError
from fewer.methods import Client, Server
from fewer.models import Weights
from fewer.runs.reader import RunReader
from tests.helpers import DIGITS, Buggy, call

HELPERS = Path(__file__).parents[1] / "helpers.py"


class Reluctant(FedAvg):
    """One client is unable, another answers with a wrong size."""

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        if client.id == 0:
            raise Unable("no time")
        answer = super().local_train(client, model)
        return {**answer, "size": -5} if client.id == 1 else answer


class BrokenServer(FedAvg):
    """A handler on the server fails."""

    @on_server
    def count_on_server(self, server: Server, start: int) -> dict[str, Any]:
        raise ZeroDivisionError("on the server")

    def round(self, state: Any, clients: fewer.Clients) -> Any:
        clients.map_on_server(self.count_on_server, [{"start": 0}])
        return state


@pytest.mark.parametrize("runtime", ["inline", "pool"])
def test_debug_raises_the_exception_of_a_client(
    runtime: str, digits: Data, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ZeroDivisionError, match="by design") as caught:
        fewer.run(Buggy(rounds=2, cohort=6), digits, runtime=runtime, debug=True, out=tmp_path / "run")
    assert caught.value.__notes__ == ["client 0, round 1, handler local_train"]
    frames = [Path(frame.filename).name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "helpers.py"  # the traceback leads to the line in the handler
    switched = ["debug: clients run inline instead of in the pool; the results are the same"]
    assert [record.getMessage() for record in caplog.records] == (switched if runtime == "pool" else [])
    assert '"event": "stop"' in (tmp_path / "run/events.jsonl").read_text()


def test_debug_raises_the_exception_of_the_server(digits: Data) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        fewer.run(BrokenServer(rounds=1), digits, debug=True)
    assert caught.value.__notes__ == ["server, round 1, handler count_on_server"]


def test_debug_keeps_unable_and_refused_clients_as_missing_answers(digits: Data) -> None:
    result = fewer.run(Reluctant(rounds=1, cohort=6), digits, debug=True)
    assert result.metrics["absent"] == 2


def test_debug_changes_neither_numbers_nor_hash(digits: Data, tmp_path: Path) -> None:
    method = FedAvg(rounds=2, cohort=3, local_steps=2)
    for name, debug in (("plain", False), ("debug", True)):
        fewer.run(method, digits, debug=debug, out=tmp_path / name)
    assert (tmp_path / "plain/ledger.csv").read_bytes() == (tmp_path / "debug/ledger.csv").read_bytes()
    plain, debug_run = (RunReader(tmp_path / name) for name in ("plain", "debug"))
    assert plain.metadata["hash"] == debug_run.metadata["hash"]
    assert plain.metadata["settings"] == debug_run.metadata["settings"]  # so that a resumed run is not in debug mode
    accuracies = [[line["accuracy"] for line in reader.history] for reader in (plain, debug_run)]
    assert accuracies[0] == accuracies[1]


def test_debug_on_the_command_line_shows_the_traceback(tmp_path: Path) -> None:
    failing = [f"{HELPERS}:Buggy", *DIGITS, "--no-report"]
    error = call("run", *failing, "--out", tmp_path / "run", "--debug", code=1).exception
    assert isinstance(error, ZeroDivisionError) and error.__notes__ == ["client 0, round 1, handler local_train"]
    assert isinstance(call("resume", tmp_path / "run", "--debug", code=1).exception, ZeroDivisionError)
    for debug in ([], ["--debug"]):  # a wrong value is one line either way
        assert call("run", "fedavg", "--rounds", "0", *debug, code=2).stderr.count("\n") == 1


@pytest.mark.parametrize("runtime", ["inline", "pool"])
def test_without_a_run_directory_the_log_has_each_traceback_once(
    runtime: str, digits: Data, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fewer.run(Buggy(rounds=2, cohort=6), digits, runtime=runtime)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("client 0 failed: round 1, local_train\nTraceback")
    assert "helpers.py" in message and message.endswith("ZeroDivisionError: by design")
    caplog.clear()
    fewer.run(Buggy(rounds=2, cohort=6), digits, runtime=runtime, out=tmp_path / "run")
    assert not caplog.records  # the run directory has it
    with pytest.raises(RunError, match="server handler 'count_on_server' failed"):
        fewer.run(BrokenServer(rounds=1), digits, runtime=runtime)
    assert caplog.records[-1].getMessage().endswith("ZeroDivisionError: on the server")
