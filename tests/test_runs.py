"""The run directory: a run can resume after any interruption."""

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
import torch
from torch import nn

import fewer
from fewer import FedAvg, FedBN, FedProx, Local
from fewer.data import ArrayData, Data
from fewer.data.partition import Parts
from fewer.errors import QuorumLost, RunError, SettingError
from fewer.methods import Method
from fewer.runs.directory import RunDirectory
from fewer.wire import unpack
from tests.examples import SlowToScore
from tests.test_runtime import metrics, same_state


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


def test_a_full_disk(digits: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        with pytest.raises(RunError, match=r"No space left on device.*The last checkpoint is intact.*fewer resume"):
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


# --- invalid run directories --------------------------------------------------------------------------------------


def test_foreign_and_damaged_directories(digits: Data, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="does not exist"):
        fewer.resume(tmp_path / "nowhere")
    (tmp_path / "foreign").mkdir()
    with pytest.raises(RunError, match="is not a run directory: it has no settings.json"):
        fewer.resume(tmp_path / "foreign")
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="exists already"):
        fewer.run(FedAvg(rounds=1), digits, out=tmp_path / "foreign")
    run = tmp_path / "run"
    fewer.run(FedAvg(rounds=2, cohort=2), digits, out=run)
    for name, part in (
        ("checkpoint.safetensors", "checkpoint"),
        ("settings.json", "settings.json"),
        ("ledger.csv", "ledger"),
    ):
        content = (run / name).read_bytes()
        (run / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(RunError, match=f"damaged.*{part}"):
            fewer.resume(run)
        (run / name).write_bytes(content)
    settings = json.loads((run / "settings.json").read_text())
    (run / "settings.json").write_text(json.dumps({**settings, "format": 99}))
    with pytest.raises(RunError, match="format 99"):
        fewer.resume(run)


def test_changed_data_is_detected(digits: Data, tmp_path: Path) -> None:
    data = fewer.data.from_arrays(torch.rand(90, 1, 8, 8), torch.arange(90) % 3, clients=3, partition="iid")
    fewer.run(FedAvg(rounds=1), data, out=tmp_path / "run")
    with pytest.raises(RunError, match="with your own data"):
        fewer.resume(tmp_path / "run")
    other = fewer.data.from_arrays(torch.rand(90, 1, 8, 8), torch.arange(90) % 3, clients=3, partition="iid")
    with pytest.raises(RunError, match="was run on other data"):
        fewer.resume(tmp_path / "run", data=other)
    fewer.resume(tmp_path / "run", data=data)


def test_one_process_at_a_time(digits: Data, tmp_path: Path) -> None:
    fewer.run(FedAvg(rounds=1, cohort=2), digits, out=tmp_path / "run")
    with RunDirectory.open(tmp_path / "run"), pytest.raises(RunError, match="in use by another process"):
        fewer.resume(tmp_path / "run")


def test_the_seed_cannot_change_on_resume(digits: Data, tmp_path: Path) -> None:
    fewer.run(FedAvg(rounds=1, cohort=2), digits, out=tmp_path / "run")
    with pytest.raises(SettingError, match="seed cannot change when a run resumes"):
        fewer.resume(tmp_path / "run", seed=4)


# --- using finished runs ------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flat, self.layer = nn.Flatten(), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layer(self.flat(x))
        return scores


def test_user_model_as_class_and_as_object(digits: Data, tmp_path: Path) -> None:
    by_class = fewer.run(FedAvg(rounds=2, cohort=3), digits, model=Net, out=tmp_path / "class")
    assert isinstance(by_class.model, Net)
    start = Net()
    nn.init.constant_(start.layer.weight, 0.25)
    by_object = fewer.run(FedAvg(rounds=1, cohort=3, lr=1e-9), digits, model=start)
    assert torch.allclose(by_object.state.model["layer.weight"], torch.tensor(0.25))
    with pytest.raises(RunError, match="with your own model"):
        _ = fewer.open_run(tmp_path / "class").model
    net = fewer.open_run(tmp_path / "class", model=Net).model
    x, _ = digits.test.slice(0, 5)
    assert not net.training and torch.equal(net(x), by_class.model(x))


def test_a_model_that_does_not_fit(digits: Data) -> None:
    with pytest.raises(SettingError, match="rejects inputs of shape"):
        fewer.run(FedAvg(), digits, model=nn.Linear(5, 10))
    with pytest.raises(SettingError, match="at least 10 classes"):
        fewer.run(FedAvg(), digits, model=nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))


def test_open_run_gives_the_trained_models(digits: Data, tmp_path: Path) -> None:
    result = fewer.run(Local(rounds=2, cohort=6), digits, out=tmp_path / "local")
    with pytest.raises(SettingError, match="local has no global model"):
        _ = fewer.open_run(tmp_path / "local").model
    with pytest.raises(SettingError, match=r"client = 6 \(allowed: 0 … 5\)"):
        fewer.open_run(tmp_path / "local").personal_model(6)
    x, y = digits.client(2).test.slice(0, 1000)
    accuracy = (fewer.open_run(tmp_path / "local").personal_model(2)(x).argmax(1) == y).float().mean()
    assert float(accuracy) == pytest.approx(result.metrics["clients"]["2"])


def test_settings_are_saved_and_hashed(digits: Data, tmp_path: Path) -> None:
    fewer.run(FedAvg(rounds=1, cohort=2), digits, out=tmp_path / "a", seed=1)
    fewer.run(FedAvg(rounds=1, cohort=2), digits, out=tmp_path / "b", seed=1, runtime="pool")
    fewer.run(FedAvg(rounds=1, cohort=2, lr=0.2), digits, out=tmp_path / "c", seed=1)
    a, b, c = (json.loads((tmp_path / name / "settings.json").read_text()) for name in "abc")
    assert a["hash"] == b["hash"] != c["hash"]
    assert a["settings"]["method_options"]["lr"] == 0.1 and a["settings"]["clients"] == 6
    assert a["environment"]["torch"] == torch.__version__ and a["data"]["fingerprint"] == digits.fingerprint()


# --- command line -------------------------------------------------------------------------------------------------

FEWER = [sys.executable, "-m", "fewer"]


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


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
    assert time.monotonic() - start < 3
    assert process.returncode == 130
    assert f"Resume with: fewer resume {path}" in errors and "Traceback" not in errors
    wait_for(lambda: not any(worker.is_running() and worker.status() != "zombie" for worker in workers), 5)
    done = run_contents(path)["round"]
    resumed = subprocess.Popen([*FEWER, "resume", str(path)], stderr=subprocess.PIPE, text=True)
    wait_for(lambda: run_contents(path)["round"] > done)
    resumed.kill()
    resumed.communicate()


class Counting(nn.Module):
    """A model whose output depends on a buffer that is not part of its weights."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.layer = nn.Flatten(), nn.Linear(64, 10)
        self.register_buffer("seen", torch.ones(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        scores: torch.Tensor = self.layer(self.flat(x)) * self.seen
        return scores


def test_buffers_of_a_model_do_not_leak_between_clients(digits: Data) -> None:
    inline = fewer.run(FedAvg(rounds=2, cohort=4, lr=0.01), digits, model=Counting)
    pooled = fewer.run(FedAvg(rounds=2, cohort=4, lr=0.01), digits, model=Counting, runtime="pool", workers=3)
    assert same_state(inline.state, pooled.state) and metrics(inline) == metrics(pooled)


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


def test_settings_of_an_object_belong_to_the_object(digits: Data) -> None:
    with pytest.raises(SettingError, match="rounds belongs to the method"):
        fewer.run(FedAvg(), digits, rounds=2)
    with pytest.raises(SettingError, match="clients belongs to the data"):
        fewer.run("fedavg", digits, clients=7)


def test_a_deadline_does_not_cut_the_evaluation_short(digits: Data) -> None:
    for runtime in ("inline", "pool"):
        result = fewer.run(SlowToScore(rounds=1, cohort=2), digits, runtime=runtime, deadline=2)
        assert len(result.metrics["clients"]) == 6


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda: 3, "the model is of type int"),
        (lambda needed: nn.Linear(1, needed), "the model cannot be built: TypeError"),
        (lambda: nn.Linear(-5, 2), "the model cannot be built: RuntimeError"),
        (lambda: nn.Flatten(), "no trainable parameters"),
    ],
)
def test_a_model_that_cannot_be_built(model: Any, text: str, digits: Data) -> None:
    with pytest.raises(SettingError, match=text):
        fewer.run(FedAvg(rounds=1), digits, model=model)


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
