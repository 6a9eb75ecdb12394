"""A cache of arrays that are expensive to build, in $FEWER_CACHE (by default ~/.cache/fewer)."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewer.errors import DataError

Arrays = dict[str, NDArray[Any]]


def load_or_build(name: str, build: Callable[[], Mapping[str, NDArray[Any]]], folder: Path | None = None) -> Arrays:
    """Returns the arrays cached under `name`, in `folder` or $FEWER_CACHE, memory-mapped. Builds them first if needed.

    Safe for concurrent processes: the second waits for the first. Safe if a process is killed: an entry is a directory
    that gets its final name only once it is complete.
    """
    root = folder or Path(os.environ.get("FEWER_CACHE") or Path.home() / ".cache" / "fewer")
    entry = root / name
    try:
        if not entry.is_dir():
            root.mkdir(parents=True, exist_ok=True)
            with (root / f"{name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not entry.is_dir():
                    _write_entry(entry, build())
        return {file.stem: np.load(file, mmap_mode="c") for file in sorted(entry.glob("*.npy"))}
    except OSError as error:
        raise DataError(
            f"cannot use the cache {entry}: {error.strerror or error}; set FEWER_CACHE to another directory"
        ) from error
    except ValueError as error:
        raise DataError(f"cache {entry} is damaged: {error}; remove it to rebuild it") from error


def _write_entry(entry: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{entry.name}-", dir=entry.parent) as folder:
        draft = Path(folder) / entry.name
        draft.mkdir()
        for key, array in arrays.items():
            with (draft / f"{key}.npy").open("wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
        draft.rename(entry)
