"""Shared by the tests: commands, rounds without the engine, methods that misbehave on purpose, what runs contain."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from click.testing import Result
from numpy.typing import NDArray
from torch import Tensor
from typer.testing import CliRunner

import fewer
from fewer.cli.app import app
from fewer.methods import Client, Method, ModelState
from fewer.methods.context import ContextFactory
from fewer.methods.fedavg import FedAvg
from fewer.methods.local import Local
from fewer.models import Task, Weights, get_weights
from fewer.models.objective import CLASS_METRICS
from fewer.runs.experiment import Experiment, build_experiment, parse_settings
from fewer.runtime import Answers, Clients, Inline, on_client
from fewer.runtime.handlers import OUTGOING, Call, Reply
from fewer.wire import Number, pack, unpack


class Deadly(FedAvg):
    """Kills the process in which one client trains, once."""

    victim: int = 0
    mark: str = ""

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        if client.id == self.victim and not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().local_train(client, model)


class Sleepy(FedAvg):
    """One client is slow."""

    sleeper: int = 0
    nap: float = 0.6

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        if client.id == self.sleeper:
            time.sleep(self.nap)
        return super().local_train(client, model)


class Buggy(FedAvg):
    """One client crashes, another reports a wrong size, a third sends NaN."""

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        if client.id == 0:
            raise ZeroDivisionError("by design")
        answer = super().local_train(client, model)
        if client.id == 1:
            answer["size"] = -5
        if client.id == 2:
            answer["model"]["head.bias"][0] = torch.nan
        return answer


class Gambler(FedAvg):
    """Draws from every global generator, on clients and on the server."""

    def round(self, state: ModelState, clients: Clients) -> ModelState:
        before = self._draw()
        answers = clients.ask(
            self.sample_cohort(clients), self.gamble, returns={"luck": state.model["head.bias"], "size": Number(int, 1)}
        )
        total = torch.stack([answer["luck"] for answer in answers]).sum(0)
        return ModelState({**state.model, "head.bias": total + before + self._draw()})

    @on_client
    def gamble(self, client: Client) -> dict[str, Any]:
        return {"luck": torch.rand(10) + self._draw(), "size": len(client.train)}

    def _draw(self) -> float:
        return float(np.random.rand()) + random.random() + float(torch.rand(()))


class Witness(FedAvg):
    """Collects all answers in SEEN_ANSWERS."""

    def round(self, state: ModelState, clients: Clients) -> ModelState:
        answers = clients.ask(
            self.sample_cohort(clients),
            self.local_train,
            model=state.model,
            returns={"model": state.model, "size": Number(int, 1)},
        )
        SEEN_ANSWERS.append(answers)
        return state


SEEN_ANSWERS: list[Answers] = []


class SlowToScore(Local):
    """Trains quickly, but is slow to evaluate."""

    @on_client
    def score(self, client: Client, model: Weights, use_global_test: bool) -> dict[str, float]:
        time.sleep(2.2 if client.id == 0 else 0)
        return super().score(client, model, use_global_test)


class Stop(Exception):
    """Stops a run."""


class Stopping(fewer.Callback):
    """Stops a run after its second round."""

    def on_round_end(self, run: fewer.Run, metrics: Any) -> None:
        if metrics["round"] == 2:
            raise Stop


FRL_SETTINGS: dict[str, Any] = {
    "rounds": 4,
    "method_options": {"way": 2, "group_size": 2, "eval_groups": 1, "samples_per_class": 20},
}
"""Settings that make FRL fast."""
META = ("alone", "fedmeta", "fedavg-meta", "fedbabu-meta", "knn-per-meta", "reptile", "per-fedavg")
"""These need clients for training, validation and evaluation: at least eight."""
FEW_SHOT: dict[str, Any] = {
    "data_options": {"split": "4/3/3"},
    "partition": "iid",
    "method_options": {"way": 2, "shot": 1, "queries": 2, "tasks": 2, "test_tasks": 4, "validate_every": 2},
}
FEW_SHOT_METHODS = ("f2l", "fedfsl", "fl-maml", "fl-proto", "fl-base", "local-maml", "local-proto")
SYNTHESIS = {"method_options": {"local_steps": 2, "epochs": 2, "generator_steps": 2, "distill_steps": 2}}
STEPS = {"local_steps": 5, "first_steps": 5}
SMALL: dict[str, dict[str, Any]] = {
    "fedavg": {"drop": 0.2, "corrupt": 0.2},
    "fedbn": {"norm": "batch"},
    "fedmk": {"method_options": {"per_class": 2, "matching_steps": 5, "outer_steps": 2, "server_steps": 10}},
    "dp-fedmk": {"method_options": {"per_class": 2, "nets": 2, "matching_steps": 5, "server_steps": 10}},
    "fedmk-avg": {"method_options": {"per_class": 2, "matching_steps": 5, "server_steps": 10, **STEPS}},
    "fedmk-paper": {"method_options": {"per_class": 2, "server_steps": 10}},
    "feddm": {"method_options": {"per_class": 2, "matching_steps": 5, "real_per_class": 8, "server_steps": 10}},
    **dict.fromkeys(("dense", "co-boosting"), SYNTHESIS),
    "fusefl": {"rounds": 2, "method_options": {"local_steps": 5}},
    "metafed": {"validation": 0.2},
    **dict.fromkeys(FEW_SHOT_METHODS, FEW_SHOT),
    **dict.fromkeys(
        ("frl", "frl-meta-head", "frl-scratch", "frl-fine-tuning", "frl-per-fedavg", "coprefl"), FRL_SETTINGS
    ),
    "frl-warm-start": {"rounds": 8, "method_options": {**FRL_SETTINGS["method_options"], "warmup_rounds": 4}},
}
"""Settings that make a method fast."""


def client_count(method: str) -> int:
    return 8 if method in META else 3


def experiment(clients: int, method: str = "fedavg", **settings: Any) -> Experiment:
    """A small experiment."""
    defaults: dict[str, Any] = {"data": "digits", "alpha": 1.0, "rounds": 2, "seed": 3, "runtime": "flower"}
    return build_experiment(parse_settings({**defaults, "method": method, "clients": clients, **settings}))


Array = NDArray[np.float64]


def is_close(actual: Tensor, expected: Array, tolerance: float = 2e-6) -> bool:
    return actual.shape == expected.shape and bool(np.abs(actual.double().numpy() - expected).max() <= tolerance)


@dataclass
class Wiretap(Inline):
    """Records every message."""

    down: list[tuple[Call, bytes]] = field(default_factory=list)
    up: list[tuple[Call, bytes]] = field(default_factory=list)

    def _deliver_calls(self, calls: Sequence[tuple[Call, bytes]]) -> Iterator[tuple[Call, Reply | None]]:
        self.down += calls
        for call, reply in super()._deliver_calls(calls):
            if reply is not None:
                assert reply.failure in (None, "unable"), reply.detail
                self.up.append((call, reply.blob))
            yield call, reply


@dataclass
class Harness:
    """Runs the rounds of a method without the engine."""

    method: Method
    task: Task
    clients: Wiretap
    contexts: ContextFactory
    state: Any

    def rounds(self, count: int) -> Any:
        for _ in range(count):
            self.clients.round += 1
            self.state = self.method.round(self.state, self.clients)
        return self.state

    def client(self, id: int) -> Client:
        context = self.contexts(id, self.clients.round)
        assert isinstance(context, Client)
        return context

    def personal_model(self, client: int) -> Weights:
        return get_weights(self.method.build_predictor(self.state.shared, self.client(client)))


def data_bytes(blob: bytes) -> int:
    """The bytes of a message after its header."""
    return len(blob) - 8 - int.from_bytes(blob[:8], "little")


def run_contents(path: Path) -> dict[str, Any]:
    """The parts of a run that must not depend on the runtime or on interruptions."""
    checkpoint = unpack((path / "checkpoint.safetensors").read_bytes())
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return {
        "state": pack(checkpoint["state"]),
        "metrics": [{name: value for name, value in line.items() if name != "seconds"} for line in metrics],
        "ledger": (path / "ledger.csv").read_bytes(),
        "clients": {f.relative_to(path): f.read_bytes() for f in path.glob("clients/*/*/*.safetensors")},
    }


def remote_contents(path: Path, remote: Path) -> dict[str, Any]:
    """The contents of an inline run as they are in the same run between machines, `remote`.

    Remote clients send no label counts, so figures that need these may be missing.
    """
    contents = run_contents(path)
    lines = zip(contents["metrics"], run_contents(remote)["metrics"], strict=True)
    for metrics, found in lines:
        for name in {*CLASS_METRICS, "classes"} - found.keys():
            metrics.pop(name, None)
        for values in metrics.get("client_metrics", {}).values():
            values.pop("majority_baseline", None)
    return {**contents, "clients": {}}


def without_outgoing(files: dict[Path, bytes]) -> dict[Path, bytes]:
    """All files except outgoing messages: the metadata keys of an encoded message have no fixed order."""
    return {path: content for path, content in files.items() if not path.name.startswith(OUTGOING)}


class Interrupt(fewer.Callback):
    """Interrupts a run after `after` answers in its second round."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_answer(self, run: fewer.Run, answered: int, asked: int) -> None:
        if run.round == 2 and answered == self.after:
            raise KeyboardInterrupt


DIGITS = ["--data", "digits", "--clients", "6"]


def call(*args: str | Path, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    return result


def same_state(a: Any, b: Any) -> bool:
    """Bit-for-bit equality of states."""
    left, right = vars(a), vars(b)
    return left.keys() == right.keys() and all(
        {*left[part]} == {*right[part]} and all(torch.equal(left[part][k], right[part][k]) for k in left[part])
        for part in left
    )


def metrics(result: fewer.Result) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "seconds"} for line in result.history]


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


LAYERS = (
    "cli",
    "dash",
    "report",
    "experiments",
    "audit",
    "runs",
    "methods",
    "learning",
    "models",
    "data",
    "runtime",
    "wire",
)
"""Top to bottom."""
