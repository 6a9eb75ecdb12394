"""Stopping a run, as Ctrl-C would, and going on with it. Both only on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fewer.errors import RunError
from fewer.runs.files import writer

LOG = "resume.log"
"""In a run's directory: what `fewer resume` said that was begun from here."""
_GO_ON = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from fewer.cli import main; main()"
"""Whoever started us may have made us deaf to Ctrl-C, and so all that we start."""


class Control:
    """Knows the processes that were started from here."""

    def __init__(self) -> None:
        self._started: dict[Path, tuple[float, subprocess.Popen[bytes]]] = {}

    def stop(self, run: Path) -> int:
        """Interrupt the process that writes a run, once it is sure that it does; its number."""
        number = writer(run)
        try:
            handle = os.pidfd_open(number)
        except OSError as error:
            raise RunError(f"process {number} cannot be reached: {error.strerror}") from error
        try:
            if writer(run) != number:  # looked at anew: now the handle cannot mean another process
                raise RunError(f"{run} has just passed to another process: try again")
            if _deaf(number):
                raise RunError(
                    f"process {number} does not hear Ctrl-C, as it was started in the background of a script: "
                    f"kill {number} ends it, and it can be resumed all the same"
                )
            signal.pidfd_send_signal(handle, signal.SIGINT)
        except OSError as error:
            raise RunError(f"process {number} cannot be stopped: {error.strerror}") from error
        finally:
            os.close(handle)
        return number

    def resume(self, run: Path, description: Mapping[str, Any]) -> int:
        """Start `fewer resume` apart from us, which goes on when we end; its number."""
        if reason := hindrance(run, description):
            raise RunError(reason)
        try:
            with (run / LOG).open("ab") as log:
                begun = time.time()
                process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _GO_ON, "resume", str(run)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise RunError(f"{run} cannot be resumed: {error.strerror}") from error
        self._started[run] = begun, process
        return process.pid

    def started(self, run: Path) -> float | None:
        """When what was started from here for this run began, if it still lives."""
        begun, process = self._started.get(run, (0.0, None))
        return begun if process and process.poll() is None else None


def hindrance(run: Path, description: Mapping[str, Any]) -> str:
    """Why a run cannot be resumed with a button; empty where it can."""
    if description["settings"]["runtime"] == "flower":
        return f"its clients are on other machines: fewer server --resume {run} --keys DIR"
    if own := description["own"]:
        return f"it was run with a {own[0]} of your own: fewer.resume({str(run)!r}, {own[0]}=…) from Python"
    return ""


def _deaf(number: int) -> bool:
    lines = Path(f"/proc/{number}/status").read_text().splitlines()
    ignored = next(line.split()[1] for line in lines if line.startswith("SigIgn:"))
    return bool(int(ignored, 16) >> (signal.SIGINT - 1) & 1)
