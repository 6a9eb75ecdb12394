"""Confusion matrices, reliability and the tables by class and client: seeds are added up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fewer.learning.classes import BINS
from fewer.report.charts import plot_curves
from fewer.report.classes import (
    MAX_CLIENT_ROWS,
    add_seeds,
    draw_classes,
    plot_confusion,
    tabulate_classes,
    tabulate_clients,
)
from fewer.report.groups import RunGroup
from fewer.report.style import assign_styles
from fewer.report.verdict import verdict
from tests.report.harness import fake_run, round_metrics


def classes(confusion: list[list[int]], accuracy: float) -> dict[str, Any]:
    total = sum(map(sum, confusion))
    empty: list[Any] = [None] * (BINS - 1)
    samples = [*[0] * (BINS - 1), total]
    reliability = {"samples": samples, "accuracy": [*empty, accuracy], "confidence": [*empty, 0.99]}
    return {
        "names": ["healthy", "ill", "unknown"],
        "support": [sum(row) for row in confusion],
        "confusion": confusion,
        "reliability": reliability,
    }


FIRST = classes([[6, 1, 0], [1, 2, 0], [0, 0, 0]], 0.8)
SECOND = classes([[4, 1, 0], [3, 2, 0], [0, 0, 0]], 0.6)


def group(label: str, *lines: dict[str, Any], metrics: tuple[str, ...] = ()) -> RunGroup:
    runs = []
    for seed, more in enumerate(lines):
        settings = {"method": label, "data": "digits", "data_seed": None, "seed": seed, "metrics": metrics}
        metadata = {"settings": settings, "method": {"rounds": 1}, "objects": []}
        runs.append(fake_run(Path(f"{label}-{seed}"), metadata, [round_metrics(1, more.pop("accuracy", 0.7), **more)]))
    return RunGroup(label, runs)


def test_seeds_are_added_up() -> None:
    both = group("fedavg", {"classes": FIRST}, {"classes": SECOND})
    figures = add_seeds(both)
    assert figures and figures.confusion.tolist() == [[10, 2, 0], [4, 4, 0], [0, 0, 0]]
    assert figures.accuracy[-1] == pytest.approx(0.7) and np.isnan(figures.accuracy[0])
    table = tabulate_classes([both])
    assert table.heads == ("class", "support", "recall %", "precision %", "F1 %")
    assert table.rows[0] == ("healthy", "12", "83.3", "71.4", "76.9") and table.rows[2][2:] == ("–", "–", "–")
    assert add_seeds(group("fedavg", {"classes": FIRST}, {})) is None


def test_several_methods_are_compared_by_recall() -> None:
    table = tabulate_classes([group("fedavg", {"classes": FIRST}), group("fedmk", {"classes": SECOND})])
    assert table.heads == ("recall % of class", "fedavg", "fedmk") and table.rows[1] == ("ill", "66.7", "40.0")
    assert tabulate_classes([group("fedavg", {})]).rows == []


def test_many_methods_show_the_matrix_of_the_best() -> None:
    names = {"fedavg": 0.1, "fedmk": 0.4, "local": 0.2, "fedbn": 0.3}
    groups = [group(name, {"classes": FIRST, "accuracy": value, "ece": 0.1}) for name, value in names.items()]
    drawn = list(draw_classes(groups, assign_styles(names)))
    assert [picture.name for picture in drawn] == ["confusion", "reliability"]
    assert drawn[0].caption.startswith("fedmk: ") and "Only the best of 4 methods is shown." in drawn[0].caption
    assert "fedavg 10.0 %" in drawn[1].caption
    assert list(draw_classes([group("fedavg", {})], {})) == []


def test_a_confusion_matrix_shows_counts_of_few_classes_only() -> None:
    few = add_seeds(group("fedavg", {"classes": FIRST}))
    assert few
    assert [text.get_text() for text in plot_confusion("few", few).axes[0].texts] == ["6", "1", "1", "2"]
    many = few._replace(names=[str(n) for n in range(90)], confusion=np.eye(90, dtype=np.int64))
    figure = plot_confusion("many", many)
    assert not figure.axes[0].texts and max(figure.get_size_inches()) < 9


def test_clients_are_listed_with_own_metrics_the_worst_first() -> None:
    by_client = {
        "0": {"samples": 1200, "accuracy": 0.9, "majority_baseline": 0.5, "cost": 1.5, "loss": 0.1},
        "7": {"samples": 3, "accuracy": 0.25, "majority_baseline": 0.75, "cost": 12.0, "loss": 2.0},
    }
    table = tabulate_clients([group("fedavg", {"client_metrics": by_client}, metrics=("(cost)",))])
    assert table.heads == ("client", "test samples", "accuracy %", "majority %", "cost")
    assert table.rows == [(7, "3", "25.0", "75.0", "12"), (0, "1,200", "90.0", "50.0", "1.5")]
    two = tabulate_clients([group("fedavg", {"client_metrics": by_client}), group("local", {})])
    assert two.heads[:3] == ("method", "seed", "client") and two.rows[0][:3] == ("fedavg", 0, 7)
    crowd = {str(client): by_client["0"] for client in range(MAX_CLIENT_ROWS + 1)}
    assert tabulate_clients([group("fedavg", {"client_metrics": crowd})]).rows == []


def test_the_verdict_names_methods_below_the_baseline() -> None:
    below = {"accuracy": 0.5, "majority_baseline": 0.7, "classes": classes([[7, 0, 0], [3, 0, 0], [0, 0, 0]], 0.5)}
    sentence = "50.0 % is below the majority baseline: always predicting 'healthy' scores 70.0 %."
    assert verdict([group("fedavg", dict(below))])[1] == sentence
    both = verdict([group("fedavg", dict(below)), group("fedmk", {"accuracy": 0.9, "majority_baseline": 0.7})])
    assert f"fedavg: {sentence}" in both and not any(text.startswith("fedmk: ") for text in both)


def test_a_baseline_is_drawn_unless_it_is_far_below() -> None:
    for first, baseline, expected in ((0.8, 0.95, 1), (0.8, 0.72, 1), (0.8, 0.1, 0), (0.4, 0.3, 1), (0.4, 0.2, 0)):
        histories = {"": {"fedavg": [[round_metrics(1, first), round_metrics(2, 0.9)]]}}
        figure = plot_curves("Accuracy", histories, "round", baselines={"majority baseline": baseline})
        assert figure
        texts = [text.get_text() for text in figure.legends[0].get_texts()]
        assert texts.count("majority baseline") == expected
        low, high = figure.axes[0].get_ylim()
        assert not expected or low < 100 * baseline < high
