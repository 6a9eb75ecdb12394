"""Runs to report on, and the parts of a page."""

import json
import re
import shutil
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, ClassVar

from matplotlib.figure import Figure

from fewer import FedAvg
from fewer.report import groups as report_groups
from fewer.report.charts import plot_curves
from fewer.report.groups import RunGroup
from fewer.report.metrics import Histories
from fewer.report.page import write_report
from fewer.runs.reader import RunReader


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


def fake_run(
    path: Path, metadata: dict[str, Any], history: list[dict[str, Any]], events: Sequence[dict[str, Any]] = ()
) -> RunReader:
    """A run that is not on disk."""
    run = RunReader(path)
    vars(run).update(metadata=metadata, history=history, events=list(events))
    return run


def group_runs(paths: Sequence[Path]) -> list[RunGroup]:
    return report_groups.group_runs(paths)[0]


def report(tmp_path: Path, runs: Sequence[Path]) -> tuple[Page, list[str]]:
    (path,) = write_report(runs, tmp_path / "report", pictures=False)
    page = Page(path)
    pictures = re.findall(r'<figure[^>]*><div class="scroll"[^>]* aria-label="([^"]+)"', page.text)
    check_page(page, len(pictures))
    return page, pictures


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


def copy_run(tmp_path: Path, run: Path, **metadata: Any) -> Path:
    """Copies a run and changes its settings.json."""
    copy = tmp_path / f"copy-{len(list(tmp_path.iterdir()))}"
    shutil.copytree(run, copy)
    description = json.loads((copy / "settings.json").read_text())
    for part, values in metadata.items():
        description[part] = {**description[part], **values}
    (copy / "settings.json").write_text(json.dumps(description))
    return copy
