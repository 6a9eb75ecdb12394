"""Evaluation in batches: sums that can be pooled, and the metrics that follow from them."""

from __future__ import annotations

from typing import Any

import pytest
import sklearn.metrics
import torch
from torch import Tensor, nn

from fewer.learning import evaluate_net
from fewer.learning.evaluate import add_evaluations, count_correct, measure_outputs
from fewer.models import Task
from fewer.models.objective import build_objective
from tests.methods.linear_harness import TEST, WEIGHT, linear


def test_evaluation_adds_up_over_batches() -> None:
    net = linear().train()
    x, y = torch.from_numpy(TEST[0]), torch.from_numpy(TEST[1])
    at_once, in_parts = evaluate_net(net, [(x, y)]), evaluate_net(net, [(x[:4], y[:4]), (x[4:], y[4:])])
    assert at_once.total == in_parts.total == 11 and at_once.correct == in_parts.correct
    assert at_once.correct == int(((TEST[0] @ WEIGHT.T).argmax(axis=1) == TEST[1]).sum())
    assert abs(at_once.loss - in_parts.loss) < 1e-5 and not net.training


def regression_task(*metrics: object, outputs: int = 2) -> Task:
    objective = build_objective("mse", metrics, torch.full((1, outputs), 0.5), "data")
    return Task((3,), outputs, nn.Identity, torch.device("cpu"), None, *objective)


def random_pair(seed: int, count: int = 60, outputs: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randn(count, outputs, generator=generator)
    return targets + 0.5 * torch.randn(count, outputs, generator=generator) + 3, targets + 3


def pool_parts(outputs: Tensor, targets: Tensor, task: Task) -> dict[str, float]:
    """Evaluates three parts of different sizes and adds them up."""
    parts = [measure_outputs(outputs[a:b], targets[a:b], task) for a, b in ((0, 1), (1, 20), (20, len(targets)))]
    return add_evaluations(parts).values()


def test_pooled_regression_metrics_are_those_of_scikit_learn() -> None:
    outputs, targets = random_pair(0)
    values = pool_parts(outputs, targets, regression_task("r2", "mae", "mse", "rmse"))
    y, predicted = targets.numpy(), outputs.numpy()
    assert values["r2"] == pytest.approx(sklearn.metrics.r2_score(y, predicted), rel=1e-6)
    assert values["mae"] == pytest.approx(sklearn.metrics.mean_absolute_error(y, predicted), rel=1e-6)
    assert values["mse"] == pytest.approx(sklearn.metrics.mean_squared_error(y, predicted), rel=1e-6)
    assert values["rmse"] == pytest.approx(sklearn.metrics.root_mean_squared_error(y, predicted), rel=1e-6)
    assert values["loss"] == pytest.approx(values["mse"], rel=1e-5)


def test_pooled_multi_label_metrics_are_those_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, targets = torch.randn(80, 4, generator=generator), (torch.rand(80, 4, generator=generator) < 0.3).float()
    objective = build_objective("bce", ("f1", "exact-match"), targets, "data")
    task = Task((3,), 4, nn.Identity, torch.device("cpu"), None, *objective)
    values = pool_parts(logits, targets, task)
    assert values["f1"] == pytest.approx(sklearn.metrics.f1_score(targets, logits > 0, average="micro"))
    assert values["exact-match"] == pytest.approx(sklearn.metrics.accuracy_score(targets, logits > 0))


def test_r2_of_constant_targets_is_0_unless_the_prediction_is_exact() -> None:
    task, targets = regression_task("r2", outputs=1), torch.full((5, 1), 0.1)
    assert pool_parts(targets.clone(), targets, task)["r2"] == 1
    assert pool_parts(targets + 1, targets, task)["r2"] == 0


def test_an_own_metric_is_a_mean_over_samples() -> None:
    def largest_error(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs().amax(1)

    def mean_largest_error(outputs: Tensor, targets: Tensor) -> float:
        return float(largest_error(outputs, targets).mean())

    outputs, targets = random_pair(2)
    values = pool_parts(outputs, targets, regression_task("mae", largest_error, mean_largest_error))
    expected = float((outputs - targets).abs().amax(1).double().mean())
    assert values["largest_error"] == pytest.approx(expected) == values["mean_largest_error"]


def test_outputs_that_are_not_finite_are_very_bad_values() -> None:
    outputs, targets = random_pair(3)
    outputs[7] = torch.nan
    evaluation = measure_outputs(outputs, targets, regression_task("mae", "r2"))
    assert bool(evaluation.sums.isfinite().all()) and evaluation.loss == 1e30
    assert evaluation.values()["mae"] > 1e27 and evaluation.values()["r2"] < -1e20


def test_classification_counts_the_same_as_before() -> None:
    scores, y = torch.randn(50, 4, generator=torch.Generator().manual_seed(4)), torch.arange(50) % 4
    task = Task((3,), 4, nn.Identity)
    counts = count_correct(scores, y)
    assert measure_outputs(scores, y, task).values() == {"accuracy": counts.correct / 50, "loss": counts.loss / 50}
    top_two = measure_outputs(scores, y, task, top_k=2).values()["accuracy"]
    assert top_two == sklearn.metrics.top_k_accuracy_score(y, scores, k=2)


@pytest.mark.parametrize(
    ("change", "possible"),
    [
        ({}, True),
        ({"sums": torch.tensor([[-1.0, 0.0]], dtype=torch.float64)}, False),
        ({"sums": torch.zeros(2, 2, dtype=torch.float64)}, False),
        ({"sums": torch.zeros(1, 0, dtype=torch.float64)}, False),
        ({"metrics": "accuracy"}, False),
        ({"metrics": "mae,r2"}, False),
    ],
)
def test_impossible_evaluations_are_recognized(change: dict[str, Any], possible: bool) -> None:
    outputs, targets = random_pair(5)
    evaluation = measure_outputs(100 * outputs, targets, regression_task("mae"))
    assert evaluation._replace(**change).is_possible() is possible
