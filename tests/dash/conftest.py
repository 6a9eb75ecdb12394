"""Runs for a dashboard."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dash.harness import FINISHED, STOPPED, write_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs/one", events=[FINISHED])
    write_run(tmp_path / "runs/two", "fedprox", events=[STOPPED])
    (tmp_path / "secret").write_text("secret")
    return tmp_path / "runs"
