"""Reports: what pictures and pages say is what runs and data hold."""

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
from fewer.methods.fedmk import FedMK, MKState
from fewer.methods.metafed import MetaFed
from fewer.report import client_picture, curve_picture, partition_picture, run_reader, sheet_picture, write_report
from fewer.report.charts import Grid, Ring, bar_picture, heat_picture, ring_picture, traffic_picture
from fewer.report.figures import Histories, Interval, curve, interval
from fewer.report.gallery import grid_of, ring_of
from fewer.report.html import Picture, figure_of
from fewer.report.page import _results, _worst
from fewer.report.pictures import class_counts, made_picture
from fewer.report.run_reader import Run, RunGroup
from fewer.report.style import COLORS, DARK, INK, look, looks, png, style, svg
from fewer.report.verdict import paired, verdict, winner
from fewer.runs.result import open_result
from tests.test_cli import call

# --- figures and pictures -------------------------------------------------------------------------------------


def line(number: int, accuracy: float | None, up: int = 0, **more: Any) -> dict[str, Any]:
    known = {} if accuracy is None else {"accuracy": accuracy}
    return {"round": number, **known, "up": up, "down": up, "seconds": 1.0, **more}


def round_picture(histories: Histories) -> Figure | None:
    return curve_picture("Accuracy by round", {"": histories}, "round")


def megabyte_picture(histories: Histories) -> Figure | None:
    return curve_picture("Accuracy by traffic", {"": histories}, "megabytes")


THREE = [[line(1, 0.2, 1_000_000), line(2, accuracy, 2_000_000)] for accuracy in (0.5, 0.6, 0.7)]


def test_band_by_hand() -> None:
    # mean 0.6, standard deviation 0.1, t(2 degrees, 97.5 %) = 4.30265
    half = 4.302652729911275 * 0.1 / math.sqrt(3)
    assert interval([0.5, 0.6, 0.7]) == pytest.approx((0.6, half))
    assert interval([0.5]) == (0.5, None)
    figure = round_picture({"fedavg": THREE})
    assert figure
    (band,) = figure.axes[0].collections
    heights = band.get_paths()[0].vertices
    at_two = np.asarray(heights)[np.asarray(heights)[:, 0] == 2][:, 1]
    assert (at_two.min(), at_two.max()) == pytest.approx((60 - 100 * half, 60 + 100 * half))


def test_a_single_seed_has_no_band() -> None:
    figure = round_picture({"fedavg": THREE[:1]})
    assert figure and not figure.axes[0].collections and len(figure.axes[0].lines) == 1


def test_megabytes_are_both_ways_and_summed_up() -> None:
    figure = megabyte_picture({"fedavg": THREE})
    assert figure
    assert list(figure.axes[0].lines[0].get_xdata()) == [2, 4]  # type: ignore[arg-type]


def test_traffic_of_very_different_size_is_on_a_logarithmic_scale() -> None:
    small = [[line(1, 0.2, 1000), line(2, 0.3, 2000)]]
    figures = [megabyte_picture({"fedavg": THREE}), megabyte_picture({"fedavg": THREE, "local": small})]
    assert [figure and figure.axes[0].get_xscale() for figure in figures] == ["linear", "log"]


def test_only_rounds_that_all_seeds_evaluated_are_shown() -> None:
    histories = [
        [line(1, None), line(2, 0.4), line(3, None), line(4, 0.5)],
        [line(1, 0.1), line(2, 0.6), line(3, None)],
    ]
    assert [(point.round, point.accuracy.mean) for point in curve(histories)] == [(2, 0.5)]
    assert round_picture({"fedavg": [[line(1, None)]]}) is None
    assert round_picture({}) is None


def test_clients_are_sorted_and_their_mean_is_a_line() -> None:
    runs = [[line(1, 0.5, clients={"0": 0.9, "1": 0.1})], [line(1, 0.5, clients={"0": 0.5})]]
    figure = client_picture({"fedavg": runs, "old": [[line(1, 0.5)]]})
    assert figure
    dots, mean = figure.axes[0].lines
    assert list(dots.get_ydata()) == pytest.approx([10, 50, 90])  # type: ignore[arg-type]
    assert list(mean.get_ydata()) == pytest.approx([50, 50])  # type: ignore[arg-type]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fedavg, mean 50.0"]
    assert client_picture({"fedavg": [[line(1, 0.5)]]}) is None


def test_a_method_has_one_look_everywhere() -> None:
    alone, together = round_picture({"fedbn": THREE}), megabyte_picture({"fedavg": THREE, "fedbn": THREE})
    assert alone and together
    assert alone.axes[0].lines[0].get_color() == together.axes[0].lines[1].get_color() == look("fedbn").color
    assert look("my-method") == ("#CC79A7", "o", ":")  # from one version to the next
    often = ("local", "fedavg", "fedprox", "fedbn", "metafed", "fedmk", "fedgen")
    assert {look(method).color for method in often} == set(COLORS)
    assert len({look(f"method-{number}") for number in range(20)}) > 15
    assert len({look(name) for name in names()}) == len(names())  # those of the package are all different


def test_the_users_style_is_left_alone() -> None:
    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"axes.grid": False, "text.usetex": True}):
        figure = round_picture({"$\\fedavg$": THREE})
        assert figure
        png(figure)
        assert matplotlib.rcParams["text.usetex"] and not matplotlib.rcParams["axes.grid"]
        with style():
            assert matplotlib.rcParams["axes.grid"]
    assert dict(matplotlib.rcParams) == before


def test_the_same_picture_gives_the_same_bytes(digits: Data) -> None:
    assert png(partition_picture(digits)) == png(partition_picture(digits))
    assert svg(partition_picture(digits)) == svg(partition_picture(digits))


def bubbles(figure: Figure) -> tuple[np.ndarray, np.ndarray]:
    (drawn,) = figure.axes[0].collections
    return np.asarray(drawn.get_offsets()).astype(int), drawn.get_sizes()  # type: ignore[attr-defined]


def test_bubbles_are_the_datas_counts(digits: Data) -> None:
    counts = np.zeros((len(digits), digits.classes), int)
    for client in range(len(digits)):
        for label in digits.client(client).train.slice(0, 9999)[1].tolist():
            counts[client, label] += 1
    np.testing.assert_array_equal(class_counts(digits), counts)
    places, areas = bubbles(partition_picture(digits))
    assert len(places) == (counts > 0).sum()
    shown = counts[places[:, 0], places[:, 1]]
    np.testing.assert_allclose(areas / shown, areas[0] / shown[0])


def test_of_many_clients_the_first_sixty_are_shown() -> None:
    data = fewer.data.load("digits", clients=70, partition="iid")
    figure = partition_picture(data)
    assert bubbles(figure)[0][:, 0].max() == 59
    assert "first 60 of 70 clients" in figure.get_suptitle()


def named(data: ArrayData, *names: str) -> ArrayData:
    return ArrayData(**{**vars(data), "names": names})


def test_classes_have_names_where_they_are_known() -> None:
    data = named(from_arrays(np.zeros((40, 5), np.float32), np.arange(40) % 3, clients=2), "a", " ", "$c_1$")
    labels = partition_picture(data).axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == ["a", "' '", "$c_1$"]


def test_the_sheet_shows_images_of_each_class(digits: Data) -> None:
    figure = sheet_picture(digits, columns=3)
    assert figure
    (image,) = figure.axes[0].images
    shown = np.asarray(image.get_array())
    assert shown.shape == (10 * 9 - 1, 3 * 9 - 1, 3)
    x, y = digits.test.x, digits.test.y
    third_two = x[np.flatnonzero(y == 2)[2], 0].numpy() / 255
    np.testing.assert_allclose(shown[2 * 9 : 2 * 9 + 8, 2 * 9 : 2 * 9 + 8, 0], third_two)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_sheet_shows_no_more_than_twenty_classes(channels: int) -> None:
    x = np.random.default_rng(0).standard_normal((500, channels, 6, 5)).astype(np.float32)
    figure = sheet_picture(from_arrays(x, np.arange(500) % 25, clients=2, partition="iid"))
    assert figure and "20 of 25 classes" in figure.get_suptitle()
    assert len(figure.axes[0].get_yticks()) == 20
    assert png(figure)


def test_the_sheet_shows_windows_as_lines() -> None:
    x = np.random.default_rng(0).standard_normal((200, 9, 16)).astype(np.float32)
    figure = sheet_picture(from_arrays(x, np.arange(200) % 4, clients=2, partition="iid"), columns=5)
    assert figure and "first 3 of 9 channels" in figure.get_suptitle()
    assert len(figure.axes[0].lines) == 4 * 5 * 3


def test_of_text_and_features_there_is_no_sheet() -> None:
    labels = np.arange(60) % 2
    assert sheet_picture(from_arrays(np.zeros((60, 7), np.float32), labels, clients=2)) is None
    assert sheet_picture(from_arrays(["good film", "bad film"] * 30, labels, clients=2)) is None


def test_made_images_stand_by_row_and_class_in_the_range_of_pixels(digits: Data) -> None:
    seen, labels = digits.test.slice(0, 50)
    three = seen[labels == 3][:2].numpy()
    beyond = np.full((1, 1, 8, 8), 1e3, np.float32)
    figure = made_picture(digits, "Made", {"client 4": {3: three}, "client 7": {0: beyond, 2: -beyond}}, each=2)
    assert figure
    axes = figure.axes[0]
    shown = np.asarray(axes.images[0].get_array())[..., 0]
    assert shown.shape == (2 * 9 - 1, 20 * 9 - 1 + 2 * 9)  # two pixels more between classes
    pixels = digits.test.x[torch.nonzero(labels == 3)[:2, 0], 0].numpy() / 255
    for copy, left in enumerate((3 * 20, 3 * 20 + 9)):
        np.testing.assert_allclose(shown[:8, left : left + 8], pixels[copy], atol=1e-5)
    assert (shown[:8, : 3 * 20] == 1).all() and (shown[:8, 4 * 20 :] == 1).all()  # blank
    assert (shown[9:, :8] == 1).all() and (shown[9:, 2 * 20 : 2 * 20 + 8] == 0).all()  # cut off
    assert [text.get_text() for text in axes.get_yticklabels()] == ["client 4", "client 7"]
    assert [text.get_text() for text in axes.get_xticklabels()] == [str(label) for label in range(10)]
    assert axes.get_xticks()[3] == pytest.approx(3 * 20 + 8)
    assert made_picture(digits, "Made", {"client 4": {}}) is None
    readings = from_arrays(np.zeros((40, 5), np.float32), np.arange(40) % 3, clients=2)
    assert made_picture(readings, "Made", {"client 0": {0: np.zeros((1, 5))}}) is None


def test_of_made_values_that_are_no_pixels_the_lowest_is_black() -> None:
    x = np.random.default_rng(0).standard_normal((60, 1, 4, 4)).astype(np.float32)
    made = np.linspace(-9, 3, 16, dtype=np.float32).reshape(1, 1, 4, 4)
    figure = made_picture(from_arrays(x, np.arange(60) % 2, clients=2), "Made", {"client 0": {0: made}})
    assert figure
    shown = np.asarray(figure.axes[0].images[0].get_array())[:4, :4, 0]
    np.testing.assert_allclose(shown.flatten(), np.linspace(0, 1, 16), atol=1e-6)


# --- the page -------------------------------------------------------------------------------------------------


class Bold(FedAvg):
    """Has a name that must be escaped."""

    name: ClassVar[str] = "<b>"


class Page(HTMLParser):
    """What is on a page."""

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
        """The first row of any table that begins with this cell."""
        return next(row for row in self.rows if row and row[0] == first)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small runs that reports are made from."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        data = fewer.data.load("digits", clients=4, alpha=1.0, seed=seed)
        fewer.run(FedAvg(rounds=2, cohort=3), data, seed=seed, out=folder / f"fedavg-{seed}")
    data = fewer.data.load("digits", clients=4, alpha=1.0)
    fewer.run(Local(rounds=2, cohort=3), data, out=folder / "local-0")
    fewer.run(FedAvg(rounds=3, cohort=3), data, out=folder / "sparse", evaluate_every=2)
    fewer.run(Bold(rounds=3, cohort=4), data, out=folder / "bold", drop=0.3)
    own = from_arrays(data.source.x, data.source.y, clients=3, partition="iid", name="<i>own</i>")
    fewer.run(FedAvg(rounds=1, cohort=3), own, out=folder / "own")
    small = {"per_class": 3, "matching": 1, "outer_steps": 0, "server_steps": 1, "pseudo": 0, "codec": "float32"}
    fewer.run(FedMK(rounds=3, cohort=4, **small), data, out=folder / "fedmk")
    held = fewer.data.load("digits", clients=5, alpha=1.0, validation=0.2)
    fewer.run(MetaFed(rounds=3, local_steps=2), held, out=folder / "metafed", drop=0.2)
    return folder


MANY = ("fedavg-0", "fedavg-1", "local-0", "sparse", "bold", "own", "fedmk")


def gather(paths: Sequence[Path]) -> list[RunGroup]:
    return run_reader.gather(paths)[0]


def report(tmp_path: Path, runs: Sequence[Path]) -> tuple[Page, list[str]]:
    (path,) = write_report(runs, tmp_path / "report", pictures=False)
    page = Page(path)
    pictures = re.findall(r'<figure[^>]*><div class="scroll"[^>]* aria-label="([^"]+)"', page.text)
    basics(page, len(pictures))
    return page, pictures


def test_pictures_are_files_too(tmp_path: Path, runs: Path) -> None:
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
    figures = list(csv.DictReader((tmp_path / "pictures/accuracy-by-round.csv").open()))
    history = [json.loads(text) for text in (runs / "fedmk/metrics.jsonl").read_text().splitlines()]
    assert [float(row["accuracy"]) for row in figures] == [each["accuracy"] for each in history]
    assert [float(row["megabytes"]) for row in figures] == [(each["up"] + each["down"]) / 1e6 for each in history]


def basics(page: Page, pictures: int) -> None:
    """What lets everyone read a page: names for all, headings in order, room for pictures; and that it is alone."""
    images = [each for tag, each in page.tags if tag == "img" or (tag == "svg" and each.get("role") == "img")]
    assert len(images) == pictures
    for image in images:
        assert (image.get("alt") or image["aria-label"]) and int(image["width"]) and int(image["height"])
        assert image.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")
    links = [each.get("href", "#") for _, each in page.tags if not {"src", "action", "srcset"} & each.keys()]
    assert all(link.startswith(("#", "data:text/csv;")) for link in links)
    assert "http:" not in page.text and "https:" not in page.text and "url(http" not in page.text
    kinds = [tag for tag, _ in page.tags]
    assert not set(kinds) & {"link", "iframe", "object"} and kinds.count("script") == 1
    assert ("html", {"lang": "en"}) in page.tags and kinds.count("title") == kinds.count("main") == 1
    levels = [int(tag[1]) for tag in kinds if tag in ("h1", "h2", "h3")]
    assert levels[0] == 1 and levels.count(1) == 1
    ids = [each["id"] for _, each in page.tags if "id" in each]
    assert len(ids) == len(set(ids))
    assert all(each.get("aria-label") for tag, each in page.tags if each.get("tabindex"))


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
    assert "All clients that were asked answered, and no run broke off." in page.text
    assert f"fedavg reaches {100 * last['accuracy']:.1f} % accuracy (1 seed)" in page.text


def test_a_report_shows_the_images_that_a_method_made(tmp_path: Path, runs: Path) -> None:
    page, pictures = report(tmp_path, [runs / "fedmk"])
    assert pictures == [*PLAIN, "made-by-client", "made-by-round", *DATA]
    assert "the last D̂ of 4 of the 4 clients that sent any; blank where there is none." in page.text
    assert "is not shown" not in page.text
    result = open_result(runs / "fedmk")
    by_client, by_round = result.method.image_grids(result.state)
    assert list(by_client.rows) == [f"client {client}" for client in range(4)] and by_client.each == 2
    assert list(by_round.rows) == ["round 1", "round 2", "round 3"] and by_round.each == 1
    for client, row in enumerate(by_client.rows.values()):
        sent = {label: images for label, images in result.state.knowledge[client].items() if len(images)}
        assert sent and {str(label) for label in row} == sent.keys()
        assert all(torch.equal(images, sent[str(label)]) for label, images in row.items())
    last = result.state.knowledge[next(iter(result.state.knowledge))]
    assert all(torch.equal(images, last[str(label)][:1]) for label, images in by_round.rows["round 3"].items())


def test_of_many_rounds_ten_are_shown_from_the_first_to_the_last() -> None:
    one = {"0": torch.zeros(1, 1, 8, 8), "1": torch.zeros(0, 1, 8, 8)}
    pages = dict.fromkeys(range(1, 41), one)
    _, by_round = FedMK().image_grids(MKState({}, {}, one, {0: one}, pages))
    names = list(by_round.rows)
    assert len(names) == 10 and (names[0], names[-1]) == ("round 1", "round 40")
    assert [list(row) for row in by_round.rows.values()] == [[0]] * 10
    assert len(FedMK().image_grids(MKState({}, {}, one, {0: one}, {1: one}))) == 1  # nothing has changed yet


CLUMSY = """
from pathlib import Path
from fewer import FedAvg

Path(__file__).with_name("was-run").touch()

class Clumsy(FedAvg):
    '''Has images that cannot be had.'''

    def image_grids(self, state):
        raise KeyError("album")
"""


def test_a_report_is_written_where_images_cannot_be_had(tmp_path: Path, runs: Path) -> None:
    shown = [*PLAIN, *DATA]
    gone = changed(tmp_path, runs / "fedmk", settings={"method": "gone.py:FedMK"})
    page, pictures = report(tmp_path, [gone])
    assert pictures == shown and "is not shown" not in page.text
    early = changed(tmp_path, runs / "fedmk")
    (early / "checkpoint.safetensors").unlink()
    page, pictures = report(tmp_path, [early])
    assert pictures == shown and f"What fedmk made is not shown: {early.name} has no checkpoint yet" in page.text
    (early / "checkpoint.safetensors").write_bytes(b"nothing")
    assert report(tmp_path, [early])[1] == shown


def test_a_report_runs_no_file_that_a_run_names(tmp_path: Path, runs: Path) -> None:
    file = tmp_path / "clumsy_in_a_file.py"
    file.write_text(CLUMSY)
    clumsy = changed(tmp_path, runs / "fedavg-0", settings={"method": f"{file}:Clumsy"})
    page, _ = report(tmp_path, [clumsy])
    assert "What fedavg does" not in page.text and "is not shown" not in page.text
    netted = changed(tmp_path, runs / "fedmk", settings={"model": f"{file}:Net"})
    page, _ = report(tmp_path, [netted])
    assert "What fedmk does" in page.text and "What fedmk made is not shown: its net is in a file" in page.text
    assert not (tmp_path / "was-run").exists()
    find(f"{file}:Clumsy")  # as where `fewer run` has just run it, and writes the report
    page, pictures = report(tmp_path, [clumsy, runs / "fedmk"])
    assert pictures == [*SEVERAL, "made-by-client-2", "made-by-round-2", *DATA]
    assert "What fedavg made is not shown: KeyError: &#x27;album&#x27;." in page.text
    assert "What fedavg does: has images" in report(tmp_path, [clumsy])[0].text


def test_seeds_of_a_method_are_put_together(tmp_path: Path, runs: Path) -> None:
    page, pictures = report(tmp_path, [runs / name for name in ("local-0", "fedavg-1", "fedavg-0")])
    assert pictures == [*SEVERAL, *DATA]
    found = [
        json.loads((runs / f"fedavg-{seed}" / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"]
        for seed in (0, 1)
    ]
    mean, half = interval(found)
    assert half
    assert page.row("fedavg")[1] == f"{100 * mean:.2f} ± {100 * half:.2f}"
    assert page.row("fedavg")[-1] == "0, 1"
    last = json.loads((runs / "local-0" / "metrics.jsonl").read_text().splitlines()[-1])
    assert page.row("local")[1:3] == [f"{100 * last[name]:.2f}" for name in ("accuracy", "global")]


def test_a_report_on_many_runs(tmp_path: Path, runs: Path) -> None:
    page, pictures = report(tmp_path, [runs / name for name in sorted(MANY)])
    assert pictures == [*SEVERAL, "made-by-client-3", "made-by-round-3", *DATA]
    assert "<h1>digits, 4 clients, dirichlet (alpha 1); &lt;i&gt;own&lt;/i&gt;, 3 clients</h1>" in page.text
    assert "Not only the methods differ: " in page.text and "data = digits, clients = 4" in page.text


def test_names_are_escaped_and_absent_answers_counted(tmp_path: Path, runs: Path) -> None:
    page, _ = report(tmp_path, [runs / "bold"])
    assert page.row("<b>") and "b" not in {tag for tag, _ in page.tags}
    dropped = (runs / "bold" / "events.jsonl").read_text().count('"reason": "dropped"')
    assert dropped and ["method", "dropped", "absent in all", "went on after a break"] in page.rows
    assert ["<b>", str(dropped), str(dropped), "0"] in page.rows
    assert str(Path(__file__)) not in page.text  # where a method's file lies


def test_a_run_that_was_not_evaluated_in_every_round(tmp_path: Path, runs: Path) -> None:
    report(tmp_path, [runs / "sparse"])
    (group,) = gather([runs / "sparse"])
    assert [point.round for point in curve([run.history for run in group.runs])] == [2, 3]


def test_data_of_the_users_own_is_not_shown(tmp_path: Path, runs: Path) -> None:
    page, pictures = report(tmp_path, [runs / "own"])
    assert pictures == PLAIN
    assert "The data is not shown" not in page.text


def changed(tmp_path: Path, run: Path, **description: Any) -> Path:
    """A copy of a run with another settings.json."""
    copy = tmp_path / f"copy-{len(list(tmp_path.iterdir()))}"
    shutil.copytree(run, copy)
    told = json.loads((copy / "settings.json").read_text())
    for part, values in description.items():
        told[part] = {**told[part], **values}
    (copy / "settings.json").write_text(json.dumps(told))
    return copy


def test_data_that_changed_or_is_gone_is_not_shown(tmp_path: Path, runs: Path) -> None:
    other = changed(tmp_path, runs / "fedavg-0", data={"fingerprint": "00000000"})
    page, pictures = report(tmp_path, [other])
    assert (
        pictures == PLAIN and f"The data is not shown: digits is no longer what {other.name} was run on." in page.text
    )
    gone = changed(tmp_path, runs / "fedavg-0", settings={"data": "npz:gone.npz"})
    page, pictures = report(tmp_path, [gone])
    assert pictures == PLAIN and "The data is not shown: no &#x27;gone.npz&#x27;" in page.text


def test_a_run_without_figures_by_client_that_was_stopped(tmp_path: Path, runs: Path) -> None:
    copy = changed(tmp_path, runs / "local-0")
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text(lines[0])
    with (copy / "events.jsonl").open("a") as file:
        file.write('{"event": "sto\n{"time": 1, "event": "stop", "round": 1, "reason": "KeyboardInterrupt: "}\n')
    page, pictures = report(tmp_path, [copy])
    assert pictures == [*CURVES, "traffic", *DATA]
    assert "No run has come to its end yet" in page.text
    assert page.row("local")[2:4] == ["–", "1 of 2"]
    assert "local with seed 0 has come to round 1 of 2, then stopped: KeyboardInterrupt" in page.text


def test_what_differs_is_never_put_together(tmp_path: Path, runs: Path) -> None:
    one = runs / "fedavg-0"
    faster = changed(tmp_path, one, method={"lr": 0.3}, settings={"seed": 1})
    skewed = changed(tmp_path, one, settings={"seed": 1, "alpha": 0.1})
    pooled = changed(tmp_path, one, settings={"seed": 1, "runtime": "pool", "data_dir": "/elsewhere"})

    def told(*paths: Path) -> dict[str, list[int]]:
        return {group.label: [run.seed for run in group.runs] for group in gather(paths)}

    assert told(pooled, one) == {"fedavg": [0, 1]}
    assert told(one, faster) == {"fedavg lr=0.1": [0], "fedavg lr=0.3": [1]}
    assert told(one, skewed, runs / "local-0") == {
        "fedavg alpha=1.0": [0],
        "fedavg alpha=0.1": [1],
        "local": [0],
    }
    many = changed(tmp_path, one, settings={"alpha": 0.1, "drop": 0.1, "slow": 0.1})
    assert told(one, many) == {"fedavg": [0], "fedavg (2)": [0]}
    again = [changed(tmp_path, one), changed(tmp_path, one)]
    assert told(one, *again) == {"fedavg": [0], "fedavg (2)": [0], "fedavg (3)": [0]}
    assert told(one, one) == {"fedavg": [0]}


def test_absent_answers_of_a_round_begun_anew_count_once(tmp_path: Path, runs: Path) -> None:
    copy = changed(tmp_path, runs / "bold")
    events = (copy / "events.jsonl").read_text()
    (copy / "events.jsonl").write_text(events + events)
    assert gather([copy])[0].absent == gather([runs / "bold"])[0].absent


def told_of(history: list[dict[str, Any]], events: Sequence[dict[str, Any]] = (), path: Path = Path("run")) -> Run:
    about = {"settings": {"method": "fedavg", "seed": 0}, "method": {"rounds": len(history)}, "own": []}
    return Run(path, about, history, events)


def test_faults_of_rounds_that_were_done_again_do_not_count() -> None:
    absent = {"event": "absent", "round": 3, "client": 1, "reason": "late", "handler": "train"}
    told: list[dict[str, Any]] = [{"event": "start"}, {**absent, "round": 2}, absent, {"event": "resume", "round": 2}]
    run = told_of([{"round": number} for number in (1, 2, 3)], told)
    assert run.absent == {"late": 1} and run.breaks == 1
    assert told_of([{"round": 1}], [{"event": "start"}, {"event": "resume", "round": 1}]).breaks == 0  # it was over


def test_a_round_under_way_is_not_in_the_traffic(tmp_path: Path) -> None:
    (tmp_path / "ledger.csv").write_text("round,client,direction,kind,bytes\n1,0,up,train,5\n2,0,up,train,7\n")
    assert told_of([{"round": 1}], path=tmp_path).traffic == {("up", "train"): 5}


def test_the_worst_tenth_by_hand() -> None:
    clients = {str(client): client / 100 for client in range(1, 21)}
    text = _worst([RunGroup("fedavg", [told_of([{"round": 1, "clients": clients}])])])
    assert "<td>10.5</td><td>1.5</td><td>client 1 1.0, client 2 2.0, client 3 3.0</td>" in text


def test_a_caption_and_an_alt_are_text() -> None:
    drawn = bar_picture({"a": Interval(0.5, None), "b": Interval(0.4, None)}, looks({"a": "a", "b": "b"}))
    page = figure_of(Picture("bars", drawn, "<script>", '"><script>'))
    assert "<script>" not in page and page.count("&lt;script&gt;") == 2


def test_a_directory_of_runs_and_of_comparisons_is_reported_on_wholly(tmp_path: Path, runs: Path) -> None:
    shutil.copytree(runs / "fedavg-0", tmp_path / "all/first")
    shutil.copytree(runs / "local-0", tmp_path / "all/compared/local-seed0")
    told = call("report", tmp_path / "all", "--out", tmp_path / "report").stdout
    page = Page(tmp_path / "report/report.html")
    assert page.row("fedavg") and page.row("local") and "files of its pictures are in" in told


def test_a_report_without_a_picture_is_written(tmp_path: Path, runs: Path) -> None:
    early = changed(tmp_path, runs / "own")
    (early / "metrics.jsonl").write_text(json.dumps(line(1, None)) + "\n")
    (early / "ledger.csv").write_text("round,client,direction,kind,bytes\n")
    assert call("report", early, "--out", tmp_path / "report").stdout == f"{tmp_path / 'report/report.html'}\n"


def test_runs_without_a_round_are_left_out_with_a_word(tmp_path: Path, runs: Path) -> None:
    early, new = (changed(tmp_path, runs / "local-0") for _ in range(2))
    (early / "metrics.jsonl").write_text('{"round": 1, "acc')  # a kill, a full disk
    for name in ("metrics.jsonl", "events.jsonl", "checkpoint.safetensors"):
        (new / name).unlink()
    page, _ = report(tmp_path, [early, runs / "fedavg-0", new])
    assert not [row for row in page.rows if row and row[0] == "local"]
    assert all(f"{run.name} is left out: no round of it has ended yet." in page.text for run in (early, new))


def test_half_a_last_line_is_no_figure(tmp_path: Path, runs: Path) -> None:
    cut = changed(tmp_path, runs / "fedavg-0")
    text = (cut / "metrics.jsonl").read_text()
    (cut / "metrics.jsonl").write_text(text + '{"round": 3, "acc')
    assert len(gather([cut])[0].runs[0].history) == 2


def test_events_that_tell_too_little_are_no_trouble() -> None:
    told: list[dict[str, Any]] = [{"event": "start"}, {"event": "resume"}, {"event": "absent"}]
    run = told_of([{"round": 1}], told)
    assert (run.name, run.breaks, run.absent) == ("fedavg", 1, {"?": 1})


def test_what_is_no_run_is_refused(tmp_path: Path, runs: Path) -> None:
    out = tmp_path / "report"
    with pytest.raises(RunError, match="is not a run of Fewer: it does not exist"):
        write_report([tmp_path / "nothing"], out)
    with pytest.raises(RunError, match="is not a run of Fewer: it has no settings.json"):
        write_report([runs / "fedavg-0", tmp_path], out)
    with pytest.raises(RunError, match="no runs to report on"):
        write_report([], out)
    broken = changed(tmp_path, runs / "fedavg-0")
    (broken / "metrics.jsonl").write_text("")
    with pytest.raises(RunError, match="no round has ended"):
        write_report([broken], out)
    (broken / "metrics.jsonl").write_text('{"round": 1, "acc\n')
    with pytest.raises(RunError, match="metrics.jsonl cannot be read"):
        write_report([broken], out)
    (broken / "metrics.jsonl").unlink()
    with pytest.raises(RunError, match="metrics.jsonl cannot be read"):  # a checkpoint tells of rounds
        write_report([broken], out)
    (broken / "settings.json").write_text('{"format": 1}')
    with pytest.raises(RunError, match="settings.json cannot be read"):
        write_report([broken], out)
    assert not out.exists()
    out.write_text("in the way")
    with pytest.raises(RunError, match="cannot be written: File exists"):
        write_report([runs / "fedavg-0"], out)


# --- who won --------------------------------------------------------------------------------------------------


def group(label: str, *ends: float, mb: float = 1.0, seconds: float = 10.0, rounds: int = 2, **facts: Any) -> RunGroup:
    """Runs that end with these accuracies, one for each seed, half as good in the first round."""
    settings = {"method": label.split()[0], "data": "digits", "data_seed": None, **facts}
    runs = []
    for seed, end in enumerate(ends):
        each = [line(1, end / 2, int(mb * 250_000)), line(2, end, int(mb * 500_000))]
        history = [{**one, "seconds": seconds * one["round"] / 2} for one in each]
        description = {"settings": {**settings, "seed": seed}, "method": {"rounds": rounds}, "own": []}
        runs.append(Run(Path(f"{label}-{seed}"), description, history, []))
    return RunGroup(label, runs)


def test_a_winner_is_called_only_where_it_is_surely_ahead() -> None:
    fedmk, fedavg = group("fedmk", 0.80, 0.81, 0.79, seconds=60), group("fedavg", 0.70, 0.71, 0.69, mb=4)
    assert winner([fedavg, fedmk]) is fedmk
    won, cost, soon, target, does = verdict([fedavg, fedmk])
    assert won == (
        "fedmk won: 80.0 ± 2.5 % accuracy, before fedavg with 70.0 ± 2.5 % (3 seeds). "
        "Seed by seed it is 10.0 ± 0.0 points ahead of fedavg."
    )
    assert cost == (
        "Cost: fedmk sent 0.5 MB up and 0.5 MB down in 2 rounds and 60 s; "
        "fedavg sent 2 MB up and 2 MB down in 2 rounds and 10 s."
    )
    assert soon == "Soonest: after round 1, fedmk had 40.0 ± 1.2 %, the next, fedavg, 35.0 ± 1.2 %."
    assert target == (
        "The best of fedavg, 70.0 %, fedmk reached in round 2 with 1 MB sent in all; fedavg in round 2 with 4 MB."
    )
    assert does.startswith("What fedmk does: clients condense their data")
    near, far = group("fedprox", 0.76, 0.80, 0.78), group("local", 0.3, 0.31, 0.32)
    assert winner([fedmk, near, far]) is None
    assert verdict([near, far, fedmk])[0] == (
        "No clear winner: fedmk has the highest mean, 80.0 ± 2.5 %, but seed by seed (95 % interval) it is not "
        "surely ahead of fedprox 78.0 ± 5.0 % (3 seeds). All others are behind."
    )
    assert verdict([fedavg, fedmk, far])[0].endswith(
        "10.0 ± 0.0 points ahead of fedavg, and surely ahead of all others (2 comparisons, each at 95 % by itself)."
    )


def test_runs_that_share_seeds_are_compared_seed_by_seed() -> None:
    # means 0.7 and 0.6 with ± 0.248: these meet. Differences 0.11, 0.10, 0.09: 0.1 ± 0.0248
    one, other = group("fedmk", 0.61, 0.70, 0.79), group("fedavg", 0.50, 0.60, 0.70)
    assert paired([one, other]) and winner([other, one]) is one
    assert "Seed by seed it is 10.0 ± 2.5 points ahead of fedavg." in verdict([one, other])[0]
    apart = RunGroup("fedavg", [*other.runs[:2], group("fedavg", 0, 0, 0, 0.70).runs[3]])
    assert not paired([one, apart]) and winner([one, apart]) is None
    assert "but its 95 % interval overlaps with fedavg 60.0 ± 24.8 %" in verdict([one, apart])[0]
    divided = RunGroup("fedavg", group("fedavg", 0.50, 0.60, 0.70, data_seed=5).runs)
    assert not paired([one, divided]) and not paired([group("fedmk", 0.9), group("fedavg", 0.1)])
    far = RunGroup("fedavg", [*group("fedavg", 0.1, 0.11).runs, group("fedavg", 0, 0, 0, 0.12).runs[3]])
    assert verdict([one, far])[0].endswith("(3 seeds). Its 95 % interval does not meet that of any other.")
    # in the second round all is as sure, in the first nothing is
    for run, start in zip(one.runs, (0.31, 0.20, 0.45), strict=True):
        run.history[0]["accuracy"] = start  # type: ignore[index]
    assert winner([one, other]) is one and not any(text.startswith("Soonest") for text in verdict([one, other]))


def test_the_verdict_tells_of_the_clients_that_fare_worst() -> None:
    one, other = group("fedmk", 0.8, 0.8), group("fedavg", 0.7, 0.7)
    for each, low in ((one, 0.5), (other, 0.2)):
        for run in each.runs:
            run.history[-1]["clients"] = {"0": 0.9, "1": low}  # type: ignore[index]
    assert "Its worst tenth of clients has 50.0 %, that of fedavg 20.0 %." in verdict([one, other])


def test_the_best_is_the_first_row() -> None:
    few, many, none = group("local", 0.3, 0.31), group("fedavg", 0.7, 0.71), group("fedmk", 0.0)
    none.runs[0].history[0].pop("accuracy"), none.runs[0].history[1].pop("accuracy")  # type: ignore[attr-defined]
    rows = re.findall(r"<tr[^>]*><t[hd][^>]*>(\w+)</t", _results([none, few, many]))
    assert rows[1:] == ["fedavg", "local", "fedmk"]


def test_nobody_wins_by_one_seed_or_on_another_task_or_before_the_end() -> None:
    good, bad = group("fedmk", 0.9), group("fedavg", 0.1)
    assert winner([good, bad]) is None and "cannot tell merit from chance" in verdict([good, bad])[0]
    other = group("fedavg alpha", 0.1, 0.12, 0.11, data="mnist")
    sure = group("fedmk", 0.9, 0.91, 0.92)
    assert winner([sure, other]) is None and verdict([sure, other])[0].startswith("These runs are not of one task")
    early = group("fedavg", 0.1, 0.12, 0.11, rounds=5)
    assert winner([sure, early]) is None
    assert verdict([sure, early])[0].startswith("Only fedmk has come to its end: fedmk reaches 91.0 ± ")
    assert verdict([early])[0].startswith("No run has come to its end yet")
    fair = group("fedmeta", 0.5, 0.5, 0.51)
    for run in fair.runs:
        run.history[-1]["fairness"] = {"mean": 0.5}  # type: ignore[index]
    assert winner([sure, fair]) is None and "not judged alike" in verdict([sure, fair])[0]


def test_judged_on_groups_the_interval_is_over_groups() -> None:
    one = group("frl", 0.5)
    assert one.accuracy == (0.5, None) and one.over == "1 seed"
    one.runs[0].history[-1]["groups"] = [0.4, 0.5, 0.6]  # type: ignore[index]
    assert one.accuracy == pytest.approx((0.5, interval([0.4, 0.5, 0.6]).half)) and one.over == "3 groups"
    other = group("f2l", 0.5)
    for figure, value in (("groups", [0.4, 0.5, 0.6]), ("tasks", 3)):
        other.runs[0].history[-1][figure] = value  # type: ignore[index]
    assert other.over == "3 tasks" and winner([one, other]) is None
    for which, told in ((one, "groups make of the prepared model, mean"), (other, "queries of novel classes, mean")):
        assert told in _results([which]) and f"95 % confidence over {which.units}" in _results([which])


# --- bars, maps, traffic, rings -------------------------------------------------------------------------------


def test_bars_are_means_with_whiskers() -> None:
    results = {"fedavg": Interval(0.6, 0.1), "fedavg lr=1": Interval(0.5, None)}
    of = looks({"fedavg": "fedavg", "fedavg lr=1": "fedavg"})
    axes = bar_picture(results, of).axes[0]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([60, 50])  # type: ignore[attr-defined]
    assert {text.get_text() for text in axes.texts} == {"60.0 ± 10.0", "50.0"}
    assert of["fedavg lr=1"].color == look("fedavg").color and of["fedavg lr=1"] != look("fedavg")


def test_runs_that_differ_in_two_settings_make_a_map(tmp_path: Path, runs: Path) -> None:
    changes = [(lr, batch) for lr in (0.1, 0.3) for batch in (8, 16, 4)][:-1]
    some = [changed(tmp_path, runs / "fedavg-0", method={"lr": r, "batch": b}) for r, b in changes]
    groups = gather(some)
    grid = grid_of(groups)
    accuracy = groups[0].accuracy
    assert grid == Grid("batch", "lr", [4, 8, 16], [0.1, 0.3], [[accuracy] * 3, [None, accuracy, accuracy]])
    drawn = heat_picture("fedavg", grid).axes[0]
    assert len(drawn.collections) == len(drawn.texts) == 5
    assert not {text.get_color() for text in drawn.texts} & DARK.keys()  # a field is as dark in either theme
    assert (drawn.get_xlabel(), drawn.get_ylabel()) == ("batch", "lr")
    assert grid_of(groups[:2]) is None  # one setting only
    _, pictures = report(tmp_path, some)
    assert "settings" in pictures


def test_traffic_is_the_ledgers_by_direction_and_kind(runs: Path) -> None:
    (one,) = gather([runs / "fedmk"])
    last = one.runs[0].history[-1]
    for way in ("up", "down"):
        assert sum(size for (there, _), size in one.traffic.items() if there == way) == last[way]
    figure = traffic_picture({"fedmk": one.traffic})
    assert figure
    bars = figure.axes[0].patches
    assert sum(bar.get_width() for bar in bars) == pytest.approx(  # type: ignore[attr-defined]
        (last["up"] + last["down"]) / 1e6
    )
    assert traffic_picture({"local": {}}) is None


def test_a_damaged_ledger_is_told(tmp_path: Path, runs: Path) -> None:
    broken = changed(tmp_path, runs / "fedavg-0")
    (broken / "ledger.csv").write_text("round,client,direction,kind,bytes\n1,2,up,train,many\n")
    with pytest.raises(RunError, match="ledger.csv cannot be read"):
        write_report([broken], tmp_path / "report")


def test_a_ring_is_drawn_with_hops_skips_and_weights(tmp_path: Path, runs: Path) -> None:
    (run,) = gather([runs / "metafed"])[0].runs
    ring = ring_of(run)
    assert ring and ring.members == list(range(5))
    told = run.history[-1]["ring"]
    assert ring.weights == {int(client): each["weight"] for client, each in told.items()}
    events = [json.loads(text) for text in (runs / "metafed/events.jsonl").read_text().splitlines()]
    passed = [e for e in events if e["event"] == "absent" and e["handler"] in ("accumulate", "personalize")]
    assert passed and sum(ring.passed_over.values()) == len(passed)
    entries = [text.split(",") for text in (runs / "metafed/ledger.csv").read_text().splitlines()[1:]]
    taken = [entry for entry in entries if entry[2] == "down" and entry[3] in ("accumulate", "personalize")]
    assert sum(ring.hops.values()) == len(taken) and all(one != other for one, other in ring.hops)
    page, pictures = report(tmp_path, [runs / "metafed"])
    assert "ring" in pictures and "<h2>Rings</h2>" in page.text
    assert ring_of(gather([runs / "fedavg-0"])[0].runs[0]) is None
    by_hand = Ring({(0, 1): 2, (1, 3): 1}, {2: 1}, {0: 0.5, 1: 0.0, 2: 0.1, 3: 1.0}, {})
    texts = [text.get_text() for text in ring_picture(by_hand).axes[0].texts]
    assert {"0", "1", "2", "3", "λ 0.5", "λ 0.1\n−1"} <= set(texts)


def test_ours_stands_beside_the_papers(tmp_path: Path, runs: Path) -> None:
    folder = tmp_path / "recipe/iid"
    for seed in (0, 1):
        shutil.copytree(runs / f"fedavg-{seed}", folder / f"fedavg-tuned-seed{seed}")
    cell = {"row": "FedAvg, tuned", "column": "IID", "paper": 70.5}
    told = {"title": "T", "paper": "P", "mean": "samples", "quick": False, "cells": {"iid/fedavg-tuned": cell}}
    (tmp_path / "recipe/recipe.json").write_text(json.dumps(told))
    page, _ = report(tmp_path, sorted(folder.iterdir()))
    ours = gather(sorted(folder.iterdir()))[0].accuracy
    assert ours and ours.half
    shown = f"{100 * ours.mean:.2f} ± {100 * ours.half:.2f}"
    assert page.row("FedAvg, tuned") == ["FedAvg, tuned", "IID", shown, "70.50", f"{100 * ours.mean - 70.5:+.2f}"]
    assert "T. Paper: P." in page.text and "quick form" not in page.text
    (tmp_path / "recipe/recipe.json").write_text(json.dumps({**told, "mean": "clients", "quick": True}))
    page, _ = report(tmp_path, sorted(folder.iterdir()))
    by_client = [run.history[-1]["clients"].values() for run in gather(sorted(folder.iterdir()))[0].runs]
    mean = np.mean([np.mean(list(values)) for values in by_client])
    assert page.row("FedAvg, tuned")[2].startswith(f"{100 * mean:.2f} ± ") and "quick form" in page.text


# --- how the page looks ---------------------------------------------------------------------------------------


def contrast(one: str, other: str) -> float:
    def light(color: str) -> float:
        parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def test_text_and_lines_stand_out_in_both_themes(tmp_path: Path, runs: Path) -> None:
    page, _ = report(tmp_path, [runs / "fedavg-0"])
    for block in ("color-scheme: light", "color-scheme: dark"):
        (own, *_) = re.findall(rf"{block};([^}}]*)}}", page.text)
        values = dict(re.findall(r"--(\w+): (#\w{6});", own))
        paper = values["ffffff"]
        assert min(contrast(values[name], paper) for name in ("222222", "faint", "link")) >= 4.5
        least = 2 if "light" in block else 3  # the palette's orange and sky are pale on white
        assert min(contrast(values.get(c.lstrip("#").lower(), c), paper) for c in COLORS) >= least
    assert INK in DARK and "fill: var(--222222)" in page.text and "fill: #222222" not in page.text


def test_the_page_of_ten_methods_and_five_seeds_is_small(tmp_path: Path, runs: Path) -> None:
    paths = []
    draw = np.random.default_rng(0)
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
            path = changed(tmp_path, runs / "fedavg-0", settings={"seed": seed, "method": method})
            events = (path / "events.jsonl").read_text().replace('"method": "fedavg"', f'"method": "{method}"')
            (path / "events.jsonl").write_text(events)
            by_client = {str(client): float(draw.random()) for client in range(100)}
            history = [line(number, float(draw.random()), 10**6 * number) for number in range(1, 101)]
            history[-1]["clients"] = by_client
            (path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in history))
            told = json.loads((path / "settings.json").read_text())
            (path / "settings.json").write_text(json.dumps({**told, "method": {**told["method"], "rounds": 100}}))
            paths.append(path)
    page, pictures = report(tmp_path, paths)
    assert len(page.text.encode()) < 5e6 and set(SEVERAL) <= set(pictures)
    assert len(page.row("fedgen")) == 8 and "No clear winner" in page.text
