"""The pool gives the same numbers as inline, and a killed or slow worker loses only its client."""

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import fewer
from fewer import FedAvg, FedBN, FedProx, Local
from fewer.data import Data
from fewer.methods import Method
from fewer.runtime import Pool
from tests.helpers import Deadly, Gambler, Sleepy, metrics, same_state
from tests.runtime.harness import make_experiment

EARLIER: set[psutil.Process] = set()
"""Child processes that were there before the current test."""


def children() -> list[psutil.Process]:
    """Live child processes that the current test has started, without Python's resource tracker."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child not in EARLIER
        and child.status() != psutil.STATUS_ZOMBIE
        and "resource_tracker" not in " ".join(child.cmdline())
    ]


@pytest.fixture(autouse=True)
def remember_children() -> None:
    """Other tests of the same process may have started some."""
    EARLIER.clear()
    EARLIER.update(psutil.Process().children(recursive=True))


@pytest.mark.parametrize("kind", [FedAvg, FedProx, FedBN, Local, Gambler])
def test_pool_gives_the_same_numbers_as_inline(kind: type[Method], digits: Data, tmp_path: Path) -> None:
    faults: dict[str, Any] = {"drop": 0.2, "slow": 0.1, "corrupt": 0.2, "seed": 3}
    method = kind(rounds=3, cohort=5)
    inline = fewer.run(method, digits, out=tmp_path / "inline", **faults)
    pooled = fewer.run(method, digits, out=tmp_path / "pool", runtime="pool", workers=3, **faults)
    assert same_state(inline.state, pooled.state)
    assert metrics(inline) == metrics(pooled)
    assert any(line["absent"] for line in inline.history)
    assert (tmp_path / "inline/ledger.csv").read_bytes() == (tmp_path / "pool/ledger.csv").read_bytes()
    for client in range(len(digits)) if kind is Local else ():
        left, right = inline.personal_model(client).state_dict(), pooled.personal_model(client).state_dict()
        assert all(torch.equal(left[name], right[name]) for name in left)
    assert not children()


def test_spawned_workers_give_the_same_numbers(digits: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    inline = fewer.run(FedAvg(rounds=1, cohort=2), digits)
    monkeypatch.setattr(Pool, "_start_method", lambda self: "spawn")
    spawned = fewer.run(FedAvg(rounds=1, cohort=2), digits, runtime="pool", workers=1)
    assert same_state(inline.state, spawned.state)


@pytest.mark.parametrize("runtime", ["inline", "pool"])
def test_a_client_that_misses_the_deadline_is_absent(runtime: str, digits: Data, tmp_path: Path) -> None:
    # In the pool, the nap exceeds the grace period, so the worker is killed.
    nap = 2.2 if runtime == "inline" else 60
    start = time.monotonic()
    fewer.run(Sleepy(rounds=2, cohort=6, nap=nap), digits, runtime=runtime, deadline=2, out=tmp_path / "run")
    assert time.monotonic() - start < 50
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [(e["client"], e["reason"]) for e in events if e["event"] == "absent"] == [(0, "late")] * 2
    assert not children()


def test_a_killed_worker_loses_only_its_client(digits: Data, tmp_path: Path) -> None:
    method = Deadly(rounds=2, cohort=6, victim=3, mark=str(tmp_path / "mark"))
    result = fewer.run(method, digits, runtime="pool", out=tmp_path / "run")
    assert [line["absent"] for line in result.history] == [1, 0]
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [(e["client"], e["reason"]) for e in events if e["event"] == "absent"] == [(3, "lost")]
    assert not children()


def _serve_and_die(data: Data, pids: Any) -> None:
    def send_pids_and_die(done: int, asked: int) -> None:
        pids.send([child.pid for child in children()])
        os.kill(os.getpid(), 9)

    experiment, connect = make_experiment(data, Sleepy(cohort=6, nap=60), runtime="pool")
    clients = connect(Path())
    clients.round, clients.on_answer = 1, send_pids_and_die
    experiment.method.round(experiment.method.init(experiment.task, 0), clients)


def test_workers_die_with_a_killed_server(digits: Data) -> None:
    receiver, sender = multiprocessing.Pipe()
    server = multiprocessing.get_context("fork").Process(target=_serve_and_die, args=(digits, sender))
    server.start()
    pids = receiver.recv()
    server.join()
    assert len(pids) == 2
    deadline = time.monotonic() + 5
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)
