"""A verdict names a winner only if the runs show it."""

from pathlib import Path
from typing import Any

import pytest

from fewer.methods.fedmk import FedMK
from fewer.report.groups import RunGroup
from fewer.report.page import explain_results, tabulate_results
from fewer.report.verdict import is_paired, verdict, winner
from fewer.statistics import interval
from tests.report.harness import fake_run, round_metrics


def group(label: str, *ends: float, mb: float = 1.0, seconds: float = 10.0, rounds: int = 2, **facts: Any) -> RunGroup:
    """Runs with these final accuracies, one per seed, and half of them in round 1."""
    settings = {"method": label.split()[0], "data": "digits", "data_seed": None, **facts}
    runs = []
    for seed, end in enumerate(ends):
        lines = [round_metrics(1, end / 2, int(mb * 250_000)), round_metrics(2, end, int(mb * 500_000))]
        history = [{**metrics, "seconds": seconds * metrics["round"] / 2} for metrics in lines]
        metadata = {"settings": {**settings, "seed": seed}, "method": {"rounds": rounds}, "objects": []}
        runs.append(fake_run(Path(f"{label}-{seed}"), metadata, history))
    return RunGroup(label, runs)


def test_a_winner_must_be_significantly_ahead() -> None:
    fedmk, fedavg = group("fedmk", 0.80, 0.81, 0.79, seconds=60), group("fedavg", 0.70, 0.71, 0.69, mb=4)
    assert winner([fedavg, fedmk]) is fedmk
    won, cost, early, target, method_line = verdict([fedavg, fedmk])
    assert won == (
        "fedmk wins: 80.0 ± 2.5 % accuracy, ahead of fedavg with 70.0 ± 2.5 % (3 seeds). "
        "Paired by seed, it leads fedavg by 10.0 ± 0.0 points."
    )
    assert cost == (
        "Cost: fedmk sent 0.5 MB up and 0.5 MB down in 2 rounds and took 60 s; "
        "fedavg sent 2 MB up and 2 MB down in 2 rounds and took 10 s."
    )
    assert early == "Early lead: after round 1, fedmk had 40.0 ± 1.2 %, ahead of fedavg with 35.0 ± 1.2 %."
    assert target == (
        "fedmk reached the best accuracy of fedavg, 70.0 %, in round 2 after 1 MB; fedavg did in round 2 after 4 MB."
    )
    assert method_line == f"About fedmk: {(FedMK.__doc__ or '').splitlines()[0]}"
    near, far = group("fedprox", 0.76, 0.80, 0.78), group("local", 0.3, 0.31, 0.32)
    assert winner([fedmk, near, far]) is None
    assert verdict([near, far, fedmk])[0] == (
        "No clear winner: fedmk has the highest mean, 80.0 ± 2.5 %, but paired by seed its lead over "
        "fedprox 78.0 ± 5.0 % is not significant (95 %, 3 seeds). It is significantly ahead of local."
    )
    assert verdict([fedavg, fedmk, far])[0].endswith(
        "it leads fedavg by 10.0 ± 0.0 points and all others significantly (2 comparisons, each at 95 %, without "
        "correction)."
    )


def test_runs_that_share_seeds_are_compared_seed_by_seed() -> None:
    # means 0.7 and 0.6 with ± 0.248: these overlap. Differences 0.11, 0.10, 0.09: 0.1 ± 0.0248
    fedmk, fedavg = group("fedmk", 0.61, 0.70, 0.79), group("fedavg", 0.50, 0.60, 0.70)
    assert is_paired([fedmk, fedavg]) and winner([fedavg, fedmk]) is fedmk
    assert "Paired by seed, it leads fedavg by 10.0 ± 2.5 points." in verdict([fedmk, fedavg])[0]
    other_seeds = RunGroup("fedavg", [*fedavg.runs[:2], group("fedavg", 0, 0, 0, 0.70).runs[3]])
    assert not is_paired([fedmk, other_seeds]) and winner([fedmk, other_seeds]) is None
    assert "but its interval overlaps fedavg 60.0 ± 24.8 % (95 %, 3 seeds)" in verdict([fedmk, other_seeds])[0]
    other_data = RunGroup("fedavg", group("fedavg", 0.50, 0.60, 0.70, data_seed=5).runs)
    assert not is_paired([fedmk, other_data]) and not is_paired([group("fedmk", 0.9), group("fedavg", 0.1)])
    far = RunGroup("fedavg", [*group("fedavg", 0.1, 0.11).runs, group("fedavg", 0, 0, 0, 0.12).runs[3]])
    assert verdict([fedmk, far])[0].endswith("(3 seeds). Its 95 % interval overlaps no other.")
    # the lead stays significant in round 2, but not in round 1
    for run, start in zip(fedmk.runs, (0.31, 0.20, 0.45), strict=True):
        run.history[0]["accuracy"] = start
    assert winner([fedmk, fedavg]) is fedmk and not any(
        text.startswith("Early lead") for text in verdict([fedmk, fedavg])
    )


def test_the_verdict_mentions_the_worst_clients() -> None:
    fedmk, fedavg = group("fedmk", 0.8, 0.8), group("fedavg", 0.7, 0.7)
    for method_runs, low in ((fedmk, 0.5), (fedavg, 0.2)):
        for run in method_runs.runs:
            run.history[-1]["clients"] = {"0": 0.9, "1": low}
    assert "Its worst tenth of clients reaches 50.0 %, compared with 20.0 % for fedavg." in verdict([fedmk, fedavg])


def test_the_best_is_the_first_row() -> None:
    worse, better, unevaluated = group("local", 0.3, 0.31), group("fedavg", 0.7, 0.71), group("fedmk", 0.0)
    unevaluated.runs[0].history[0].pop("accuracy"), unevaluated.runs[0].history[1].pop("accuracy")
    rows = tabulate_results([unevaluated, worse, better]).rows
    assert [row[0] for row in rows] == ["fedavg", "local", "fedmk"]


def test_no_winner_with_one_seed_or_different_tasks_or_unfinished_runs() -> None:
    good, bad = group("fedmk", 0.9), group("fedavg", 0.1)
    assert winner([good, bad]) is None and "With a single seed this may be chance" in verdict([good, bad])[0]
    other = group("fedavg alpha", 0.1, 0.12, 0.11, data="mnist")
    sure = group("fedmk", 0.9, 0.91, 0.92)
    assert winner([sure, other]) is None and verdict([sure, other])[0].startswith("These runs have different tasks")
    early = group("fedavg", 0.1, 0.12, 0.11, rounds=5)
    assert winner([sure, early]) is None
    assert verdict([sure, early])[0].startswith("Only fedmk has finished: fedmk reaches 91.0 ± ")
    assert verdict([early])[0].startswith("No run has finished yet")
    fair = group("fedmeta", 0.5, 0.5, 0.51)
    for run in fair.runs:
        run.history[-1]["fairness"] = {"mean": 0.5}
    assert winner([sure, fair]) is None and "are evaluated differently" in verdict([sure, fair])[0]


def test_an_evaluation_on_groups_has_an_interval_over_groups() -> None:
    frl = group("frl", 0.5)
    assert frl.value == (0.5, None) and frl.averaged_over == "1 seed"
    frl.runs[0].history[-1]["groups"] = [0.4, 0.5, 0.6]
    assert frl.value == pytest.approx((0.5, interval([0.4, 0.5, 0.6]).half)) and frl.averaged_over == "3 groups"
    f2l = group("f2l", 0.5)
    for figure, value in (("groups", [0.4, 0.5, 0.6]), ("tasks", 3)):
        f2l.runs[0].history[-1][figure] = value
    assert f2l.averaged_over == "3 tasks" and winner([frl, f2l]) is None
    for evaluated, text in (
        (frl, "groups that start from the prepared model; mean"),
        (f2l, "queries of novel classes; mean"),
    ):
        explanation = explain_results([evaluated])
        assert text in explanation and f"95 % confidence over {evaluated.units}" in explanation
