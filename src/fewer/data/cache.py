"""Arrays that are costly to make, made once and kept: $FEWER_CACHE, by default ~/.cache/fewer."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewer.errors import DataError

Arrays = dict[str, NDArray[Any]]


def cached(name: str, make: Callable[[], Mapping[str, NDArray[Any]]]) -> Arrays:
    """The arrays under this name, from the cache or made now. They are mapped from disk, and read when they are used.

    Safe against two processes (the second waits for the first) and against a kill: an entry is a directory that gets
    its name only when it is whole.
    """
    root = Path(os.environ.get("FEWER_CACHE") or Path.home() / ".cache" / "fewer")
    entry = root / name
    try:
        if not entry.is_dir():
            root.mkdir(parents=True, exist_ok=True)
            with (root / f"{name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not entry.is_dir():
                    _keep(entry, make())
        return {file.stem: np.load(file, mmap_mode="c") for file in sorted(entry.glob("*.npy"))}
    except OSError as error:
        raise DataError(
            f"cache {entry} cannot be used: {error.strerror or error} (FEWER_CACHE names another place)"
        ) from error
    except ValueError as error:
        raise DataError(f"cache {entry} is damaged: {error} (remove it, and it is made anew)") from error


def _keep(entry: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    draft = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
    try:
        for key, array in arrays.items():
            with (draft / f"{key}.npy").open("wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
        draft.rename(entry)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
