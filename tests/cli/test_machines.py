"""The commands for runs between machines."""

from __future__ import annotations

import fcntl
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fewer[flower]')")
from fewer.cli import printing
from fewer.cli.machines import _prepare_process
from fewer.errors import QuorumLost, RunError, SettingError
from fewer.report.page import write_report
from fewer.runs.engine import resume, run_experiment
from fewer.runs.experiment import Experiment
from fewer.runs.machines import ClientDaemon, FlowerServer
from fewer.runtime.flower.credentials import Credentials
from fewer.runtime.flower.programs import Program, secret_file
from fewer.runtime.flower.superlink import SuperLink
from fewer.runtime.handlers import Call, on_client
from fewer.wire import encode
from tests.helpers import Interrupt, experiment
from tests.helpers import call as command
from tests.runtime.flower.harness import connect_daemons, session


def test_keys_and_mistakes_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    assert "client 1: " in command("keys", "init", keys, "--clients", "2", "--host", "a.example").stdout
    assert "already contains keys" in command("keys", "init", keys, "--clients", "2", code=2).stderr
    before = (keys / "server.crt").read_bytes()
    command("keys", "renew", keys, "--host", "b.example")
    assert (keys / "server.crt").read_bytes() != before
    digits: list[str | Path] = ["--data", "digits", "--keys", keys, "--clients"]
    wrong = command("server", "fedavg", *digits, "3", code=2).stderr
    assert f"clients = 3, but {keys} has keys of clients [0, 1]" in wrong
    method_file = Path(__file__).parents[2] / "docs/examples/fedmedian.py"
    assert "names a file" in command("server", f"{method_file}:FedMedian", *digits, "2", code=2).stderr
    assert "has no node.key" in command("join", "127.0.0.1:1", "--key", tmp_path, code=2).stderr
    join: list[str | Path] = ["join", "127.0.0.1:1", "--key", keys / "client-0"]
    assert "unknown level 'recrod'" in command(*join, "--dp", "recrod:epsilon=8", code=2).stderr
    assert "device = 'gpu' is not available" in command(*join, "--device", "gpu", code=2).stderr
    assert "'none.npz' does not exist" in command(*join, "--data", "npz:none.npz", code=2).stderr
    for address in ("server", "https://server:443", "server:http"):
        wrong = command("join", address, *join[2:], code=2).stderr
        assert f"'{address}' is not the address of a server (expected: HOST:PORT)" in wrong
    assert "is not a run directory" in command("server", "--resume", tmp_path, "--keys", keys, code=2).stderr
    assert "--resume RUN" in command("server", "fedavg", "--resume", tmp_path, *digits, "2", code=2).stderr
    assert "runtime = flower" in command("run", "fedavg", "--data", "digits", "--runtime", "flower", code=2).stderr
    monkeypatch.setattr("fewer.runtime.flower.find_spec", lambda name: None)
    for args in (["join", "a:1", "--key", "x"], ["local-cluster", "2"], ["keys", "init", "x", "--clients", "1"]):
        assert "pip install 'fewer[flower]'" in command(*args, code=2).stderr


def test_sigterm_ends_a_client_in_the_middle_of_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other exception in a handler becomes a reply."""
    before = signal.getsignal(signal.SIGTERM)
    description = session(tmp_path)
    daemon = ClientDaemon(tmp_path / "store")
    monkeypatch.setattr("fewer.methods.fedavg.FedAvg.local_train", on_client(lambda *_, **__: signal.raise_signal(15)))
    try:
        _prepare_process()
        with pytest.raises(KeyboardInterrupt):
            daemon.answer(json.dumps(description), Call(0, "local_train", 1), encode("train", {"model": {}}))
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_lost_quorum_prints_how_to_resume(capsys: pytest.CaptureFixture[str]) -> None:
    @printing.report_errors
    def lose_quorum() -> None:
        with printing.resumable("Resume so."):
            raise QuorumLost("too few")

    with pytest.raises(typer.Exit):
        lose_quorum()
    assert capsys.readouterr().err == "fewer: too few\nResume so.\n"


def test_a_stopped_local_cluster_prints_how_to_resume_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    joined: list[Sequence[str]] = []
    resumed: list[tuple[Path, dict[str, Any]]] = []

    def start_and_stop(self: FlowerServer, unused: Any, out: Path, callbacks: Any) -> None:
        run_experiment(experiment(2, runtime="inline"), out, [Interrupt(1)])

    def resume_run(self: FlowerServer, out: Path, callbacks: Any, **changed: Any) -> None:
        resumed.append((out, changed))
        raise QuorumLost("too few")

    monkeypatch.setattr(Program, "start", lambda self: joined.append(self.arguments))
    monkeypatch.setattr(SuperLink, "__enter__", lambda self: self)
    monkeypatch.setattr(SuperLink, "__exit__", lambda self, *_: None)
    monkeypatch.setattr(FlowerServer, "start", start_and_stop)
    monkeypatch.setattr(FlowerServer, "resume", resume_run)
    args: list[str | Path] = ["local-cluster", "2", "fedavg", "--data", "digits", "--out", run]
    hint = f"Resume with: fewer local-cluster --resume {run}"
    assert hint in command(*args, code=130).stderr and len(joined) == 2
    assert "exists already" in command(*args, code=2).stderr and len(joined) == 2
    assert hint in command("local-cluster", "--resume", run, "--quorum", "0.5", code=2).stderr
    assert resumed == [(run, {"quorum": 0.5})] and len(joined) == 4
    assert "N is missing" in command("local-cluster", code=2).stderr
    assert "--resume RUN cannot be combined" in command("local-cluster", "2", "--resume", run, code=2).stderr
    missing = tmp_path / "nowhere"
    assert "is not a run directory" in command("local-cluster", "--resume", missing, code=2).stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run-cluster"]


def test_a_server_stopped_before_its_run_prints_no_resume_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(self: SuperLink) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SuperLink, "__enter__", stopped)
    keys = Credentials.create(tmp_path / "keys", 2).folder
    args = ["fedavg", "--data", "digits", "--keys", str(keys), "--clients", "2", "--out", str(tmp_path / "run")]
    assert command("server", *args, code=130).stderr == "\nStopped.\n"


def test_the_keys_say_how_many_clients_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def start(self: FlowerServer, experiment: Experiment, *_: Any) -> None:
        started.append(len(experiment.data))
        raise KeyboardInterrupt

    monkeypatch.setattr(SuperLink, "__enter__", lambda self: self)
    monkeypatch.setattr(SuperLink, "__exit__", lambda self, *_: None)
    monkeypatch.setattr(FlowerServer, "start", start)
    np.savez(tmp_path / "public.npz", x=np.zeros((12, 5), np.float32), y=np.arange(12) % 2)
    keys = Credentials.create(tmp_path / "keys", 0).folder
    args: list[str | Path] = ["server", "fedavg", "--keys", keys, "--model", "mlp", "--out", tmp_path / "run", "--data"]
    assert f"{keys} has no client (add one with: fewer keys add NAME" in command(*args, "digits", code=2).stderr
    for _ in range(3):
        Credentials(keys).add_client(f"clinic-{len(Credentials(keys).public_keys)}")
    for data in ("digits", f"npz:{tmp_path / 'public.npz'}"):
        command(*args, data, code=130)
    command(*args, "digits", "--clients", "3", code=130)
    assert started == [3, 3, 3]
    wrong = command(*args, "digits", "--clients", "2", code=2).stderr
    assert wrong == f"fewer: clients = 2, but {keys} has keys of clients [0, 1, 2]\n"


def test_a_finished_run_starts_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, run = Credentials.create(tmp_path / "my keys", 2).folder, tmp_path / "run"
    run_experiment(experiment(2, rounds=1), run, connect=connect_daemons(run, [None, None]))
    finished = command("server", "--resume", run, "--keys", keys)
    resume = f"fewer server --resume {run} --keys '{keys}'"
    assert f"{run} is already finished: 1 rounds. To add some: {resume} --rounds 6\n" == finished.stderr
    changes: list[dict[str, Any]] = []

    def resume_run(self: FlowerServer, out: Path, callbacks: Any, **changed: Any) -> None:
        changes.append(changed)
        raise KeyboardInterrupt

    monkeypatch.setattr(SuperLink, "__enter__", lambda self: self)
    monkeypatch.setattr(SuperLink, "__exit__", lambda self, *_: None)
    monkeypatch.setattr(FlowerServer, "resume", resume_run)
    stopped = command("server", "--resume", run, "--keys", keys, "--rounds", "2", code=130).stderr
    assert changes == [{"rounds": 2}] and f"Resume with: {resume}" in stopped


def test_only_one_server_at_a_time_uses_the_keys(tmp_path: Path) -> None:
    keys = Credentials.create(tmp_path / "keys", 1)
    secret_file(keys.folder / "flower")
    with (keys.folder / "flower/lock").open("a+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="another server uses the keys in"), SuperLink(keys, port=1):
            pass


def test_a_personal_model_exists_only_on_its_client(tmp_path: Path) -> None:
    result = run_experiment(experiment(3, rounds=1, runtime="inline"), tmp_path / "run")
    with pytest.raises(SettingError, match="cannot switch between simulated and remote clients"):
        resume(tmp_path / "run", runtime="flower")
    result.personal_model(0)
    result.settings = result.settings.model_copy(update={"runtime": "flower"})
    with pytest.raises(RunError, match="exists only on that client's machine"):
        result.personal_model(0)


def test_the_report_shows_the_bytes_that_flower_sent(tmp_path: Path) -> None:
    run_experiment(experiment(3, rounds=1, runtime="inline"), tmp_path / "run")
    with (tmp_path / "run/events.jsonl").open("a") as events:
        events.write(json.dumps({"event": "finish", "transport_up": 2_500_000, "transport_down": 1_000_000}) + "\n")
    page = write_report([tmp_path / "run"], tmp_path / "report")[0]
    assert "Flower sent 2.5 MB up and 1 MB down" in page.read_text()
