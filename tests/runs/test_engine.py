"""A run can resume after any interruption, with the same numbers."""

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import fewer
from fewer import FedAvg, FedBN, FedProx, Local
from fewer.data import ArrayData, Data
from fewer.data.partition import Parts
from fewer.errors import QuorumLost, RunError, SettingError
from fewer.methods import Method
from fewer.runs.experiment import warn_once
from fewer.wire import unpack
from tests.helpers import SlowToScore, metrics, same_state, wait_for


def run_contents(path: Path) -> dict[str, Any]:
    """The parts of a run that must not depend on interruptions."""
    checkpoint = unpack((path / "checkpoint.safetensors").read_bytes())
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    client_files = {
        f.relative_to(path / "clients"): f.read_bytes() for f in (path / "clients").rglob("*") if f.is_file()
    }
    return {
        "state": {
            part: {name: tensor.numpy().tobytes() for name, tensor in tree.items()}
            for part, tree in checkpoint["state"].items()
        },
        "totals": checkpoint["ledger"],
        "round": checkpoint["round"],
        "metrics": [{name: value for name, value in line.items() if name != "seconds"} for line in metrics],
        "ledger": (path / "ledger.csv").read_bytes(),
        "clients": client_files,
    }


def run_in_child(work: Callable[[], None]) -> int:
    """Runs a function in a child process and returns the exit code."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    return int(child.exitcode or 0)


def kill_at(number: int) -> None:
    """Makes this process kill itself at its n-th write step: before or after an fsync or a rename."""
    count = 0
    sync, replace = os.fsync, Path.replace

    def count_step() -> None:
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def fsync(descriptor: int) -> None:
        count_step()
        sync(descriptor)
        count_step()

    def rename(self: Path, target: Any) -> Path:
        count_step()
        renamed = replace(self, target)
        count_step()
        return renamed

    os.fsync, Path.replace = fsync, rename  # type: ignore[assignment,method-assign]


@pytest.mark.parametrize(
    ("kind", "points"), [(FedAvg, range(1, 45, 3)), (FedBN, range(1, 75, 4)), (Local, range(2, 75, 4))]
)
def test_resume_after_a_kill_at_any_moment(kind: type[Method], points: range, digits: Data, tmp_path: Path) -> None:
    method = kind(rounds=3, cohort=3, **({"local_steps": 3} if kind is not FedAvg else {}))
    settings: dict[str, Any] = {"seed": 2, "drop": 0.1}
    fewer.run(method, digits, out=tmp_path / "uninterrupted", **settings)
    expected = run_contents(tmp_path / "uninterrupted")
    killed = 0
    for point in points:
        path = tmp_path / str(point)

        def first(point: int = point, path: Path = path) -> None:
            kill_at(point)
            fewer.run(method, digits, out=path, **settings)

        code = run_in_child(first)
        killed += code == -signal.SIGKILL
        if not (path / "settings.json").exists():  # killed before the run existed
            with pytest.raises(RunError, match="is not a run directory"):
                fewer.resume(path)
            continue

        def second(point: int = point, path: Path = path) -> None:
            kill_at(point // 2 + 1)
            fewer.resume(path)

        run_in_child(second)
        fewer.resume(path)
        assert run_contents(path) == expected, f"killed at step {point}"
    assert killed >= len(points) * 0.7


def test_kills_at_random_times_in_the_pool(digits: Data, tmp_path: Path) -> None:
    method = FedBN(rounds=4, cohort=4)
    fewer.run(method, digits, out=tmp_path / "uninterrupted")
    path = tmp_path / "broken"
    starts = 0
    while not path.exists() or not (path / "checkpoint.safetensors").exists() or run_contents(path)["round"] < 4:

        def work() -> None:
            if (path / "settings.json").exists():
                fewer.resume(path, runtime="pool")
            else:
                fewer.run(method, digits, out=path, runtime="pool")

        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        child.join(0.15 + 0.1 * starts)
        child.kill()
        child.join()
        starts += 1
        assert starts < 60
    assert starts > 1
    assert run_contents(path) == run_contents(tmp_path / "uninterrupted")


def test_a_finished_run_stays_finished(digits: Data, tmp_path: Path) -> None:
    first = fewer.run(FedAvg(rounds=2, cohort=3), digits, out=tmp_path / "run")
    before = run_contents(tmp_path / "run")
    resumed = fewer.resume(tmp_path / "run")
    assert same_state(first.state, resumed.state) and metrics(first) == metrics(resumed)
    assert run_contents(tmp_path / "run") == before


def test_a_run_resumes_after_a_full_disk(digits: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer.run(FedAvg(rounds=3, cohort=3), digits, out=tmp_path / "uninterrupted")
    sync, count = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal count
        count += 1
        if count > 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(RunError, match=r"No space left on device.*The last checkpoint is intact.*then resume"):
            fewer.run(FedAvg(rounds=3, cohort=3), digits, out=tmp_path / "run")
    assert not list((tmp_path / "run").glob("*.part"))
    assert run_contents(tmp_path / "run")["round"] >= 1
    fewer.resume(tmp_path / "run")
    assert run_contents(tmp_path / "run") == run_contents(tmp_path / "uninterrupted")


def test_resuming_after_a_lost_quorum_meets_the_same_faults(digits: Data, tmp_path: Path) -> None:
    with pytest.raises(QuorumLost):
        fewer.run(FedAvg(rounds=50, cohort=3), digits, out=tmp_path / "run", drop=0.3, quorum=1.0, seed=1)
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "stop" and "QuorumLost" in events[-1]["reason"]
    with pytest.raises(QuorumLost):  # the seed is the same, so the faults are too
        fewer.resume(tmp_path / "run")


FEWER = [sys.executable, "-m", "fewer"]


def test_ctrl_c_and_resume(tmp_path: Path) -> None:
    path = tmp_path / "run"
    command = ["run", "fedavg", "--data", "digits", "--clients", "6", "--rounds", "400", "--runtime", "pool"]
    restore_ctrl_c = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # background processes ignore Ctrl-C
    process = subprocess.Popen(
        [*FEWER, *command, "--out", str(path)], stderr=subprocess.PIPE, text=True, preexec_fn=restore_ctrl_c
    )
    wait_for((path / "checkpoint.safetensors").exists)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) == 2
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert time.monotonic() - start < 10
    assert process.returncode == 130
    assert f"Resume with: fewer resume {path}" in errors and "Traceback" not in errors
    wait_for(lambda: not any(worker.is_running() and worker.status() != "zombie" for worker in workers), 5)
    done = run_contents(path)["round"]
    resumed = subprocess.Popen([*FEWER, "resume", str(path)], stderr=subprocess.PIPE, text=True)
    wait_for(lambda: run_contents(path)["round"] > done)
    resumed.kill()
    resumed.communicate()


def test_a_run_resumes_with_a_lower_quorum(digits: Data, tmp_path: Path) -> None:
    with pytest.raises(QuorumLost):
        fewer.run(FedAvg(rounds=8, cohort=3), digits, out=tmp_path / "run", drop=0.4, quorum=1.0, seed=1)
    result = fewer.resume(tmp_path / "run", quorum=0.1)
    assert len(result.history) == 8
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [event["changed"] for event in events if event["event"] == "resume"] == [{"quorum": "0.1"}]


def test_a_run_killed_before_its_start_does_not_block_a_new_run(digits: Data, tmp_path: Path) -> None:
    (tmp_path / "run/clients").mkdir(parents=True)
    (tmp_path / "run/settings.json.part").write_text("{")
    fewer.run(FedAvg(rounds=1, cohort=2), digits, out=tmp_path / "run")


def test_a_deadline_does_not_cut_the_evaluation_short(digits: Data) -> None:
    for runtime in ("inline", "pool"):
        result = fewer.run(SlowToScore(rounds=1, cohort=2), digits, runtime=runtime, deadline=2)
        assert len(result.metrics["clients"]) == 6


def test_a_resumed_run_keeps_the_options_of_its_method(digits: Data, tmp_path: Path) -> None:
    fewer.run(FedAvg(rounds=1, cohort=3, lr=0.1), digits, out=tmp_path / "run")
    with pytest.raises(SettingError, match=r"^fedavg: lr cannot change when a run resumes: it was 0\.1, got 0\.5$"):
        fewer.resume(tmp_path / "run", method=FedAvg(rounds=1, cohort=3, lr=0.5))
    with pytest.raises(SettingError, match="fedprox: mu cannot change"):
        fewer.resume(tmp_path / "run", method=FedProx(rounds=1, cohort=3, lr=0.1))
    assert len(fewer.resume(tmp_path / "run", method=FedAvg(rounds=1, cohort=3, lr=0.1)).history) == 1


def test_clients_without_test_samples_do_not_end_a_run(digits: Data, tmp_path: Path) -> None:
    assert isinstance(digits, ArrayData)
    no_rows = Parts(digits.tests.rows[:0], np.zeros_like(digits.tests.offsets))
    result = fewer.run(FedAvg(rounds=1, cohort=3), replace(digits, tests=no_rows), out=tmp_path / "run")
    assert result.accuracy > 0 and "clients" not in result.metrics and "personal_accuracy" not in result.metrics


def test_a_run_logs_the_notes_on_its_data_once(caplog: pytest.LogCaptureFixture) -> None:
    x, y = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32), np.arange(60) % 2
    data = fewer.data.from_arrays(x, np.where(y, 3, 7), clients=2, partition="iid")
    warn_once.cache_clear()
    for _ in range(2):
        fewer.run(FedAvg(rounds=1), data, model="mlp")
    assert caplog.messages == ["data 'arrays': labels: 3, 7 are the names of 2 classes, numbered from 0"]
