"""The runtimes: all give the same numbers, and every fault becomes a missing answer."""

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import fewer
from fewer import FedAvg, FedBN, FedProx, Local
from fewer.data import Data
from fewer.errors import QuorumLost, SettingError
from fewer.methods import Method
from fewer.runs.engine import connect_clients
from fewer.runs.experiment import Experiment, build_experiment, parse_settings
from fewer.runtime import Clients, Each, Pool, Store, on_client, seed_of, stream
from fewer.runtime.store import client_folder, delete_state_after
from fewer.wire import Number
from tests.examples import SEEN_ANSWERS, Buggy, Deadly, Gambler, Sleepy, Witness


def same_state(a: Any, b: Any) -> bool:
    """Bit-for-bit equality of states."""
    left, right = vars(a), vars(b)
    return left.keys() == right.keys() and all(
        {*left[part]} == {*right[part]} and all(torch.equal(left[part][k], right[part][k]) for k in left[part])
        for part in left
    )


def metrics(result: fewer.Result) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "seconds"} for line in result.history]


def children() -> list[psutil.Process]:
    """Our live child processes, without Python's resource tracker."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(child.cmdline())
    ]


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


def test_the_global_random_state_is_unchanged(digits: Data) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    fewer.run(FedAvg(rounds=1, cohort=2), digits)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


def test_streams_depend_on_every_part_of_the_key() -> None:
    keys = [(0, 1, 2, "a"), (1, 1, 2, "a"), (0, 2, 2, "a"), (0, 1, 3, "a"), (0, 1, 2, "b"), (0, 12, "a"), (0, 1, 2)]
    assert len({seed_of(*key) for key in keys}) == len(keys)
    assert torch.equal(torch.rand(4, generator=stream(1, "x")), torch.rand(4, generator=stream(1, "x")))


# --- sampling -----------------------------------------------------------------------------------------------------


def make_experiment(
    data: Data, method: Method | None = None, **settings: Any
) -> tuple[Experiment, Callable[[Path], Clients]]:
    experiment = build_experiment(parse_settings(settings), method or FedAvg(), data)
    return experiment, lambda folder: connect_clients(experiment, folder)


def test_sampling(digits: Data, tmp_path: Path) -> None:
    _, connect = make_experiment(digits, seed=4)
    with connect(tmp_path) as clients:
        clients.round = 1
        first = clients.sample(4)
        assert len(set(first)) == 4 and set(first) <= set(range(6))
        assert clients.sample(4) == first
        assert sorted(clients.sample(6)) == list(range(6))
        drawn = []
        for clients.round in range(200):
            drawn += clients.sample(3)
        counts = np.bincount(drawn, minlength=6)
        assert counts.min() > 70 and counts.max() < 130  # each client is in about half of the rounds
        with pytest.raises(SettingError, match="cohort = 7, but there are only 6 clients"):
            clients.sample(7)
        assert clients.eval_cohort() == list(range(6))


def test_a_cohort_larger_than_the_population(digits: Data) -> None:
    with pytest.raises(SettingError, match="cohort = 7, but there are only 6 clients"):
        fewer.run(FedAvg(cohort=7), digits)


# --- faults -------------------------------------------------------------------------------------------------------


def ledger(path: Path) -> list[list[str]]:
    return [line.split(",") for line in (path / "ledger.csv").read_text().splitlines()[1:]]


@pytest.mark.parametrize(
    ("fault", "reason", "sent"), [("drop", "dropped", 0), ("slow", "late", 1), ("corrupt", "refused", 1)]
)
def test_injected_faults_become_missing_answers(
    fault: str, reason: str, sent: int, digits: Data, tmp_path: Path
) -> None:
    SEEN_ANSWERS.clear()
    faults: dict[str, Any] = {fault: 0.4}
    fewer.run(Witness(rounds=8, cohort=6), digits, out=tmp_path / "run", **faults)
    absent = [answer for answers in SEEN_ANSWERS for answer in answers.absent]
    assert {answer.reason for answer in absent} == {reason}
    assert 8 <= len(absent) <= 30  # about 0.4 of 48 requests
    assert all(len(answers) + len(answers.absent) == 6 for answers in SEEN_ANSWERS)
    rows = [row for row in ledger(tmp_path / "run") if row[3] == "local_train"]
    assert sum(row[2] == "down" for row in rows) == 48
    assert sum(row[2] == "up" for row in rows) == 48 - (0 if sent else len(absent))
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert sum(event["event"] == "absent" for event in events) == len(absent)


def test_bytes_by_arithmetic(digits: Data, tmp_path: Path) -> None:
    result = fewer.run(FedAvg(rounds=2, cohort=3), digits, out=tmp_path / "run")
    count = sum(tensor.numel() for tensor in result.state.model.values())
    rows = [row for row in ledger(tmp_path / "run") if not row[3].startswith("evaluate/")]
    assert len(rows) == 2 * 3 * 2
    assert all(0 < int(row[4]) - 4 * count < 800 for row in rows)  # the weights, and a small header
    assert sum(int(row[4]) for row in rows if row[2] == "up") == result.metrics["up"]
    assert sum(int(row[4]) for row in rows if row[2] == "down") == result.metrics["down"]
    half = fewer.run(FedAvg(rounds=2, cohort=3, codec="float16"), digits)
    assert result.metrics["up"] - half.metrics["up"] == pytest.approx(2 * 3 * 2 * count, abs=6 * 20)


def test_a_float16_model_arrives_as_float16(digits: Data, tmp_path: Path) -> None:
    experiment, connect = make_experiment(digits, FedAvg(codec="float16", lr=1e-9, local_steps=1))
    with connect(tmp_path) as clients:
        clients.round = 1
        state = experiment.method.init(experiment.task, 0)
        after = experiment.method.round(state, clients)
    for name, tensor in state.model.items():
        assert torch.allclose(after.model[name], tensor.half().float(), atol=1e-6)


def line_of(text: str) -> int:
    lines = (Path(__file__).parent / "examples.py").read_text().splitlines()
    return 1 + next(number for number, line in enumerate(lines) if text in line and "raise" in line)


@pytest.mark.parametrize("runtime", ["inline", "pool"])
def test_errors_and_invalid_values_become_missing_answers(runtime: str, digits: Data, tmp_path: Path) -> None:
    fewer.run(Buggy(rounds=1, cohort=6), digits, runtime=runtime, out=tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    seen = {event["client"]: (event["reason"], event["detail"]) for event in events if event["event"] == "absent"}
    assert seen == {
        0: ("failed", f"ZeroDivisionError at examples.py:{line_of('by design')}"),
        1: ("refused", "'size' is -5, outside 1 … 1000000000"),
        2: ("refused", "'model' is not finite"),
    }
    assert "by design" in (tmp_path / "run/clients/000/000000/errors.txt").read_text()  # it stays on the client
    files = [file for file in (tmp_path / "run").iterdir() if file.is_file()]
    assert not any(b"by design" in file.read_bytes() for file in files)


def test_quorum(digits: Data, tmp_path: Path) -> None:
    with pytest.raises(QuorumLost, match=r"round 1: 3 of 6 clients answered, 4 needed \(quorum 0.6\): .*1 failed"):
        fewer.run(Buggy(rounds=2, cohort=6), digits, quorum=0.6)
    fewer.run(Buggy(rounds=2, cohort=6), digits, quorum=0.5)
    with pytest.raises(QuorumLost, match="0 of 6"):
        fewer.run(FedAvg(rounds=1), digits, drop=1.0)


def test_a_diverging_run_reports_the_reason(digits: Data) -> None:
    with pytest.raises(QuorumLost, match="'model' is not finite"):
        fewer.run(FedAvg(lr=1e6, rounds=5), digits)


@pytest.mark.parametrize("runtime", ["inline", "pool"])
def test_deadline(runtime: str, digits: Data, tmp_path: Path) -> None:
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
    clients.round, clients.on_progress = 1, send_pids_and_die
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


def test_a_client_without_data_reports_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pairs = [(rng.random((n, 1, 8, 8), np.float32), rng.integers(0, 3, n)) for n in (30, 0, 30)]
    result = fewer.run(FedAvg(rounds=1), fewer.data.from_clients(pairs), out=tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [(e["client"], e["reason"], e["detail"]) for e in events if e["event"] == "absent"] == [
        (1, "unable", "no training data")
    ]
    assert set(result.metrics["clients"]) == {"0", "2"}


class EchoMethod(FedAvg):
    def peek(self, client: Any) -> dict[str, Any]:
        return {}

    @on_client
    def echo(self, client: Any, number: int) -> dict[str, Any]:
        return {"number": number * 10 + client.id}


def test_only_marked_handlers_can_be_asked(digits: Data, tmp_path: Path) -> None:
    experiment, connect = make_experiment(digits, EchoMethod())
    with connect(tmp_path) as clients:
        with pytest.raises(QuorumLost, match="'peek' is not an @on_client handler"):
            clients.ask([0], experiment.method.peek, returns={})  # type: ignore[attr-defined]
        with pytest.raises(QuorumLost, match="do not match the parameters of 'echo'"):
            clients.ask([0], experiment.method.echo, wrong=1, returns={})  # type: ignore[attr-defined]


@pytest.mark.parametrize("runtime", ["inline", "pool"])
def test_a_field_for_each_client(runtime: str, digits: Data, tmp_path: Path) -> None:
    experiment, connect = make_experiment(digits, EchoMethod(), runtime=runtime)
    with connect(tmp_path) as clients:
        numbers = Each({1: 100, 4: 200})
        answers = clients.ask([4, 1], experiment.method.echo, number=numbers, returns={"number": Number(int)})  # type: ignore[attr-defined]
    assert [(answer.client, answer["number"]) for answer in answers] == [(4, 2004), (1, 1001)]


# --- the store of a client -----------------------------------------------------------------------------------------


def test_the_store_returns_the_value_of_the_latest_earlier_round(tmp_path: Path) -> None:
    folder = client_folder(tmp_path, 7)
    assert Store(folder, 1).get("model") is None and not folder.exists()
    for round in (1, 2, 5):
        Store(folder, round).put("model", {"w": torch.tensor([float(round)]), "n": round})
    assert Store(folder, 9).get("model")["n"] == 5
    assert Store(folder, 4).get("model")["n"] == 2
    assert sorted(path.name for path in folder.iterdir()) == [
        "model.00000002.safetensors",
        "model.00000005.safetensors",
    ]
    delete_state_after(tmp_path, 4)
    assert Store(folder, 9).get("model")["n"] == 2
    Store(folder, 9).put("model", None)
    assert Store(folder, 9).get("model") is None
