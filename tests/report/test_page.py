"""The page of a report: its content, its pictures, and what it leaves out."""

import csv
import json
import re
import shutil
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fewer.methods import find
from fewer.methods.fedmk import FedMK, FedMKState
from fewer.report.metrics import metric_curve
from fewer.report.page import write_report
from fewer.report.style import COLORS, DARK, INK
from fewer.runs.result import open_run
from fewer.statistics import interval
from tests.helpers import call
from tests.report import harness
from tests.report.harness import Page, copy_run, group_runs, report, round_metrics

# --- the page ---------------------------------------------------------------------------------------------------


ALL_RUNS = ("fedavg-0", "fedavg-1", "local-0", "sparse", "bold", "own", "fedmk")


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


CURVES = ["accuracy-by-round", "accuracy-by-megabyte", "accuracy-by-second"]
CLIENTS = ["accuracy-by-client", "accuracy-density"]
PLAIN = [*CURVES, "traffic", "confusion", "reliability", *CLIENTS]
TWO = [*CURVES, "accuracy-bars", "traffic", "confusion", "confusion-2", "reliability", *CLIENTS]
MANY = [name for name in TWO if name != "confusion-2"]
DATA = ["partition", "examples"]


def test_a_report_on_one_run(tmp_path: Path, runs: Path) -> None:
    page, pictures = report(tmp_path, [runs / "fedavg-0"])
    assert pictures == [*PLAIN, *DATA]
    last = json.loads((runs / "fedavg-0" / "metrics.jsonl").read_text().splitlines()[-1])
    accuracy = f"{100 * last['accuracy']:.2f}"
    up, down = f"{last['up'] / 1e6:.3g}", f"{last['down'] / 1e6:.3g}"
    figures = [f"{100 * last[name]:.1f}" for name in ("majority_baseline", "macro_f1", "ece")]
    heads = ["method", "accuracy %", "majority %", "macro F1 %", "ECE %", "global accuracy %"]
    assert page.row("method")[:6] == heads
    assert page.row("fedavg") == ["fedavg", accuracy, *figures, accuracy, "2", up, down, f"{last['seconds']:.1f}", "0"]
    by_class = [f"{100 * last['classes'][name][3]:.1f}" for name in ("recall", "precision", "f1")]
    assert page.row("3") == ["3", str(last["classes"]["support"][3]), *by_class]
    (first, _), *_ = sorted(last["client_metrics"].items(), key=lambda item: item[1]["accuracy"])
    worst = last["client_metrics"][first]
    assert ["client", "test samples", "accuracy %", "majority %"] in page.rows
    cells = [f"{100 * worst[name]:.1f}" for name in ("accuracy", "majority_baseline")]
    assert [first, str(worst["samples"]), *cells] in page.rows
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
    assert isinstance(result.method, FedMK)
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
    assert pictures == [*TWO, "made-by-client-2", "made-by-round-2", *DATA]
    assert "Pictures from the model of fedavg are not shown: KeyError: &#39;album&#39;." in page.text
    assert "About fedavg: Has images" in report(tmp_path, [clumsy])[0].text


def test_seeds_of_a_method_are_averaged(tmp_path: Path, runs: Path) -> None:
    page, pictures = report(tmp_path, [runs / name for name in ("local-0", "fedavg-1", "fedavg-0")])
    assert pictures == [*TWO, *DATA]
    accuracies = [
        json.loads((runs / f"fedavg-{seed}" / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"]
        for seed in (0, 1)
    ]
    mean, half = interval(accuracies)
    assert half
    assert page.row("fedavg")[1] == f"{100 * mean:.2f} ± {100 * half:.2f}"
    assert page.row("fedavg")[-1] == "0, 1"
    last = json.loads((runs / "local-0" / "metrics.jsonl").read_text().splitlines()[-1])
    assert page.row("local")[1:6:4] == [f"{100 * last[name]:.2f}" for name in ("accuracy", "global_accuracy")]
    assert ["recall % of class", "local", "fedavg"] in page.rows


def test_a_report_on_many_runs(tmp_path: Path, runs: Path) -> None:
    page, pictures = report(tmp_path, [runs / name for name in sorted(ALL_RUNS)])
    assert pictures == [*MANY, "made-by-client-3", "made-by-round-3", *DATA]
    assert "Only the best of 6 methods is shown." in page.text
    assert "<h1>digits, 4 clients, dirichlet (alpha 1); &lt;i&gt;own&lt;/i&gt;, 3 clients</h1>" in page.text
    assert "Other settings differ too: " in page.text and "data = digits, clients = 4" in page.text


def test_names_are_escaped_and_absent_answers_counted(tmp_path: Path, runs: Path) -> None:
    page, _ = report(tmp_path, [runs / "bold"])
    assert page.row("<b>") and "b" not in {tag for tag, _ in page.tags}
    dropped = (runs / "bold" / "events.jsonl").read_text().count('"reason": "dropped"')
    assert dropped and ["method", "dropped", "absent in total", "resumed"] in page.rows
    assert ["<b>", str(dropped), str(dropped), "0"] in page.rows
    assert harness.__file__ not in page.text  # the path of a method's file


def test_a_run_that_was_not_evaluated_in_every_round(tmp_path: Path, runs: Path) -> None:
    report(tmp_path, [runs / "sparse"])
    (group,) = group_runs([runs / "sparse"])
    assert [point.round for point in metric_curve([run.history for run in group.runs])] == [2, 3]


def test_user_data_is_not_shown(tmp_path: Path, runs: Path) -> None:
    page, pictures = report(tmp_path, [runs / "own"])
    assert pictures == PLAIN
    assert "The data is not shown" not in page.text


def test_changed_or_missing_data_is_not_shown(tmp_path: Path, runs: Path) -> None:
    other = copy_run(tmp_path, runs / "fedavg-0", data={"fingerprint": "00000000"})
    page, pictures = report(tmp_path, [other])
    assert pictures == PLAIN and f"The data is not shown: digits has changed since {other.name} was run." in page.text
    gone = copy_run(tmp_path, runs / "fedavg-0", settings={"data": "npz:gone.npz"})
    page, pictures = report(tmp_path, [gone])
    assert pictures == PLAIN and "The data is not shown: &#39;gone.npz&#39; does not exist" in page.text


def test_a_stopped_run_without_metrics_by_client(tmp_path: Path, runs: Path) -> None:
    copy = copy_run(tmp_path, runs / "local-0")
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text(lines[0])
    with (copy / "events.jsonl").open("a") as file:
        file.write('{"event": "sto\n{"time": 1, "event": "stop", "round": 1, "reason": "KeyboardInterrupt: "}\n')
    page, pictures = report(tmp_path, [copy])
    assert pictures == [*CURVES, "traffic", *DATA]
    assert "No run has finished yet" in page.text
    assert page.row("local")[5:7] == ["–", "1 of 2"]
    assert "local, seed 0, is at round 1 of 2; it stopped: KeyboardInterrupt" in page.text


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


# --- bars, maps, traffic, rings ---------------------------------------------------------------------------------


def test_ours_is_compared_with_the_paper(tmp_path: Path, runs: Path) -> None:
    folder = tmp_path / "recipe/iid"
    for seed in (0, 1):
        shutil.copytree(runs / f"fedavg-{seed}", folder / f"fedavg-tuned-seed{seed}")
    cell = {"row": "FedAvg, tuned", "column": "IID", "paper": 70.5}
    recipe = {"title": "T", "paper": "P", "mean": "samples", "quick": False, "cells": {"iid/fedavg-tuned": cell}}
    (tmp_path / "recipe/recipe.json").write_text(json.dumps(recipe))
    page, _ = report(tmp_path, sorted(folder.iterdir()))
    ours = group_runs(sorted(folder.iterdir()))[0].value
    assert ours and ours.half
    shown = f"{100 * ours.mean:.2f} ± {100 * ours.half:.2f}"
    assert page.row("FedAvg, tuned") == ["FedAvg, tuned", "IID", shown, "70.50", f"{100 * ours.mean - 70.5:+.2f}"]
    assert "T. Paper: P." in page.text and "quick settings" not in page.text
    (tmp_path / "recipe/recipe.json").write_text(json.dumps({**recipe, "mean": "clients", "quick": True}))
    page, _ = report(tmp_path, sorted(folder.iterdir()))
    by_client = [run.history[-1]["clients"].values() for run in group_runs(sorted(folder.iterdir()))[0].runs]
    mean = np.mean([np.mean(list(values)) for values in by_client])
    assert page.row("FedAvg, tuned")[2].startswith(f"{100 * mean:.2f} ± ") and "quick settings" in page.text


# --- appearance -------------------------------------------------------------------------------------------------


def contrast(first: str, second: str) -> float:
    def luminance(color: str) -> float:
        parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_text_and_lines_have_contrast_in_both_themes(tmp_path: Path, runs: Path) -> None:
    page, _ = report(tmp_path, [runs / "fedavg-0"])
    colors = re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\);", page.text)
    for index, minimum in enumerate((2, 3)):  # the palette's orange and sky are pale on white
        values = {name: pair[index] for name, *pair in colors}
        background = values["ffffff"]
        assert min(contrast(values[name], background) for name in ("222222", "faint", "link")) >= 4.5
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
    assert len(page.text.encode()) < 5e6 and {*CURVES, "accuracy-bars", *CLIENTS} <= set(pictures)
    assert len(page.row("fedgen")) == 8 and "No clear winner" in page.text
