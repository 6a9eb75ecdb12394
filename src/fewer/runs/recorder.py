"""The callbacks that record a run: in its directory, or in the log if there is no directory."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fewer.errors import QuorumLost
from fewer.runs.artifacts import write_artifact
from fewer.runs.callbacks import Callback, Metrics, Run
from fewer.runs.directory import RunDirectory
from fewer.runtime import Absent
from fewer.runtime.store import client_folder

_LOG = logging.getLogger("fewer")


class Recorder(Callback):
    """Records events, metrics, messages and checkpoints in the run directory."""

    def __init__(self, directory: RunDirectory, changed: Mapping[str, Any] | None = None) -> None:
        self.directory = directory
        self.changed = {name: str(value) for name, value in (changed or {}).items()}
        """The settings that changed on resume."""

    def on_run_start(self, run: Run) -> None:
        """Logs the start, or that the run resumes."""
        if run.history:
            self.directory.log_event("resume", round=len(run.history), changed=self.changed)
        else:
            self.directory.log_event("start", method=run.method.name, hash=run.hash)

    def on_round_start(self, run: Run) -> None:
        """Writes the schema of the data, unless an earlier round did."""
        if run.round == 1 or self.directory.schema is None:
            self.directory.write_schema(run.data.schema.to_dict())

    def on_absent(self, run: Run, absent: Absent, handler: str) -> None:
        """Logs an absent client."""
        details = {"client": absent.client, "reason": absent.reason, "handler": handler, "detail": absent.detail}
        self.directory.log_event("absent", round=run.round, **details)

    def on_round_end(self, run: Run, metrics: Metrics) -> None:
        """Records the round: first metrics and messages, then the checkpoint."""
        self.directory.log_metrics(metrics)
        self.directory.log_messages(run.ledger.drain())
        ending: dict[str, Any] = {"stopped": run.stopped} if run.stopped else {}
        ending |= {"privacy": run.privacy.to_dict()} if run.privacy else {}
        state, ledger = vars(run.state), dict(run.ledger.total)
        self.directory.save_checkpoint(round=run.round, state=state, ledger=ledger, seconds=run.seconds, **ending)

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Logs the end and its reason. A preparation also writes its model."""
        reason = run.end_reason(error)
        details: dict[str, Any] = {**({"reason": reason} if reason else {}), **run.transport_bytes}
        if isinstance(error, QuorumLost) and not error.resumable:
            details["resumable"] = False
        if error is None:
            with self.directory.explain_errors(full_disk_only=True):
                write_artifact(run, self.directory.path)
        self.directory.log_event("stop" if error else "finish", round=len(run.history), **details)


class FailureLog(Callback):
    """Logs the first traceback of each failure of simulated clients, whose folder is deleted after the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: set[str] = set()

    def on_absent(self, run: Run, absent: Absent, handler: str) -> None:
        """Logs the traceback of a client that failed."""
        if absent.reason == "failed" and absent.detail not in self.seen:
            self.seen.add(absent.detail)
            self._log_last(f"client {absent.client} failed", client_folder(self.folder, absent.client))

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Logs the traceback of a server handler, which ends a run."""
        if error is not None:
            self._log_last("the server failed", self.folder)

    def _log_last(self, title: str, folder: Path) -> None:
        if (file := folder / "errors.txt").exists():
            *_, last = re.split(r"\n\n(?=round \d+, )", file.read_text().rstrip())
            _LOG.warning(f"{title}: {last}")
