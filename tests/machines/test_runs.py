"""Runs between machines, with real processes on loopback: the same numbers as on one machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fewer[flower]')")
from fewer.methods import find, names
from fewer.runs.engine import run_experiment
from fewer.runs.machines import FlowerServer
from fewer.runtime.flower.credentials import create_node_key
from tests.helpers import (
    FRL_SETTINGS,
    SMALL,
    client_count,
    experiment,
    remote_contents,
    run_contents,
    wait_for,
    without_outgoing,
)
from tests.machines.cluster import Cluster

pytestmark = pytest.mark.timeout(900)
DEFAULT_METHODS = ("fedavg", "fedbn", "fedmk")
"""Tested by default: one sends a model, one has private state, one sends data."""


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], tuple[Cluster, FlowerServer]]]:
    """Long-lived clients and one server for all runs, created on first use."""
    with ExitStack() as stack:

        @cache
        def make(clients: int) -> tuple[Cluster, FlowerServer]:
            cluster = Cluster(tmp_path_factory.mktemp("cluster"), clients)
            stack.callback(wait_for, lambda: not cluster.strays(), 30)
            stack.callback(cluster.close)
            for client in range(clients):
                cluster.join(client)
            return cluster, stack.enter_context(cluster.server())

        yield make


@pytest.mark.parametrize(
    "method",
    [
        name if name in DEFAULT_METHODS else pytest.param(name, marks=pytest.mark.cluster)
        for name in names()
        if not find(name).simulation_only
    ],
)
def test_the_numbers_match_inline(
    method: str, clusters: Callable[[int], tuple[Cluster, FlowerServer]], tmp_path: Path
) -> None:
    clients = client_count(method)
    cluster, server = clusters(clients)
    settings = SMALL.get(method, {})
    if method == "frl-deploy":
        run_experiment(experiment(clients, "frl-scratch", runtime="inline", **FRL_SETTINGS), tmp_path / "prepared")
        settings = {"method_options": {"prepared": str(tmp_path / "prepared")}}
    inline = run_experiment(experiment(clients, method, runtime="inline", **settings), tmp_path / "inline")
    remote = server.start(experiment(clients, method, **settings), tmp_path / "flower")
    inline_files, remote_files = run_contents(tmp_path / "inline"), run_contents(tmp_path / "flower")
    run = json.loads((tmp_path / "flower/machines.json").read_text())["run"]
    client_files = {
        Path("clients", *file.parts[-3:]): file.read_bytes()
        for client in range(clients)
        for file in (cluster.store(client) / "runs" / run).rglob("*.safetensors")
    }
    assert remote_files == remote_contents(tmp_path / "inline", tmp_path / "flower")
    assert without_outgoing(client_files) == without_outgoing(inline_files["clients"])
    assert remote.accuracy == inline.accuracy
    if method == "fedavg":  # evaluated at the server: it counts the labels of its own test samples
        assert remote.metrics["macro_f1"] == inline.metrics["macro_f1"]
        assert remote.metrics["classes"] == inline.metrics["classes"]
        assert any(line["absent"] for line in inline.history)
    if method == "fedbn":  # evaluated at the clients: their label counts stay there
        assert "macro_f1" in inline.metrics and not {"macro_f1", "ece", "classes"} & remote.metrics.keys()
        assert client_files


@pytest.mark.cluster
def test_clients_with_an_added_and_a_self_made_key_take_part_and_a_run_gets_more_rounds(tmp_path: Path) -> None:
    cluster, own = Cluster(tmp_path, 1), tmp_path / "own"
    create_node_key(own)
    assert [cluster.keys.add_client("clinic"), cluster.keys.add_client("own", own / "node.pub")] == [1, 2]
    shutil.copy(cluster.keys.client_folder(2) / "ca.crt", own)
    try:
        for client, keys in enumerate((None, None, own)):
            cluster.join(client, keys=keys)
        with cluster.server() as server:
            server.start(experiment(3, rounds=1), tmp_path / "run")
            server.resume(tmp_path / "run", rounds=2)
    finally:
        cluster.close()
    run_experiment(experiment(3, rounds=2, runtime="inline"), tmp_path / "inline")
    assert run_contents(tmp_path / "run") == remote_contents(tmp_path / "inline", tmp_path / "run")
