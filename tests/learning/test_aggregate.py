"""Weighted means of models, and rules that bear lies, against values by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fewer.learning import aggregate, weighted_mean
from fewer.learning.aggregate import RULES, bound_updates, combine, reject_outliers
from fewer.learning.prototypes import Prototypes, merge_prototypes
from fewer.methods.condensed import concatenate_images
from fewer.models import SmallCNN, get_weights
from fewer.runtime import Aggregation


def test_weighted_mean_of_each_dtype() -> None:
    models = [
        {
            "w": torch.tensor([[1.0, 2.0]]),
            "n": torch.tensor(3),
            "m": torch.tensor([1, 1, -1]),
            "h": torch.ones(1).half(),
        },
        {
            "w": torch.tensor([[5.0, -2.0]]),
            "n": torch.tensor(4),
            "m": torch.tensor([2, 8, -6]),
            "h": torch.zeros(1).half(),
        },
    ]
    mean = weighted_mean(models, [1, 3])
    assert mean["w"].tolist() == [[4.0, -1.0]] and mean["w"].dtype == torch.float32
    assert mean["n"].item() == 4 and mean["n"].dtype == torch.int64  # 3.75
    assert mean["m"].tolist() == [2, 6, -5]  # 1.75, 6.25, -4.75
    assert mean["h"].tolist() == [0.25] and mean["h"].dtype == torch.float16
    assert list(mean) == ["w", "n", "m", "h"]
    assert models[0]["w"].tolist() == [[1.0, 2.0]] and models[1]["n"].item() == 4


def test_weighted_mean_is_summed_in_float64() -> None:
    models = [{"w": torch.tensor([value])} for value in (1e8, 1.0, -1e8)]
    assert abs(weighted_mean(models, [1, 1, 1])["w"].item() - 1 / 3) < 1e-7


def test_weighted_mean_of_one_model_is_that_model() -> None:
    model = get_weights(SmallCNN((1, 8, 8), 3, "batch"))
    mean = weighted_mean([model], [17])
    assert all(torch.equal(mean[name], tensor) for name, tensor in model.items())


@pytest.mark.parametrize(("count", "shares"), [(0, []), (1, [0]), (2, [1]), (1, [1, 1]), (2, [1, -1])])
def test_weighted_mean_needs_models_and_shares(count: int, shares: list[float]) -> None:
    with pytest.raises(ValueError, match=r"a mean needs|argument 2"):
        weighted_mean([{"w": torch.zeros(1)}] * count, shares)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


@pytest.mark.parametrize(
    ("rule", "values", "liars", "expected"),
    [
        ("median", (7, 1, 100, 2, 6), 1, 6),
        ("median", (7, 1, 100, 2), 1, 4.5),  # the mean of 2 and 7
        ("trimmed-mean", (7, 1, 100, 2, 6), 1, 5),  # of 2, 6 and 7
        ("trimmed-mean", (7, 1, 100, 2, 6), 9, 6),  # never trims all
        # Squared distances to the 2 nearest others: 26, 17, 17, 26 and many. The 2 best are 2 and 6.
        ("multi-krum", (1, 2, 6, 7, 100), 1, 4),
        # Krum chooses 3, 4, 1, 6 and 0 in this order. The 3 values nearest to their median are 3, 4 and 1.
        ("bulyan", (0, 1, 3, 4, 6, 7, 100), 1, 8 / 3),
        ("geometric-median", (7, 1, 100, 2, 6), 1, 6),
        ("norm-bound", (1, -2, 100), 1, 1 / 3),  # 1, -2 and 2
    ],
)
def test_a_rule_by_hand(rule: str, values: tuple[float, ...], liars: int, expected: float) -> None:
    assert RULES[rule](column(*values), liars).item() == pytest.approx(expected, abs=1e-6)


def test_norm_bound_keeps_directions() -> None:
    changes = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, -2.0]], dtype=torch.float64)  # of lengths 5, 1 and 2
    assert torch.allclose(RULES["norm-bound"](changes, 0), torch.tensor([0.4, 0.2], dtype=torch.float64))


def test_centered_clip_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregate, "CLIP_STEPS", 2)
    # From 0, the bound is 1: (0 + 1 + 1) / 3. From 2/3, it is 2/3: 2/3 + (-2/3 + 1/3 + 2/3) / 3.
    assert RULES["centered-clip"](column(0, 1, 10), 0).item() == pytest.approx(7 / 9)


def test_the_geometric_median_of_a_triangle_is_its_center() -> None:
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, math.sqrt(0.75)]], dtype=torch.float64)
    center = torch.tensor([0.5, math.sqrt(0.75) / 3], dtype=torch.float64)
    assert torch.allclose(RULES["geometric-median"](corners, 0), center, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_bears_two_liars_of_ten_in_a_model(rule: str) -> None:
    start = {"w": torch.full((2, 2), 5.0), "n": torch.tensor(4)}
    honest = [{"w": start["w"] + 1 + 0.01 * k, "n": torch.tensor(4)} for k in range(8)]
    liars = [{"w": start["w"] - 30, "n": torch.tensor(4)}] * 2
    combined = combine([*liars, *honest], [1] * 10, Aggregation(rule, 0.2), start)  # type: ignore[arg-type]
    assert combined["n"].item() == 4 and combined["w"].dtype == torch.float32
    assert (combined["w"] - 6.03).abs().max() < 0.5 < (combine([*liars, *honest], [1] * 10)["w"] - 6.03).abs().max()


def test_implausible_changes_and_sizes_are_bounded() -> None:
    start = {"w": torch.tensor([1.0, 1.0])}
    changes = ([3.0, 4.0], [0.0, 5.0], [0.0, 5.0], [0.0, 5.0], [0.0, -3e15])
    models = [{"w": start["w"] + torch.tensor(change)} for change in changes]
    claimed = [10, 20, 20, 20, 10**9]
    bounded, sizes = bound_updates(models, claimed, start)
    assert bounded[0] is models[0] and bounded[4]["w"].tolist() == [1.0, -4.0]  # as long as the others
    assert sizes == [10, 20, 20, 20, 20]
    assert bound_updates(models[1:], claimed[1:], start) == (models[1:], claimed[1:])  # four clients are not bounded
    assert combine(models, claimed, start=start)["w"][1] == pytest.approx((10 * 5 + 60 * 6 + 20 * -4) / 90, rel=1e-5)


def test_a_client_that_changes_something_is_plausible_if_most_change_nothing() -> None:
    start = {"w": torch.zeros(1)}
    models = [*[start] * 4, {"w": torch.ones(1)}]
    assert bound_updates(models, [1] * 5, start)[0] == models


def test_implausible_prototypes_are_bounded() -> None:
    def prototypes(value: float, count: int) -> Prototypes:
        return Prototypes(torch.tensor([0]), torch.tensor([[value]]), torch.tensor([count]))

    merged = merge_prototypes([*[prototypes(1, 2)] * 4, prototypes(1e9, 10**9)])
    assert merged.counts.tolist() == [208] and merged.means.item() == pytest.approx(1)


@pytest.mark.parametrize("rule", RULES)
def test_the_outliers_of_each_class_are_rejected(rule: Any) -> None:
    """Of five rows of class 0, the ones at 9 and −8 are far from the others; of two rows of class 1, none is."""
    rows = torch.tensor([[1.0], [9.0], [1.1], [-8.0], [0.9], [5.0], [-5.0]])
    labels = torch.tensor([0, 0, 0, 0, 0, 1, 1])
    kept = reject_outliers(rows, labels, Aggregation(rule, 0.4))
    assert kept.tolist() == [True, False, True, False, True, True, True]
    assert reject_outliers(rows, labels, Aggregation("mean", 0.4)).all()
    assert int(reject_outliers(rows[:5], labels[:5], Aggregation(rule, 0.9)).sum()) == 3  # liars are a minority


def test_images_of_a_class_are_rejected_by_client() -> None:
    images = [{"0": torch.full((2, 1, 1, 1), value), "1": torch.empty(0, 1, 1, 1)} for value in (1.0, 1.1, 0.9, 7.0)]
    kept, labels = concatenate_images(images, Aggregation("median", 0.25))
    assert kept.flatten().tolist() == pytest.approx([1, 1, 1.1, 1.1, 0.9, 0.9]) and labels.tolist() == [0] * 6
    assert len(concatenate_images(images)[0]) == 8
