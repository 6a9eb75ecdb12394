"""Faults between machines, with real processes: killed, late, malformed, and not admitted."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fewer[flower]')")
import fewer
from fewer.errors import QuorumLost, RunError
from fewer.runs.engine import run_experiment
from fewer.runtime import Absent
from fewer.runtime.flower.clients import Flower
from fewer.runtime.flower.credentials import Credentials
from tests.helpers import experiment, remote_contents, run_contents, wait_for
from tests.machines.cluster import TIMEOUT, Cluster

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    created = Cluster(tmp_path, 2)
    yield created
    created.close()
    wait_for(lambda: not created.strays(), 30)


class After(fewer.Callback):
    """Calls a function once: after a round, or after the first answer in a round."""

    def __init__(self, action: Callable[[], Any], round: int = 0, answer: int = 0) -> None:
        self.action, self.after_round, self.answer_round = action, round, answer

    def on_answer(self, run: fewer.Run, answered: int, asked: int) -> None:
        if (run.round, answered) == (self.answer_round, 1):
            self.answer_round = 0
            self.action()

    def on_round_end(self, run: fewer.Run, metrics: Mapping[str, Any]) -> None:
        if metrics["round"] == self.after_round:
            self.action()


def absent(run: Path) -> list[tuple[int, int, str]]:
    """Round, client and reason of all missing answers."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [(event["round"], event["client"], event["reason"]) for event in events if event["event"] == "absent"]


def check_same_as_inline(run: Path, folder: Path, **settings: Any) -> None:
    """Checks that a run left the same files as an uninterrupted run on one machine."""
    run_experiment(experiment(2, runtime="inline", **settings), folder)
    expected, found = remote_contents(folder, run), run_contents(run)
    assert found["metrics"] == expected["metrics"]
    assert found["ledger"].decode() == expected["ledger"].decode()
    assert found == expected


# --- killed -----------------------------------------------------------------------------------------------------


def test_a_killed_server_resumes(cluster: Cluster, tmp_path: Path) -> None:
    cluster.join(0)
    cluster.join(1)
    args = ["fedavg", "--data", "digits", "--clients", "2", "--alpha", "1", "--rounds", "3", "--seed", "3"]
    run = tmp_path / "run"
    first = cluster.start_server(*args, "--out", run)
    wait_for((run / "checkpoint.safetensors").exists, TIMEOUT)
    time.sleep(1)  # clients poll every 3 seconds: the next question is on its way
    children = psutil.Process(first.pid).children()
    first.kill()
    first.wait()
    wait_for(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children), 10)
    completed = subprocess.run(cluster.command("--resume", run), capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    assert re.search(r"resumes after round [12]/3", completed.stderr) and "fedavg: accuracy" in completed.stdout
    check_same_as_inline(run, tmp_path / "inline", rounds=3)


def test_a_client_killed_in_mid_round_is_lost_and_can_rejoin_with_its_key(cluster: Cluster, tmp_path: Path) -> None:
    cluster.join(0)
    cluster.join(1, "hangs")

    def restart_client() -> None:  # while the client handles its first question
        wait_for((tmp_path / "mark-1").exists, TIMEOUT)
        cluster.kill(1)
        cluster.join(1)

    threading.Thread(target=restart_client, daemon=True).start()
    with cluster.server() as server:
        run = tmp_path / "run"
        with pytest.raises(QuorumLost, match="1 of 2 clients answered, 2 needed.*lost"):
            server.start(experiment(2, quorum=1.0), run)
        assert absent(run) == [(1, 1, "lost")]
        server.resume(run)  # waits for both
    check_same_as_inline(run, tmp_path / "inline", quorum=1.0)


@pytest.mark.cluster
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_client_is_lost_within_15_seconds(sign: signal.Signals, cluster: Cluster, tmp_path: Path) -> None:
    cluster.join(0)
    cluster.join(1, "hangs")
    killed = 0.0

    def kill() -> None:
        nonlocal killed
        wait_for((tmp_path / "mark-1").exists, TIMEOUT)
        node = cluster.node(1)
        killed = time.monotonic()
        node.send_signal(sign)  # with its machine, a client's SuperNode is gone, too
        cluster.clients[1].send_signal(sign)

    threading.Thread(target=kill, daemon=True).start()
    with cluster.server() as server:
        lost: list[float] = []
        watch = Absences(lambda: lost.append(time.monotonic() - killed))
        server.start(experiment(2, rounds=1), tmp_path / "run", [watch])
    cluster.kill(1)
    assert absent(tmp_path / "run")[0] == (1, 1, "lost") and lost[0] < 15


class Absences(fewer.Callback):
    """Calls a function for each absent client."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def on_absent(self, run: fewer.Run, absent: Absent, handler: str) -> None:
        self.call()


@pytest.mark.cluster
def test_a_client_that_dies_while_it_sends_delays_no_other_client(cluster: Cluster, tmp_path: Path) -> None:
    """Its answer is announced to the SuperLink, which would wait three minutes for the rest."""
    cluster.join(0)
    cluster.join(1, "dies")
    with cluster.server() as server:
        result = server.start(experiment(2, rounds=1, deadline=2.0), tmp_path / "run")
    assert absent(tmp_path / "run") == [(1, 1, "late"), (1, 1, "lost")] and result.accuracy > 0
    (seconds,) = re.findall(r"no answer after (\d+) s", (tmp_path / "run/events.jsonl").read_text())
    assert int(seconds) < 60


@pytest.mark.cluster
def test_a_killed_supernode_is_started_again(cluster: Cluster, tmp_path: Path) -> None:
    cluster.join(0)
    cluster.join(1)
    watch = After(lambda: cluster.node(1).kill(), round=1)
    with cluster.server() as server:
        server.start(experiment(2), tmp_path / "run", [watch])
        server.start(experiment(2), tmp_path / "again")
    assert [(client, reason) for _, client, reason in absent(tmp_path / "run")] in ([(1, "lost")] * n for n in (1, 2))
    check_same_as_inline(tmp_path / "again", tmp_path / "inline")


@pytest.mark.cluster
@pytest.mark.parametrize("when", [{"round": 1}, {"answer": 2}])
def test_a_killed_superlink_is_started_again(when: dict[str, int], cluster: Cluster, tmp_path: Path) -> None:
    cluster.join(0)
    cluster.join(1)
    with cluster.server() as server:
        first = server.superlink.pid
        watch = After(lambda: os.kill(first or 0, signal.SIGKILL), **when)
        server.start(experiment(2, rounds=3), tmp_path / "run", [watch])
        assert server.superlink.pid not in (None, first)
    check_same_as_inline(tmp_path / "run", tmp_path / "inline", rounds=3)


@pytest.mark.cluster
def test_a_lost_quorum_stops_the_run_and_it_can_resume(cluster: Cluster, tmp_path: Path) -> None:
    cluster.join(0)
    cluster.join(1)
    run = tmp_path / "run"
    settings: dict[str, Any] = {"rounds": 3, "quorum": 1.0}
    with cluster.server() as server:
        with pytest.raises(QuorumLost, match="round 2: 1 of 2 clients answered, 2 needed"):
            server.start(experiment(2, **settings), run, [After(lambda: cluster.kill(1), round=1)])
        cluster.join(1)
        server.resume(run)
    check_same_as_inline(run, tmp_path / "inline", **settings)


@pytest.mark.cluster
def test_a_sealed_ring_resumes_at_the_hop_where_it_was_interrupted(cluster: Cluster, tmp_path: Path) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    cluster.join(0)
    cluster.join(1)
    run, ring = tmp_path / "run", experiment(2, "metafed", validation=0.2)
    with cluster.server() as server:
        with pytest.raises(KeyboardInterrupt):
            server.start(ring, run, [After(stop, answer=2)])
        assert list((run / "hops").glob("00000002-*"))
        server.resume(run)
    for client in (0, 1):  # no client was asked twice
        assert cluster.log(client).read_text().count("round 2  personalize") == 1
    check_same_as_inline(run, tmp_path / "inline", method="metafed", validation=0.2)


@pytest.mark.cluster
def test_no_client_online_loses_the_quorum(cluster: Cluster, tmp_path: Path) -> None:
    with cluster.server(timeout=1) as server, pytest.raises(QuorumLost, match="0 of 2 clients are online"):
        server.start(experiment(2), tmp_path / "run")


@pytest.mark.cluster
def test_a_client_that_joins_late_takes_part_in_later_rounds(cluster: Cluster, tmp_path: Path) -> None:
    def join_late() -> None:
        cluster.join(1)
        wait_for(lambda: cluster.logged(1, "joined"), TIMEOUT)

    cluster.join(0)
    with cluster.server(timeout=0) as server:
        wait_for(lambda: cluster.logged(0, "joined"), TIMEOUT)
        server.start(experiment(2, rounds=3), tmp_path / "run", [After(join_late, round=1)])
    assert absent(tmp_path / "run") == [(1, 1, "lost")]


# --- malformed --------------------------------------------------------------------------------------------------


@pytest.mark.cluster
@pytest.mark.parametrize("mode", ["garbage", "huge", "broken"])
def test_invalid_messages_are_refused(mode: str, cluster: Cluster, tmp_path: Path) -> None:
    cluster.join(0)
    cluster.join(1, mode)
    with cluster.server() as server:
        result = server.start(experiment(2, rounds=1), tmp_path / "run")
    assert absent(tmp_path / "run") == [(1, 1, "refused")] * 2  # in training and in evaluation
    assert result.accuracy > 0
    sizes = {"garbage": 1000, "huge": 200_000_000}
    received = re.findall(r"^1,1,up,local_train,(\d+)$", (tmp_path / "run/ledger.csv").read_text(), re.MULTILINE)
    assert received == ([str(sizes[mode])] if mode in sizes else [])  # an unreadable message has no size


@pytest.mark.cluster
def test_a_message_of_200_mb_can_be_sent_and_returned(cluster: Cluster) -> None:
    def echo() -> None: ...

    large = torch.arange(50_000_000, dtype=torch.float32)
    cluster.join(0, "echo")
    with cluster.server() as server:
        server.superlink.start_run("{}")
        wait_for(lambda: 0 in server.superlink.online_clients(), TIMEOUT)
        clients = Flower(2, 0, handlers=None, superlink=server.superlink)  # type: ignore[arg-type]
        (answer,) = clients.ask([0], echo, returns={"x": large}, x=large)
    assert torch.equal(answer["x"], large)
    assert clients.ledger.total["up"] == clients.ledger.total["down"] > 200_000_000
    assert 0 < server.superlink.packed["up"] - clients.ledger.total["up"] < 10_000


# --- not admitted -----------------------------------------------------------------------------------------------


def mix_credentials(folder: Path, key: Path, authority: Path) -> Path:
    """Creates a client's folder with the key of one federation and the certificate authority of another."""
    folder.mkdir()
    shutil.copy(key / "node.key", folder)
    shutil.copy(authority / "ca.crt", folder)
    return folder


def test_a_foreign_key_and_a_foreign_authority_are_not_admitted(cluster: Cluster, tmp_path: Path) -> None:
    other = Credentials.create(tmp_path / "other", 1)
    own = cluster.keys.client_folder(0)
    with cluster.server() as server:
        cluster.join(0, keys=mix_credentials(tmp_path / "wrong-key", other.client_folder(0), own))
        cluster.join(1, keys=mix_credentials(tmp_path / "wrong-authority", own, other.client_folder(0)))
        wait_for(lambda: cluster.logged(0, "does not accept this key"), TIMEOUT)
        wait_for(lambda: cluster.logged(1, "certificate cannot be trusted (unable to get local issuer"), TIMEOUT)
        server.superlink.start_run("{}")
        assert server.superlink.online_clients() == {}


@pytest.mark.cluster
def test_a_client_without_a_key_is_not_admitted(cluster: Cluster, tmp_path: Path) -> None:
    from fewer.runtime.flower.programs import Program, find_free_port

    args = ["--superlink", cluster.address, "--root-certificates", str(cluster.keys.folder / "ca.crt")]
    args += ["--isolation", "process", "--port", str(find_free_port())]
    node = Program("flwr.supernode.cli:flower_supernode", args, tmp_path / "home")
    with cluster.server() as server:
        node.start()
        wait_for(lambda: node.pid is None, TIMEOUT)
        server.superlink.start_run("{}")
        assert server.superlink.online_clients() == {}
    assert "Failed to initialize the connection to the SuperLink." in node.log_lines()


@pytest.mark.cluster
def test_a_removed_key_is_not_admitted_again(cluster: Cluster, tmp_path: Path) -> None:
    public = cluster.keys.client_folder(1) / "node.pub"
    with cluster.server():
        pass
    public.rename(tmp_path / "taken")
    with cluster.server():
        cluster.join(1)
        wait_for(lambda: cluster.logged(1, "does not accept this key"), TIMEOUT)
    (tmp_path / "taken").rename(public)
    with pytest.raises(RunError, match="client 1: Flower does not accept a key again"), cluster.server():
        pass


@pytest.mark.cluster
def test_a_key_admits_only_one_client(cluster: Cluster) -> None:
    cluster.join(0)
    with cluster.server():
        wait_for(lambda: cluster.logged(0, "joined"), TIMEOUT)
        cluster.join(1, keys=cluster.keys.client_folder(0))
        wait_for(lambda: cluster.logged(1, "does not accept this key"), TIMEOUT)


@pytest.mark.cluster
def test_an_expired_certificate_is_not_trusted(cluster: Cluster) -> None:
    cluster.keys.issue_certificate((), days=-1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cluster.keys.folder / "server.crt", cluster.keys.folder / "server.key")

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                with listener.accept()[0] as connection:
                    context.wrap_socket(connection, server_side=True)
            except ssl.SSLError:
                continue
            except OSError:
                return

    with closing(socket.create_server(("127.0.0.1", cluster.port))) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        cluster.join(0)
        wait_for(lambda: cluster.logged(0, "certificate cannot be trusted (certificate has expired)"), TIMEOUT)
