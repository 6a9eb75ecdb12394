"""Differential privacy between machines, with real processes: noise that neither server nor seed knows."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fewer[flower]')")
pytest.importorskip("dp_accounting", reason="the accountant is not installed (pip install 'fewer[dp]')")
from fewer.privacy import Release, compute_epsilon
from fewer.runtime.noise import SECRET
from tests.helpers import experiment
from tests.machines.cluster import Cluster

pytestmark = [pytest.mark.timeout(900), pytest.mark.cluster]


def test_clients_share_noise_or_draw_their_own_or_trust_the_server(cluster: Cluster, tmp_path: Path) -> None:
    settings = {"model": "mlp", "rounds": 1, "cohort": 3, "method_options": {"local_steps": 2}}
    epsilons = {}
    with cluster.server() as server:
        for dp in ("user:noise=2", "user:noise=2,distributed", "record:noise=1"):
            private = experiment(3, "fedavg", **settings, dp=dp, secure_sum="distributed" in dp)
            epsilons[dp] = server.start(private, tmp_path / dp).metrics["epsilon"]
    assert epsilons["user:noise=2"] == pytest.approx(compute_epsilon(((Release(3, 3, 2.0), 1),), 1e-5))
    # two of three shares have all of the noise, and three are there
    assert epsilons["user:noise=2,distributed"] == pytest.approx(
        compute_epsilon(((Release(3, 3, 2.0 * 1.5**0.5), 1),), 1e-5)
    )
    assert 0 < epsilons["record:noise=1"] < 20
    secrets = [path.read_bytes() for client in range(3) for path in cluster.store(client).rglob(SECRET)]
    assert len({*secrets}) == len(secrets) == 9
    servers = [path for folder in (tmp_path, cluster.keys.folder) for path in folder.rglob("*") if path.is_file()]
    stores = tuple(cluster.store(client) for client in range(3))
    content = b"".join(path.read_bytes() for path in servers if not any(path.is_relative_to(s) for s in stores))
    assert not any(secret in content or secret.hex().encode() in content for secret in secrets)
