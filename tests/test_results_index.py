"""The index of results is complete and up to date."""

import re

import pytest

from fewer.experiments import recipes
from tools.make_results_index import (
    INDEX,
    Item,
    Paper,
    describe_state,
    list_commands,
    load_papers,
    load_results,
    render_index,
)
from tools.make_results_index import select_results as select

PAPERS = load_papers()
RESULTS = load_results()
ITEMS = [(paper, item) for paper in PAPERS for item in paper.item]
NUMBERS = {
    "FedMK": (7, 6),
    "FRL": (3, 3),
    "FedMeta": (4, 7),
    "F2L": (2, 6),
    "MetaFed": (3, 7),
}
"""How many tables and figures each paper has."""


def test_the_index_is_up_to_date() -> None:
    assert INDEX.read_text() == render_index(), "run python tools/make_results_index.py"


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_every_table_and_figure_is_listed_once(paper: Paper) -> None:
    names = [*(item.name for item in paper.item), *paper.without_results]
    tables, figures = NUMBERS[paper.name]
    expected = [f"Table {n}" for n in range(1, tables + 1)] + [f"Figure {n}" for n in range(1, figures + 1)]
    assert sorted(name for name in names if name != "Appendix") == sorted(expected)


@pytest.mark.parametrize(("paper", "item"), ITEMS, ids=lambda part: part.name)
def test_an_item_names_recipes_rows_and_columns_that_exist_and_has_a_verdict(paper: Paper, item: Item) -> None:
    plans = [recipes.load_recipe(name) for name in item.recipes]
    assert {*item.rows} <= {row.name for plan in plans for row in plan.row}
    assert {*item.columns} <= {column.name for plan in plans for column in plan.column}
    if select(item, RESULTS):
        assert item.verdict and len(item.verdict) <= 80, f"{paper.name}, {item.name}: say in a line what came out"


def test_the_state_depends_on_what_was_run() -> None:
    fig6 = next(item for paper, item in ITEMS if paper.name == "FedMK" and item.name == "Figure 6")
    results = select(fig6, RESULTS)
    assert describe_state(fig6, []) == "not run"
    assert describe_state(fig6, results) == "small"
    fig6 = fig6.model_copy(update={"size": "full"})
    assert describe_state(fig6, results) == "full"
    both = fig6.model_copy(update={"recipes": ["fedmk/fig6", "fedmk/nodes"]})
    assert describe_state(both, results) == "small"  # a column of the second recipe is missing


@pytest.mark.parametrize(("paper", "item"), ITEMS, ids=lambda part: part.name)
def test_every_column_of_an_item_has_a_command(paper: Paper, item: Item) -> None:
    results = select(item, RESULTS)
    commands = list_commands(item, results)
    for name in item.recipes:
        for column in recipes.load_recipe(name).column:
            if item.columns and column.name not in item.columns:
                continue
            run = any(
                result.recipe == name and column.name in {cell.column for cell in result.cells} for result in results
            )
            new = {f"fewer reproduce {name}", f'fewer reproduce {name} --column "{column.name}"'} & {*commands}
            assert run or new, (name, column.name)
            assert not run or f'fewer reproduce {name} --column "{column.name}"' not in {*commands} - {
                result.command for result in results
            }


def test_its_numbers_are_those_of_the_pages_it_links_to() -> None:
    text = INDEX.read_text()
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert [target for target in targets if not (INDEX.parent / target).is_file()] == []
    assert {f"{file.parent.name}/{file.name}" for file in INDEX.parent.glob("*/*.md")} <= {*targets}
    numbers = re.findall(r"^\| \[[^]]+\]\(([^)]+)\) \|.* \| (\d[^|]*) \| [^|]+ \|$", text, re.M)
    assert len(numbers) > 50
    for target, ours in numbers:
        assert ours in (INDEX.parent / target).read_text(), f"{ours} is not in {target}"


def test_the_commands_name_recipes() -> None:
    commands = re.findall(r"^fewer reproduce (\S+)", INDEX.read_text(), re.M)
    assert len(commands) > 30 and {*commands} <= {*recipes.list_recipes()}
