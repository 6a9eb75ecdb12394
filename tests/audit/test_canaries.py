"""Canaries in shadow runs, and LiRA's scores by arithmetic."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import fewer
from fewer.audit.canaries import assign_runs, confidence_logits, draw_canaries, insert_canaries, lira_scores
from fewer.audit.membership import membership
from fewer.data import ArrayData
from fewer.runtime import stream
from tests.helpers import DIGITS, call


def load_digits() -> ArrayData:
    data = fewer.data.load("digits", clients=4, alpha=10.0)
    assert isinstance(data, ArrayData)
    return data


def test_canaries_have_wrong_labels_and_belong_to_the_attacked_clients() -> None:
    data = load_digits()
    canaries = draw_canaries(data, [1, 3], stream("canaries"))
    owned = {*data.train.rows_of(1).tolist(), *data.train.rows_of(3).tolist()}
    assert {*canaries.rows.tolist()} <= owned and len(canaries.rows) == len(set(canaries.rows.tolist()))
    assert len(canaries.rows) == len(owned) // 10
    assert not (canaries.labels == data.source.y[canaries.rows]).any()
    assert canaries.labels.min() >= 0 and canaries.labels.max() < 10


def test_each_canary_is_in_half_of_the_runs() -> None:
    inside = assign_runs(50, 8, stream("runs"))
    assert inside.shape == (8, 50) and (inside.sum(0) == 4).all()
    assert len({tuple(column) for column in inside.T.tolist()}) > 20  # by chance, not all the same runs


def test_a_run_trains_on_its_canaries_only() -> None:
    data = load_digits()
    canaries = draw_canaries(data, [0], stream("canaries"))
    inside = torch.arange(len(canaries.rows)) % 2 == 0
    changed = insert_canaries(data, canaries, inside)
    kept = {*data.train.rows_of(0).tolist()} - {*canaries.rows[~inside].tolist()}
    assert {*changed.train.rows_of(0).tolist()} == kept and changed.size(1) == data.size(1)
    assert torch.equal(changed.source.y[canaries.rows], canaries.labels)
    other = torch.ones(len(data.source.y), dtype=torch.bool)
    other[canaries.rows] = False
    assert torch.equal(changed.source.y[other], data.source.y[other]) and changed.test is data.test


def test_confidence_by_arithmetic() -> None:
    # p = (0.5, 0.3, 0.2): log(0.3 / 0.7) for label 1, log(0.5 / 0.5) for label 0
    x = torch.log(torch.tensor([[0.5, 0.3, 0.2]] * 2))
    found = confidence_logits(nn.Identity(), x, torch.tensor([1, 0]))
    assert found.tolist() == pytest.approx([math.log(3 / 7), 0.0], abs=1e-6)


def test_likelihood_ratios_by_arithmetic() -> None:
    # One canary, four runs, inside in the first two. Target 0: in {5}, out {0, 2}.
    logits, inside = (
        torch.tensor([[4.0], [5.0], [0.0], [2.0]]).double(),
        torch.tensor([[True], [True], [False], [False]]),
    )
    # A second canary that is inside in the other two, so that both variances exist.
    logits = torch.cat([logits, torch.tensor([[1.0], [1.0], [7.0], [9.0]]).double()], 1)
    inside = torch.cat([inside, ~inside], 1)
    logits, inside = logits.repeat(1, 20), inside.repeat(1, 20)
    members, nonmembers = lira_scores(logits, inside)
    # Target 0. In: means 5 and 8, squares 0 + 2, degrees of freedom 0 + 1: σ² = 2. Out: means 1 and 1, σ² = 2, too.
    # The larger sides, {0, 2} and {7, 9}, give up a random run: their means for the target are 2 or 0, and 9 or 7.
    expected_members = {-((4 - 5) ** 2) / 4 + (4 - mean) ** 2 / 4 for mean in (2, 0)}
    expected_nonmembers = {-((1 - mean) ** 2) / 4 + (1 - 1) ** 2 / 4 for mean in (9, 7)}
    assert {round(ratio, 9) for ratio in members[:20].tolist()} == expected_members
    assert {round(ratio, 9) for ratio in nonmembers[:20].tolist()} == expected_nonmembers
    assert len(members) == len(nonmembers) == 80


@pytest.mark.parametrize("runs", [4, 8])
def test_models_that_know_nothing_are_not_found_out(runs: int) -> None:
    """Logits that do not depend on membership: members and nonmembers score alike."""
    generator = stream("nothing")
    logits = torch.randn(runs, 8000 // runs, generator=generator, dtype=torch.float64)
    attack = membership(*lira_scores(logits, assign_runs(8000 // runs, runs, generator)))
    assert attack.auc == pytest.approx(0.5, abs=0.03) and attack.epsilon_bound == 0


def test_runs_with_unusual_scores_do_not_look_like_members() -> None:
    """Two of eight runs score all canaries higher, members or not. The attack must not take that for memory."""
    generator = stream("offsets")
    logits = torch.randn(1, 500, generator=generator) + 0.3 * torch.randn(8, 500, generator=generator)
    logits[:2] += 5
    attack = membership(*lira_scores(logits.double(), assign_runs(500, 8, generator)))
    assert attack.auc == pytest.approx(0.5, abs=0.04) and attack.epsilon_bound == 0


def test_canaries_are_found_in_a_model_that_memorizes(tmp_path: Path) -> None:
    options = ["--model", "mlp", "-o", "local_steps=60", "-o", "lr=0.5"]
    call("run", "fedavg", *DIGITS, "--cohort", "6", "--rounds", "4", *options, "--no-report", "--out", tmp_path / "run")
    result = call("audit", tmp_path / "run", "--steps", "2", "--starts", "1", "--shadows", "4")
    attack = json.loads((tmp_path / "run/audit/audit.json").read_text())["metrics"]["membership"]["canaries"]
    assert attack["members"] == attack["nonmembers"] > 100
    assert attack["low"] > 0.6 and attack["epsilon_bound"] > 0
    assert "Membership by canaries: members score higher" in result.stdout
    assert (
        "shadows must be an even number >= 4, got 3" in call("audit", tmp_path / "run", "--shadows", "3", code=2).stderr
    )
