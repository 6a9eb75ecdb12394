"""Scores are checked where they are made and where a run records them."""

from typing import Any

import pytest
import torch

import fewer
from fewer import FedAvg, Scores
from fewer.errors import SettingError
from fewer.methods import Client
from fewer.models import Weights
from fewer.runtime import on_client


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
