"""Scores are checked where they are made and where a run records them."""

from typing import Any

import pytest
import torch
from torch import nn

import fewer
from fewer import FedAvg, Scores
from fewer.errors import SettingError
from fewer.learning import Evaluation
from fewer.learning.evaluate import add_evaluations, measure_outputs
from fewer.methods import Client
from fewer.methods.scores import pool_evaluations, score_clients
from fewer.models import Task, Weights
from fewer.runtime import on_client
from fewer.runtime.handlers import Unsent


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"accuracy": 1.0}, "foo"), "unit = 'foo' (allowed: samples, clients, groups, tasks)"),
        (({"round": 7},), "metric 'round' needs another name"),
        (({"accuracy": torch.tensor(1.0)},), "metric 'accuracy' must be a number, got Tensor"),
    ],
)
def test_scores_that_cannot_be_recorded_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(SettingError) as error:
        Scores(*arguments)
    assert message in str(error.value)


def test_values_may_be_a_tensor() -> None:
    scores = Scores({"accuracy": 0.5}, "groups", torch.tensor([0.25, 0.75]))  # type: ignore[arg-type]
    assert scores.as_dict() == {"accuracy": 0.5, "unit": "groups", "groups": [0.25, 0.75]}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"accuracy": 1.0}, "evaluate must return fewer.Scores, got dict"),
        (None, "evaluate must return fewer.Scores, got NoneType"),
        (Scores({"loss": 1.0}), "lack the primary metric 'accuracy'"),
        (Scores({}), "lack the primary metric 'accuracy'"),
    ],
)
def test_a_run_needs_scores_with_the_primary_metric(returned: Any, message: str) -> None:
    class Own(FedAvg):
        def evaluate(self, *_: Any) -> Any:
            return returned

    with pytest.raises(SettingError, match=message):
        fewer.run(Own(rounds=1, local_steps=1), "digits")


def test_a_misspelled_exact_field_is_an_error() -> None:
    class Own(FedAvg):
        @on_client(exact=("modle",))
        def local_train(self, client: Client, model: Weights) -> dict[str, Any]:
            return super().local_train(client, model)

    with pytest.raises(ValueError, match="exact = 'modle' of 'local_train' is neither sent nor returned"):
        fewer.run(Own(rounds=1, local_steps=1), "digits")


def evaluation(predicted: list[int], labels: list[int]) -> Evaluation:
    task = Task((2,), 2, nn.Identity)
    return measure_outputs(nn.functional.one_hot(torch.tensor(predicted), 2).float(), torch.tensor(labels), task)


def test_the_majority_baseline_is_that_of_each_evaluation() -> None:
    clients = [evaluation([0, 0, 0, 0], [0, 0, 0, 1]), evaluation([1, 1], [1, 1])]
    by_client, pooled = pool_evaluations(clients), pool_evaluations([add_evaluations(clients)])
    assert by_client.metrics["accuracy"] == pooled.metrics["accuracy"] == 5 / 6
    assert by_client.metrics["majority_baseline"] == 5 / 6  # three of four, and two of two
    assert pooled.metrics["majority_baseline"] == 3 / 6  # classes are equally frequent
    assert by_client.metrics["macro_f1"] == pytest.approx((6 / 7 + 4 / 5) / 2)
    scores = score_clients(by_client, dict(enumerate(clients)))
    assert scores.clients == {0: 0.75, 1: 1.0}
    first = scores.client_metrics[0]
    assert (first["samples"], first["accuracy"], first["majority_baseline"]) == (4, 0.75, 0.75)


def test_figures_by_class_are_recorded_once() -> None:
    scores = pool_evaluations([evaluation([0, 1], [0, 0])])
    assert scores.as_dict()["classes"]["confusion"] == [[1, 1], [0, 0]]
    assert "classes" not in scores.as_dict(is_last=False) and "ece" in scores.as_dict(is_last=False)


def test_answers_without_class_counts_have_no_figures_by_class() -> None:
    remote = evaluation([0, 1], [0, 0])._replace(class_counts=Unsent())
    scores = score_clients(pool_evaluations([remote]), {0: remote})
    assert scores.metrics.keys() == {"accuracy", "loss"} and not scores.classes
    assert scores.client_metrics[0].keys() == {"samples", "accuracy", "loss"}


@pytest.mark.parametrize("name", ["macro_f1", "ece", "majority_baseline"])
def test_an_own_metric_cannot_take_the_name_of_a_class_metric(name: str) -> None:
    def metric(outputs: Any, targets: Any) -> float:
        return 0.0

    metric.__name__ = name
    with pytest.raises(SettingError, match=f"your metric '{name}' needs another name"):
        fewer.run(FedAvg(rounds=1), "digits", metrics=[metric])
