"""What the docs say works."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import pytest
import typer

import fewer
from fewer.cli.app import app
from fewer.cli.options import assignments
from fewer.experiments import recipes
from fewer.experiments.compare import own_settings
from fewer.methods import find, names
from fewer.registry import FORMATS, MODELS
from fewer.runs.experiment import parse_settings
from fewer.runs.settings import Settings
from tests.test_cli import DIGITS, call
from tests.test_floors import FLOORS
from tests.test_runs import Net

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(page for page in DOCS.rglob("*.md") if "results" not in page.parts)]


class Block(NamedTuple):
    """A piece of code on a page: its language, the file that it is meant to be, and its text."""

    language: str
    title: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    fence = r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$'
    for language, title, fenced, indented in re.findall(
        rf"{fence}|(?<=\n\n)((?:    [^\n]*\n+)+)", page.read_text(), re.S | re.M
    ):
        yield Block(language, title, fenced or re.sub("^    ", "", indented, flags=re.M))


def commands(block: Block) -> list[list[str]]:
    if block.language not in ("", "sh"):
        return []
    return [shlex.split(line, comments=True)[1:] for line in block.text.splitlines() if line.startswith("fewer ")]


def on(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_worked_example_runs_from_the_command_line(tmp_path: Path) -> None:
    file = DOCS / "examples/fedmedian.py"
    assert len(file.read_text().splitlines()) < 50
    call("compare", "fedavg", f"{file}:FedMedian", *DIGITS, "--rounds", "2", "--out", tmp_path, "--corrupt", "0.1")
    assert "Step size" in call("methods", f"{file}:FedMedian").stdout


def test_the_snippets_of_the_python_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", (DOCS / "python.md").read_text(), re.S)
    assert len(snippets) == 4
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 255, (600, 8, 8), np.uint8), draw.integers(0, 10, 600)
    names: dict[str, object] = {
        "texts": [f"word{n % 7} good" for n in range(80)],
        "labels": y[:80],
        "dataset": list(zip(x, y, strict=True)),
    }
    names |= {"x": x, "y": y, "x_test": x, "y_test": y, "hospital": y % 4, "MyNet": Net}
    names |= {f"{part}{n}": array[:40] for n in range(3) for part, array in (("x", x), ("y", y))}
    exec(snippets[0].replace("fashion-mini", "digits").replace("rounds=10", "rounds=1"), names)
    exec(snippets[1].replace("FedAvg()", "FedAvg(rounds=1)"), names)
    exec(snippets[2].replace("clients=50", "clients=10"), names)
    short = {"fashion-mini": "digits", "rounds=10": "rounds=1", "clients=20": "clients=4", "seeds=3": "seeds=2"}
    for long, quick in short.items():
        snippets[3] = snippets[3].replace(long, quick)
    exec(snippets[3], names)
    assert (tmp_path / "traffic.png").stat().st_size > 5000


# --- commands ---------------------------------------------------------------------------------------------------


def understood(words: list[str]) -> tuple[str, dict[str, Any]]:
    """The command that the words name, and what they give it; an error where it takes no such thing."""
    command, name = typer.main.get_command(app), "fewer"
    while isinstance(command, click.Group):
        name, *words = words
        command = command.commands[name]
    words = [word for before, word in pairwise(["", *words]) if word != "…" or before.startswith("--")]
    given, rest, _ = command.make_parser(click.Context(command)).parse_args(words)
    assert not rest, rest
    return name, {key: value for key, value in given.items() if isinstance(value, str | list | tuple)}


@pytest.mark.parametrize("page", PAGES, ids=on)
def test_every_command_takes_what_a_page_gives_it(page: Path) -> None:
    for words in (words for block in blocks(page) for words in commands(block)):
        name, given = understood(words)
        methods, default = given.get("methods", given.get("method")), "frl" if name == "prepare" else "fedavg"
        settings = {key: value for key, value in given.items() if key in Settings.model_fields and key != "method"}
        if name in ("run", "compare", "prepare", "server", "local-cluster"):
            some = [methods or default] if not isinstance(methods, tuple | list) else list(methods)
            kinds = [find(str(ROOT / one) if one.startswith("docs/") else one) for one in some]
            own_settings(kinds, assignments(settings.pop("method_options", [])))
            pairs = {key: assignments(settings.pop(key, [])) for key in ("data_options", "model_set")}
            known = parse_settings({**settings, **pairs})
            assert known.data in fewer.data.NAMES or known.data.partition(":")[0] in FORMATS, known.data
            assert known.model in MODELS or ".py:" in known.model, known.model
        if name == "methods" and methods:
            find(methods)
        if name == "reproduce" and (recipe := given.get("name")) and not recipe.endswith(".toml"):
            known_columns = [column.name for column in recipes.recipe(recipe).column]
            assert set(given.get("column") or ()) <= set(known_columns)


SLOW = ("local-cluster", "join", "server")
"""Commands that tests/machines tries, with processes of their own."""


@pytest.mark.parametrize(
    "page", [*sorted((DOCS / "tutorial").glob("*.md")), DOCS / "how-to/add-data.md", DOCS / "how-to/recipe.md"], ids=on
)
def test_a_page_works_from_top_to_bottom(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its code in its order, on smaller data and for fewer rounds; recipes only with --quick."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    np.savez("mine.npz", x=np.zeros((999, 8, 8), np.uint8), y=np.arange(999) % 2)  # what a reader has already
    spaces: dict[str, Any] = {"__name__": "page"}
    ran = 0
    for block in blocks(page):
        text = block.text.replace("fashion-mini", "digits")
        text = re.sub(r"(--rounds |rounds=|--seeds )\d+", r"\g<1>1", text)
        text = re.sub(r"(--clients |clients=)20", r"\g<1>5", text)
        if block.title:
            Path(block.title).write_text(text)
        elif block.language == "python":
            exec(text, spaces)
        for words in commands(block._replace(text=text)):
            if words[0] in SLOW or (words[0] == "reproduce" and "--list" not in words and "--quick" not in words):
                continue
            call(*words, *(["--no-report"] if words[0] in ("run", "compare") else []))
            ran += 1
    for name in set(sys.modules) - before:
        if (Path(getattr(sys.modules[name], "__file__", None) or "/").parent) == tmp_path:
            del sys.modules[name]
    assert ran


# --- text -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=on)
def test_links_lead_somewhere_without_the_site_too(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_a_figure_that_is_a_link_stands_in_the_table_it_leads_to() -> None:
    figure = re.compile(r"\[(-?[\d.]+(?: ± [\d.]+)?)\]\(([^)]+)\)")
    found = [(page, *match) for page in PAGES for match in figure.findall(page.read_text())]
    assert len(found) > 20
    for page, value, target in found:
        table = (page.parent / target).read_text()
        assert re.search(rf"(?<![\d.]){re.escape(value)}(?![\d.])", table), f"{on(page)}: {value} is not in {target}"


def test_all_that_the_package_offers_is_in_the_reference() -> None:
    told = re.findall(r"^::: (fewer\.\S+)$", (DOCS / "reference/python.md").read_text(), re.M)
    methods = {find(name) for name in names()}
    for name in set(fewer.__all__) - {"data", "__version__"}:
        assert getattr(fewer, name) in methods or any(one.endswith(f".{name}") for one in told), name
    assert {f"fewer.data.{name}" for name in ("load", "from_arrays", "from_clients", "from_dataset", "Data")} <= {*told}


def test_the_house_has_the_floors_that_its_page_lists() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "explanation/house.md").read_text(), re.M)
    assert len(rows) > 10 and rows == [floor for floor in FLOORS if floor in rows]


# --- the site ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def handlers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the site needs the extra docs: pip install 'fewer[docs]'")
    where = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(where)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return where


def test_the_site_loads_nothing_from_elsewhere(handlers: Path) -> None:
    """Scripts, styles, pictures and fonts are its own; links are for the reader to follow."""
    pages, styles = list(handlers.rglob("*.html")), list(handlers.rglob("*.css"))
    assert len(pages) > 40 and styles
    outside = r"[\"']?\s*(?:https?:)?//"
    for page in pages:
        text = page.read_text()
        loads = re.findall(rf"<(?!a\b|meta\b)[a-z]+[^>]*\b(?:src|href|data)={outside}[^>]*>", text)
        loads = [tag for tag in loads if 'rel="canonical"' not in tag]
        assert not loads, f"{page}: {loads}"
        assert not re.search(rf"(?:@import|url\()\s*{outside}", text)
        assert 'class="mermaid"' not in text  # the theme would fetch a program to draw it
    for style in styles:
        assert not re.search(rf"(?:@import\s*|url\(){outside}", style.read_text()), style


def test_what_is_made_of_the_code_is_all_there(handlers: Path) -> None:
    methods = (handlers / "reference/methods.html").read_text()
    assert all(f'<h2 id="{name}">' in methods for name in names())
    assert all(f"<code>{setting}</code>" in methods for name in names() for setting in find(name).model_fields)
    assert all(name in (handlers / "reference/recipes.html").read_text() for name in recipes.names())
    commands = (handlers / "reference/cli.html").read_text()
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        for below in getattr(command, "commands", {"": command}):
            assert f'<h3 id="fewer-{name}{"-" if below else ""}{below}">' in commands
    assert all(f"--{name.replace('_', '-')}" in commands for name in Settings.model_fields)
    assert not [page for page in handlers.rglob("*.html") if "made of the code:" in page.read_text()]


def test_the_site_shows_no_raw_markdown(handlers: Path) -> None:
    """What a renderer of another dialect takes for a list or a table must be one here, too."""
    for page in handlers.rglob("*.html"):
        for paragraph in re.findall(r"<p>(.*?)</p>", page.read_text(), re.S):
            assert not re.search(r"^\s*(?:[-*] |\|.*\|$|```|#+ )", paragraph, re.M), f"{page}: {paragraph}"
