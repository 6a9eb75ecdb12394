"""Membership scores and their intervals by arithmetic."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fewer.audit.membership import clopper_pearson, estimate_proportion, loss_gaps, losses, membership
from fewer.runtime import stream

# --- membership -------------------------------------------------------------------------------------------------


def test_auc_by_arithmetic() -> None:
    # pairs: 3 > {1, 2, 3: half}, 2 > {1, 2: half}, 5 > all three: (2.5 + 1.5 + 3) / 9
    result = membership(torch.tensor([3.0, 2.0, 5.0]), torch.tensor([1.0, 2.0, 3.0]))
    assert result.auc == pytest.approx(7 / 9)
    # DeLong: shares of others beaten 2.5/3, 1.5/3, 1; shares of members that beat each other sample: the same three
    shares = [2.5 / 3, 0.5, 1.0]
    mean = sum(shares) / 3
    variance = sum((share - mean) ** 2 for share in shares) / 2
    half = 1.959964 * math.sqrt(2 * variance / 3)
    assert result.low == pytest.approx(7 / 9 - half, abs=1e-5) and result.high == 1.0
    assert (result.members, result.nonmembers) == (3, 3)


def test_auc_of_useless_and_perfect_scores() -> None:
    useless = membership(torch.zeros(5), torch.zeros(7))
    assert useless.auc == 0.5 and useless.true_positive_rate == 0
    perfect = membership(torch.arange(5) + 10.0, torch.arange(7.0))
    assert (perfect.auc, perfect.low, perfect.high, perfect.true_positive_rate) == (1, 1, 1, 1)
    assert membership(torch.arange(7.0), torch.arange(5) + 10.0).auc == 0
    assert membership(torch.tensor([math.nan, 1.0]), torch.tensor([2.0, 3.0])).auc == 0


def test_the_interval_has_about_its_nominal_coverage() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = 0.5 * (1 + math.erf(0.5))  # normal scores, shifted by 1: Φ(1/√2)
    results = [
        membership(torch.randn(60, generator=generator) + 1, torch.randn(40, generator=generator)) for _ in range(300)
    ]
    assert 0.9 < sum(result.low <= truth <= result.high for result in results) / 300 < 0.985


def test_hits_at_one_false_alarm_in_a_hundred() -> None:
    others = torch.arange(200.0)  # two may count as members: 199 and 198
    assert membership(torch.tensor([197.0, 197.5, 198.5, 300.0]), others).true_positive_rate == 0.75


class Steep(nn.Module):
    """Two logits: 0 and the sum of the image."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.flatten(1).sum(1)
        return torch.stack([torch.zeros_like(total), total], 1)


def test_scores_of_samples_by_arithmetic() -> None:
    x = torch.zeros(2, 1, 4, 4)
    x[1, 0, 1:3, 1:3] = 1.0
    y = torch.tensor([1, 1])
    expected = [math.log(2), math.log(1 + math.exp(-4))]
    assert losses(Steep(), x, y).tolist() == pytest.approx(expected, rel=1e-4)
    gap = loss_gaps(Steep(), torch.ones(1, 1, 4, 4), y[:1], torch.Generator().manual_seed(0))
    assert gap.item() == pytest.approx(0, abs=1e-6)  # shifts do not change a constant image


# --- the command ------------------------------------------------------------------------------------------------


def test_a_sample_whose_variants_have_a_higher_loss_scores_high() -> None:
    x = torch.rand(3, 1, 6, 6)

    class DistanceNet(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            distance = (inputs - x).abs().flatten(1).sum(1)
            return torch.stack([distance, torch.zeros_like(distance)], 1)

    assert (loss_gaps(DistanceNet(), x, torch.ones(3, dtype=torch.long), stream("v")) > 0.1).all()


def test_proportion_by_arithmetic() -> None:
    # Wilson: (0.75 + z²/80 ± z √(0.75 · 0.25 / 40 + z² / 6400)) / (1 + z²/40)
    estimate = estimate_proportion(30, 40)
    assert (estimate["fraction"], estimate["total"]) == (0.75, 40)
    assert (estimate["low"], estimate["high"]) == pytest.approx((0.5981, 0.8581), abs=1e-4)


# --- certain about a few ----------------------------------------------------------------------------------------


def test_hits_at_one_false_alarm_in_a_thousand() -> None:
    members = torch.tensor([997.5, 998.5, 999.5, 5.0])
    result = membership(members, torch.arange(1000.0))  # one may count as a member: 999
    assert result.strict_true_positive_rate == 0.5
    # Clopper–Pearson, 2 of 4: the low end p has P(X ≥ 2) = 6p²(1−p)² + 4p³(1−p) + p⁴ = 0.025
    low = result.strict_low
    assert low and 6 * low**2 * (1 - low) ** 2 + 4 * low**3 * (1 - low) + low**4 == pytest.approx(0.025)
    few = membership(members, torch.arange(999.0))
    assert few.strict_true_positive_rate is None and few.strict_low is None


def test_clopper_pearson_by_arithmetic() -> None:
    low, high = clopper_pearson(np.array([0, 1, 10]), 10)
    assert low[0] == 0 and high[2] == 1
    assert high[0] == pytest.approx(1 - 0.025**0.1) and low[2] == pytest.approx(0.025**0.1)
    assert 1 - (1 - low[1]) ** 10 == pytest.approx(0.025)  # P(X ≥ 1)
    assert (1 - high[1]) ** 10 + 10 * high[1] * (1 - high[1]) ** 9 == pytest.approx(0.025)  # P(X ≤ 1)


def test_the_bound_on_epsilon_by_arithmetic() -> None:
    # Half of 200 + 200 samples measure: 100 of 100 members and none of 100 nonmembers are above the threshold.
    edge = 0.025**0.01
    perfect = membership(torch.ones(200), torch.zeros(200), delta=0.01)
    assert perfect.epsilon_bound == pytest.approx(math.log((edge - 0.01) / (1 - edge)))
    assert membership(torch.zeros(50), torch.zeros(50)).epsilon_bound == 0
    # All members are above, and half of the nonmembers. Only nonmembers below prove something: TNR against FNR.
    half = torch.tensor([0.0, 0.0, 1.0, 1.0]).repeat(50)
    high = float(clopper_pearson(np.array(50), 100)[1])
    bound = membership(torch.ones(200), half, delta=0.0).epsilon_bound
    assert bound == pytest.approx(math.log((1 - high) / (1 - edge)))


def test_other_samples_than_those_that_chose_the_threshold_prove_the_bound() -> None:
    # The even samples are separated perfectly, the odd ones not at all.
    assert membership(torch.tensor([1.0, 0.0]).repeat(100), torch.zeros(200)).epsilon_bound == 0


def test_the_bound_on_epsilon_rarely_exceeds_the_truth() -> None:
    # Randomized response with ε = 1: a member shows 1 with probability e / (1 + e), a nonmember with 1 / (1 + e).
    generator = torch.Generator().manual_seed(0)
    yes = math.e / (1 + math.e)
    bounds = [
        membership(
            (torch.rand(1000, generator=generator) < yes).float(),
            (torch.rand(1000, generator=generator) > yes).float(),
            0,
        ).epsilon_bound
        for _ in range(200)
    ]
    assert sum(bound > 1 for bound in bounds) <= 10 and sum(bounds) / 200 > 0.7
