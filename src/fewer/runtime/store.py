"""The private state of clients on disk, by client, name and round."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from fewer.wire import Tree, pack, unpack


def is_disk_full(error: BaseException) -> bool:
    """True if a write failed because there is no space left, or the user's quota of it is used up."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def write_durably(path: Path, blob: bytes) -> None:
    """Writes a file atomically. A crash at any moment leaves either the old content or the new."""
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


def write_private(path: Path, blob: bytes) -> None:
    """Writes a file atomically. Other users can never read it, nor its draft."""
    path.with_name(path.name + ".part").touch(0o600)
    write_durably(path, blob)


def lock_file(path: Path) -> IO[str] | None:
    """Locks a file until it is closed. Returns None if another process holds the lock."""
    lock = path.open("a+")
    for _ in range(20):  # the children of a killed process hold the lock a little longer
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
    """The state that one client keeps between rounds. Values are read from disk only on `get`.

    Each value is a file named by the round that wrote it. The version before the current round stays until a later
    round writes. A run that was killed in the middle of a round resumes from that version.
    """

    folder: Path
    round: int
    read: set[str] = field(default_factory=set, compare=False, repr=False)
    """The names that `get` was asked for."""

    def get(self, name: str) -> Tree:
        """The latest value under this name, or None."""
        self.read.add(name)
        versions = self._versions(name)
        return unpack(self._path(name, versions[-1]).read_bytes()) if versions else None

    def put(self, name: str, value: Tree) -> None:
        """Stores a value (tensors, numbers, text, containers of them) under this name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        older = [version for version in self._versions(name) if version < self.round]
        write_durably(self._path(name, self.round), pack(value))
        for version in older[:-1]:
            self._path(name, version).unlink(missing_ok=True)

    def _path(self, name: str, version: int) -> Path:
        if not name.isidentifier():
            raise ValueError(f"'{name}' is not a valid store name (allowed: letters, digits and _)")
        return self.folder / f"{name}.{version:08d}.safetensors"

    def _versions(self, name: str) -> list[int]:
        rounds = (int(path.name.split(".")[-2]) for path in self.folder.glob(f"{name}.*.safetensors"))
        return sorted(version for version in rounds if version <= self.round)


def client_folder(root: Path, client: int) -> Path:
    """The folder of a client's state. A directory holds at most a thousand clients."""
    return root / f"{client // 1000:03d}" / f"{client:06d}"


def delete_state_after(root: Path, round: int, keep: Collection[int] = ()) -> None:
    """Deletes all state that clients stored after this round, because the run resumes from it.

    The clients in `keep` have finished the next round already. Their state stays.
    """
    kept_folders = {client_folder(root, client) for client in keep}
    for path in root.glob("*/*/**/*.safetensors"):
        folder = root.joinpath(*path.relative_to(root).parts[:2])
        if int(path.name.split(".")[-2]) > round and folder not in kept_folders:
            path.unlink()
