"""Stops runs, as Ctrl-C does, and resumes them. Both work only on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fewer.errors import RunError
from fewer.runs.reader import RunReader

LOG = "resume.log"
"""File in the run directory with the output of a `fewer resume` started by the dashboard."""
_RESUME_CODE = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from fewer.cli import main; main()"
)
"""Restores the handler of Ctrl-C: a dashboard started in the background ignores it, and so would its children."""


class Control:
    """Stops and resumes runs, and tracks the processes that it started."""

    def __init__(self) -> None:
        self._started: dict[Path, tuple[float, subprocess.Popen[bytes]]] = {}

    def stop(self, run: RunReader) -> int:
        """Interrupts the process that writes a run, and returns its id."""
        pid = run.writer_pid()
        try:
            handle = os.pidfd_open(pid)
        except OSError as error:
            raise RunError(f"cannot reach process {pid}: {error.strerror}") from error
        try:
            if run.writer_pid() != pid:  # checked again: from here on, the handle cannot refer to another process
                raise RunError(f"{run.path} has just passed to another process: try again")
            if _ignores_interrupt(pid):
                raise RunError(
                    f"process {pid} ignores Ctrl-C, because it was started in the background of a script: "
                    f"use kill {pid}; the run can still be resumed"
                )
            signal.pidfd_send_signal(handle, signal.SIGINT)
        except OSError as error:
            raise RunError(f"cannot stop process {pid}: {error.strerror}") from error
        finally:
            os.close(handle)
        return pid

    def resume(self, run: RunReader) -> int:
        """Starts `fewer resume` in its own session, so that it outlives the dashboard, and returns its process id."""
        if reason := why_not_resumable(run):
            raise RunError(reason)
        try:
            with (run.path / LOG).open("ab") as log:
                start = time.time()
                process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _RESUME_CODE, "resume", str(run.path)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise RunError(f"cannot resume {run.path}: {error.strerror}") from error
        self._started[run.path] = start, process
        return process.pid

    def start_time(self, run: Path) -> float | None:
        """When the dashboard started the process of this run; None if that process is not alive."""
        start, process = self._started.get(run, (0.0, None))
        return start if process and process.poll() is None else None


def why_not_resumable(run: RunReader) -> str:
    """Why the dashboard cannot resume a run; empty if it can."""
    if run.settings["runtime"] == "flower":
        return f"its clients are on other machines: use {run.resume_command}"
    if objects := run.metadata["objects"]:
        return f"it was run with your own {objects[0]}: use fewer.resume({str(run.path)!r}, {objects[0]}=…) in Python"
    if (status := run.status()).state == "stopped" and not run.can_resume:
        return f"it would stop again: {status.reason}"
    return ""


def _ignores_interrupt(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    ignored = next(line.split()[1] for line in lines if line.startswith("SigIgn:"))
    return bool(int(ignored, 16) >> (signal.SIGINT - 1) & 1)
