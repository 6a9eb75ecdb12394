"""Writes pages and pictures to disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fewer.errors import RunError


def write_files(out: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Writes files by name into the directory `out` and returns their paths."""
    try:
        for folder in {out, *((out / name).parent for name in files)}:
            folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (out / name).write_bytes(content)
    except OSError as error:
        raise RunError(f"cannot write to {out}: {error.strerror}") from error
    return [out / name for name in files]
