"""The reverse proxy from the docs: it lets clients through and nothing else."""

from __future__ import annotations

import http.client
import os
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fewer[flower]')")
from fewer.runs.engine import run_experiment
from fewer.runtime.flower.programs import find_free_port
from tests.helpers import experiment, remote_contents, run_contents
from tests.machines.cluster import Cluster

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: apt-get install nginx-light)"),
]
CONF = Path(__file__).parents[2] / "docs/examples/machines/nginx.conf"


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[tuple[Cluster, int]]:
    """A cluster whose clients connect through the proxy."""
    cluster = Cluster(tmp_path, 2)
    inner, outer = cluster.port, find_free_port()
    changes = {"listen 443": f"listen 127.0.0.1:{outer}", "127.0.0.1:8443": f"127.0.0.1:{inner}"}
    changes |= {"/etc/fewer/keys": str(cluster.keys.folder), "/var/log/nginx/fewer.log": str(tmp_path / "access.log")}
    text = CONF.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temp_paths = "".join(f"    {kind}_temp_path {tmp_path / kind};\n" for kind in kinds)
    (tmp_path / "nginx.conf").write_text(text.replace("http {\n", "http {\n" + temp_paths))
    directives = f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/error.log;"
    if os.getuid() == 0:
        directives += " user root;"
    command = [str(NGINX), "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf"), "-g", directives]
    proxy = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    yield cluster, outer
    cluster.close()
    proxy.terminate()
    proxy.wait()


def test_the_proxy_lets_clients_through_and_nothing_else(proxied: tuple[Cluster, int], tmp_path: Path) -> None:
    cluster, outer = proxied
    context = ssl.create_default_context(cafile=str(cluster.keys.folder / "ca.crt"))

    def status(path: str, port: int = outer) -> int:
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=30)
        connection.request("POST", path, body=b"", headers={"content-type": "application/protobuf"})
        return connection.getresponse().status

    inner = cluster.port
    with cluster.server() as server:
        assert status("/v1/control/list-nodes", inner) != 404
        assert status("/v1/fleet/pull-messages") == 401
        for path in ("/v1/control/list-nodes", "/v1/runtime/acquire-task", "/", "/docs", "/v1//control/list-nodes"):
            assert status(path) == 404
        for traversal in ("..", "%2e%2e", "..%2f.", "%2e%2e%2f."):
            assert status(f"/v1/fleet/{traversal}/control/list-nodes") in (400, 404)
        cluster.port = outer  # clients connect to the proxy
        cluster.join(0)
        cluster.join(1)
        server.start(experiment(2, rounds=1), tmp_path / "run")
    run_experiment(experiment(2, rounds=1, runtime="inline"), tmp_path / "inline")
    assert remote_contents(tmp_path / "inline", tmp_path / "run") == run_contents(tmp_path / "run")
    assert "/v1/fleet/push-messages" in (tmp_path / "access.log").read_text()
