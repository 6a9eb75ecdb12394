"""The docs are correct: the commands, code, links and tables on the pages work."""

import inspect
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from textwrap import dedent, indent
from typing import Any, NamedTuple
from urllib.parse import unquote

import click
import numpy as np
import pytest
import typer
from torch import nn

import fewer
from fewer.cli.app import app
from fewer.cli.options import parse_assignments
from fewer.data.class_split import OPTIONS as CLASS_OPTIONS
from fewer.data.formats.readers import INTERNAL
from fewer.data.sources import EMBEDDED, LOAD_OPTIONS
from fewer.experiments import recipes
from fewer.experiments.compare import assign_options
from fewer.methods import find, names
from fewer.registry import FORMATS, METHODS, MODELS
from fewer.runs.experiment import parse_settings
from fewer.runs.settings import Settings
from tests.helpers import DIGITS, LAYERS, call

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(page for page in DOCS.rglob("*.md") if "results" not in page.parts)]


class MyNet(nn.Sequential):
    """The reader's own model, for 8×8 images."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 10))


class Block(NamedTuple):
    """A code block on a page: its language, the name of the file it shows, and its text."""

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
    lines = block.text.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("fewer ")]


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_worked_example_runs_from_the_command_line(tmp_path: Path) -> None:
    file = DOCS / "examples/fedmedian.py"
    assert len(file.read_text().splitlines()) < 50
    call("compare", "fedavg", f"{file}:FedMedian", *DIGITS, "--rounds", "2", "--out", tmp_path, "--corrupt", "0.1")
    assert "Learning rate" in call("methods", f"{file}:FedMedian").stdout


def test_server_momentum_leaves_batch_statistics_alone() -> None:
    method = find(f"{DOCS / 'examples/fedavgm.py'}:FedAvgM")(rounds=3)
    digits = fewer.data.load("digits", clients=4)
    result = fewer.run(method, digits, norm="batch")
    assert result.accuracy > 0.5  # 0.08 with momentum on batch statistics, too
    assert {*result.state.model} - {*result.state.momentum} == {
        name for name in result.state.model if "running" in name or "tracked" in name
    }
    assert all(bool((tensor > 0).all()) for name, tensor in result.state.model.items() if name.endswith("running_var"))


def test_the_snippets_of_the_python_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", (DOCS / "how-to/python.md").read_text(), re.S)
    assert len(snippets) == 7
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 255, (600, 8, 8), np.uint8), rng.integers(0, 10, 600)
    names: dict[str, object] = {
        "texts": [f"word{n % 7} good" for n in range(80)],
        "labels": y[:80],
        "dataset": list(zip(x, y, strict=True)),
    }
    names |= {"x": x, "y": y, "x_test": x, "y_test": y, "hospital": y % 4, "MyNet": MyNet}
    names |= {f"{part}{n}": array[:40] for n in range(3) for part, array in (("x", x), ("y", y))}
    smaller = {
        "fashion-mini": "digits",
        "rounds=10": "rounds=1",
        "FedAvg()": "FedAvg(rounds=1)",
        "clients=50": "clients=10",
        "clients=20": "clients=4",
        "seeds=3": "seeds=2",
        "trials=4": "trials=1",
    }
    for snippet in snippets:
        for shown, quick in smaller.items():
            snippet = snippet.replace(shown, quick)
        exec(snippet, names)
    assert (tmp_path / "traffic.png").stat().st_size > 5000


def test_the_example_of_the_readme_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    [example] = [block.text for block in blocks(ROOT / "README.md") if block.language == "python"]
    assert len(example.splitlines()) <= 10
    exec(example, {})
    line = re.compile(r"(\d+)% accuracy, ([\d.]+) MB up")
    printed, promised = line.search(capsys.readouterr().out), line.search((ROOT / "README.md").read_text())
    assert printed and promised and printed[2] == promised[2]
    assert abs(int(printed[1]) - int(promised[1])) <= 2  # processors round differently


def test_the_readme_is_short() -> None:
    page = ROOT / "README.md"
    assert len(table_below(page, "Results")) <= 8
    tables = re.findall(r"^\|(.*)\|$", re.sub(r"\]\([^)]*\)", "]", page.read_text()), re.M)
    cells = [cell.strip().replace("[", "").replace("]", "") for row in tables for cell in row.split("|")]
    assert not [cell for cell in cells if len(cell) > 60]
    assert len(page.read_text().split()) < 1000  # two to four minutes


def test_the_badges_of_the_readme_say_what_the_project_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    badges = [unquote(badge) for badge in re.findall(r"/badge/([^)]+)-blue", (ROOT / "README.md").read_text())]
    license = project["license"].replace("-", "--")
    assert badges == [f"python-{project['requires-python'].replace('>=', '≥ ')}", f"license-{license}"]


def test_work_on_the_server_as_on_the_page_gives_the_default_accuracy(tmp_path: Path) -> None:
    page = DOCS / "how-to/write-a-method.md"
    [snippet] = [block.text for block in blocks(page) if "map_on_server" in block.text]
    imports = """
        from typing import Any
        from fewer import Clients, FedAvg, on_server
        from fewer.data import Data
        from fewer.methods import ModelState, Scores, Server
        from fewer.models import Weights
    """
    source = f"{dedent(imports)}\nclass Evaluated(FedAvg):\n{indent(snippet, '    ')}"
    (tmp_path / "evaluated.py").write_text(source)
    method = find(f"{tmp_path / 'evaluated.py'}:Evaluated")
    data = fewer.data.load("digits", clients=4)
    assert fewer.run(method(rounds=2), data).accuracy == fewer.run(fewer.FedAvg(rounds=2), data).accuracy


# --- commands ---------------------------------------------------------------------------------------------------


def parse_command(args: list[str]) -> tuple[str, dict[str, Any]]:
    """Returns the name of a command and its arguments; fails if the command does not accept them."""
    command, name = typer.main.get_command(app), "fewer"
    while isinstance(command, click.Group):
        name, *args = args
        command = command.commands[name]
    args = [arg for before, arg in pairwise(["", *args]) if arg != "…" or before.startswith("--")]
    parsed, rest, _ = command.make_parser(click.Context(command)).parse_args(args)
    assert not rest, rest
    return name, {key: value for key, value in parsed.items() if isinstance(value, str | list | tuple)}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_command_accepts_the_arguments_on_a_page(page: Path) -> None:
    for args in (args for block in blocks(page) for args in commands(block)):
        name, parsed = parse_command(args)
        methods, default = parsed.get("methods", parsed.get("method")), "frl" if name == "prepare" else "fedavg"
        settings = {key: value for key, value in parsed.items() if key in Settings.model_fields and key != "method"}
        if name in ("run", "compare", "prepare", "server", "local-cluster"):
            chosen = [methods or default] if not isinstance(methods, tuple | list) else list(methods)
            classes = [find(str(ROOT / method) if method.startswith("docs/") else method) for method in chosen]
            assign_options(classes, parse_assignments(settings.pop("method_options", [])))
            pairs = {key: parse_assignments(settings.pop(key, [])) for key in ("data_options", "model_options")}
            checked = parse_settings({**settings, **pairs})
            assert checked.data in fewer.data.NAMES or checked.data.partition(":")[0] in FORMATS, checked.data
            assert checked.model is None or checked.model in MODELS or re.match(r".+\.py:|hf:|timm:", checked.model)
        if name == "methods" and methods:
            find(methods)
        if name == "reproduce" and (recipe := parsed.get("name")) and not recipe.endswith(".toml"):
            known_columns = [column.name for column in recipes.load_recipe(recipe).column]
            assert set(parsed.get("column") or ()) <= set(known_columns)


HOW_TO = ("add-data", "classes", "fedmk-python", "install", "own-data", "own-loss", "own-training", "recipe", "slurm")
SLOW = ("local-cluster", "join", "server")
"""Commands that tests/machines runs in separate processes."""


@pytest.mark.parametrize(
    "page",
    [
        ROOT / "README.md",
        *sorted((DOCS / "tutorials").glob("*.md")),
        *(DOCS / f"how-to/{name}.md" for name in HOW_TO),
    ],
    ids=page_name,
)
def test_a_page_works_from_top_to_bottom(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs all code of a page in order, on smaller data and for fewer rounds; recipes only with --quick."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    np.savez("mine.npz", x=np.zeros((999, 8, 8), np.uint8), y=np.arange(999) % 2)  # the reader's own files
    Path("house.csv").write_text("area,price\n" + "".join(f"{n % 7},{n % 7 + 0.5}\n" for n in range(400)))
    namespace: dict[str, Any] = {"__name__": "page"}
    ran = 0
    for block in blocks(page):
        text = block.text.replace("fashion-mini", "digits")
        text = re.sub(r"(--rounds |rounds=|--seeds )\d+", r"\g<1>1", text)
        text = re.sub(r"(--clients |clients=)20", r"\g<1>5", text)
        if block.title:
            Path(block.title).write_text(text)
        elif block.language == "python":
            exec(text, namespace)
        for args in commands(block._replace(text=text)):
            if args[0] in SLOW or (args[0] == "reproduce" and "--list" not in args and "--quick" not in args):
                continue
            call(*args, *(["--no-report"] if args[0] in ("run", "compare") else []))
            ran += 1
    for name in set(sys.modules) - before:
        if (Path(getattr(sys.modules[name], "__file__", None) or "/").parent) == tmp_path:
            del sys.modules[name]
    assert ran


# --- text -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_to_existing_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if target.startswith("../../actions/"):  # the repository's page of a workflow, on GitHub
            target = f".github/{target.removeprefix('../../actions/').removesuffix('/badge.svg')}"
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_a_linked_number_is_in_the_table_it_links_to() -> None:
    figure = re.compile(r"\[(-?[\d.]+(?: ± [\d.]+)?)\]\(([^)]+)\)")
    links = [(page, *match) for page in PAGES for match in figure.findall(page.read_text())]
    assert len(links) > 20
    for page, value, target in links:
        table = (page.parent / target).read_text()
        assert re.search(rf"(?<![\d.]){re.escape(value)}(?![\d.])", table), (
            f"{page_name(page)}: {value} is not in {target}"
        )


def test_every_public_name_is_in_the_reference() -> None:
    documented = re.findall(r"^::: (fewer\.\S+)$", (DOCS / "reference/python.md").read_text(), re.M)
    method_classes = {find(name) for name in names()}
    packages = {"audit", "data", "methods", "models", "__version__"}
    for name in set(dir(fewer)) - packages:
        assert getattr(fewer, name) in method_classes or any(path.endswith(f".{name}") for path in documented), name
    functions = ("load", "from_arrays", "from_clients", "from_dataset", "Data")
    assert {f"fewer.data.{name}" for name in functions} <= {*documented}


def test_the_page_on_installing_lists_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "how-to/install.md").read_text(), re.M)
    assert rows == [*project["optional-dependencies"]]


def table_below(page: Path, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, row by row."""
    text = page.read_text().split(f"\n## {heading}\n")[1]
    rows = re.search(r"^\|[-|]+\|\n((?:\|.*\n)+)", text, re.M)
    assert rows, heading
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1].splitlines()]


def test_the_page_of_all_methods_lists_each_once_and_nothing_else() -> None:
    rows = table_below(DOCS / "methods/index.md", "What a client sends")
    listed = [name for row in rows for name in re.findall("`([^`]+)`", row[0])]
    assert sorted(listed) == sorted(METHODS.builtins)


@pytest.mark.parametrize("name", ["fedmk", "fedmeta", "frl", "metafed", "f2l"])
def test_the_page_of_a_flagship_method_has_all_parts(name: str) -> None:
    headings = re.findall(r"^## (.+)$", (DOCS / f"methods/{name}.md").read_text(), re.M)
    parts = {"When to use it", "How it works", "Departures from the paper", "What we measured"}
    assert parts <= {*headings} and any("options" in heading.lower() for heading in headings)


@pytest.mark.parametrize("heading", ["By goal", "By rounds", "By samples", "By trust"])
def test_the_page_on_choosing_a_method_names_only_methods(heading: str) -> None:
    options = {*Settings.model_fields, *(option for name in names() for option in find(name).model_fields)}
    for row in table_below(DOCS / "explanation/which-method.md", heading):
        for code in re.findall("`([^`]+)`", " ".join(row)):
            option = re.split("[= ]", code.removeprefix("-o ").removeprefix("--"))[0].replace("-", "_")
            assert code in METHODS.builtins or option in options, code


def test_the_pages_on_data_list_every_format_and_model_with_its_options() -> None:
    page = DOCS / "how-to/own-data.md"
    formats = {row[0].strip("`").partition(":")[0]: row[2] for row in table_below(page, "Formats")}
    assert {*formats} == {*FORMATS}
    for name, cell in formats.items():
        parameters = {*inspect.signature(FORMATS[name]).parameters} - {*INTERNAL}
        assert {*re.findall(r"`(\w+)`", cell)} <= parameters and bool(cell) == bool(parameters), name
    options = {row[0].strip("`") for row in table_below(page, "CSV")}
    assert options == {*inspect.signature(FORMATS["csv"]).parameters} - {*INTERNAL}
    rows = table_below(DOCS / "how-to/data.md", "Models")
    models = {name: row for row in rows for name in re.findall("`([^`]+)`", row[0])}
    assert {*models} == {*MODELS}
    model_options = {option for model in MODELS.values() for option in inspect.signature(model).parameters}
    for row in models.values():
        assert {*re.findall(r"`(\w+)`", row[1])} <= model_options


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_flag_and_option_in_the_text_exists(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    codes = re.findall(r"`([^`\n]+)`", prose)
    options = {"name", *(option for name in names() for option in find(name).model_fields)}
    for option in re.findall(r"(?:^|\s)-o ([\w-]+\.)?(\w+)=", "\n".join(codes)):
        assert option[1] in options, option
    for option in re.findall(r"--data-option (\w+)=", page.read_text()):
        assert option in {"name", "split", "held_out", *CLASS_OPTIONS, *LOAD_OPTIONS, *data_options()}, option
    known = {flag for command in all_commands() for flag in flags_of(command)} | {"--help"}
    for flag in re.findall(r"^(--[a-z-]+)", "\n".join(codes), re.M):
        assert flag in known, flag


def data_options() -> set[str]:
    """The options of all data formats and built-in datasets."""
    readers = [*FORMATS.values(), *EMBEDDED.values()]
    return {option for reader in readers for option in inspect.signature(reader).parameters} - {*INTERNAL}


def all_commands() -> Iterator[click.Command]:
    """Yields all commands of the program, including those in groups."""
    groups = [typer.main.get_command(app)]
    for command in groups:
        yield command
        groups += getattr(command, "commands", {}).values()


def flags_of(command: click.Command) -> list[str]:
    return [flag for option in command.params for flag in option.opts if flag.startswith("--")]


def test_the_page_on_layers_lists_them_in_order() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "explanation/layers.md").read_text(), re.M)
    assert len(rows) > 10 and rows == [layer for layer in LAYERS if layer in rows]


# --- the site ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the site needs the extra docs: pip install 'fewer[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    return folder


def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    """Scripts, styles, images and fonts are local; only links lead elsewhere."""
    pages, styles = list(site.rglob("*.html")), list(site.rglob("*.css"))
    assert len(pages) > 40 and styles
    outside = r"[\"']?\s*(?:https?:)?//"
    for page in pages:
        text = page.read_text()
        loads = re.findall(rf"<(?!a\b|meta\b)[a-z]+[^>]*\b(?:src|href|data)={outside}[^>]*>", text)
        loads = [tag for tag in loads if 'rel="canonical"' not in tag]
        assert not loads, f"{page}: {loads}"
        assert not re.search(rf"(?:@import|url\()\s*{outside}", text)
        assert 'class="mermaid"' not in text  # the theme would load a script to draw it
    for style in styles:
        assert not re.search(rf"(?:@import\s*|url\(){outside}", style.read_text()), style


def test_the_generated_pages_are_complete(site: Path) -> None:
    methods = (site / "reference/methods.html").read_text()
    assert all(f'<h2 id="{name}">' in methods for name in names())
    assert all(f"<code>{setting}</code>" in methods for name in names() for setting in find(name).model_fields)
    assert all(name in (site / "reference/recipes.html").read_text() for name in recipes.list_recipes())
    commands = (site / "reference/cli.html").read_text()
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        for subcommand in getattr(command, "commands", {"": command}):
            assert f'<h3 id="fewer-{name}{"-" if subcommand else ""}{subcommand}">' in commands
    flags = {flag for command in all_commands() if not hasattr(command, "commands") for flag in flags_of(command)}
    assert not [flag for flag in flags if flag not in commands]
    assert not [page for page in site.rglob("*.html") if "<!-- generated:" in page.read_text()]


def test_the_site_shows_no_raw_markdown(site: Path) -> None:
    """Lists and tables in GitHub's Markdown are lists and tables on the site, too."""
    for page in site.rglob("*.html"):
        for paragraph in re.findall(r"<p>(.*?)</p>", page.read_text(), re.S):
            assert not re.search(r"^\s*(?:[-*] |\|.*\|$|```|#+ )", paragraph, re.M), f"{page}: {paragraph}"
