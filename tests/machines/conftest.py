"""Fixtures of the tests between machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import wait_for
from tests.machines.cluster import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three clients that have joined."""
    cluster = Cluster(tmp_path / "cluster", 3)
    for client in range(3):
        cluster.join(client)
    yield cluster
    cluster.close()
    wait_for(lambda: not cluster.strays(), 30)
