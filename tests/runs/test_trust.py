"""Lies and robust aggregation in whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fewer
from fewer.errors import SettingError
from fewer.methods import Client, ModelState, find, names
from fewer.methods.fedavg import FedAvg
from fewer.models import Weights
from fewer.runs.experiment import build_experiment, parse_settings
from fewer.runtime import Clients, on_client
from fewer.wire import Shaped
from tests.helpers import metrics, same_state

SETTINGS: dict[str, Any] = {"data": "digits", "model": "mlp", "clients": 10, "alpha": 10.0, "rounds": 3, "seed": 1}
DOES_NOT_AVERAGE = {
    *("alone", "dp-fedmk", "dpsgd-ring", "feddistill-logits", "fedelmy", "fedmk", "fedmk-paper", "fedproto", "fedseq"),
    *("local", "local-maml", "local-proto", "metafed"),
    *("centralized", "co-boosting", "dense", "fed3r", "fedavg-head", "fedcof", "feddm", "fedncm", "fedpft", "fusefl"),
}
REJECTS_OUTLIERS = {"dp-fedmk", "fedmk", "fedmk-paper", "fedproto", "fedcof", "feddm", "fedncm"}


def test_a_robust_rule_bears_lies_that_ruin_the_mean() -> None:
    honest = fewer.run("fedavg", **SETTINGS)
    fooled = fewer.run("fedavg", **SETTINGS, lie="scale:0.3")
    robust = fewer.run("fedavg", **SETTINGS, lie="scale:0.3", aggregate="multi-krum", liars=0.3)
    assert fooled.accuracy < robust.accuracy - 0.1 and robust.accuracy > honest.accuracy - 0.1


def test_lies_and_rules_are_the_same_in_the_pool(tmp_path: Path) -> None:
    settings = {**SETTINGS, "rounds": 2, "lie": "noise:0.2", "aggregate": "bulyan"}
    inline, pool = (fewer.run("fedavg", **settings, runtime=runtime) for runtime in ("inline", "pool"))
    assert same_state(inline.state, pool.state) and metrics(inline) == metrics(pool)


class Labels(FedAvg):
    """Collects the labels that each client trains on."""

    @on_client(stream="train")
    def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
        SEEN[client.id] = client.train.labels
        return super().local_train(client, model)


SEEN: dict[int, torch.Tensor] = {}


def test_liars_train_on_flipped_labels() -> None:
    data = fewer.data.load("digits", clients=4, alpha=10.0)
    run = fewer.run(Labels(rounds=1, local_steps=1), data, lie="label-flip:0.5")
    flipped = [torch.equal(SEEN[client], 9 - data.client(client).train.labels) for client in range(4)]
    honest = [torch.equal(SEEN[client], data.client(client).train.labels) for client in range(4)]
    assert sum(flipped) == 2 and honest == [not flip for flip in flipped] and run.accuracy is not None


def test_a_liar_of_a_ring_passes_on_a_lie(tmp_path: Path) -> None:
    settings = {**SETTINGS, "clients": 3, "rounds": 2, "validation": 0.2}
    honest, false = (fewer.run("metafed", **settings, lie=lie) for lie in (None, "noise:1"))
    assert false.accuracy < honest.accuracy
    with pytest.raises(
        SettingError, match=r"lie = alie needs the answers of honest clients.*allowed: sign-flip, scale"
    ):
        fewer.run("metafed", **settings, lie="alie:0.5")


def test_a_method_that_averages_nothing_refuses_a_rule() -> None:
    assert {name for name in names() if not find(name).averages()} == DOES_NOT_AVERAGE
    assert {name for name in DOES_NOT_AVERAGE if find(name).takes_rules()} == REJECTS_OUTLIERS
    with pytest.raises(SettingError, match=r"aggregate = median, but fed3r averages nothing .*allowed: apfl"):
        build_experiment(parse_settings({**SETTINGS, "method": "fed3r", "aggregate": "median"}))


CONDENSE = {"matching_steps": 20, "per_class": 5, "server_steps": 200, "min_samples": 3}


@pytest.mark.parametrize(
    ("method", "model", "options", "dp"),
    [
        ("fedncm", "cnn", {}, None),
        ("fedncm", "cnn", {}, "record:epsilon=1000,public_noise"),
        ("fedproto", "cnn", {"local_steps": 5}, None),
        ("fedmk", "cnn", CONDENSE, None),
    ],
)
def test_outliers_among_prototypes_and_images_are_rejected(
    method: str, model: str, options: dict[str, Any], dp: str | None
) -> None:
    settings: dict[str, Any] = {**SETTINGS, "model": model, "rounds": 1, "method_options": options, "dp": dp}
    lie: dict[str, Any] = {"lie": "label-flip:0.3", "liars": 0.3}
    fooled, robust = (fewer.run(method, **settings, **lie, aggregate=rule) for rule in ("mean", "multi-krum"))
    assert robust.accuracy > fooled.accuracy + 0.03


def test_a_rule_cannot_look_at_sums_whose_noise_is_shared() -> None:
    with pytest.raises(SettingError, match="distributed noise needs aggregate = mean"):
        fewer.run("fedncm", **SETTINGS, dp="record:noise=1,distributed", aggregate="median")


def test_flipped_labels_need_classes() -> None:
    settings = {**SETTINGS, "loss": "mse", "lie": "label-flip:0.1"}
    with pytest.raises(SettingError, match="lie = label-flip:0.1 needs classes, but this is a regression task"):
        build_experiment(parse_settings(settings))


class Bounded(FedAvg):
    """Clients send a tensor whose values may be at most 3."""

    def round(self, state: ModelState, clients: Clients) -> ModelState:
        answers = clients.ask(range(4), self.send_two, returns={"two": Shaped((1,), max_value=3)})
        assert len(answers) == 3 and answers.absent[0].reason == "refused"
        return state

    @on_client
    def send_two(self, client: Client) -> dict[str, Any]:
        return {"two": torch.full((1,), 2.0)}


def test_a_lie_that_the_checks_find_is_refused() -> None:
    run = fewer.run(Bounded(rounds=1), "digits", clients=4, alpha=10.0, lie="scale:0.25")
    assert [line["absent"] for line in run.history] == [1]
