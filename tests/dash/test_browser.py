"""The pages of the dashboard and of a report in a real browser."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, expect

import fewer
from fewer.report.page import write_report
from tests.browser import launch_browser, needs_browser
from tests.dash.harness import FINISHED, STOPPED, DashboardClient, metrics, running, serving, write_run
from tests.helpers import wait_for

pytestmark = needs_browser

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launch_browser() as launched:
        yield launched


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens pages; fails on console errors that are not allowed."""
    problems: list[str] = []
    allowed: list[str] = []

    def record(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            problems.append(message.text)

    with ExitStack() as stack:

        def load_page(address: str, width: int = 1200, dark: bool = False, allow: str = "") -> Page:
            scheme: Any = "dark" if dark else "light"
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(20_000)
            page.on("console", record)
            page.on("pageerror", lambda error: problems.append(str(error)))
            allowed.extend([allow] if allow else [])
            page.add_init_script(WATCH_SHIFTS)
            page.goto(address)
            return page

        yield load_page
    assert [text for text in problems if not any(part in text for part in allowed)] == []


WATCH_SHIFTS = """
window.shift = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shift += entry.value;
}).observe({ type: "layout-shift", buffered: true });
"""


FIGURES = {
    "majority_baseline": 0.6,
    "ece": 0.125,
    "classes": {
        "names": ["healthy", "ill"],
        "support": [60, 40],
        **{name: [1, None] for name in ("recall", "precision", "f1")},
    },
    "client_metrics": {"3": {"samples": 1200, "accuracy": 1, "loss": 0.25}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of several methods and states; one with many faults."""
    root = tmp_path_factory.mktemp("runs")
    for number, method in enumerate(("fedavg", "fedprox", "local", "fedmk")):
        write_run(root / f"table/{method}-seed0", method, done=3 + number, events=[FINISHED], seed=0)
    absent = {
        "time": 1.5,
        "event": "absent",
        "round": 1,
        "client": 3,
        "reason": "late",
        "handler": "train",
        "detail": "",
    }
    data_path = "npz:/home/somebody/measured-in-the-summer/and-cleaned-afterwards/readings-of-all-machines.npz"
    with (root / "table/fedavg-seed0/metrics.jsonl").open("a") as file:
        file.write(json.dumps({**metrics(4, 0.3), **FIGURES}) + "\n")
    write_run(root / "faulty", "fedbn", events=[*([absent] * 60), STOPPED], data=data_path)
    (root / "table/report").mkdir()
    (root / "table/report/report.html").write_text("<h1>All of them</h1>")
    write_run(root / "between-machines", "fedavg", runtime="flower", events=[STOPPED])
    (root / "bad").mkdir()
    (root / "bad/settings.json").write_text("{")
    return root


@pytest.fixture(scope="module")
def site(runs: Path) -> Iterator[DashboardClient]:
    with serving(runs) as client:
        yield client


def row(page: Page, name: str) -> Any:
    return page.get_by_role("row").filter(has=page.get_by_role("link", name=name, exact=True))


def test_runs_are_listed_found_sorted_and_opened(site: DashboardClient, open_page: Open) -> None:
    page = open_page(site.address)
    expect(row(page, "faulty")).to_contain_text("■ stopped")
    expect(row(page, "bad")).to_contain_text("damaged")
    expect(row(page, "table/fedmk-seed0")).to_contain_text("60.00 %")
    page.get_by_label("Search").fill("table prox")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_label("Search").fill("no such run")
    expect(page.locator("tbody")).to_contain_text("No matching runs.")
    page.get_by_label("Search").fill("")
    expect(page.locator("tbody tr")).to_have_count(7)
    page.get_by_role("columnheader", name="metric").get_by_role("link").click()
    expect(page.get_by_role("columnheader", name="metric")).to_have_attribute("aria-sort", "descending")
    expect(page.locator("a.open").first).to_have_text("fedmk-seed0")
    page.get_by_label("State").select_option("stopped")
    expect(page.locator("tbody tr")).to_have_count(2)
    page.get_by_role("link", name="faulty").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("faulty")
    expect(page.get_by_role("region", name="Absent answers by reason")).to_contain_text("late60")
    expect(page.get_by_role("region", name="Bytes by kind and direction")).to_contain_text("total33,000")
    events = page.get_by_role("region", name="Events, newest first").locator("tbody tr")
    expect(events).to_have_count(20)
    expect(events.first).to_contain_text("interrupted (Ctrl-C or the Stop button)")
    page.get_by_role("button", name="Show older").click()
    expect(events).to_have_count(40)
    page.get_by_role("button", name="Show messages").click()
    expect(page.get_by_role("region", name="Messages, newest first").locator("tbody tr")).to_have_count(6)
    page.get_by_text("All settings").click()
    expect(page.locator("details").filter(has_text="All settings")).to_contain_text("runtimeinline")
    page.go_back()
    expect(page.locator("tbody tr")).to_have_count(2)


def test_a_run_shows_its_figures(site: DashboardClient, open_page: Open) -> None:
    page = open_page(f"{site.address}/?run={site.row('table/fedavg-seed0')['id']}")
    expect(page.locator(".tiles")).to_contain_text("majority baseline60.00 %macro F1–ECE12.50 %")
    expect(page.locator(".note")).to_have_text(
        re.compile("^30.0 % is below the majority baseline: .* 'healthy' scores 60")
    )
    expect(page.get_by_role("region", name="Classes")).to_contain_text("healthy601.00001.00001.0000ill40–––")
    expect(page.get_by_role("region", name="Clients")).to_contain_text("31,2001.00000.2500")


def test_a_run_between_machines_says_how_to_resume_it(site: DashboardClient, open_page: Open) -> None:
    page = open_page(f"{site.address}/?run={site.row('between-machines')['id']}")
    expect(page.get_by_text("fewer server --resume")).to_be_visible()
    expect(page.get_by_role("button", name="Resume")).to_have_attribute("aria-disabled", "true")


def test_chosen_runs_are_compared(site: DashboardClient, open_page: Open) -> None:
    page = open_page(site.address)
    expect(page.get_by_text("Compare …")).to_have_attribute("aria-disabled", "true")
    for name in ("table/fedavg-seed0", "table/local-seed0", "faulty"):
        page.get_by_label(f"Compare {name}").check()
    page.get_by_role("link", name="Compare 3").click()
    lines = page.locator(".chart .line")
    expect(lines).to_have_count(3)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for number, name in enumerate(("table/fedavg-seed0", "table/local-seed0", "faulty")):
            color = site.row(name)["dark" if scheme == "dark" else "color"]
            expect(lines.nth(number)).to_have_css("stroke", f"rgb{tuple(bytes.fromhex(color[1:]))}")
    chart = page.locator(".chart")
    expect(chart).to_have_attribute("aria-label", re.compile("accuracy by round. Last: table/fedavg-seed0 30 %"))
    chart.focus()
    page.keyboard.press("End")
    expect(page.locator(".readout")).to_have_text(
        "round 5: table/fedavg-seed0 30 %, table/local-seed0 50 %, faulty 30 %"
    )
    page.get_by_role("radio", name="megabyte").check()
    expect(chart).to_have_attribute("aria-label", re.compile("accuracy by megabyte"))
    page.get_by_role("radio", name="loss").check()
    expect(chart).to_have_attribute("aria-label", re.compile("loss by megabyte"))
    expect(page.get_by_role("region", name="Compared runs").locator("tbody tr")).to_have_count(3)
    expect(page.get_by_role("link", name="Report of this comparison")).to_have_count(0)  # faulty does not belong to it
    page.get_by_role("link", name="table/local-seed0").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("table/local-seed0")
    ids = [site.row(f"table/{method}-seed0")["id"] for method in ("fedavg", "local")]
    page.goto(f"{site.address}/?compare={','.join(ids)},gone")
    expect(page.get_by_text("2 of 3 selected runs are shown: at most 24")).to_be_visible()
    with page.expect_popup() as popup:
        page.get_by_role("link", name="Report of this comparison").click()
    expect(popup.value.get_by_role("heading")).to_have_text("All of them")


def test_the_dashboard_works_by_keyboard_alone(site: DashboardClient, open_page: Open) -> None:
    page = open_page(f"{site.address}/?sort=name&down=0")
    focused = page.locator(":focus")
    expect(page.locator("tbody tr")).to_have_count(7)
    page.keyboard.press("Tab")
    expect(focused).to_have_text("Skip to content")
    page.keyboard.press("Enter")
    expect(focused).to_have_attribute("id", "main")
    page.keyboard.press("Tab")
    expect(focused).to_have_attribute("id", "find")
    for _ in range(20):
        page.keyboard.press("Tab")
        if focused.get_attribute("class") == "open":
            break
    expect(focused).to_have_text("bad")
    page.keyboard.press("ArrowDown")
    expect(focused).to_have_text("between-machines")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Space")
    expect(page.get_by_role("link", name="Compare 1")).to_be_visible()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("faulty")
    expect(focused).to_have_attribute("id", "main")
    names = []
    for _ in range(6):
        page.keyboard.press("Tab")
        names.append(focused.evaluate("element => element.textContent.trim() || element.value || element.className"))
    assert names[:4] == ["Stop", "Resume", "metric", "round"] and focused.count() == 1
    assert page.locator(":focus-visible").evaluate("element => getComputedStyle(element).outlineStyle") == "solid"


def test_pages_need_the_token(runs: Path, open_page: Open) -> None:
    token = "a-token-of-the-test"
    with serving(runs, token=token) as site:
        page = open_page(f"{site.address}/?state=stopped", allow="401")
        expect(page.get_by_role("heading")).to_have_text("This dashboard needs a token")
        assert find_violations(page) == []
        page.get_by_label("Token").fill("not this one")
        signed_in = open_page(f"{site.address}/#token={token}", allow="403")
        expect(signed_in.locator("tbody tr")).to_have_count(7)
        assert signed_in.url == f"{site.address}/"
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("Wrong token.")
        page.get_by_label("Token").fill(token)
        page.keyboard.press("Enter")
        expect(page.locator("tbody tr")).to_have_count(2)
        page.reload()
        expect(page.locator("tbody tr")).to_have_count(2)
        page.context.clear_cookies()  # as if the dashboard had restarted with another token
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        expect(page.get_by_role("heading")).to_have_text("This dashboard needs a token")
        for tab in (page, signed_in):
            tab.close()


def test_a_read_only_page_has_no_buttons(runs: Path, open_page: Open) -> None:
    with serving(runs, read_only=True) as site:
        page = open_page(f"{site.address}/?run={site.row('faulty')['id']}")
        expect(page.get_by_text("Read-only: runs cannot be stopped or resumed here.")).to_be_visible()
        expect(page.get_by_role("button", name=re.compile("Stop|Resume"))).to_have_count(0)
        page.close()  # before the server stops, or the page would log errors


def test_a_real_run_followed_stopped_and_resumed(tmp_path: Path, open_page: Open) -> None:
    cue = get_context("fork").Event()
    with running(tmp_path / "mine", cue) as process, serving(tmp_path) as site:
        page = open_page(site.address, allow="net::ERR")
        expect(page.locator("tbody")).to_contain_text("Start one with: fewer run")
        cue.set()
        page.get_by_role("button", name="Show 1 new run").click()
        expect(row(page, "mine")).to_contain_text("● running")
        done = "Number(document.querySelector('.rounds').textContent.split('/')[0])"
        wait_for(lambda: page.evaluate(done) > 2)
        page.get_by_role("link", name="mine", exact=True).click()
        expect(page.locator(".chart .line")).to_have_count(1)
        before = page.evaluate(done)
        wait_for(lambda: page.evaluate(done) > before)
        page.get_by_role("button", name="Stop").click()
        process.join(20)
        assert process.exitcode == 0
        expect(page.locator(".state")).to_contain_text("■ stoppedinterrupted")
        expect(page.get_by_role("button", name="Stop")).to_have_attribute("aria-disabled", "true")
        before = page.evaluate(done)
        page.get_by_role("button", name="Resume").click()
        expect(page.locator(".message")).to_contain_text("Started process")
        wait_for(lambda: page.evaluate(done) > before)
        expect(page.locator(".state")).to_contain_text("● running")
        expect(page.get_by_role("region", name="Log of fewer resume")).to_contain_text("resumes after round")
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".state")).to_contain_text("■ stopped")
        events = page.get_by_role("region", name="Events, newest first").locator("tbody td:nth-child(2)")
        expect(events).to_have_text(["stop", "resume", "stop", "start"])
        id = site.row("mine")["id"]
        wait_for(lambda: any("Stopped. Resume with" in line for line in site.get(f"runs/{id}/log")["lines"]))
    expect(page.locator("#connection")).to_have_text("Connection lost. Reconnecting …")


def find_violations(page: Page) -> list[str]:
    """The violations that the accessibility checker finds on a page."""
    violations = Axe().run(page).response["violations"]
    return [
        f"{violation['id']}: {violation['help']}: {node['html'][:120]}"
        for violation in violations
        for node in violation["nodes"]
    ]


SCREENS = pytest.mark.parametrize(("width", "dark"), [(390, False), (1200, True)], ids=["phone", "dark"])


@SCREENS
def test_every_screen_is_accessible(site: DashboardClient, open_page: Open, width: int, dark: bool) -> None:
    ids = ",".join(site.row(f"table/{method}-seed0")["id"] for method in ("fedavg", "local"))
    ready = {
        "": "tbody tr >> nth=6",
        f"?run={site.row('faulty')['id']}": ".chart .line",
        f"?compare={ids}": ".chart .line",
    }
    for address, selector in ready.items():
        page = open_page(f"{site.address}/{address}", width, dark)
        page.wait_for_selector(selector)
        assert find_violations(page) == [], address
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), address


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    fewer.run("fedavg", "digits", clients=4, rounds=2, drop=0.3, out=folder / "run")
    return write_report([folder / "run"], folder / "report")[0]


@SCREENS
def test_a_report_is_accessible_and_its_layout_is_stable(report: Path, open_page: Open, width: int, dark: bool) -> None:
    page = open_page(report.as_uri(), width, dark)
    assert page.evaluate("window.shift") < 0.1
    page.evaluate("for (const element of document.querySelectorAll('details')) element.open = true")
    assert find_violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("width", [1200, 390])
def test_the_layout_is_stable_while_metrics_arrive(tmp_path: Path, open_page: Open, width: int) -> None:
    run = write_run(tmp_path / "mine", "fedavg")
    write_run(tmp_path / "other", "fedmk", events=[FINISHED])
    with serving(tmp_path) as site:
        watched = open_page(f"{site.address}/?run={site.row('mine')['id']}", width)
        listed = open_page(site.address, width)
        expect(watched.locator(".chart .line")).to_have_count(1)
        with (run / "metrics.jsonl").open("a") as file:
            for number in range(4, 8):
                file.write(json.dumps(metrics(number, 0.1 * number)) + "\n")
        with (run / "events.jsonl").open("a") as file:
            file.write(json.dumps({"time": 3.0, "event": "resume", "round": 7, "changed": {}}) + "\n")
        write_run(tmp_path / "third")
        expect(watched.locator(".tiles")).to_contain_text("7/10")
        expect(row(listed, "mine")).to_contain_text("7/10")
        expect(listed.get_by_role("button", name="Show 1 new run")).to_be_visible()
        shutil.rmtree(tmp_path / "other")  # the same number of runs, but different ones
        expect(listed.get_by_label("State")).not_to_contain_text("finished")
        expect(listed.get_by_role("button", name="Show 1 new run")).to_be_visible()
        for page in (watched, listed):
            assert page.evaluate("window.shift") < 0.1
            page.close()
