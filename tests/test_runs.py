"""The run directory: whatever happens to a run, what it leaves can be gone on with."""

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import fewer
from fewer import FedAvg, FedBN, Local
from fewer.data import Data
from fewer.errors import QuorumLost, RunError, SettingError
from fewer.methods import Method
from fewer.runs.directory import RunDirectory
from fewer.wire import unpack
from tests.examples import SlowToScore
from tests.test_runtime import metrics, same


def left(path: Path) -> dict[str, Any]:
    """All of a run that must not depend on how often it was broken off."""
    kept = unpack((path / "checkpoint.safetensors").read_bytes())
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rest = {f.relative_to(path / "clients"): f.read_bytes() for f in (path / "clients").rglob("*") if f.is_file()}
    return {
        "state": {
            part: {name: tensor.numpy().tobytes() for name, tensor in tree.items()}
            for part, tree in kept["state"].items()
        },
        "totals": kept["ledger"],
        "round": kept["round"],
        "metrics": [{name: value for name, value in line.items() if name != "seconds"} for line in metrics],
        "ledger": (path / "ledger.csv").read_bytes(),
        "clients": rest,
    }


def in_child(work: Callable[[], None]) -> int:
    """Run in a real process of its own; its exit code."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    return int(child.exitcode or 0)


def kill_at(number: int) -> None:
    """Make this process kill itself at the n-th step of making something durable: before or after a sync or rename."""
    count = 0
    sync, replace = os.fsync, Path.replace

    def step() -> None:
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def fsync(descriptor: int) -> None:
        step()
        sync(descriptor)
        step()

    def rename(self: Path, target: Any) -> Path:
        step()
        found = replace(self, target)
        step()
        return found

    os.fsync, Path.replace = fsync, rename  # type: ignore[assignment,method-assign]


@pytest.mark.parametrize(
    ("kind", "points"), [(FedAvg, range(1, 45, 3)), (FedBN, range(1, 75, 4)), (Local, range(2, 75, 4))]
)
def test_resume_after_a_kill_at_any_moment(kind: type[Method], points: range, digits: Data, tmp_path: Path) -> None:
    method = kind(rounds=3, cohort=3, **({"local_steps": 3} if kind is not FedAvg else {}))
    settings: dict[str, Any] = {"seed": 2, "drop": 0.1}
    fewer.run(method, digits, out=tmp_path / "whole", **settings)
    expected = left(tmp_path / "whole")
    killed = 0
    for point in points:
        path = tmp_path / str(point)

        def first(point: int = point, path: Path = path) -> None:
            kill_at(point)
            fewer.run(method, digits, out=path, **settings)

        code = in_child(first)
        killed += code == -signal.SIGKILL
        if not (path / "settings.json").exists():  # killed before there was a run
            with pytest.raises(RunError, match="is not a run directory"):
                fewer.resume(path)
            continue

        def second(point: int = point, path: Path = path) -> None:
            kill_at(point // 2 + 1)
            fewer.resume(path)

        in_child(second)
        fewer.resume(path)
        assert left(path) == expected, f"killed at step {point}"
    assert killed >= len(points) * 0.7


def test_kills_at_random_times_in_the_pool(digits: Data, tmp_path: Path) -> None:
    method = FedBN(rounds=4, cohort=4)
    fewer.run(method, digits, out=tmp_path / "whole")
    path = tmp_path / "broken"
    starts = 0
    while not path.exists() or not (path / "checkpoint.safetensors").exists() or left(path)["round"] < 4:

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
    assert left(path) == left(tmp_path / "whole")


def test_a_finished_run_stays_finished(digits: Data, tmp_path: Path) -> None:
    one = fewer.run(FedAvg(rounds=2, cohort=3), digits, out=tmp_path / "run")
    before = left(tmp_path / "run")
    two = fewer.resume(tmp_path / "run")
    assert same(one.state, two.state) and metrics(one) == metrics(two)
    assert left(tmp_path / "run") == before


def test_a_full_disk(digits: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer.run(FedAvg(rounds=3, cohort=3), digits, out=tmp_path / "whole")
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
    assert left(tmp_path / "run")["round"] >= 1
    fewer.resume(tmp_path / "run")
    assert left(tmp_path / "run") == left(tmp_path / "whole")


def test_a_lost_quorum_can_be_gone_on_with(digits: Data, tmp_path: Path) -> None:
    with pytest.raises(QuorumLost):
        fewer.run(FedAvg(rounds=50, cohort=3), digits, out=tmp_path / "run", drop=0.3, quorum=1.0, seed=1)
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "stop" and "QuorumLost" in events[-1]["reason"]
    with pytest.raises(QuorumLost):  # the same faults again: the seed has not changed
        fewer.resume(tmp_path / "run")


# --- directories that are no run ----------------------------------------------------------------------------------


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
    for name, what in (
        ("checkpoint.safetensors", "checkpoint"),
        ("settings.json", "settings.json"),
        ("ledger.csv", "ledger"),
    ):
        whole = (run / name).read_bytes()
        (run / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(RunError, match=f"damaged.*{what}"):
            fewer.resume(run)
        (run / name).write_bytes(whole)
    settings = json.loads((run / "settings.json").read_text())
    (run / "settings.json").write_text(json.dumps({**settings, "format": 99}))
    with pytest.raises(RunError, match="format 99"):
        fewer.resume(run)


def test_other_data_is_noticed(digits: Data, tmp_path: Path) -> None:
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


def test_only_what_does_not_matter_can_be_changed(digits: Data, tmp_path: Path) -> None:
    fewer.run(FedAvg(rounds=1, cohort=2), digits, out=tmp_path / "run")
    with pytest.raises(SettingError, match="seed cannot change when a run resumes"):
        fewer.resume(tmp_path / "run", seed=4)


# --- using what is left -------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flat, self.layer = nn.Flatten(), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layer(self.flat(x))
        return scores


def test_ones_own_model_as_class_and_as_object(digits: Data, tmp_path: Path) -> None:
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


def test_load_gives_the_trained_models(digits: Data, tmp_path: Path) -> None:
    result = fewer.run(Local(rounds=2, cohort=6), digits, out=tmp_path / "local")
    with pytest.raises(SettingError, match="local has no global model"):
        _ = fewer.open_run(tmp_path / "local").model
    with pytest.raises(SettingError, match=r"client = 6 \(allowed: 0 … 5\)"):
        fewer.open_run(tmp_path / "local").personal_model(6)
    x, y = digits.client(2).test.slice(0, 1000)
    right = (fewer.open_run(tmp_path / "local").personal_model(2)(x).argmax(1) == y).float().mean()
    assert float(right) == pytest.approx(result.metrics["clients"]["2"])


def test_settings_are_kept_and_hashed(digits: Data, tmp_path: Path) -> None:
    fewer.run(FedAvg(rounds=1, cohort=2), digits, out=tmp_path / "a", seed=1)
    fewer.run(FedAvg(rounds=1, cohort=2), digits, out=tmp_path / "b", seed=1, runtime="pool")
    fewer.run(FedAvg(rounds=1, cohort=2, lr=0.2), digits, out=tmp_path / "c", seed=1)
    a, b, c = (json.loads((tmp_path / name / "settings.json").read_text()) for name in "abc")
    assert a["hash"] == b["hash"] != c["hash"]
    assert a["settings"]["method_options"]["lr"] == 0.1 and a["settings"]["clients"] == 6
    assert a["environment"]["torch"] == torch.__version__ and a["data"]["fingerprint"] == digits.fingerprint()


# --- from outside -------------------------------------------------------------------------------------------------

FEWER = [sys.executable, "-m", "fewer"]


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_ctrl_c_and_resume(tmp_path: Path) -> None:
    path = tmp_path / "run"
    command = ["run", "fedavg", "--data", "digits", "--clients", "6", "--rounds", "400", "--runtime", "pool"]
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests in the background are deaf to it
    process = subprocess.Popen(
        [*FEWER, *command, "--out", str(path)], stderr=subprocess.PIPE, text=True, preexec_fn=heed
    )
    wait_for((path / "checkpoint.safetensors").exists)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) == 2
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert time.monotonic() - begun < 3
    assert process.returncode == 130
    assert f"Resume with: fewer resume {path}" in errors and "Traceback" not in errors
    wait_for(lambda: not any(worker.is_running() and worker.status() != "zombie" for worker in workers), 5)
    done = left(path)["round"]
    again = subprocess.Popen([*FEWER, "resume", str(path)], stderr=subprocess.PIPE, text=True)
    wait_for(lambda: left(path)["round"] > done)
    again.kill()
    again.communicate()


class Counting(nn.Module):
    """A net with a buffer that is no part of its weights, and that changes what it gives."""

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


def test_nothing_hidden_in_a_net_passes_between_clients(digits: Data) -> None:
    one = fewer.run(FedAvg(rounds=2, cohort=4, lr=0.01), digits, model=Counting)
    two = fewer.run(FedAvg(rounds=2, cohort=4, lr=0.01), digits, model=Counting, runtime="pool", workers=3)
    assert same(one.state, two.state) and metrics(one) == metrics(two)


def test_a_lost_quorum_can_be_mended(digits: Data, tmp_path: Path) -> None:
    with pytest.raises(QuorumLost):
        fewer.run(FedAvg(rounds=8, cohort=3), digits, out=tmp_path / "run", drop=0.4, quorum=1.0, seed=1)
    result = fewer.resume(tmp_path / "run", quorum=0.1)
    assert len(result.history) == 8
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [event["changed"] for event in events if event["event"] == "resume"] == [{"quorum": "0.1"}]


def test_a_run_that_was_killed_before_it_began_leaves_room_for_another(digits: Data, tmp_path: Path) -> None:
    (tmp_path / "run/clients").mkdir(parents=True)
    (tmp_path / "run/settings.json.part").write_text("{")
    fewer.run(FedAvg(rounds=1, cohort=2), digits, out=tmp_path / "run")


def test_settings_of_an_object_are_given_to_the_object(digits: Data) -> None:
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
def test_a_model_that_cannot_be_made(model: Any, text: str, digits: Data) -> None:
    with pytest.raises(SettingError, match=text):
        fewer.run(FedAvg(rounds=1), digits, model=model)
