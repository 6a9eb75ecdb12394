"""Asking clients: sampling, bytes, and every fault becomes a missing answer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fewer
from fewer import FedAvg
from fewer.data import Data
from fewer.errors import QuorumLost, SettingError
from tests import helpers
from tests.helpers import SEEN_ANSWERS, Buggy, Witness
from tests.runtime.harness import make_experiment

# --- sampling ---------------------------------------------------------------------------------------------------


def test_sampling_is_fixed_per_round_and_even(digits: Data, tmp_path: Path) -> None:
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


# --- faults -----------------------------------------------------------------------------------------------------


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
    lines = Path(helpers.__file__).read_text().splitlines()
    return 1 + next(number for number, line in enumerate(lines) if text in line and "raise" in line)


@pytest.mark.parametrize("runtime", ["inline", "pool"])
def test_errors_and_invalid_values_become_missing_answers(runtime: str, digits: Data, tmp_path: Path) -> None:
    fewer.run(Buggy(rounds=1, cohort=6), digits, runtime=runtime, out=tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    seen = {event["client"]: (event["reason"], event["detail"]) for event in events if event["event"] == "absent"}
    assert seen == {
        0: ("failed", f"ZeroDivisionError at helpers.py:{line_of('by design')}"),
        1: ("refused", "'size' is -5, outside 1 … 1000000000"),
        2: ("refused", "'model' is not finite"),
    }
    assert "by design" in (tmp_path / "run/clients/000/000000/errors.txt").read_text()  # it stays on the client
    files = [file for file in (tmp_path / "run").iterdir() if file.is_file()]
    assert not any(b"by design" in file.read_bytes() for file in files)


def test_too_few_answers_end_a_run(digits: Data, tmp_path: Path) -> None:
    with pytest.raises(QuorumLost, match=r"round 1: 3 of 6 clients answered, 4 needed \(quorum 0.6\): .*1 failed"):
        fewer.run(Buggy(rounds=2, cohort=6), digits, quorum=0.6)
    fewer.run(Buggy(rounds=2, cohort=6), digits, quorum=0.5)
    with pytest.raises(QuorumLost, match="0 of 6"):
        fewer.run(FedAvg(rounds=1), digits, drop=1.0)


def test_a_diverging_run_reports_the_reason(digits: Data) -> None:
    with pytest.raises(QuorumLost, match="'model' is not finite.*; training diverged: lower lr, or standardize"):
        fewer.run(FedAvg(lr=1e6, rounds=5), digits)


def test_a_client_without_data_reports_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pairs = [(rng.random((n, 1, 8, 8), np.float32), rng.integers(0, 3, n)) for n in (30, 0, 30)]
    result = fewer.run(FedAvg(rounds=1), fewer.data.from_clients(pairs), out=tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [(e["client"], e["reason"], e["detail"]) for e in events if e["event"] == "absent"] == [
        (1, "unable", "no training data")
    ]
    assert set(result.metrics["clients"]) == {"0", "2"}
