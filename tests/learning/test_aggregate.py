"""Weighted means of models."""

from __future__ import annotations

import pytest
import torch

from fewer.learning import weighted_mean
from fewer.models import SmallCNN, get_weights


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
