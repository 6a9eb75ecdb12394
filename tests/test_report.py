"""Reports: pictures and pages show what runs and data contain."""

import csv
import json
import math
import re
import shutil
from collections.abc import Sequence
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

import fewer
from fewer import FedAvg, Local
from fewer.data import ArrayData, Data, from_arrays
from fewer.errors import RunError
from fewer.methods import find, names
from fewer.methods.fedmk import FedMK, FedMKState
from fewer.methods.metafed import MetaFed
from fewer.report import plot_clients, plot_curves, plot_examples, plot_partition, run_reader, write_report
from fewer.report.charts import Grid, Ring, plot_bars, plot_heatmap, plot_ring, plot_traffic
from fewer.report.gallery import build_grid, build_ring
from fewer.report.html import Picture, render_figure
from fewer.report.metrics import Histories, Interval, accuracy_curve, interval
from fewer.report.page import _render_results, _render_worst_clients
from fewer.report.pictures import class_counts, plot_image_grid
from fewer.report.run_reader import Run, RunGroup
from fewer.report.style import COLORS, DARK, INK, LineStyle, assign_label_styles, assign_styles, png, svg, theme
from fewer.report.verdict import is_paired, verdict, winner
from fewer.runs.result import open_run
from tests.test_cli import call

# --- metrics and pictures -------------------------------------------------------------------------------------


def round_metrics(number: int, accuracy: float | None, up: int = 0, **more: Any) -> dict[str, Any]:
    known = {} if accuracy is None else {"accuracy": accuracy}
    return {"round": number, **known, "up": up, "down": up, "seconds": 1.0, **more}


def plot_by_round(histories: Histories) -> Figure | None:
    return plot_curves("Accuracy by round", {"": histories}, "round")


def plot_by_megabyte(histories: Histories) -> Figure | None:
    return plot_curves("Accuracy by traffic", {"": histories}, "megabytes")


THREE_SEEDS = [
    [round_metrics(1, 0.2, 1_000_000), round_metrics(2, accuracy, 2_000_000)] for accuracy in (0.5, 0.6, 0.7)
]


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


def test_only_rounds_that_all_seeds_evaluated_are_shown() -> None:
    histories = [
        [round_metrics(1, None), round_metrics(2, 0.4), round_metrics(3, None), round_metrics(4, 0.5)],
        [round_metrics(1, 0.1), round_metrics(2, 0.6), round_metrics(3, None)],
    ]
    assert [(point.round, point.accuracy.mean) for point in accuracy_curve(histories)] == [(2, 0.5)]
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


def test_a_method_has_one_style_in_all_pictures_of_a_page() -> None:
    histories = {"fedavg": THREE_SEEDS, "fedbn": THREE_SEEDS, "late": [[round_metrics(1, None)]]}
    first, second = plot_by_round(histories), plot_by_megabyte(histories)
    assert first and second
    styles = assign_styles(histories)
    for figure in (first, second):
        drawn = [
            LineStyle(str(curve.get_color()), str(curve.get_marker()), str(curve.get_linestyle()))
            for curve in figure.axes[0].lines
        ]
        assert drawn == [styles["fedavg"], styles["fedbn"]]


def test_methods_on_one_page_have_distinct_styles() -> None:
    methods = [*names(), *(f"method-{number}" for number in range(100))]
    for order in (methods, methods[::-1]):
        assert len({style.color for style in assign_styles(order[:7]).values()}) == 7 == len(COLORS)
        assert len({(style.color, style.dash) for style in assign_styles(order[:28]).values()}) == 28
        assert len(set(assign_styles(order).values())) == len(methods)


def test_the_style_of_a_method_is_stable() -> None:
    single = assign_styles(["my-method"])
    assert single == {"my-method": ("#CC79A7", "D", "-")}  # the same in every version
    page = assign_styles(["my-method", "fedavg", "fedprox"])
    assert page["my-method"] == single["my-method"]
    more = assign_styles(["another", "fedprox"], page)  # later methods do not change earlier ones
    assert {method: more[method] for method in page} == page and len(set(more.values())) == 4


def test_variants_of_a_method_share_its_color_and_nothing_else() -> None:
    methods = {"fedavg": "fedavg", **{f"fedavg lr={number}": "fedavg" for number in range(20)}, "fedbn": "fedbn"}
    styles = assign_label_styles(methods)
    assert len(set(styles.values())) == len(methods)
    assert {style.color for label, style in styles.items() if methods[label] == "fedavg"} == {styles["fedavg"].color}
    assert styles["fedavg"] == assign_styles(["fedavg", "fedbn"])["fedavg"]
    crowd = assign_label_styles({f"{method} {number}": method for number in range(2) for method in names()[:14]})
    assert len(set(crowd.values())) == 28
    assert len(assign_label_styles({str(number): "fedavg" for number in range(50)})) == 50  # repeats, but no failure


def test_the_users_matplotlib_settings_are_unchanged() -> None:
    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"axes.grid": False, "text.usetex": True}):
        figure = plot_by_round({"$\\fedavg$": THREE_SEEDS})
        assert figure
        png(figure)
        assert matplotlib.rcParams["text.usetex"] and not matplotlib.rcParams["axes.grid"]
        with theme():
            assert matplotlib.rcParams["axes.grid"]
    assert dict(matplotlib.rcParams) == before


def test_the_same_picture_gives_the_same_bytes(digits: Data) -> None:
    assert png(plot_partition(digits)) == png(plot_partition(digits))
    assert svg(plot_partition(digits)) == svg(plot_partition(digits))


def bubbles(figure: Figure) -> tuple[np.ndarray, np.ndarray]:
    (scatter,) = figure.axes[0].collections
    return np.asarray(scatter.get_offsets()).astype(int), scatter.get_sizes()  # type: ignore[attr-defined]


def test_bubbles_match_the_counts(digits: Data) -> None:
    counts = np.zeros((len(digits), digits.classes), int)
    for client in range(len(digits)):
        for label in digits.client(client).train.slice(0, 9999)[1].tolist():
            counts[client, label] += 1
    np.testing.assert_array_equal(class_counts(digits), counts)
    positions, areas = bubbles(plot_partition(digits))
    assert len(positions) == (counts > 0).sum()
    shown = counts[positions[:, 0], positions[:, 1]]
    np.testing.assert_allclose(areas / shown, areas[0] / shown[0])


def test_only_the_first_sixty_clients_are_shown() -> None:
    data = fewer.data.load("digits", clients=70, partition="iid")
    figure = plot_partition(data)
    assert bubbles(figure)[0][:, 0].max() == 59
    assert "first 60 of 70 clients" in figure.get_suptitle()


def with_class_names(data: ArrayData, *names: str) -> ArrayData:
    return ArrayData(**{**vars(data), "class_names": names})


def test_classes_have_their_names() -> None:
    data = with_class_names(from_arrays(np.zeros((40, 5), np.float32), np.arange(40) % 3, clients=2), "a", " ", "$c_1$")
    labels = plot_partition(data).axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == ["a", "' '", "$c_1$"]


def test_examples_show_images_of_each_class(digits: Data) -> None:
    figure = plot_examples(digits, columns=3)
    assert figure
    (image,) = figure.axes[0].images
    shown = np.asarray(image.get_array())
    assert shown.shape == (10 * 9 - 1, 3 * 9 - 1, 3)
    x, y = digits.test.x, digits.test.y
    third_two = x[np.flatnonzero(y == 2)[2], 0].numpy() / 255
    np.testing.assert_allclose(shown[2 * 9 : 2 * 9 + 8, 2 * 9 : 2 * 9 + 8, 0], third_two)


@pytest.mark.parametrize("channels", [1, 3])
def test_examples_show_at_most_twenty_classes(channels: int) -> None:
    x = np.random.default_rng(0).standard_normal((500, channels, 6, 5)).astype(np.float32)
    figure = plot_examples(from_arrays(x, np.arange(500) % 25, clients=2, partition="iid"))
    assert figure and "20 of 25 classes" in figure.get_suptitle()
    assert len(figure.axes[0].get_yticks()) == 20
    assert png(figure)


def test_examples_show_time_series_as_lines() -> None:
    x = np.random.default_rng(0).standard_normal((200, 9, 16)).astype(np.float32)
    figure = plot_examples(from_arrays(x, np.arange(200) % 4, clients=2, partition="iid"), columns=5)
    assert figure and "first 3 of 9 channels" in figure.get_suptitle()
    assert len(figure.axes[0].lines) == 4 * 5 * 3


def test_text_and_features_have_no_examples() -> None:
    labels = np.arange(60) % 2
    assert plot_examples(from_arrays(np.zeros((60, 7), np.float32), labels, clients=2)) is None
    assert plot_examples(from_arrays(["good film", "bad film"] * 30, labels, clients=2)) is None


def test_synthetic_images_are_shown_by_row_and_class_in_the_pixel_range(digits: Data) -> None:
    seen, labels = digits.test.slice(0, 50)
    threes = seen[labels == 3][:2].numpy()
    out_of_range = np.full((1, 1, 8, 8), 1e3, np.float32)
    figure = plot_image_grid(
        digits, "Made", {"client 4": {3: threes}, "client 7": {0: out_of_range, 2: -out_of_range}}, max_per_class=2
    )
    assert figure
    axes = figure.axes[0]
    shown = np.asarray(axes.images[0].get_array())[..., 0]
    assert shown.shape == (2 * 9 - 1, 20 * 9 - 1 + 2 * 9)  # two pixels more between classes
    pixels = digits.test.x[torch.nonzero(labels == 3)[:2, 0], 0].numpy() / 255
    for index, left in enumerate((3 * 20, 3 * 20 + 9)):
        np.testing.assert_allclose(shown[:8, left : left + 8], pixels[index], atol=1e-5)
    assert (shown[:8, : 3 * 20] == 1).all() and (shown[:8, 4 * 20 :] == 1).all()  # blank
    assert (shown[9:, :8] == 1).all() and (shown[9:, 2 * 20 : 2 * 20 + 8] == 0).all()  # cut off
    assert [text.get_text() for text in axes.get_yticklabels()] == ["client 4", "client 7"]
    assert [text.get_text() for text in axes.get_xticklabels()] == [str(label) for label in range(10)]
    assert axes.get_xticks()[3] == pytest.approx(3 * 20 + 8)
    assert plot_image_grid(digits, "Made", {"client 4": {}}) is None
    readings = from_arrays(np.zeros((40, 5), np.float32), np.arange(40) % 3, clients=2)
    assert plot_image_grid(readings, "Made", {"client 0": {0: np.zeros((1, 5))}}) is None


def test_the_lowest_value_is_black_if_data_is_not_pixels() -> None:
    x = np.random.default_rng(0).standard_normal((60, 1, 4, 4)).astype(np.float32)
    synthetic = np.linspace(-9, 3, 16, dtype=np.float32).reshape(1, 1, 4, 4)
    figure = plot_image_grid(from_arrays(x, np.arange(60) % 2, clients=2), "Made", {"client 0": {0: synthetic}})
    assert figure
    shown = np.asarray(figure.axes[0].images[0].get_array())[:4, :4, 0]
    np.testing.assert_allclose(shown.flatten(), np.linspace(0, 1, 16), atol=1e-6)


# --- the page -------------------------------------------------------------------------------------------------


class Bold(FedAvg):
    """Has a name that must be escaped."""

    name: ClassVar[str] = "<b>"


class Page(HTMLParser):
    """The tags, tables and text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.rows: list[list[str]] = []
        self.text = path.read_text()
        self.feed(self.text)
        self.close()
        assert not self.open, "tags that are not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)

    def row(self, first: str) -> list[str]:
        """The first row of any table that starts with this cell."""
        return next(row for row in self.rows if row and row[0] == first)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small runs to report on."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        data = fewer.data.load("digits", clients=4, alpha=1.0, seed=seed)
        fewer.run(FedAvg(rounds=2, cohort=3), data, seed=seed, out=folder / f"fedavg-{seed}")
    data = fewer.data.load("digits", clients=4, alpha=1.0)
    fewer.run(Local(rounds=2, cohort=3), data, out=folder / "local-0")
    fewer.run(FedAvg(rounds=3, cohort=3), data, out=folder / "sparse", evaluate_every=2)
    fewer.run(Bold(rounds=3, cohort=4), data, out=folder / "bold", drop=0.3)
    user_data = from_arrays(data.source.x, data.source.y, clients=3, partition="iid", name="<i>own</i>")
    fewer.run(FedAvg(rounds=1, cohort=3), user_data, out=folder / "own")
    small = {
        "per_class": 3,
        "matching_steps": 1,
        "outer_steps": 0,
        "server_steps": 1,
        "pseudo_weight": 0,
        "codec": "float32",
    }
    fewer.run(FedMK(rounds=3, cohort=4, **small), data, out=folder / "fedmk")
    held = fewer.data.load("digits", clients=5, alpha=1.0, validation=0.2)
    fewer.run(MetaFed(rounds=3, local_steps=2), held, out=folder / "metafed", drop=0.2)
    return folder


ALL_RUNS = ("fedavg-0", "fedavg-1", "local-0", "sparse", "bold", "own", "fedmk")


def group_runs(paths: Sequence[Path]) -> list[RunGroup]:
    return run_reader.group_runs(paths)[0]


def report(tmp_path: Path, runs: Sequence[Path]) -> tuple[Page, list[str]]:
    (path,) = write_report(runs, tmp_path / "report", pictures=False)
    page = Page(path)
    pictures = re.findall(r'<figure[^>]*><div class="scroll"[^>]* aria-label="([^"]+)"', page.text)
    check_page(page, len(pictures))
    return page, pictures


def test_pictures_are_also_written_as_files(tmp_path: Path, runs: Path) -> None:
    page, *files = write_report([runs / "fedmk"], tmp_path)
    assert page == tmp_path / "report.html"
    _, shown = report(tmp_path, [runs / "fedmk"])
    assert {path.stem for path in files} == set(shown) and len(files) == 3 * len(shown)
    for path in files:
        if path.suffix == ".png":
            width, height = Image.open(BytesIO(path.read_bytes())).size
            assert 600 <= width <= 3000 and 200 <= height <= 3000, path
        else:
            text = path.read_text()
            assert len(text.splitlines()) > 1 and ("<svg" in text) == (path.suffix == ".svg")
    rows = list(csv.DictReader((tmp_path / "pictures/accuracy-by-round.csv").open()))
    history = [json.loads(text) for text in (runs / "fedmk/metrics.jsonl").read_text().splitlines()]
    assert [float(row["accuracy"]) for row in rows] == [metrics["accuracy"] for metrics in history]
    assert [float(row["megabytes"]) for row in rows] == [(metrics["up"] + metrics["down"]) / 1e6 for metrics in history]


def check_page(page: Page, pictures: int) -> None:
    """Checks that a page is accessible (labels, headings in order, image sizes) and loads nothing."""
    images = [
        attributes
        for tag, attributes in page.tags
        if tag == "img" or (tag == "svg" and attributes.get("role") == "img")
    ]
    assert len(images) == pictures
    for image in images:
        assert (image.get("alt") or image["aria-label"]) and int(image["width"]) and int(image["height"])
        assert image.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")
    links = [
        attributes.get("href", "#")
        for _, attributes in page.tags
        if not {"src", "action", "srcset"} & attributes.keys()
    ]
    assert all(link.startswith(("#", "data:text/csv;")) for link in links)
    assert "http:" not in page.text and "https:" not in page.text and "url(http" not in page.text
    kinds = [tag for tag, _ in page.tags]
    assert not set(kinds) & {"link", "iframe", "object"} and kinds.count("script") == 1
    assert ("html", {"lang": "en"}) in page.tags and kinds.count("title") == kinds.count("main") == 1
    levels = [int(tag[1]) for tag in kinds if tag in ("h1", "h2", "h3")]
    assert levels[0] == 1 and levels.count(1) == 1
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert all(attributes.get("aria-label") for tag, attributes in page.tags if attributes.get("tabindex"))


CURVES = ["accuracy-by-round", "accuracy-by-megabyte", "accuracy-by-second"]
CLIENTS = ["traffic", "accuracy-by-client", "accuracy-density"]
PLAIN = [*CURVES, *CLIENTS]
SEVERAL = [*CURVES, "accuracy-bars", *CLIENTS]
DATA = ["partition", "examples"]


def test_a_report_on_one_run(tmp_path: Path, runs: Path) -> None:
    page, pictures = report(tmp_path, [runs / "fedavg-0"])
    assert pictures == [*PLAIN, *DATA]
    last = json.loads((runs / "fedavg-0" / "metrics.jsonl").read_text().splitlines()[-1])
    accuracy = f"{100 * last['accuracy']:.2f}"
    up, down = f"{last['up'] / 1e6:.3g}", f"{last['down'] / 1e6:.3g}"
    assert page.row("fedavg") == ["fedavg", accuracy, accuracy, "2", up, down, f"{last['seconds']:.1f}", "0"]
    assert "<h1>digits, 4 clients, dirichlet (alpha 1)</h1>" in page.text
    described = json.loads((runs / "fedavg-0" / "settings.json").read_text())
    assert described["hash"] in page.text and page.row("torch") == ["torch", described["environment"]["torch"]]
    assert page.row("lr") == ["lr", "0.1"]
    assert "All clients answered, and no run was interrupted." in page.text
    assert f"fedavg reaches {100 * last['accuracy']:.1f} % accuracy (1 seed)" in page.text


def test_a_report_shows_synthetic_images(tmp_path: Path, runs: Path) -> None:
    page, pictures = report(tmp_path, [runs / "fedmk"])
    assert pictures == [*PLAIN, "made-by-client", "made-by-round", *DATA]
    assert "the last D̂ of 4 of the 4 clients that sent any. Blank cells have no image." in page.text
    assert "not shown" not in page.text
    result = open_run(runs / "fedmk")
    by_client, by_round = result.method.image_grids(result.state)
    assert list(by_client.rows) == [f"client {client}" for client in range(4)] and by_client.max_per_class == 2
    assert list(by_round.rows) == ["round 1", "round 2", "round 3"] and by_round.max_per_class == 1
    for client, row in enumerate(by_client.rows.values()):
        sent = {label: images for label, images in result.state.knowledge[client].items() if len(images)}
        assert sent and {str(label) for label in row} == sent.keys()
        assert all(torch.equal(images, sent[str(label)]) for label, images in row.items())
    last = result.state.knowledge[next(iter(result.state.knowledge))]
    assert all(torch.equal(images, last[str(label)][:1]) for label, images in by_round.rows["round 3"].items())


def test_at_most_ten_rounds_are_shown_including_first_and_last() -> None:
    images = {"0": torch.zeros(1, 1, 8, 8), "1": torch.zeros(0, 1, 8, 8)}
    by_round_images = dict.fromkeys(range(1, 41), images)
    _, by_round = FedMK().image_grids(FedMKState({}, {}, images, {0: images}, by_round_images))
    names = list(by_round.rows)
    assert len(names) == 10 and (names[0], names[-1]) == ("round 1", "round 40")
    assert [list(row) for row in by_round.rows.values()] == [[0]] * 10
    # nothing has changed yet
    assert len(FedMK().image_grids(FedMKState({}, {}, images, {0: images}, {1: images}))) == 1


CLUMSY = """
from pathlib import Path
from fewer import FedAvg

Path(__file__).with_name("was-run").touch()

class Clumsy(FedAvg):
    '''Has images that fail.'''

    def image_grids(self, state):
        raise KeyError("album")
"""


def test_a_report_is_written_without_missing_images(tmp_path: Path, runs: Path) -> None:
    shown = [*PLAIN, *DATA]
    gone = copy_run(tmp_path, runs / "fedmk", settings={"method": "gone.py:FedMK"})
    page, pictures = report(tmp_path, [gone])
    assert pictures == shown and "not shown" not in page.text
    early = copy_run(tmp_path, runs / "fedmk")
    (early / "checkpoint.safetensors").unlink()
    page, pictures = report(tmp_path, [early])
    assert (
        pictures == shown
        and f"Pictures from the model of fedmk are not shown: {early.name} has no checkpoint yet" in page.text
    )
    (early / "checkpoint.safetensors").write_bytes(b"nothing")
    assert report(tmp_path, [early])[1] == shown


def test_a_report_executes_no_user_file(tmp_path: Path, runs: Path) -> None:
    file = tmp_path / "clumsy_in_a_file.py"
    file.write_text(CLUMSY)
    clumsy = copy_run(tmp_path, runs / "fedavg-0", settings={"method": f"{file}:Clumsy"})
    page, _ = report(tmp_path, [clumsy])
    assert "About fedavg" not in page.text and "not shown" not in page.text
    netted = copy_run(tmp_path, runs / "fedmk", settings={"model": f"{file}:Net"})
    page, _ = report(tmp_path, [netted])
    assert "About fedmk" in page.text
    assert "Pictures from the model of fedmk are not shown: its model is in a file" in page.text
    assert not (tmp_path / "was-run").exists()
    find(f"{file}:Clumsy")  # as if `fewer run` had just imported it
    page, pictures = report(tmp_path, [clumsy, runs / "fedmk"])
    assert pictures == [*SEVERAL, "made-by-client-2", "made-by-round-2", *DATA]
    assert "Pictures from the model of fedavg are not shown: KeyError: &#x27;album&#x27;." in page.text
    assert "About fedavg: Has images" in report(tmp_path, [clumsy])[0].text


def test_seeds_of_a_method_are_averaged(tmp_path: Path, runs: Path) -> None:
    page, pictures = report(tmp_path, [runs / name for name in ("local-0", "fedavg-1", "fedavg-0")])
    assert pictures == [*SEVERAL, *DATA]
    accuracies = [
        json.loads((runs / f"fedavg-{seed}" / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"]
        for seed in (0, 1)
    ]
    mean, half = interval(accuracies)
    assert half
    assert page.row("fedavg")[1] == f"{100 * mean:.2f} ± {100 * half:.2f}"
    assert page.row("fedavg")[-1] == "0, 1"
    last = json.loads((runs / "local-0" / "metrics.jsonl").read_text().splitlines()[-1])
    assert page.row("local")[1:3] == [f"{100 * last[name]:.2f}" for name in ("accuracy", "global_accuracy")]


def test_a_report_on_many_runs(tmp_path: Path, runs: Path) -> None:
    page, pictures = report(tmp_path, [runs / name for name in sorted(ALL_RUNS)])
    assert pictures == [*SEVERAL, "made-by-client-3", "made-by-round-3", *DATA]
    assert "<h1>digits, 4 clients, dirichlet (alpha 1); &lt;i&gt;own&lt;/i&gt;, 3 clients</h1>" in page.text
    assert "Other settings differ too: " in page.text and "data = digits, clients = 4" in page.text


def test_names_are_escaped_and_absent_answers_counted(tmp_path: Path, runs: Path) -> None:
    page, _ = report(tmp_path, [runs / "bold"])
    assert page.row("<b>") and "b" not in {tag for tag, _ in page.tags}
    dropped = (runs / "bold" / "events.jsonl").read_text().count('"reason": "dropped"')
    assert dropped and ["method", "dropped", "absent in total", "resumed"] in page.rows
    assert ["<b>", str(dropped), str(dropped), "0"] in page.rows
    assert str(Path(__file__)) not in page.text  # the path of a method's file


def test_a_run_that_was_not_evaluated_in_every_round(tmp_path: Path, runs: Path) -> None:
    report(tmp_path, [runs / "sparse"])
    (group,) = group_runs([runs / "sparse"])
    assert [point.round for point in accuracy_curve([run.history for run in group.runs])] == [2, 3]


def test_user_data_is_not_shown(tmp_path: Path, runs: Path) -> None:
    page, pictures = report(tmp_path, [runs / "own"])
    assert pictures == PLAIN
    assert "The data is not shown" not in page.text


def copy_run(tmp_path: Path, run: Path, **metadata: Any) -> Path:
    """Copies a run and changes its settings.json."""
    copy = tmp_path / f"copy-{len(list(tmp_path.iterdir()))}"
    shutil.copytree(run, copy)
    description = json.loads((copy / "settings.json").read_text())
    for part, values in metadata.items():
        description[part] = {**description[part], **values}
    (copy / "settings.json").write_text(json.dumps(description))
    return copy


def test_changed_or_missing_data_is_not_shown(tmp_path: Path, runs: Path) -> None:
    other = copy_run(tmp_path, runs / "fedavg-0", data={"fingerprint": "00000000"})
    page, pictures = report(tmp_path, [other])
    assert pictures == PLAIN and f"The data is not shown: digits has changed since {other.name} was run." in page.text
    gone = copy_run(tmp_path, runs / "fedavg-0", settings={"data": "npz:gone.npz"})
    page, pictures = report(tmp_path, [gone])
    assert pictures == PLAIN and "The data is not shown: &#x27;gone.npz&#x27; does not exist" in page.text


def test_a_stopped_run_without_metrics_by_client(tmp_path: Path, runs: Path) -> None:
    copy = copy_run(tmp_path, runs / "local-0")
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text(lines[0])
    with (copy / "events.jsonl").open("a") as file:
        file.write('{"event": "sto\n{"time": 1, "event": "stop", "round": 1, "reason": "KeyboardInterrupt: "}\n')
    page, pictures = report(tmp_path, [copy])
    assert pictures == [*CURVES, "traffic", *DATA]
    assert "No run has finished yet" in page.text
    assert page.row("local")[2:4] == ["–", "1 of 2"]
    assert "local, seed 0, is at round 1 of 2; it stopped: KeyboardInterrupt" in page.text


def test_runs_with_different_settings_are_never_averaged(tmp_path: Path, runs: Path) -> None:
    original = runs / "fedavg-0"
    faster = copy_run(tmp_path, original, method={"lr": 0.3}, settings={"seed": 1})
    skewed = copy_run(tmp_path, original, settings={"seed": 1, "alpha": 0.1})
    pooled = copy_run(tmp_path, original, settings={"seed": 1, "runtime": "pool", "data_dir": "/elsewhere"})

    def seeds(*paths: Path) -> dict[str, list[int]]:
        return {group.label: [run.seed for run in group.runs] for group in group_runs(paths)}

    assert seeds(pooled, original) == {"fedavg": [0, 1]}
    assert seeds(original, faster) == {"fedavg lr=0.1": [0], "fedavg lr=0.3": [1]}
    assert seeds(original, skewed, runs / "local-0") == {
        "fedavg alpha=1.0": [0],
        "fedavg alpha=0.1": [1],
        "local": [0],
    }
    several = copy_run(tmp_path, original, settings={"alpha": 0.1, "drop": 0.1, "slow": 0.1})
    assert seeds(original, several) == {"fedavg": [0], "fedavg (2)": [0]}
    again = [copy_run(tmp_path, original), copy_run(tmp_path, original)]
    assert seeds(original, *again) == {"fedavg": [0], "fedavg (2)": [0], "fedavg (3)": [0]}
    assert seeds(original, original) == {"fedavg": [0]}


def test_absent_answers_of_a_repeated_round_count_once(tmp_path: Path, runs: Path) -> None:
    copy = copy_run(tmp_path, runs / "bold")
    events = (copy / "events.jsonl").read_text()
    (copy / "events.jsonl").write_text(events + events)
    assert group_runs([copy])[0].absent_counts == group_runs([runs / "bold"])[0].absent_counts


def make_run(history: list[dict[str, Any]], events: Sequence[dict[str, Any]] = (), path: Path = Path("run")) -> Run:
    metadata = {"settings": {"method": "fedavg", "seed": 0}, "method": {"rounds": len(history)}, "objects": []}
    return Run(path, metadata, history, events)


def test_faults_of_repeated_rounds_do_not_count() -> None:
    absent = {"event": "absent", "round": 3, "client": 1, "reason": "late", "handler": "train"}
    events: list[dict[str, Any]] = [{"event": "start"}, {**absent, "round": 2}, absent, {"event": "resume", "round": 2}]
    run = make_run([{"round": number} for number in (1, 2, 3)], events)
    assert run.absent_counts == {"late": 1} and run.interruptions == 1
    # it had finished
    assert make_run([{"round": 1}], [{"event": "start"}, {"event": "resume", "round": 1}]).interruptions == 0


def test_an_unfinished_round_is_not_in_the_traffic(tmp_path: Path) -> None:
    (tmp_path / "ledger.csv").write_text("round,client,direction,kind,bytes\n1,0,up,train,5\n2,0,up,train,7\n")
    assert make_run([{"round": 1}], path=tmp_path).traffic == {("up", "train"): 5}


def test_the_worst_tenth_by_arithmetic() -> None:
    clients = {str(client): client / 100 for client in range(1, 21)}
    text = _render_worst_clients([RunGroup("fedavg", [make_run([{"round": 1, "clients": clients}])])])
    assert "<td>10.5</td><td>1.5</td><td>client 1 1.0, client 2 2.0, client 3 3.0</td>" in text


def test_captions_and_alt_texts_are_escaped() -> None:
    drawn = plot_bars({"a": Interval(0.5, None), "b": Interval(0.4, None)}, assign_label_styles({"a": "a", "b": "b"}))
    page = render_figure(Picture("bars", drawn, "<script>", '"><script>'))
    assert "<script>" not in page and page.count("&lt;script&gt;") == 2


def test_a_directory_of_runs_and_comparisons_is_reported_completely(tmp_path: Path, runs: Path) -> None:
    shutil.copytree(runs / "fedavg-0", tmp_path / "all/first")
    shutil.copytree(runs / "local-0", tmp_path / "all/compared/local-seed0")
    output = call("report", tmp_path / "all", "--out", tmp_path / "report").stdout
    page = Page(tmp_path / "report/report.html")
    assert page.row("fedavg") and page.row("local") and "plot files in" in output


def test_a_report_without_a_picture_is_written(tmp_path: Path, runs: Path) -> None:
    early = copy_run(tmp_path, runs / "own")
    (early / "metrics.jsonl").write_text(json.dumps(round_metrics(1, None)) + "\n")
    (early / "ledger.csv").write_text("round,client,direction,kind,bytes\n")
    assert call("report", early, "--out", tmp_path / "report").stdout == f"{tmp_path / 'report/report.html'}\n"


def test_runs_without_a_round_are_left_out_with_a_note(tmp_path: Path, runs: Path) -> None:
    early, new = (copy_run(tmp_path, runs / "local-0") for _ in range(2))
    (early / "metrics.jsonl").write_text('{"round": 1, "acc')  # after a kill or a full disk
    for name in ("metrics.jsonl", "events.jsonl", "checkpoint.safetensors"):
        (new / name).unlink()
    page, _ = report(tmp_path, [early, runs / "fedavg-0", new])
    assert not [row for row in page.rows if row and row[0] == "local"]
    assert all(f"{run.name} is left out: it has no completed round yet." in page.text for run in (early, new))


def test_an_incomplete_last_line_is_ignored(tmp_path: Path, runs: Path) -> None:
    cut = copy_run(tmp_path, runs / "fedavg-0")
    text = (cut / "metrics.jsonl").read_text()
    (cut / "metrics.jsonl").write_text(text + '{"round": 3, "acc')
    assert len(group_runs([cut])[0].runs[0].history) == 2


def test_incomplete_events_are_accepted() -> None:
    events: list[dict[str, Any]] = [{"event": "start"}, {"event": "resume"}, {"event": "absent"}]
    run = make_run([{"round": 1}], events)
    assert (run.method_name, run.interruptions, run.absent_counts) == ("fedavg", 1, {"?": 1})


def test_invalid_run_directories_are_errors(tmp_path: Path, runs: Path) -> None:
    out = tmp_path / "report"
    with pytest.raises(RunError, match="is not a run directory: it does not exist"):
        write_report([tmp_path / "nothing"], out)
    with pytest.raises(RunError, match="is not a run directory: it has no settings.json"):
        write_report([runs / "fedavg-0", tmp_path], out)
    with pytest.raises(RunError, match="no runs to report on"):
        write_report([], out)
    broken = copy_run(tmp_path, runs / "fedavg-0")
    (broken / "metrics.jsonl").write_text("")
    with pytest.raises(RunError, match="has no completed round yet"):
        write_report([broken], out)
    (broken / "metrics.jsonl").write_text('{"round": 1, "acc\n')
    with pytest.raises(RunError, match="metrics.jsonl cannot be read"):
        write_report([broken], out)
    (broken / "metrics.jsonl").unlink()
    with pytest.raises(RunError, match="metrics.jsonl cannot be read"):  # the checkpoint has rounds
        write_report([broken], out)
    (broken / "settings.json").write_text('{"format": 2}')
    with pytest.raises(RunError, match="settings.json cannot be read"):
        write_report([broken], out)
    assert not out.exists()
    out.write_text("in the way")
    with pytest.raises(RunError, match="cannot write to .*: File exists"):
        write_report([runs / "fedavg-0"], out)


# --- verdict --------------------------------------------------------------------------------------------------


def group(label: str, *ends: float, mb: float = 1.0, seconds: float = 10.0, rounds: int = 2, **facts: Any) -> RunGroup:
    """Runs with these final accuracies, one per seed, and half of them in round 1."""
    settings = {"method": label.split()[0], "data": "digits", "data_seed": None, **facts}
    runs = []
    for seed, end in enumerate(ends):
        lines = [round_metrics(1, end / 2, int(mb * 250_000)), round_metrics(2, end, int(mb * 500_000))]
        history = [{**metrics, "seconds": seconds * metrics["round"] / 2} for metrics in lines]
        metadata = {"settings": {**settings, "seed": seed}, "method": {"rounds": rounds}, "objects": []}
        runs.append(Run(Path(f"{label}-{seed}"), metadata, history, []))
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
        "fedprox 78.0 ± 5.0 % is not significant (95 %, 3 seeds). All others are behind."
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
        run.history[0]["accuracy"] = start  # type: ignore[index]
    assert winner([fedmk, fedavg]) is fedmk and not any(
        text.startswith("Early lead") for text in verdict([fedmk, fedavg])
    )


def test_the_verdict_mentions_the_worst_clients() -> None:
    fedmk, fedavg = group("fedmk", 0.8, 0.8), group("fedavg", 0.7, 0.7)
    for method_runs, low in ((fedmk, 0.5), (fedavg, 0.2)):
        for run in method_runs.runs:
            run.history[-1]["clients"] = {"0": 0.9, "1": low}  # type: ignore[index]
    assert "Its worst tenth of clients reaches 50.0 %, compared with 20.0 % for fedavg." in verdict([fedmk, fedavg])


def test_the_best_is_the_first_row() -> None:
    worse, better, unevaluated = group("local", 0.3, 0.31), group("fedavg", 0.7, 0.71), group("fedmk", 0.0)
    unevaluated.runs[0].history[0].pop("accuracy"), unevaluated.runs[0].history[1].pop("accuracy")  # type: ignore[attr-defined]
    rows = re.findall(r"<tr[^>]*><t[hd][^>]*>(\w+)</t", _render_results([unevaluated, worse, better]))
    assert rows[1:] == ["fedavg", "local", "fedmk"]


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
        run.history[-1]["fairness"] = {"mean": 0.5}  # type: ignore[index]
    assert winner([sure, fair]) is None and "are evaluated differently" in verdict([sure, fair])[0]


def test_an_evaluation_on_groups_has_an_interval_over_groups() -> None:
    frl = group("frl", 0.5)
    assert frl.accuracy == (0.5, None) and frl.averaged_over == "1 seed"
    frl.runs[0].history[-1]["groups"] = [0.4, 0.5, 0.6]  # type: ignore[index]
    assert frl.accuracy == pytest.approx((0.5, interval([0.4, 0.5, 0.6]).half)) and frl.averaged_over == "3 groups"
    f2l = group("f2l", 0.5)
    for figure, value in (("groups", [0.4, 0.5, 0.6]), ("tasks", 3)):
        f2l.runs[0].history[-1][figure] = value  # type: ignore[index]
    assert f2l.averaged_over == "3 tasks" and winner([frl, f2l]) is None
    for evaluated, text in (
        (frl, "groups that start from the prepared model; mean"),
        (f2l, "queries of novel classes; mean"),
    ):
        assert text in _render_results([evaluated]) and f"95 % confidence over {evaluated.units}" in _render_results(
            [evaluated]
        )


# --- bars, maps, traffic, rings -------------------------------------------------------------------------------


def test_bars_are_means_with_whiskers() -> None:
    results = {"fedavg": Interval(0.6, 0.1), "fedavg lr=1": Interval(0.5, None)}
    styles = assign_label_styles({"fedavg": "fedavg", "fedavg lr=1": "fedavg"})
    axes = plot_bars(results, styles).axes[0]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([60, 50])  # type: ignore[attr-defined]
    assert {text.get_text() for text in axes.texts} == {"60.0 ± 10.0", "50.0"}
    assert styles["fedavg lr=1"].color == styles["fedavg"].color and styles["fedavg lr=1"] != styles["fedavg"]


def test_runs_that_differ_in_two_settings_make_a_heat_map(tmp_path: Path, runs: Path) -> None:
    changes = [(lr, batch_size) for lr in (0.1, 0.3) for batch_size in (8, 16, 4)][:-1]
    paths = [
        copy_run(tmp_path, runs / "fedavg-0", method={"lr": lr, "batch_size": batch_size}) for lr, batch_size in changes
    ]
    groups = group_runs(paths)
    grid = build_grid(groups)
    accuracy = groups[0].accuracy
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


def test_a_damaged_ledger_is_an_error(tmp_path: Path, runs: Path) -> None:
    broken = copy_run(tmp_path, runs / "fedavg-0")
    (broken / "ledger.csv").write_text("round,client,direction,kind,bytes\n1,2,up,train,many\n")
    with pytest.raises(RunError, match="ledger.csv cannot be read"):
        write_report([broken], tmp_path / "report")


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


def test_ours_is_compared_with_the_paper(tmp_path: Path, runs: Path) -> None:
    folder = tmp_path / "recipe/iid"
    for seed in (0, 1):
        shutil.copytree(runs / f"fedavg-{seed}", folder / f"fedavg-tuned-seed{seed}")
    cell = {"row": "FedAvg, tuned", "column": "IID", "paper": 70.5}
    recipe = {"title": "T", "paper": "P", "mean": "samples", "quick": False, "cells": {"iid/fedavg-tuned": cell}}
    (tmp_path / "recipe/recipe.json").write_text(json.dumps(recipe))
    page, _ = report(tmp_path, sorted(folder.iterdir()))
    ours = group_runs(sorted(folder.iterdir()))[0].accuracy
    assert ours and ours.half
    shown = f"{100 * ours.mean:.2f} ± {100 * ours.half:.2f}"
    assert page.row("FedAvg, tuned") == ["FedAvg, tuned", "IID", shown, "70.50", f"{100 * ours.mean - 70.5:+.2f}"]
    assert "T. Paper: P." in page.text and "quick settings" not in page.text
    (tmp_path / "recipe/recipe.json").write_text(json.dumps({**recipe, "mean": "clients", "quick": True}))
    page, _ = report(tmp_path, sorted(folder.iterdir()))
    by_client = [run.history[-1]["clients"].values() for run in group_runs(sorted(folder.iterdir()))[0].runs]
    mean = np.mean([np.mean(list(values)) for values in by_client])
    assert page.row("FedAvg, tuned")[2].startswith(f"{100 * mean:.2f} ± ") and "quick settings" in page.text


# --- appearance -----------------------------------------------------------------------------------------------


def contrast(first: str, second: str) -> float:
    def luminance(color: str) -> float:
        parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_text_and_lines_have_contrast_in_both_themes(tmp_path: Path, runs: Path) -> None:
    page, _ = report(tmp_path, [runs / "fedavg-0"])
    for block in ("color-scheme: light", "color-scheme: dark"):
        (declarations, *_) = re.findall(rf"{block};([^}}]*)}}", page.text)
        values = dict(re.findall(r"--(\w+): (#\w{6});", declarations))
        background = values["ffffff"]
        assert min(contrast(values[name], background) for name in ("222222", "faint", "link")) >= 4.5
        minimum = 2 if "light" in block else 3  # the palette's orange and sky are pale on white
        assert min(contrast(values.get(c.lstrip("#").lower(), c), background) for c in COLORS) >= minimum
    assert INK in DARK and "fill: var(--222222)" in page.text and "fill: #222222" not in page.text


def test_the_page_of_ten_methods_and_five_seeds_is_small(tmp_path: Path, runs: Path) -> None:
    paths = []
    rng = np.random.default_rng(0)
    for method in (
        "local",
        "fedavg",
        "fedprox",
        "fedbn",
        "fedgen",
        "fedmk",
        "feddistill",
        "fedensemble",
        "reptile",
        "frl",
    ):
        for seed in range(5):
            path = copy_run(tmp_path, runs / "fedavg-0", settings={"seed": seed, "method": method})
            events = (path / "events.jsonl").read_text().replace('"method": "fedavg"', f'"method": "{method}"')
            (path / "events.jsonl").write_text(events)
            by_client = {str(client): float(rng.random()) for client in range(100)}
            history = [round_metrics(number, float(rng.random()), 10**6 * number) for number in range(1, 101)]
            history[-1]["clients"] = by_client
            (path / "metrics.jsonl").write_text("".join(json.dumps(metrics) + "\n" for metrics in history))
            metadata = json.loads((path / "settings.json").read_text())
            (path / "settings.json").write_text(
                json.dumps({**metadata, "method": {**metadata["method"], "rounds": 100}})
            )
            paths.append(path)
    page, pictures = report(tmp_path, paths)
    assert len(page.text.encode()) < 5e6 and set(SEVERAL) <= set(pictures)
    assert len(page.row("fedgen")) == 8 and "No clear winner" in page.text
