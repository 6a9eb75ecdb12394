"""The page on which all results can be filtered: its points are current, and it works in a browser."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.browser import launch_browser, needs_browser
from tools.make_results_index import POINTS, RESULTS, list_points, load_results, render_points


def test_the_points_are_up_to_date() -> None:
    assert POINTS.read_text() == render_points(), "run python tools/make_results_index.py"


def test_every_cell_of_every_result_is_a_point_with_its_page_its_file_and_its_command() -> None:
    script = POINTS.read_text()
    points = [json.loads(line.rstrip(",")) for line in script.splitlines() if line.startswith('{"result"')]
    commands = json.loads(re.findall(r"const commands = (\{.*?\});", script, re.S)[0])
    files = {file: json.loads(file.read_text()) for file in RESULTS.glob("*/*.json")}
    expected = sorted(
        (file.relative_to(RESULTS).with_suffix("").as_posix(), cell["row"], cell["column"], cell["ours"]["method"])
        for file, content in files.items()
        for cell in content["cells"]
    )
    assert len(expected) > 300
    assert sorted((point["result"], point["row"], point["column"], point["method"]) for point in points) == expected
    assert commands == {
        file.relative_to(RESULTS).with_suffix("").as_posix(): content["command"] for file, content in files.items()
    }
    for point in points:
        assert point["text"] in (RESULTS / f"{point['result']}.md").read_text()
        assert point["text"].startswith(f"{point['accuracy']:.2f}")


def test_a_point_has_the_sum_of_the_traffic_and_epsilon_where_there_is_one() -> None:
    result = next(result for result in load_results() if result.page == "global/mnist.md")
    cell = result.cells[0]
    private = replace(cell.ours, accuracy=0.5, mb_up=1.25, mb_down=2.5, gflop=None, epsilon=7.98765)
    loss = replace(cell.ours, metric={"name": "loss", "higher_is_better": False})
    (point,) = list_points([result._replace(cells=[replace(cell, ours=private), replace(cell, ours=loss)])])
    assert (point["accuracy"], point["mb"], point["gflop"], point["epsilon"]) == (50.0, 3.75, None, 7.988)
    assert (point["data"], point["column"], point["rounds"]) == ("mnist", "Dirichlet 0.1", 10)


# --- in a browser -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launch_browser() as launched:
        yield launched


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    """The page without the site around it, opened as a file, with four points."""
    points: list[dict[str, Any]] = [
        {"row": "FedAvg, tuned", "method": "fedavg", "accuracy": 91.5, "rounds": 10, "mb": 21, "gflop": 28},
        {"row": "FedMK", "method": "fedmk", "accuracy": 97.54, "rounds": 10, "mb": 5.3, "gflop": None},
        {"row": "Local", "method": "local", "accuracy": 60, "rounds": 1, "mb": 0, "gflop": 3},
        {"row": "FedAvg", "method": "fedavg", "accuracy": 30, "rounds": 400, "mb": 5000, "gflop": 900, "data": "hapt"},
    ]
    common = {"column": "α = 1", "data": "mnist", "paper": None, "epsilon": None, "seeds": 3, "result": "a/b"}
    content = [{**common, **point, "text": f"{point['accuracy']} ± 0.1"} for point in points]
    (tmp_path / "points.js").write_text(
        f'const commands = {{"a/b": "fewer reproduce a/b"}};\nconst points = {json.dumps(content)};'
    )
    html = (RESULTS / "browse.md").read_text().partition('<div id="browse">')[1:]
    head = '<!doctype html><html lang="en" data-md-color-scheme="default"><meta charset="utf-8"><title>Results</title>'
    body = f'<body><main class="md-typeset"><h1>Results</h1>{"".join(html)}</main>'
    (tmp_path / "page.html").write_text(f'{head}<link rel="stylesheet" href="site.css">{body}')
    shutil.copy(RESULTS / "browse.js", tmp_path)
    shutil.copy(RESULTS.parent / "site.css", tmp_path)
    context = browser.new_context()
    opened, problems = context.new_page(), list[str]()
    opened.set_default_timeout(20_000)
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("request", lambda request: problems.extend([request.url] if "file:" not in request.url else []))
    opened.goto((tmp_path / "page.html").as_uri())
    yield opened
    context.close()
    assert problems == []


def rows(page: Page) -> list[str]:
    return page.locator("tbody tr td:first-child").all_text_contents()


@needs_browser
def test_filters_apply_to_the_table_and_the_plot_and_are_kept_in_the_address(page: Page) -> None:
    marks = page.locator(".browse-plot .mark")
    assert rows(page) == ["FedMK", "FedAvg, tuned", "Local", "FedAvg"]  # the most accurate first
    expect(marks).to_have_count(4)
    page.get_by_label("rounds ≤").fill("10")
    assert rows(page) == ["FedMK", "FedAvg, tuned", "Local"]
    page.get_by_label("MB ≤").fill("5.3")
    assert rows(page) == ["FedMK", "Local"]
    page.get_by_label("GFLOP ≤").fill("100")
    assert rows(page) == ["Local"]  # the operations of FedMK were not counted
    page.get_by_role("button", name="Reset").click()
    page.get_by_text("Methods: all").click()
    page.get_by_role("checkbox", name="fedavg").check()
    page.get_by_text("Data: all").click()
    page.get_by_role("checkbox", name="hapt").check()
    assert rows(page) == ["FedAvg"]
    expect(marks).to_have_count(1)
    page.get_by_role("checkbox", name="hapt").uncheck()
    page.get_by_label("Contains").fill("TUNED α")
    assert rows(page) == ["FedAvg, tuned"]
    page.reload()
    assert rows(page) == ["FedAvg, tuned"]
    page.get_by_label("Contains").fill("nothing")
    expect(page.locator(".browse-plot")).to_contain_text("No points match.")
    assert page.get_by_label("ε ≤").count() == 0  # no point has one


@needs_browser
def test_points_with_epsilon_bring_a_filter_for_it(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "points.js"
    file.write_text(file.read_text().replace('"epsilon": null', '"epsilon": 8', 1))
    page.reload()
    page.get_by_label("ε ≤").fill("8")
    assert rows(page) == ["FedAvg, tuned"]
    page.get_by_label("ε ≤").fill("7.9")
    assert rows(page) == []


@needs_browser
def test_a_phone_shows_the_accuracy_without_scrolling(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    box = page.get_by_role("columnheader", name="accuracy").bounding_box()
    assert box and box["x"] + box["width"] <= 390
    legend = [entry.bounding_box() for entry in page.locator(".browse-legend li").all()]
    assert len({box["y"] for box in legend if box}) == 1  # the entries are side by side


@needs_browser
def test_columns_sort_both_ways_with_missing_values_last(page: Page) -> None:
    gflop = page.get_by_role("button", name="GFLOP")
    gflop.focus()
    page.keyboard.press("Enter")
    assert rows(page) == ["FedAvg", "FedAvg, tuned", "Local", "FedMK"]
    page.keyboard.press("Enter")
    assert rows(page) == ["Local", "FedAvg, tuned", "FedAvg", "FedMK"]
    assert page.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    page.get_by_role("button", name="row", exact=True).click()
    assert rows(page) == ["FedAvg", "FedAvg, tuned", "FedMK", "Local"]


@needs_browser
def test_a_point_shows_its_page_its_file_and_its_command(page: Page) -> None:
    readout = page.locator(".browse-readout")
    page.locator(".browse-plot").focus()
    page.keyboard.press("ArrowRight")  # from the left: 0 MB, which a logarithmic axis has no place for
    expect(readout).to_contain_text("Local on mnist, α = 1: 60 ± 0.1 %, 1 rounds, 0 MB, 3 GFLOP, 3 seeds.")
    page.keyboard.press("ArrowRight")
    expect(readout).to_contain_text("FedMK")
    page.keyboard.press("ArrowDown")  # the next lower accuracy
    expect(readout).to_contain_text("FedAvg, tuned")
    assert readout.locator("a").evaluate_all("links => links.map((link) => link.getAttribute('href'))") == [
        "a/b.html",
        "a/b.json",
    ]
    expect(readout.locator("pre")).to_have_text("fewer reproduce a/b")
    page.get_by_label("x-axis").select_option("gflop")
    expect(page.locator(".browse-plot .mark")).to_have_count(3)
    expect(page.locator(".browse-count")).to_have_text("4 of 4 results; 1 without GFLOP are only in the table")
    page.locator("tbody summary").first.click()
    expect(page.locator("tbody code").first).to_be_visible()


@needs_browser
def test_the_page_is_accessible(page: Page) -> None:
    page.locator(".browse-plot .mark").first.click()
    found = Axe().run(page).response["violations"]
    assert [(problem["id"], problem["nodes"][0]["html"]) for problem in found] == []
