"""Losses, metrics and kinds: what fits which targets, and sums that can be pooled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fewer.errors import SettingError
from fewer.models.objective import build_objective

LABELS = torch.tensor([0, 2, 1])
SETS = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
NUMBERS = torch.tensor([[0.5], [1.0], [0.0]])


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


@pytest.mark.parametrize(
    ("loss", "targets", "kind", "metric"),
    [
        (None, LABELS, "classification", "accuracy"),
        ("cross-entropy", LABELS, "classification", "accuracy"),
        ("bce", SETS, "multi-label", "f1"),
        ("mse", NUMBERS, "regression", "mae"),
        ("huber", SETS, "regression", "mae"),
        (squares, LABELS, "classification", "accuracy"),
        (squares, SETS, "multi-label", "f1"),
        (squares, NUMBERS, "regression", "mae"),
        (squares, NUMBERS.round(), "regression", "mae"),  # one column of 0 and 1 is a number
    ],
)
def test_the_kind_follows_from_the_loss_or_the_targets(loss: object, targets: Tensor, kind: str, metric: str) -> None:
    objective = build_objective(loss, (), targets, "data")  # type: ignore[arg-type]
    assert (objective.kind, [metric.name for metric in objective.metrics]) == (kind, [metric])


def test_classes_that_are_tokens_are_next_tokens() -> None:
    assert build_objective(None, (), LABELS, "data", next_token=True).kind == "next-token"


def test_accuracy_is_the_first_metric_of_a_classification() -> None:
    objective = build_objective(None, [squares, "accuracy"], LABELS, "data")
    assert [metric.name for metric in objective.metrics] == ["accuracy", "squares"]


def test_a_loss_in_a_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "own_losses.py").write_text("from torch.nn.functional import l1_loss as distance\n")
    assert build_objective(f"{tmp_path}/own_losses.py:distance", (), NUMBERS, "data").loss is F.l1_loss


@pytest.mark.parametrize(
    ("loss", "metrics", "targets", "message"),
    [
        (None, (), NUMBERS, r"loss = cross-entropy is for classification, but data 'd' has numbers .*mse, mae, huber"),
        ("bce", (), NUMBERS, "loss = bce is for multi-label, but data 'd' has numbers"),
        ("mse", (), LABELS, "loss = mse is for regression, but data 'd' has class labels"),
        ("bce", (), LABELS, r"but data 'd' has class labels \(allowed: cross-entropy, or your own"),
        ("msee", (), NUMBERS, "unknown loss 'msee', did you mean 'mse'"),
        (3, (), NUMBERS, "loss must be a name or a function of outputs and targets, got int"),
        ("mse", ["accuracy"], NUMBERS, r"unknown metric of regression 'accuracy' .*mae, mse, r2, rmse"),
        ("bce", ["mae"], SETS, r"unknown metric of multi-label 'mae' .*exact-match, f1"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(loss: object, metrics: list[str], targets: Tensor, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        build_objective(loss, metrics, targets, "d")  # type: ignore[arg-type]


def test_own_metrics_need_names_that_nothing_else_has() -> None:
    def rmse(outputs: Tensor, targets: Tensor) -> Tensor:
        return squares(outputs, targets).sqrt()

    def seconds(outputs: Tensor, targets: Tensor) -> float:
        return 1.0

    for metric in (rmse, seconds):
        with pytest.raises(SettingError, match=f"your metric '{metric.__name__}' needs another name"):
            build_objective("mse", [metric], NUMBERS, "toy")
    with pytest.raises(SettingError, match="two metrics have the name 'squares'"):
        build_objective("mse", [squares, squares], NUMBERS, "toy")
    assert build_objective("mse", [torch.nn.L1Loss()], NUMBERS, "toy").metrics[0].name == "L1Loss"


@pytest.mark.parametrize(("higher_is_better", "worst"), [(True, -torch.inf), (False, torch.inf)])
def test_nan_is_the_worst_value_of_an_own_metric(higher_is_better: bool, worst: float) -> None:
    def undefined(outputs: Tensor, targets: Tensor) -> float:
        return float("nan")

    undefined.higher_is_better = higher_is_better  # type: ignore[attr-defined]
    metric = build_objective("mse", [undefined], NUMBERS, "toy").metrics[0]
    assert metric.sums(NUMBERS, NUMBERS).item() == worst
