"""A client's private state, kept on its own disk, by client, name and round."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fewer.wire import Tree, pack, unpack


def write_durably(path: Path, blob: bytes) -> None:
    """Write a file so that a crash at any moment leaves the old content or the new, never a mixture."""
    draft = path.with_name(path.name + ".part")
    try:
        with draft.open("wb") as file:
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def hold(path: Path) -> IO[str] | None:
    """A file that no other process can hold until it is closed; None where one does."""
    lock = path.open("a+")
    for _ in range(20):  # the children of a killed process hold it for a moment longer
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.1)
        else:
            return lock
    lock.close()
    return None


@dataclass(frozen=True)
class Store:
    """What one client remembers between rounds. Nothing of it is read until it is asked for.

    Each value is a file named by the round that wrote it. The value before the current round stays until a later
    round writes: a run that is killed in the middle goes back to it.
    """

    folder: Path
    round: int

    def get(self, name: str) -> Tree:
        """The value last put under this name, or None."""
        versions = self._versions(name)
        return unpack(self._path(name, versions[-1]).read_bytes()) if versions else None

    def put(self, name: str, value: Tree) -> None:
        """Keep a value (tensors, numbers, text, containers of them) under this name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        older = [version for version in self._versions(name) if version < self.round]
        write_durably(self._path(name, self.round), pack(value))
        for version in older[:-1]:
            self._path(name, version).unlink(missing_ok=True)

    def _path(self, name: str, version: int) -> Path:
        if not name.isidentifier():
            raise ValueError(f"'{name}' cannot name what is kept (allowed: letters, digits and _)")
        return self.folder / f"{name}.{version:08d}.safetensors"

    def _versions(self, name: str) -> list[int]:
        found = (int(path.name.split(".")[-2]) for path in self.folder.glob(f"{name}.*.safetensors"))
        return sorted(version for version in found if version <= self.round)


def folder_of(root: Path, client: int) -> Path:
    """Where a client's state lies; a thousand clients to a directory at most."""
    return root / f"{client // 1000:03d}" / f"{client:06d}"


def forget_after(root: Path, round: int, spared: Collection[int] = ()) -> None:
    """Remove what clients put after this round: the run goes on from there. Those spared keep what they put."""
    kept = {folder_of(root, client) for client in spared}
    for path in root.glob("*/*/**/*.safetensors"):
        own = root.joinpath(*path.relative_to(root).parts[:2])
        if int(path.name.split(".")[-2]) > round and own not in kept:
            path.unlink()
