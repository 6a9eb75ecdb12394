"""Flower's programs as child processes: quiet, offline, with their own home, and stopped when the parent ends."""

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
from fewer.runtime.store import write_private

_LIBC = ctypes.CDLL(None)
_COLOR = re.compile(r"\x1b\[\d*m")
_NOISE = re.compile(r"^(INFO|WARNING|For more information|The SuperNode could not)|Z (INFO|WARNING) ")
STOP_TIMEOUT = 5.0
"""Seconds that a program gets to stop before it is killed."""


@dataclass
class Program:
    """A program in a child process. `entry` is module:function, as in Python entry points."""

    entry: str
    arguments: Sequence[str]
    home: Path
    """The folder for the program's files and its log, NAME.log."""
    setup: str = "pass"
    """Statements that the program runs first, on one line."""
    _log_start: int = 0
    """Length of the log when the program started."""
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def log(self) -> Path:
        """The file with the program's output."""
        return self.home / f"{self.entry.rpartition(':')[2]}.log"

    @property
    def pid(self) -> int | None:
        """The process id; None if the program is not running."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Starts the program. It ends when the calling thread does."""
        module, _, function = self.entry.partition(":")
        code = f"import sys; sys.argv[0] = {function!r}; {self.setup}; from {module} import {function}; {function}()"
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **QUIET, "FLWR_HOME": str(self.home)},
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
                start_new_session=True,  # Ctrl-C reaches only the parent, which then stops the program
            )

    def stop(self) -> None:
        """Stops the program and waits until it is gone."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def log_lines(self) -> list[str]:
        """The last hundred non-empty lines of output since the program started."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - (1 << 14)))
                lines = _COLOR.sub("", log.read().decode(errors="replace")).splitlines()
        except OSError:
            return []
        return [line.strip() for line in lines if line.strip()][-100:]

    def exit_reason(self) -> str:
        """The last informative line of output, or the path of the log."""
        informative = [line for line in self.log_lines() if not _NOISE.search(line)]
        return informative[-1] if informative else f"see {self.log}"


def _die_with_parent() -> None:
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def secret_file(folder: Path) -> Path:
    """A file with a secret, readable by this user only. Flower's programs give work to anyone who holds it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the folder also holds messages
    path = folder / "secret"
    if not path.exists():
        write_private(path, secrets.token_bytes(32))
    return path


def find_free_port() -> int:
    """A free port on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
