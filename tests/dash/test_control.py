"""Runs are stopped and resumed from the dashboard."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from fewer.dash import control
from fewer.dash.control import LOG, Control
from fewer.errors import RunError
from fewer.runs.directory import RunDirectory
from fewer.runs.reader import RunReader
from tests.dash.harness import STOPPED, describe_run, hold_lock, serving, write_run
from tests.helpers import wait_for


def test_only_the_process_that_holds_a_run_is_its_writer(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    other = write_run(tmp_path / "other")
    with pytest.raises(RunError, match="is not running"):
        RunReader(run).writer_pid()
    with RunDirectory(run), RunDirectory(other):
        assert RunReader(run).in_use and RunReader(run).writer_pid() == os.getpid()
        for text, message in (
            ("", "not on this machine"),
            ("x", "not on this machine"),
            ("99999999", "not on this machine"),
        ):
            (run / "lock").write_text(text)
            with pytest.raises(RunError, match=message):
                RunReader(run).writer_pid()
        with subprocess.Popen(["sleep", "60"]) as unrelated:  # as if another process had got the number
            (run / "lock").write_text(str(unrelated.pid))
            with pytest.raises(RunError, match=f"a process other than {unrelated.pid}"):
                Control().stop(RunReader(run))
            assert unrelated.poll() is None
            unrelated.kill()
    assert not RunReader(run).in_use


def test_a_full_disk_is_reported_when_the_lock_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run")

    def full() -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "getpid", full)
    with pytest.raises(RunError, match="No space left on device.*then resume"), RunDirectory(run):
        pass
    assert not RunReader(run).in_use


HOLDER = """
import fcntl, os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN if sys.argv[2] == "ignores" else signal.default_int_handler)
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
lock.write(str(os.getpid())), lock.flush()
print(flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["ignores", "heeds"])
def test_a_process_that_ignores_ctrl_c_is_not_reported_as_stopped(tmp_path: Path, how: str) -> None:
    run = write_run(tmp_path / "run")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run / "lock"), how], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as holder:
        assert holder.stdout
        holder.stdout.readline()
        if how == "ignores":
            with pytest.raises(RunError, match=f"process {holder.pid} ignores Ctrl-C.*use kill {holder.pid}"):
                Control().stop(RunReader(run))
            holder.kill()
        else:
            assert Control().stop(RunReader(run)) == holder.pid
        assert holder.wait(10) == (-signal.SIGKILL if how == "ignores" else -signal.SIGINT)


def test_runs_that_cannot_be_resumed_are_refused_with_a_reason(runs: Path) -> None:
    write_run(runs / "flower", runtime="flower", events=[STOPPED])
    write_run(runs / "own", objects=["data"], events=[STOPPED])
    (runs / "bad").mkdir()
    (runs / "bad/settings.json").write_text(describe_run("fedavg").replace("settings", "x"))
    reasons = {
        "flower": f"use fewer server --resume {runs / 'flower'} --keys",
        "own": "your own data: use fewer.resume(",
        "one": "is finished",
        "bad": "is damaged",
    }
    with serving(runs) as site:
        for name, reason in reasons.items():
            status, response = site.post(f"runs/{site.row(name)['id']}/resume")
            assert status == 409 and reason in response["error"], response
        with hold_lock(runs / "two"):
            (runs / "two/events.jsonl").touch()
            assert "is running" in site.post(f"runs/{site.row('two')['id']}/resume")[1]["error"]
        assert "is not running" in site.post(f"runs/{site.row('two')['id']}/stop")[1]["error"]


def test_the_output_of_a_resumed_run_is_kept(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_RESUME_CODE", "import sys, time; print(*sys.argv[1:], flush=True); time.sleep(1)")
    with serving(runs) as site:
        endpoint = f"runs/{site.row('two')['id']}"
        status, _ = site.post(f"{endpoint}/resume")
        assert status == 200 and site.row("two")["state"] == "starting"
        assert "is starting" in site.post(f"{endpoint}/resume")[1]["error"]
        wait_for(lambda: site.row("two")["state"] == "stopped")
        assert site.get(f"{endpoint}/log")["lines"] == [f"resume {runs / 'two'}"] and site.get(endpoint)["log"]


def test_a_run_that_passes_to_another_process_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run")
    with subprocess.Popen(["sleep", "60"]) as process:
        pids = iter([process.pid, process.pid + 1])
        monkeypatch.setattr(RunReader, "writer_pid", lambda reader: next(pids))
        with pytest.raises(RunError, match="has just passed to another process"):
            Control().stop(RunReader(run))
        assert process.poll() is None
        process.kill()


def test_a_resumed_run_is_independent_of_the_dashboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at the dashboard does not reach it, and modules in this directory are not imported."""
    run = write_run(tmp_path / "run", events=[STOPPED])
    monkeypatch.setattr(
        control, "_RESUME_CODE", "import os, sys; print(os.getsid(0) == os.getpid(), sys.flags.safe_path)"
    )
    controller = Control()
    controller.resume(RunReader(run))
    controller._started[run][1].wait(40)
    assert (run / LOG).read_text() == "True True\n"


def test_a_run_is_not_started_twice(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_RESUME_CODE", "import time; time.sleep(60)")
    barrier = threading.Barrier(2, timeout=0.5)
    resume = Control.resume

    def resume_together(self: Control, run: RunReader) -> int:
        with suppress(threading.BrokenBarrierError):  # if there is no second request
            barrier.wait()
        return resume(self, run)

    monkeypatch.setattr(Control, "resume", resume_together)
    responses: list[tuple[int, dict[str, int]]] = []
    with serving(runs) as site:
        endpoint = f"runs/{site.row('two')['id']}/resume"
        threads = [threading.Thread(target=lambda: responses.append(site.post(endpoint))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for _, answer in responses:
        if "process" in answer:
            os.kill(answer["process"], signal.SIGKILL)
    assert sorted(status for status, _ in responses) == [200, 409]
