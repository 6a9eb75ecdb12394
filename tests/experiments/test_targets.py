"""The cost to reach a target accuracy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fewer.experiments import pages, recipes
from fewer.experiments.targets import TargetCost, best_value, cost_to_reach
from fewer.report.page import write_report


def test_cost_to_reach_a_target() -> None:
    def history(accuracies: Sequence[float | None]) -> list[dict[str, Any]]:
        lines = [
            {"round": round, "up": 1e6 * round, "down": 2e6 * round, "flops": 5e9 * round}
            for round in range(1, len(accuracies) + 1)
        ]
        return [
            line | ({} if accuracy is None else {"accuracy": accuracy})
            for line, accuracy in zip(lines, accuracies, strict=True)
        ]

    runs = [history([0.1, 0.5, None, 0.7]), history([0.3, 0.3, 0.9, 0.5])]
    assert best_value(runs) == pytest.approx(0.6)
    assert cost_to_reach(runs, 0.4) == TargetCost(0.4, 2, 6.0, 10.0)
    assert cost_to_reach(runs, 0.61) == TargetCost(0.61)


def test_a_recipe_reports_the_cost_of_a_target(tmp_path: Path) -> None:
    text = """
title = "t"
paper = "p"
seeds = 1
trials = 1
target = "FedAvg"
rivals = ["FedAvg"]
[settings]
data = "digits"
clients = 20
rounds = 2
method_options = { count_flops = true }
[[column]]
name = "50 %"
method_options = { support_fraction = 0.5 }
[[row]]
name = "FedAvg"
method = "fedavg-meta"
method_options = { adapt_steps = 0, local_steps = 2 }
[[row]]
name = "MAML"
method = "fedmeta"
"""
    (tmp_path / "t.toml").write_text(text)
    plan, cells = recipes.reproduce(str(tmp_path / "t.toml"), tmp_path / "runs")
    assert all(cell.ours.settings["support_fraction"] == 0.5 and cell.target_cost for cell in cells)
    cost = cells[0].target_cost
    assert cost and cost.round and cost.mb and cost.gflop and cost.target == cells[1].target_cost.target  # type: ignore[union-attr]
    page = pages.render_markdown(plan, cells, "c", False)
    assert f"| FedAvg | 50 % | {100 * cost.target:.2f} | {cost.round} | {cost.mb:.3g} | {cost.gflop:.3g} |" in page
    lines = [(tmp_path / f"runs/50/{row}-seed0/metrics.jsonl").read_text().splitlines() for row in ("fedavg", "maml")]
    fedavg, maml = (json.loads(line[-1])["clients"] for line in lines)
    gains = [maml[client] - fedavg[client] for client in fedavg]
    assert len(gains) == 2 and list(fedavg) == list(maml)
    half_width = 12.706 * abs(gains[0] - gains[1]) / 2  # Student's t with one degree of freedom
    assert "| FedAvg | – |" in page
    assert f"| MAML | {50 * sum(gains):.1f} ± {100 * half_width:.1f} |" in page
    assert write_report([tmp_path / "runs/50/fedavg-seed0"], tmp_path / "report")[0].exists()
