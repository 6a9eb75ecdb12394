"""`keep = best`: each client keeps its best model on its validation samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fewer
from fewer import FedAvg, FedBN, Local, MetaFed
from fewer.data import ArrayData, Data, load
from fewer.errors import SettingError
from fewer.learning import measure_net
from fewer.methods import Method
from fewer.models import get_weights
from fewer.runs.callbacks import Callback, Metrics, Run
from fewer.runs.result import Result
from fewer.runs.settings import settings_hash
from tests.helpers import run_contents

STEPS: dict[str, Any] = {"rounds": 6, "local_steps": 8, "lr": 1.5}


@pytest.fixture(scope="module")
def held() -> ArrayData:
    return load("digits", clients=4, alpha=0.3, validation=0.3)


class Recorder(Callback):
    """Records each client's current model after each round, from a run that keeps the last."""

    def __init__(self) -> None:
        self.models: list[list[dict[str, torch.Tensor]]] = []

    def on_round_end(self, run: Run, metrics: Metrics) -> None:
        contexts = run.contexts()
        clients = [contexts(client, run.round) for client in range(len(run.data))]
        self.models.append([get_weights(run.method.build_predictor(run.state.shared, client)) for client in clients])


def validate(result: Result, client: int, model: dict[str, torch.Tensor]) -> tuple[float, float]:
    net, samples = result.task.net(), result.data.client(client).validation
    net.load_state_dict(model)
    values = measure_net(net, samples.chunks(1000), result.task).values()
    return values["accuracy"], -values["loss"]


@pytest.mark.parametrize("kind", [FedAvg, FedBN, Local])
def test_a_client_uses_its_best_model_on_its_validation_samples(
    kind: type[Method], held: ArrayData, tmp_path: Path
) -> None:
    recorder = Recorder()
    last = fewer.run(kind(**STEPS), held, out=tmp_path / "last", callbacks=[recorder])
    best = fewer.run(kind(keep="best", **STEPS), held, out=tmp_path / "best")
    differ = 0
    for client in range(4):
        models = [models[client] for models in recorder.models]
        expected = max(reversed(models), key=lambda model: validate(last, client, model))
        model = get_weights(best.personal_model(client))
        assert all(torch.equal(model[name], tensor) for name, tensor in expected.items())
        net, test = best.personal_model(client), held.client(client).test
        values = measure_net(net, test.chunks(1000), best.task).values()
        assert best.metrics["clients"][str(client)] == values["accuracy"]
        differ += expected is not models[-1]
    assert differ
    assert [best.metrics[way] for way in ("up", "down")] == [last.metrics[way] for way in ("up", "down")]
    for name, tensor in last.state.shared.items():  # training is the same
        assert torch.equal(best.state.shared[name], tensor)


def test_only_evaluated_rounds_are_compared(held: ArrayData, tmp_path: Path) -> None:
    last = fewer.run(FedAvg(**STEPS), held, out=tmp_path / "last")
    best = fewer.run(FedAvg(keep="best", **STEPS), held, out=tmp_path / "best", evaluate_every=6)
    assert best.metrics["clients"] == last.metrics["clients"]


def test_metafed_keeps_its_best_or_its_last_model(held: ArrayData, tmp_path: Path) -> None:
    steps: dict[str, Any] = {"rounds": 4, "local_steps": 4, "lr": 0.8}
    best, last = (fewer.run(MetaFed(keep=keep, **steps), held, out=tmp_path / keep) for keep in ("best", "last"))
    assert best.hash == settings_hash(best.settings, MetaFed(**steps)) != last.hash
    for client in range(4):
        validated = [validate(run, client, get_weights(run.personal_model(client))) for run in (best, last)]
        assert validated[0] >= validated[1]
    assert best.metrics["clients"] != last.metrics["clients"]


class Interrupt(Callback):
    """Stops a run in the middle, after a round is evaluated and before it is recorded."""

    def on_round_end(self, run: Run, metrics: Metrics) -> None:
        if run.round == 3:
            run.stop("to repeat this round")
            raise KeyboardInterrupt


def test_the_choice_survives_an_interruption_and_a_pool(held: ArrayData, tmp_path: Path) -> None:
    method = FedBN(keep="best", **STEPS)
    fewer.run(method, held, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fewer.run(method, held, out=tmp_path / "broken", callbacks=[Interrupt()])
    assert len((tmp_path / "broken/metrics.jsonl").read_text().splitlines()) == 2
    fewer.resume(tmp_path / "broken")
    fewer.run(method, held, out=tmp_path / "pool", runtime="pool")
    expected = run_contents(tmp_path / "whole")
    assert run_contents(tmp_path / "broken") == expected == run_contents(tmp_path / "pool")
    assert any(path.name.startswith("best_model") for path in expected["clients"])


def test_a_run_that_compared_an_unscheduled_round_cannot_get_more_rounds() -> None:
    best, last = FedAvg(keep="best"), FedAvg()
    assert best.why_not_extend(3, 3, True) == "with keep = best it depends on which rounds are evaluated"
    assert best.why_not_extend(3, 3, False) == last.why_not_extend(3, 3, True) == ""


def test_a_client_without_validation_samples_uses_its_last_model(tmp_path: Path) -> None:
    data = load("digits", clients=4, alpha=0.3, validation=0.3)
    validation = data.validation.where(data.validation.owners != 2)
    few = ArrayData(**{**vars(data), "validation": validation, "origin": None})
    steps = {**STEPS, "rounds": 12, "lr": 1.0}  # accuracy swings, so that hardly ever all last models are the best
    last, best = (fewer.run(Local(keep=keep, **steps), few, out=tmp_path / keep) for keep in ("last", "best"))
    accuracies = [json.dumps(run.metrics["clients"]["2"]) for run in (last, best)]
    assert accuracies[0] == accuracies[1] and last.metrics["clients"] != best.metrics["clients"]


def test_keep_best_is_refused_if_there_is_nothing_to_choose_by(digits: Data) -> None:
    with pytest.raises(SettingError, match="keep = best needs validation samples, and there are none; set validation"):
        fewer.run("fedavg", "digits", method_options={"keep": "best"})
    for name in ("fedmeta", "frl", "fedensemble"):
        with pytest.raises(SettingError, match=f"keep = best does not work with {name}: it does not evaluate one"):
            fewer.run(name, "digits", validation=0.2, method_options={"keep": "best"})
    with pytest.raises(SettingError, match="keep must be"):
        FedAvg(keep="bets")
