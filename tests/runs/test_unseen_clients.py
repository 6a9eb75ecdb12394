"""Clients that never train: they join after the last round, and leave the server and all other clients as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fewer
from fewer.data import load
from fewer.errors import SettingError
from fewer.ledger import EVALUATION
from fewer.runs.engine import run_experiment
from fewer.runtime import Clients
from tests.helpers import Interrupt, experiment, run_contents

JOINS = ("fedavg-ft", "fedper", "ditto", "fedproto", "local", "metafed", "fedbn")


def run_new(method: str, out: Path | None = None, new: int = 2, callbacks: Any = (), **settings: Any) -> fewer.Result:
    settings = {"runtime": "inline", "rounds": 2, "cohort": 3, "evaluate_every": 2, **settings}
    experiment_ = experiment(5, method, unseen_clients=new, join_rounds=2, **settings)
    return run_experiment(experiment_, out, callbacks=callbacks)


def test_unseen_clients_keep_a_fifth_of_their_samples() -> None:
    settings: dict[str, Any] = {"clients": 5, "partition": "iid", "seed": 3}
    all_train, data = load("digits", **settings), load("digits", unseen_clients=2, **settings)
    assert [data.size(client) for client in range(3)] == [all_train.size(client) for client in range(3)]
    for client in (3, 4):
        size = all_train.size(client)
        assert data.size(client) == size - int(0.8 * size)
        assert len(data.client(client).test) == len(all_train.client(client).test) > 0


def test_tuning_leaves_unseen_clients_out() -> None:
    data = load("digits", clients=5, unseen_clients=2)
    assert len(data.hold_out(0.2, 0)) == 3


@pytest.mark.parametrize("method", JOINS)
def test_joining_changes_nothing_but_the_unseen_clients(method: str, tmp_path: Path) -> None:
    run_new(method, tmp_path / "run")
    trained = {path.name for path in (tmp_path / "run" / "clients" / "000").glob("00000[0-2]/*")}
    assert all(int(name.split(".")[-2]) <= 2 for name in trained if name.endswith(".safetensors"))
    ledger = (tmp_path / "run" / "ledger.csv").read_text().splitlines()[1:]
    asked = {line.split(",")[1] for line in ledger if EVALUATION not in line}
    assert asked <= {"0", "1", "2"}


def test_a_new_client_trains_as_often_as_join_rounds_says(tmp_path: Path) -> None:
    """A joined client of `local` equals a client that trained alone for as many rounds."""
    run_new("local", tmp_path / "run")
    store = tmp_path / "run" / "clients" / "000" / "000004"
    assert sorted(path.name for path in store.glob("model.*")) == [
        "model.00000003.safetensors",
        "model.00000004.safetensors",
    ]


@pytest.mark.parametrize(
    ("stages", "handlers"),
    [
        ("both", ["accumulate", "personalize"]),
        ("accumulate", ["accumulate", "accumulate"]),
        ("personalize", ["personalize", "personalize"]),
    ],
)
def test_new_clients_of_metafed_learn_from_the_ring_and_not_from_each_other(
    stages: str, handlers: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    passes: list[tuple[Any, ...]] = []
    relay = Clients.relay

    def record(clients: Clients, order: Any, handler: Any, holders: Any, sealed: bool) -> Any:
        passes.append((list(order), handler.__name__, list(holders)))
        return relay(clients, order, handler, holders, sealed)

    monkeypatch.setattr(Clients, "relay", record)
    result = run_new("metafed", tmp_path / "run", method_options={"stages": stages})
    ring = result.state.holders
    assert sorted(ring) == [0, 1, 2]  # none of the new clients 3 and 4
    assert passes[2:] == [([client], handler, ring) for handler in handlers for client in (3, 4)]


def test_fedavg_evaluates_the_global_model_on_unseen_clients() -> None:
    result = run_new("fedavg")
    correct = total = 0
    for client in (3, 4):
        samples = result.data.client(client).test
        x, y = samples.all()
        with torch.no_grad():
            correct += int((result.model(x).argmax(1) == y).sum())
        total += len(y)
    assert result.history[-1]["unseen_clients_accuracy"] == pytest.approx(correct / total)


@pytest.mark.parametrize("method", ["fedper", "metafed"])
def test_an_interrupted_run_ends_with_the_same_unseen_clients(method: str, tmp_path: Path) -> None:
    run_new(method, tmp_path / "unbroken")
    with pytest.raises(KeyboardInterrupt):
        run_new(method, tmp_path / "broken", callbacks=[Interrupt(1)])
    fewer.resume(tmp_path / "broken")
    assert run_contents(tmp_path / "broken")["metrics"] == run_contents(tmp_path / "unbroken")["metrics"]


def test_fedmeta_adapts_training_clients_to_all_their_samples() -> None:
    result = run_new("fedmeta", method_options={"eval_clients": "training"})
    assert set(result.history[-1]["clients"]) == {"0", "1", "2"}
    assert "unseen_clients_accuracy" in result.history[-1]


def test_methods_that_nobody_can_join_say_so() -> None:
    with pytest.raises(SettingError, match="unseen_clients does not work with dpsgd-ring: no client can join"):
        run_new("dpsgd-ring")
    with pytest.raises(SettingError, match="unseen_clients does not work with fedmeta: it does not evaluate one model"):
        run_new("fedmeta")
    with pytest.raises(SettingError, match="unseen_clients must be < 5"):
        run_new("fedavg", new=5)
