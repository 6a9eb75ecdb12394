"""Heat maps, traffic and rings show the numbers of the runs."""

import json
from pathlib import Path

import pytest

from fewer.report.charts import Grid, Ring, plot_heatmap, plot_ring, plot_traffic
from fewer.report.gallery import build_grid, build_ring
from fewer.report.style import DARK
from tests.report.harness import copy_run, group_runs, report


def test_runs_that_differ_in_two_settings_make_a_heat_map(tmp_path: Path, runs: Path) -> None:
    changes = [(lr, batch_size) for lr in (0.1, 0.3) for batch_size in (8, 16, 4)][:-1]
    paths = [
        copy_run(tmp_path, runs / "fedavg-0", method={"lr": lr, "batch_size": batch_size}) for lr, batch_size in changes
    ]
    groups = group_runs(paths)
    grid = build_grid(groups)
    accuracy = groups[0].value
    assert grid == Grid("batch_size", "lr", [4, 8, 16], [0.1, 0.3], [[accuracy] * 3, [None, accuracy, accuracy]])
    drawn = plot_heatmap("fedavg", grid).axes[0]
    assert len(drawn.collections) == len(drawn.texts) == 5
    assert not {text.get_color() for text in drawn.texts} & DARK.keys()  # a cell is equally dark in both themes
    assert (drawn.get_xlabel(), drawn.get_ylabel()) == ("batch_size", "lr")
    assert build_grid(groups[:2]) is None  # one setting only
    _, pictures = report(tmp_path, paths)
    assert "settings" in pictures


def test_traffic_matches_the_ledger(runs: Path) -> None:
    (fedmk,) = group_runs([runs / "fedmk"])
    last = fedmk.runs[0].history[-1]
    for direction in ("up", "down"):
        assert sum(size for (sent, _), size in fedmk.traffic.items() if sent == direction) == last[direction]
    figure = plot_traffic({"fedmk": fedmk.traffic})
    assert figure
    bars = figure.axes[0].patches
    assert sum(bar.get_width() for bar in bars) == pytest.approx(  # type: ignore[attr-defined]
        (last["up"] + last["down"]) / 1e6
    )
    assert plot_traffic({"local": {}}) is None


def test_a_ring_is_drawn_with_hops_skips_and_weights(tmp_path: Path, runs: Path) -> None:
    (run,) = group_runs([runs / "metafed"])[0].runs
    ring = build_ring(run)
    assert ring and ring.members == list(range(5))
    statistics = run.history[-1]["ring"]
    assert ring.weights == {int(client): values["distill_weight"] for client, values in statistics.items()}
    events = [json.loads(text) for text in (runs / "metafed/events.jsonl").read_text().splitlines()]
    skips = [e for e in events if e["event"] == "absent" and e["handler"] in ("accumulate", "personalize")]
    assert skips and sum(ring.skipped.values()) == len(skips)
    entries = [text.split(",") for text in (runs / "metafed/ledger.csv").read_text().splitlines()[1:]]
    received = [entry for entry in entries if entry[2] == "down" and entry[3] in ("accumulate", "personalize")]
    assert sum(ring.hops.values()) == len(received) and all(sender != receiver for sender, receiver in ring.hops)
    page, pictures = report(tmp_path, [runs / "metafed"])
    assert "ring" in pictures and "<h2>Rings</h2>" in page.text
    assert build_ring(group_runs([runs / "fedavg-0"])[0].runs[0]) is None
    small_ring = Ring({(0, 1): 2, (1, 3): 1}, {2: 1}, {0: 0.5, 1: 0.0, 2: 0.1, 3: 1.0}, {})
    texts = [text.get_text() for text in plot_ring(small_ring).axes[0].texts]
    assert {"0", "1", "2", "3", "λ 0.5", "λ 0.1\n−1"} <= set(texts)
