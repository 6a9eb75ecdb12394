"""Charts show the numbers of the runs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fewer.report.charts import plot_bars, plot_clients, plot_density
from fewer.report.metrics import metric_curve
from fewer.report.style import SIZE, assign_label_styles
from fewer.statistics import Interval, interval
from tests.report.harness import THREE_SEEDS, plot_by_megabyte, plot_by_round, round_metrics

# --- metrics and pictures ---------------------------------------------------------------------------------------


def test_band_by_arithmetic() -> None:
    # mean 0.6, standard deviation 0.1, t(2 degrees, 97.5 %) = 4.30265
    half = 4.302652729911275 * 0.1 / math.sqrt(3)
    assert interval([0.5, 0.6, 0.7]) == pytest.approx((0.6, half))
    assert interval([0.5]) == (0.5, None)
    figure = plot_by_round({"fedavg": THREE_SEEDS})
    assert figure
    (band,) = figure.axes[0].collections
    heights = band.get_paths()[0].vertices
    at_two = np.asarray(heights)[np.asarray(heights)[:, 0] == 2][:, 1]
    assert (at_two.min(), at_two.max()) == pytest.approx((60 - 100 * half, 60 + 100 * half))


def test_points_of_a_single_round_stand_next_to_each_other() -> None:
    runs = [[round_metrics(1, accuracy, 1000)] for accuracy in (0.2, 0.4)]
    figure = plot_by_round(dict.fromkeys(("fedavg", "local", "fedmk", "fedbn"), runs))
    assert figure
    places = {float(x) for line in figure.axes[0].lines for x in line.get_xdata()}  # type: ignore[arg-type, union-attr]
    assert sorted(places) == [0.625, 0.875, 1.125, 1.375] and list(figure.axes[0].get_xticks()) == [1]


def test_a_single_seed_has_no_band() -> None:
    figure = plot_by_round({"fedavg": THREE_SEEDS[:1]})
    assert figure and not figure.axes[0].collections and len(figure.axes[0].lines) == 1


def test_megabytes_are_cumulative_over_both_directions() -> None:
    figure = plot_by_megabyte({"fedavg": THREE_SEEDS})
    assert figure
    assert list(figure.axes[0].lines[0].get_xdata()) == [2, 4]  # type: ignore[arg-type]


def test_very_different_traffic_has_a_logarithmic_scale() -> None:
    small = [[round_metrics(1, 0.2, 1000), round_metrics(2, 0.3, 2000)]]
    figures = [plot_by_megabyte({"fedavg": THREE_SEEDS}), plot_by_megabyte({"fedavg": THREE_SEEDS, "local": small})]
    assert [figure and figure.axes[0].get_xscale() for figure in figures] == ["linear", "log"]


@pytest.mark.parametrize(("low", "labels"), [(1.5, ["2", "3", "5", "7"]), (0.4, [])])
def test_a_short_logarithmic_axis_has_plain_labels(low: float, labels: list[str]) -> None:
    """Matplotlib's own labels of minor ticks are formulas, which the theme does not set."""
    small = [[round_metrics(1, 0.2, 1000), round_metrics(2, 0.3, 2000)]]
    figure = plot_by_megabyte({"fedavg": THREE_SEEDS, "local": small})
    assert figure
    figure.axes[0].set_xlim(low, 9)
    ticks = [text.get_text() for text in figure.axes[0].get_xticklabels(minor=True)]
    assert [text for text in ticks if text] == labels


def test_only_rounds_that_all_seeds_evaluated_are_shown() -> None:
    histories = [
        [round_metrics(1, None), round_metrics(2, 0.4), round_metrics(3, None), round_metrics(4, 0.5)],
        [round_metrics(1, 0.1), round_metrics(2, 0.6), round_metrics(3, None)],
    ]
    assert [(point.round, point.value.mean) for point in metric_curve(histories)] == [(2, 0.5)]
    assert plot_by_round({"fedavg": [[round_metrics(1, None)]]}) is None
    assert plot_by_round({}) is None


def test_clients_are_sorted_and_their_mean_is_a_line() -> None:
    runs = [[round_metrics(1, 0.5, clients={"0": 0.9, "1": 0.1})], [round_metrics(1, 0.5, clients={"0": 0.5})]]
    figure = plot_clients({"fedavg": runs, "old": [[round_metrics(1, 0.5)]]})
    assert figure
    dots, mean = figure.axes[0].lines
    assert list(dots.get_ydata()) == pytest.approx([10, 50, 90])  # type: ignore[arg-type]
    assert list(mean.get_ydata()) == pytest.approx([50, 50])  # type: ignore[arg-type]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fedavg, mean 50.0"]
    assert plot_clients({"fedavg": [[round_metrics(1, 0.5)]]}) is None


# --- bars, maps, traffic, rings ---------------------------------------------------------------------------------


def test_bars_are_means_with_whiskers() -> None:
    results = {"fedavg": Interval(0.6, 0.1), "fedavg lr=1": Interval(0.5, None)}
    styles = assign_label_styles({"fedavg": "fedavg", "fedavg lr=1": "fedavg"})
    axes = plot_bars(results, styles).axes[0]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([60, 50])  # type: ignore[attr-defined]
    assert {text.get_text() for text in axes.texts} == {"60.0 ± 10.0", "50.0"}
    assert styles["fedavg lr=1"].color == styles["fedavg"].color and styles["fedavg lr=1"] != styles["fedavg"]


# --- FLOPs and costs --------------------------------------------------------------------------------------------


def test_the_distribution_over_clients_is_plotted() -> None:
    line = {"round": 1, "accuracy": 0.5, "clients": {str(n): n / 10 for n in range(10)}}
    assert plot_density({"fedmeta": [[line]]}) is not None
    assert plot_density({"fedmeta": [[{"round": 1, "accuracy": 0.5}]]}) is None


def test_a_legend_of_long_names_wraps_and_takes_as_few_lines_as_possible() -> None:
    long = [f"FedMK of the paper, variant {letter}, noise" for letter in "ab"]
    histories = dict.fromkeys([*long, *"cdefgh"], THREE_SEEDS)
    figure = plot_by_round(histories)
    assert figure
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [text.replace("\n", " ") for text in texts] == [*histories]  # nothing is cut off
    assert texts[0] == "FedMK of the paper,\nvariant a, noise"
    # Two columns: the first has two names of two lines and two of one line. One column would have eight lines.
    assert figure.get_figheight() == pytest.approx(SIZE[1] + 0.2 * (6 - 1))


def test_rows_of_bars_show_long_names_in_two_lines() -> None:
    names = ["short", "Fine-tuning via one-shot FL, distance head"]
    figure = plot_bars(dict.fromkeys(names, Interval(0.5, None)), assign_label_styles(dict.fromkeys(names, "fedavg")))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "short",
        "Fine-tuning via one-shot FL,\ndistance head",
    ]
