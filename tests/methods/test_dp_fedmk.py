"""DP-FedMK: the statistics by hand, their sensitivity by brute force, and one release whatever follows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fewer
from fewer.data import Samples
from fewer.errors import SettingError
from fewer.learning.protect import COUNT_WEIGHT, SENSITIVITY, clipped_class_sums
from fewer.methods.dp_fedmk import DPFedMK, matching_loss, moments
from fewer.runs.experiment import build_experiment, parse_settings

SMALL: dict[str, Any] = {"per_class": 2, "nets": 3, "matching_steps": 5, "server_steps": 10}
NOISE = SENSITIVITY / COUNT_WEIGHT
"""The standard deviation of the noise of a count with z = 1."""
SETTINGS: dict[str, Any] = {"data": "digits", "clients": 4, "seed": 1, "method_options": SMALL}


def test_moments_by_hand() -> None:
    """(3, 4) has first = (0.6, 0.8) and second ∝ (0.36, 0.64)."""
    length = math.hypot(0.36, 0.64)
    expected = torch.tensor([0.6, 0.8, 0.36 / length, 0.64 / length]) / math.sqrt(2)
    assert torch.allclose(moments(torch.tensor([[3.0, 4.0]]))[0], expected)


def test_the_loss_compares_class_means() -> None:
    """Means (2, 3) and (6, 7) against (1, 3) and (6, 9): 1 + 4."""
    images = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])
    loss = matching_loss(lambda x: x, images, torch.tensor([[1.0, 3.0], [6.0, 9.0]]))
    assert float(loss) == pytest.approx(5.0)


@pytest.mark.parametrize("width", [1024, 8])
def test_blanking_out_one_record_changes_the_statistics_by_the_sensitivity(width: int) -> None:
    experiment = build_experiment(parse_settings({**SETTINGS, "method": "dp-fedmk"}))
    encoders = DPFedMK(**{**SMALL, "width": width}).build_encoders(experiment.task, 7)
    x, y = experiment.data.client(0).train.slice(0, 6)
    x = torch.cat([x, 1e4 * x[:1], 0 * x[:1]])
    y = torch.cat([y, y[:2]])

    def statistics(kept: torch.Tensor) -> torch.Tensor:
        encode = lambda x: torch.cat([m(x) for m in encoders], dim=1) / math.sqrt(3)  # noqa: E731
        return clipped_class_sums(Samples(x[kept], y[kept]), encode, 10, 1.0)

    everything = statistics(torch.arange(8))
    changes = [everything - statistics(torch.arange(8) != index) for index in range(8)]
    assert max(float(change.norm()) for change in changes) == pytest.approx(SENSITIVITY, rel=1e-4)


def test_exact_sums_have_all_samples() -> None:
    result: Any = fewer.run("dp-fedmk", **SETTINGS)
    labels = torch.cat([result.data.client(client).train.labels for client in range(4)])
    assert result.state.counts.tolist() == torch.bincount(labels, minlength=10).tolist()
    assert "epsilon" not in result.history[-1]


def test_images_steps_and_rounds_cost_nothing() -> None:
    """One Gaussian release with z = 1 costs 4.38 at δ = 1e-5."""
    few = fewer.run("dp-fedmk", **SETTINGS, dp="record:noise=1,public_noise")
    settings = {**SETTINGS, "method_options": {**SMALL, "per_class": 4, "matching_steps": 10}, "rounds": 3, "cohort": 2}
    more: Any = fewer.run("dp-fedmk", **settings, dp="record:noise=1,public_noise")
    assert few.history[-1]["epsilon"] == more.history[-1]["epsilon"] == pytest.approx(4.38, abs=0.01)
    assert more.state.answered == [0, 1, 2, 3]
    assert more.state.deviation == pytest.approx(2 * NOISE)  # each of four clients adds its noise


def test_shared_noise_is_that_of_one_client() -> None:
    result: Any = fewer.run("dp-fedmk", **SETTINGS, dp="record:noise=1,distributed,public_noise")
    assert result.state.deviation == pytest.approx(NOISE)
    absent: Any = fewer.run("dp-fedmk", **SETTINGS, dp="record:noise=1,distributed,public_noise", drop=0.5)
    assert len(absent.state.answered) < 4 and absent.state.deviation == pytest.approx(NOISE)


def test_user_level_is_refused() -> None:
    with pytest.raises(SettingError, match="dp = user does not cover this method"):
        fewer.run("dp-fedmk", **SETTINGS, dp="user:noise=1")


def test_it_learns_from_noisy_sums() -> None:
    options = {"nets": 4, "per_class": 5, "matching_steps": 100, "server_steps": 200}
    result = fewer.run(
        "dp-fedmk", **{**SETTINGS, "method_options": options}, dp="record:epsilon=10,distributed,public_noise"
    )
    assert result.accuracy > 0.5
