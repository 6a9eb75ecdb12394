"""A secure sum between machines, with real processes: no file of the server has a client's update."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fewer[flower]')")
from fewer.runs.engine import run_experiment
from fewer.wire import unpack
from tests.helpers import experiment
from tests.machines.cluster import Cluster

pytestmark = [pytest.mark.timeout(900), pytest.mark.cluster]
SETTINGS = {"model": "mlp", "rounds": 1, "method_options": {"local_steps": 2}}


def test_no_file_of_the_server_has_an_update(cluster: Cluster, tmp_path: Path) -> None:
    plain = run_experiment(experiment(3, "fedavg", **SETTINGS, runtime="inline"))
    with cluster.server() as server:
        secure = server.start(experiment(3, "fedavg", **SETTINGS, secure_sum=True), tmp_path / "run")
    for name, tensor in plain.state.model.items():
        assert (secure.state.model[name] - tensor).abs().max() < 1e-6
    run = json.loads((tmp_path / "run/machines.json").read_text())["run"]
    servers = [path for folder in (tmp_path / "run", cluster.keys.folder / "flower") for path in folder.rglob("*")]
    content = b"".join(path.read_bytes() for path in servers if path.is_file())
    assert b"secure_sum/send_masked" in content and len(content) > 10_000
    for client in range(3):
        (stored,) = (cluster.store(client) / "runs" / run).rglob("secure_answer.*.safetensors")
        update = unpack(stored.read_bytes())["fields"]["model"]
        for tensor in update.values():
            assert tensor[:4].numpy().tobytes() not in content
    steps = (tmp_path / "run/ledger.csv").read_text()
    assert steps.count("up,secure_sum/") == steps.count("down,secure_sum/") == 9
