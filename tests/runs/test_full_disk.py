"""A full disk stops a run with one line. With space again, the run resumes to the same result, bit for bit.

So does a run that is killed at a write.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

import fewer
from fewer.errors import RunError, RunInterrupted
from fewer.methods import names
from fewer.runs.reader import RunReader
from tests.helpers import SMALL, client_count, run_contents, without_outgoing

MESSAGE = r"cannot be written: No space left on device\. The last checkpoint is intact"


class FullDisk:
    """From the `full_from`-th write step on, all writes fail: opening a file, a line of a log, and an fsync.

    With `kills`, this step kills the process.
    """

    def __init__(self, full_from: int, kills: bool) -> None:
        self.full_from, self.kills = full_from, kills
        self.steps = 0

    def count(self) -> None:
        self.steps += 1
        if self.steps >= self.full_from:
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def full_disk(full_from: int = 10**9, kills: bool = False) -> Iterator[FullDisk]:
    """Counts the write steps of this process, and of processes that it forks; each counts on its own."""
    disk, opened = FullDisk(full_from, kills), Path.open

    class Log(FileIO):
        def write(self, data: Any) -> int:
            disk.count()
            return super().write(data)

    def count_fsync(descriptor: int) -> None:
        disk.count()  # and no more: no test here cuts the power

    def count_open(path: Path, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        if {*mode} & {*"wax+"}:
            disk.count()
        return Log(path, mode) if buffering == 0 else opened(path, mode, buffering, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", count_fsync)
        patch.setattr(Path, "open", count_open)
        yield disk


def settings_of(method: str, **others: Any) -> dict[str, Any]:
    small = {"data": "digits", "model": "mlp", "clients": client_count(method), "rounds": 2, "cohort": 3, "seed": 1}
    if method == "fedbn":
        small["model"] = "cnn"
    if SMALL.get(method, {}).get("method_options", {}).get("group_size"):
        del small["cohort"]
    return {**small, **SMALL.get(method, {}), **others}


def contents(path: Path) -> dict[str, Any]:
    """What must be the same. Outgoing messages are compared by the models that they lead to."""
    found = run_contents(path)
    return {**found, "clients": without_outgoing(found["clients"])}


def check_full_disks(method: str, folder: Path, stride: int = 1, first: int = 1, **others: Any) -> int:
    """Fills the disk at every `stride`-th write step of a run, and resumes it. Returns how often the run stopped."""
    settings = settings_of(method, **others)
    with full_disk() as disk:
        fewer.run(method, out=folder / "unbroken", **settings)
    expected, stopped = contents(folder / "unbroken"), 0
    for step in range(first, disk.steps + 1, stride):
        path = folder / str(step)
        with full_disk(step):
            try:
                fewer.run(method, out=path, **settings)
            except RunError as error:
                stopped += 1
                assert "No space left on device" in str(error), f"step {step}: {error}"
        if not (path / "settings.json").exists():
            continue  # the run did not exist yet
        fewer.resume(path)
        assert contents(path) == expected, f"{method}: another result after a full disk at step {step} of {disk.steps}"
    return stopped


@pytest.mark.parametrize(("method", "stride"), [("metafed", 11), ("fedbn", 7), ("fedavg", 3)])
def test_a_run_resumes_after_a_full_disk(method: str, stride: int, tmp_path: Path) -> None:
    assert check_full_disks(method, tmp_path, stride) > 6


@pytest.mark.faults
@pytest.mark.parametrize("runtime", ["inline", "pool"])
@pytest.mark.parametrize("method", sorted({*names()} - {"frl-deploy"}))
def test_every_method_resumes_after_a_full_disk_at_any_write(method: str, runtime: str, tmp_path: Path) -> None:
    check_full_disks(method, tmp_path, runtime=runtime)


@pytest.mark.parametrize("dp", ["user:noise=1", "record:noise=1"])
def test_a_private_run_resumes_after_a_full_disk(dp: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its noise and its ε are those of an unbroken run."""
    pytest.importorskip("dp_accounting", reason="the accountant is not installed (pip install 'fewer[dp]')")
    monkeypatch.setattr("secrets.token_bytes", lambda count: b"s" * count)
    assert check_full_disks("fedavg", tmp_path, 11, dp=dp) > 2


def check_kills(method: str, folder: Path, stride: int = 1) -> int:
    """Kills a run at every `stride`-th write step, and resumes it. Returns how often it resumed."""
    settings, resumed = settings_of(method), 0
    with full_disk() as disk:
        fewer.run(method, out=folder / "unbroken", **settings)
    for step in range(1, disk.steps + 1, stride):
        path = folder / str(step)
        if not (process := os.fork()):
            with full_disk(step, kills=True):
                fewer.run(method, out=path, **settings)
            os._exit(0)
        assert os.waitpid(process, 0)[1] == signal.SIGKILL
        if (path / "settings.json").exists():
            fewer.resume(path)
            assert contents(path) == contents(folder / "unbroken"), f"{method}: killed at step {step} of {disk.steps}"
            resumed += 1
    return resumed


def test_a_run_resumes_after_a_kill(tmp_path: Path) -> None:
    assert check_kills("fedavg", tmp_path, stride=7) > 3


@pytest.mark.faults
@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedmk", "metafed"])
def test_a_run_resumes_after_a_kill_at_any_write(method: str, tmp_path: Path) -> None:
    assert check_kills(method, tmp_path) > 20


@pytest.mark.parametrize("method", ["metafed", "local"])
def test_a_disk_that_a_worker_fills_stops_the_run(method: str, tmp_path: Path) -> None:
    """Workers count their own writes, which are later than the server's: a client finds the full disk first."""
    assert check_full_disks(method, tmp_path, stride=5, first=12, runtime="pool") > 3


def test_a_full_disk_without_a_run_directory_is_one_line() -> None:
    with full_disk(1), pytest.raises(RunError, match=r"No space left on device. Free some space") as caught:
        fewer.run("local", **settings_of("local"))
    assert not isinstance(caught.value, RunInterrupted)


def test_a_client_that_finds_the_disk_full_is_not_absent(tmp_path: Path) -> None:
    """Only the store of one client fails: the run must stop, and not go on without that client."""
    settings = settings_of("metafed", rounds=3)
    fewer.run("metafed", out=tmp_path / "unbroken", **settings)
    opened = Path.open

    def fail_for_client_1(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "000001/federation.00000002" in str(path) and "w" in mode:
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, mode, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RunInterrupted, match=MESSAGE):
        patch.setattr(Path, "open", fail_for_client_1)
        fewer.run("metafed", out=tmp_path / "run", **settings)
    assert RunReader(tmp_path / "run").can_resume and not run_contents(tmp_path / "run")["metrics"][-1]["absent"]
    fewer.resume(tmp_path / "run")
    assert contents(tmp_path / "run") == contents(tmp_path / "unbroken")


def test_an_event_after_a_line_that_was_cut_short_is_on_a_line_of_its_own(tmp_path: Path) -> None:
    settings = settings_of("fedavg", rounds=1)
    fewer.run("fedavg", out=tmp_path / "run", **settings)
    with (tmp_path / "run/events.jsonl").open("a") as events:
        events.write('{"time": 1')
    fewer.resume(tmp_path / "run")
    lines = (tmp_path / "run/events.jsonl").read_text().splitlines()
    assert '{"time": 1' in lines and '"event": "resume"' in lines[-2]
