"""Private keys on disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fewer.runtime.keys import PinnedKeys
from fewer.wire.sealing import public_key


def test_a_key_file_is_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        PinnedKeys(tmp_path).create()
    monkeypatch.undo()
    assert not (tmp_path / "seal.key").exists()
    assert PinnedKeys(tmp_path).create() == public_key(PinnedKeys(tmp_path).private(0))
