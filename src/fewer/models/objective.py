"""Objectives: what a net predicts, the loss that it minimizes, and the metrics that it is evaluated by.

Losses and metrics compare a net's outputs with targets. Targets of a classification are labels (n). Those of a
multi-label task (0 or 1) and of a regression are floats (n × outputs), like the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fewer.errors import SettingError, unknown_name
from fewer.plugins import load_from_file

Kind = Literal["classification", "next-token", "multi-label", "regression"]
"""What a net predicts: a class, the next token of a text, a set of labels, or numbers."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""Maps the outputs of a batch and its targets to the mean loss."""

LOSSES: Mapping[str, tuple[Loss, Kind]] = {
    "cross-entropy": (F.cross_entropy, "classification"),
    "bce": (F.binary_cross_entropy_with_logits, "multi-label"),
    "mse": (F.mse_loss, "regression"),
    "mae": (F.l1_loss, "regression"),
    "huber": (F.huber_loss, "regression"),
}
"""The built-in losses, each with what it predicts."""


@dataclass(frozen=True)
class Metric:
    """A metric that is computed from sums over samples, so that batches and clients can be pooled."""

    name: str
    rows: int
    """Number of sums for each output."""
    sums: Callable[[Tensor, Tensor], Tensor]
    """Sums over the samples of a batch, given outputs and targets (rows × outputs, or rows × 1)."""
    value: Callable[[Tensor, int], Tensor]
    """The metric, given all sums (rows × outputs) and the number of samples."""
    low: float = -math.inf
    """The smallest possible value."""
    high: float = math.inf
    """The largest possible value."""
    higher_is_better: bool = True

    @property
    def percent(self) -> bool:
        """True if values are fractions, which people read in percent."""
        return (self.low, self.high) == (0, 1)


def count_top_k(scores: Tensor, y: Tensor, k: int = 1) -> int:
    """Counts the labels among the `k` highest scores (samples × classes). Among equals, the first class ranks first."""
    ranked = scores.argmax(1, keepdim=True) if k == 1 else scores.sort(dim=1, descending=True, stable=True).indices
    return int((ranked[:, :k] == y[:, None]).sum())


def _confusion(logits: Tensor, targets: Tensor) -> Tensor:
    """True positives, false positives and false negatives of each label; a label is predicted if its logit is > 0."""
    predicted, true = logits > 0, targets > 0.5
    return torch.stack([(a & b).sum(0) for a, b in ((predicted, true), (predicted, ~true), (~predicted, true))])


def _f1(sums: Tensor, total: int) -> Tensor:
    hits, false_positives, misses = sums.sum(1).unbind()
    return (2 * hits).div((2 * hits + false_positives + misses).clamp(min=1))


def _moments(outputs: Tensor, targets: Tensor) -> Tensor:
    """Σ (y − ŷ)², Σ y and Σ y² of each output."""
    y = targets.double()
    return torch.stack([(y - outputs).square().sum(0), y.sum(0), y.square().sum(0)])


def _r2(sums: Tensor, total: int) -> Tensor:
    """1 − Σ (y − ŷ)² / Σ (y − mean)², averaged over outputs; 0 for an output whose targets are all equal."""
    residual, y, y_squared = sums
    variance_sum = y_squared - y.square() / total
    constant = variance_sum <= 1e-12 * y_squared
    return torch.where(constant, (residual == 0).double(), 1 - residual / variance_sum.where(~constant, 1.0)).mean()


def _mean(sums: Tensor, total: int) -> Tensor:
    return sums.mean() / total


def _first(sums: Tensor, total: int) -> Tensor:
    return sums[0, 0] / total


def _absolute_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.double() - targets).abs().sum(0, keepdim=True)


def _squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.double() - targets).square().sum(0, keepdim=True)


def _root_mean(sums: Tensor, total: int) -> Tensor:
    return (sums / total).sqrt().mean()


def _correct(scores: Tensor, y: Tensor) -> Tensor:
    return torch.tensor([[count_top_k(scores, y)]])


def _exact_matches(logits: Tensor, targets: Tensor) -> Tensor:
    return ((logits > 0) == (targets > 0.5)).all(1).sum().view(1, 1)


_METRICS: Mapping[Kind, Sequence[Metric]] = {
    "classification": (Metric("accuracy", 1, _correct, _first, 0, 1),),
    "multi-label": (Metric("f1", 3, _confusion, _f1, 0, 1), Metric("exact-match", 1, _exact_matches, _first, 0, 1)),
    "regression": (
        Metric("mae", 1, _absolute_errors, _mean, 0, higher_is_better=False),
        Metric("mse", 1, _squared_errors, _mean, 0, higher_is_better=False),
        Metric("rmse", 1, _squared_errors, _root_mean, 0, higher_is_better=False),
        Metric("r2", 3, _moments, _r2, high=1),
    ),
}
"""The built-in metrics by what is predicted. The first is the default."""
METRICS = {metric.name: metric for metrics in _METRICS.values() for metric in metrics}
ACCURACY = METRICS["accuracy"]
CLASS_METRICS = ("macro_f1", "ece", "majority_baseline")
"""Metrics of every task with classes, in addition to the accuracy."""
RUN_RECORDS = {
    *("round", "absent", "unmeasured", "unit", "groups", "clients", "client_metrics", "classes"),
    *("up", "down", "seconds"),
}
"""Names in metrics.jsonl that the run itself sets."""


def find_metric(name: str) -> Metric:
    """The built-in metric of this name. Any other name is a user's metric: its value is the mean over samples."""
    return METRICS.get(name) or Metric(name, 1, _absolute_errors, _first)


class Objective(NamedTuple):
    """What is predicted, the loss, and the metrics. The first metric is the primary one, which ranks runs."""

    kind: Kind
    loss: Loss
    metrics: tuple[Metric, ...]


def predicted_kind(loss: Loss | str | None) -> Kind | None:
    """What a built-in loss predicts; None for a user's loss, which works for any targets."""
    name = "cross-entropy" if loss is None else loss
    return LOSSES[name][1] if isinstance(name, str) and name in LOSSES else None


def build_objective(
    loss: Loss | str | None, metrics: Sequence[Any], targets: Tensor, name: str, next_token: bool = False
) -> Objective:
    """The objective for these targets of data `name`. Losses and metrics are names, FILE.py:name, or functions.

    `next_token` is True if the inputs are text, and the classes are the tokens of its vocabulary.
    """
    kind = predicted_kind(loss)
    loss = "cross-entropy" if loss is None else loss
    fitting = _kind_of(targets)
    if kind is None:
        kind = fitting
    elif kind != fitting and not (kind == "regression" and fitting == "multi-label"):
        allowed = [name for name, (_, predicted) in LOSSES.items() if predicted == fitting]
        raise SettingError(
            f"loss = {loss} is for {kind}, but data '{name}' has {_DESCRIPTIONS[fitting]} "
            f"(allowed: {', '.join(allowed)}, or your own function)"
        )
    if isinstance(loss, str):
        if ":" not in loss and loss not in LOSSES:
            raise unknown_name("loss", loss, [*LOSSES, "FILE.py:name"])
        loss = load_from_file(loss) if ":" in loss else LOSSES[loss][0]
    if not callable(loss):
        raise SettingError(f"loss must be a name or a function of outputs and targets, got {type(loss).__name__}")
    chosen = [_build_metric(metric, kind) for metric in metrics] or [_METRICS[kind][0]]
    names = [metric.name for metric in chosen]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise SettingError(f"two metrics have the name '{repeated}'")
    if kind == "classification":
        chosen = [ACCURACY, *(metric for metric in chosen if metric is not ACCURACY)]
        kind = "next-token" if next_token else kind
    return Objective(kind, loss, tuple(chosen))


_DESCRIPTIONS = {
    "classification": "class labels",
    "multi-label": "sets of labels (a matrix of 0 and 1)",
    "regression": "numbers as targets",
}


def _kind_of(targets: Tensor) -> Kind:
    """What targets of this type, shape and content are for."""
    if not targets.is_floating_point():
        return "classification"
    is_binary = targets.shape[1] > 1 and bool(((targets == 0) | (targets == 1)).all())
    return "multi-label" if is_binary else "regression"


def _build_metric(metric: Any, kind: Kind) -> Metric:
    if isinstance(metric, str) and ":" in metric:
        metric = load_from_file(metric)
    if callable(metric):
        name = getattr(metric, "__name__", type(metric).__name__)
        if name in {*METRICS, *RUN_RECORDS, *CLASS_METRICS, "loss"}:
            raise SettingError(f"your metric '{name}' needs another name: metrics of a round already have this one")
        better = bool(getattr(metric, "higher_is_better", True))
        worst = -math.inf if better else math.inf
        sums = partial(_sum_over_samples, metric, worst)
        return Metric(name, 1, sums, _first, higher_is_better=better)
    allowed = [built_in.name for built_in in _METRICS[kind]]
    if metric not in allowed:
        raise unknown_name(f"metric of {kind}", str(metric), [*allowed, "FILE.py:name"])
    return METRICS[metric]


def _sum_over_samples(
    metric: Callable[[Tensor, Tensor], Any], worst: float, outputs: Tensor, targets: Tensor
) -> Tensor:
    """The sum of a user's metric, which returns its mean or one value per sample. NaN counts as `worst`."""
    values: Tensor = torch.as_tensor(metric(outputs, targets), dtype=torch.float64)
    values = values.where(~values.isnan(), worst)
    return (values.sum() if values.ndim else values * len(targets)).view(1, 1)
