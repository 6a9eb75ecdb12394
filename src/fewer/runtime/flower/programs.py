"""Flower's programs as children: quiet, offline, with a home of their own, and gone when we are."""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fewer.runtime.flower import QUIET

_LIBC = ctypes.CDLL(None)
_COLOR = re.compile(r"\x1b\[\d*m")
_CHATTER = re.compile(r"^(INFO|WARNING|For more information|The SuperNode could not)|Z (INFO|WARNING) ")
PATIENCE = 5.0
"""Seconds that a program gets to end in peace."""


@dataclass
class Program:
    """One of Flower's programs: `entry` is module:function, as in its package."""

    entry: str
    arguments: Sequence[str]
    home: Path
    """What it keeps on disk is here, and its log: NAME.log."""
    _from: int = 0
    """How long the log was at the start."""
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def log(self) -> Path:
        """What it printed."""
        return self.home / f"{self.entry.rpartition(':')[2]}.log"

    @property
    def pid(self) -> int | None:
        """Of the process, if it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Start it; it ends when the thread that called this does."""
        module, _, function = self.entry.partition(":")
        code = f"import sys; sys.argv[0] = {function!r}; from {module} import {function}; {function}()"
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._from = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **QUIET, "FLWR_HOME": str(self.home)},
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
                start_new_session=True,  # Ctrl-C is for us: we end it when we are done
            )

    def stop(self) -> None:
        """End it and wait until it is gone."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def said(self) -> list[str]:
        """The lines that it has printed since its start, as far as they tell something; the last hundred of them."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(self._from, log.seek(0, os.SEEK_END) - (1 << 14)))
                lines = _COLOR.sub("", log.read().decode(errors="replace")).splitlines()
        except OSError:
            return []
        return [line.strip() for line in lines if line.strip()][-100:]

    def last_words(self) -> str:
        """Why it ended, as far as it told."""
        telling = [line for line in self.said() if not _CHATTER.search(line)]
        return telling[-1] if telling else f"see {self.log}"


def _die_with_parent() -> None:
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def secret_file(folder: Path) -> Path:
    """A file with a secret that only this user can read: who has it is given work by the program."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # messages lie beside it
    path = folder / "secret"
    if not path.exists():
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
    return path


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
