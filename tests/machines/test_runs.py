"""Runs between machines, with real processes on loopback: the same numbers as on one machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fewer[flower]')")
from fewer.methods import names
from fewer.runs.engine import run_experiment
from fewer.runs.machines import FlowerServer
from fewer.runtime.handlers import OUTGOING
from tests.helpers import FRL_SETTINGS, experiment, remote_contents, run_contents, wait_for
from tests.machines.cluster import Cluster

pytestmark = pytest.mark.timeout(900)
META = ("alone", "fedmeta", "fedavg-meta", "reptile", "per-fedavg")
"""These need clients for training, validation and evaluation: at least eight."""
FEW_SHOT: dict[str, Any] = {
    "data_options": {"split": "4/3/3"},
    "partition": "iid",
    "method_options": {"way": 2, "shot": 1, "queries": 2, "tasks": 2, "test_tasks": 4, "validate_every": 2},
}
SMALL: dict[str, dict[str, Any]] = {
    "fedavg": {"drop": 0.2, "corrupt": 0.2},
    "fedbn": {"norm": "batch"},
    "fedmk": {"method_options": {"per_class": 2, "matching_steps": 5, "outer_steps": 2, "server_steps": 10}},
    "fedmk-paper": {"method_options": {"per_class": 2, "server_steps": 10}},
    "metafed": {"validation": 0.2},
    **dict.fromkeys(("f2l", "fedfsl", "fl-maml", "fl-proto", "local-maml", "local-proto"), FEW_SHOT),
    **dict.fromkeys(("frl", "frl-meta-head", "frl-scratch", "frl-fine-tuning", "frl-per-fedavg"), FRL_SETTINGS),
    "frl-warm-start": {"rounds": 8, "method_options": {**FRL_SETTINGS["method_options"], "warmup_rounds": 4}},
}
"""Settings that make a method fast."""
DEFAULT_METHODS = ("fedavg", "fedbn", "fedmk")
"""Tested by default: one sends a model, one has private state, one sends data."""


def without_outgoing(files: dict[Path, bytes]) -> dict[Path, bytes]:
    """All files except outgoing messages: the metadata keys of an encoded message have no fixed order."""
    return {path: content for path, content in files.items() if not path.name.startswith(OUTGOING)}


def client_count(method: str) -> int:
    return 8 if method in META else 3


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
    [name if name in DEFAULT_METHODS else pytest.param(name, marks=pytest.mark.cluster) for name in names()],
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
