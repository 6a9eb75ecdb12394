"""IDX files in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.arrays import IDX_FILES, idx_arrays, idx_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data directory with four good idx files in mnist/."""
    (tmp_path / "mnist").mkdir()
    for name, array in zip(IDX_FILES, idx_arrays(), strict=True):
        (tmp_path / "mnist" / name).write_bytes(idx_bytes(array))
    return tmp_path
