"""Writes docs/results/index.md and docs/results/points.js: python tools/make_results_index.py.

The index lists every table and figure of the five papers. They, and a verdict on each, are in
`src/fewer/experiments/tables/coverage.toml`. The points are all published results, for docs/results/browse.md. Numbers
and commands come from the published JSON files.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from fewer.experiments import recipes
from fewer.experiments.recipes import Cell
from fewer.runs.metric import ACCURACY
from fewer.statistics import format_interval, interval

RESULTS = Path(__file__).parents[1] / "docs/results"
INDEX = RESULTS / "index.md"
POINTS = RESULTS / "points.js"
COVERAGE = Path(recipes.__file__).parent / "tables/coverage.toml"

INTRO = """# All tables and figures

Every table and figure of the five papers, with our numbers next to theirs. `tools/make_results_index.py` writes this
page from the recipes and the published results. [Browse all results](browse.md) to filter and plot them.

| state | meaning |
|---|---|
| full | the paper's data, clients, rounds and seeds |
| small | fewer data sets, columns, clients, rounds or seeds; the linked page says which |
| not run | no published result |

Accuracy is in %, with a 95 % interval where there are several seeds, groups or tasks. Papers print no numbers in
figures. "Tuned" rows chose their settings on held-out data; the papers' baselines are not tuned.

| column of a page | meaning |
|---|---|
| MB up, MB down | training messages of a run, from and to all clients |
| GFLOP | billions of operations that all clients spend on training |
| seconds | time of a run on the machine that the page names |
| mean ± x | the 95 % interval is from mean − x to mean + x |

If a page has several columns of accuracy and one of a cost, the cost is the mean over them.
"""


class Item(BaseModel):
    """A table or figure of a paper."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    what: str
    recipes: list[str] = []
    columns: list[str] = []
    """The columns of the recipes that belong to it; all if the list is empty."""
    rows: list[str] = []
    """The rows that the page shows."""
    after: dict[str, int] = {}
    """For recipes that run longer: the round whose accuracy the page shows."""
    size: Literal["small", "full"] = "small"
    """Whether the recipes have the paper's data, clients, rounds and seeds."""
    verdict: str = ""


class Paper(BaseModel):
    """A paper: its tables and figures with results, and the others with the reason."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    page: str
    without_results: dict[str, str]
    item: list[Item]


class Published(NamedTuple):
    """A published result: its page, its command and its cells."""

    page: str
    recipe: str
    command: str
    cells: list[Cell]


def load_papers() -> list[Paper]:
    """Loads the tables and figures of the papers."""
    return [Paper(**paper) for paper in tomllib.loads(COVERAGE.read_text())["paper"]]


def load_results() -> list[Published]:
    """Loads all published results of full recipes."""
    results = []
    for file in sorted(RESULTS.glob("*/*.json")):
        content = json.loads(file.read_text())
        command = content["command"]
        if " --quick" not in command:
            page = file.with_suffix(".md").relative_to(RESULTS).as_posix()
            results.append(Published(page, command.split()[2], command, recipes.read_results(content)[1]))
    return results


def select_results(item: Item, results: Sequence[Published]) -> list[Published]:
    """Returns the results of an item, with the cells of its columns only, in the order of its recipes."""
    selected = []
    for result in sorted(
        (result for result in results if result.recipe in item.recipes),
        key=lambda result: item.recipes.index(result.recipe),
    ):
        cells = [cell for cell in result.cells if not item.columns or cell.column in item.columns]
        if cells:
            selected.append(result._replace(cells=cells))
    return selected


def describe_state(item: Item, results: Sequence[Published]) -> str:
    """Returns full, small or not run."""
    if not results:
        return "not run"
    wanted = {(name, column.name) for name in item.recipes for column in recipes.load_recipe(name).column}
    done = {(result.recipe, cell.column) for result in results for cell in result.cells}
    return "full" if item.size == "full" and wanted <= done else "small"


def list_commands(item: Item, results: Sequence[Published]) -> list[str]:
    """Returns the commands of the published results, and of recipes and columns without one."""
    done = {(result.recipe, cell.column) for result in results for cell in result.cells}
    commands = [result.command for result in results]
    for name in item.recipes:
        plan = recipes.load_recipe(name)
        wanted = [column.name for column in plan.column if not item.columns or column.name in item.columns]
        missing = [column for column in wanted if (name, column) not in done]
        if missing == [column.name for column in plan.column]:
            commands.append(f"fewer reproduce {name}")
        else:
            commands += [f'fewer reproduce {name} --column "{column}"' for column in missing]
    return commands


def render_index() -> str:
    """Returns the page."""
    results, papers = load_results(), load_papers()
    lines = [INTRO]
    for paper in papers:
        lines += _render_paper(paper, results)
    lines += _render_others({name for paper in papers for item in paper.item for name in item.recipes}, results)
    return "\n".join(lines)


def _render_paper(paper: Paper, results: Sequence[Published]) -> Iterator[str]:
    items = [(item, select_results(item, results)) for item in paper.item]
    title = next(recipes.load_recipe(name).paper for item in paper.item for name in item.recipes)
    yield from (f"## {paper.name}", "", f"*{_drop_place(title)}.*", "", f"[About {paper.name}](../{paper.page})", "")
    yield from _render_table(
        ("table or figure", "content", "state", "verdict"),
        [(item.name, item.what, describe_state(item, found), item.verdict if found else "–") for item, found in items],
    )
    numbers = [
        (
            f"[{item.name}]({result.page})",
            _data_name(result.recipe, cell.column),
            f"{cell.column}, round {item.after[result.recipe]}" if result.recipe in item.after else cell.column,
            cell.row,
            _format_ours(cell, item.after.get(result.recipe)),
            _format_paper(cell),
        )
        for item, found in items
        for result in found
        for column in dict.fromkeys(cell.column for cell in result.cells)
        for row in item.rows
        for cell in result.cells
        if (cell.column, cell.row) == (column, row)
    ]
    yield from ("Ours and theirs:", "")
    yield from _render_table(("result", "data", "column", "row", "ours", "paper"), numbers)
    yield from ("Commands:", "", "```sh")
    published = {result.command for result in results}
    commands = dict.fromkeys((command, item.name) for item, found in items for command in list_commands(item, found))
    for command, name in commands:
        yield f"{command}  # {name}{'' if command in published else ', not run'}"
    yield from ("```", "")
    pages = dict.fromkeys(result.page for item, found in items if not item.rows for result in found)
    if pages:
        yield from (f"Other figures: {', '.join(f'[{Path(page).stem}]({page})' for page in pages)}.", "")
    reasons = "; ".join(f"{name} ({reason})" for name, reason in paper.without_results.items())
    yield from (f"Without results: {reasons}.", "")


def _render_others(covered: set[str], results: Sequence[Published]) -> Iterator[str]:
    """Lists the recipes that are no table or figure of the five papers."""
    yield from ("## Beyond the papers", "")
    rows = []
    for name, title in recipes.list_recipes().items():
        pages = [f"[{Path(result.page).stem}]({result.page})" for result in results if result.recipe == name]
        if name not in covered:
            rows.append((f"`{name}`", title, ", ".join(pages) or "not run"))
    yield from _render_table(("recipe", "content", "result"), rows)


def list_points(results: Sequence[Published]) -> list[dict[str, Any]]:
    """Returns every cell of the results as a point: what was run, its accuracy in % and its costs."""
    return [
        {
            "result": result.page.removesuffix(".md"),
            "row": cell.row,
            "column": cell.column,
            "method": cell.ours.method,
            "data": _data_name(result.recipe, cell.column),
            "accuracy": round(100 * cell.ours.accuracy, 2),
            "text": cell.ours.format_accuracy(),
            "paper": cell.paper,
            "rounds": cell.ours.rounds,
            "mb": float(f"{cell.ours.mb_up + cell.ours.mb_down:.4g}"),
            "gflop": None if cell.ours.gflop is None else float(f"{cell.ours.gflop:.4g}"),
            "epsilon": None if cell.ours.epsilon is None else float(f"{cell.ours.epsilon:.4g}"),
            "seeds": len(cell.ours.seeds),
        }
        for result in results
        for cell in result.cells
        if cell.ours.primary == ACCURACY
    ]


def render_points() -> str:
    """Returns the points as a script, one per line. Pages that are opened as files can load a script, but no JSON."""
    results = load_results()
    commands = {result.page.removesuffix(".md"): result.command for result in results}
    lines = [json.dumps(point, ensure_ascii=False) for point in list_points(results)]
    return "\n".join(
        [
            "// Written by tools/make_results_index.py.",
            f"const commands = {json.dumps(commands, indent=1, ensure_ascii=False)};",
            "const points = [",
            *(f"{line}," for line in lines),
            "];",
            "",
        ]
    )


def _drop_place(paper: str) -> str:
    """Returns the paper of a recipe without the table or figure."""
    for word in (", Table", ", Figure", " ("):
        paper = paper.partition(word)[0]
    return paper


def _data_name(recipe: str, column: str) -> str:
    """Returns the name of the data of a column, without the path of a file."""
    plan = recipes.load_recipe(recipe)
    settings = next(entry.model_extra or {} for entry in plan.column if entry.name == column)
    return str({**plan.settings, **settings}["data"]).partition(":")[0]


def _format_ours(cell: Cell, round: int | None) -> str:
    if round is None:
        return cell.ours.format_accuracy()
    values = [point["accuracy"] for curve in cell.ours.curves for point in curve if point["round"] == round]
    return format_interval(interval(values), 1)  # as in the page's table by round


def _format_paper(cell: Cell) -> str:
    return "–" if cell.paper is None else f"{cell.paper:.2f}"


def _render_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield from (f"| {' | '.join(titles)} |", "|---" * len(titles) + "|")
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


if __name__ == "__main__":
    INDEX.write_text(render_index())
    POINTS.write_text(render_points())
