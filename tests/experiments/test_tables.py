"""The recipes of MetaFed and FRL use the stated settings and tune all rows equally."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fewer.data.federated import TEST_FRACTION
from fewer.experiments.recipes import RecipeColumn, RecipeRow, load_recipe, row_settings
from fewer.experiments.tune import coordinate_search, find_search_space
from fewer.methods import find
from fewer.runs.experiment import make_method, parse_settings
from fewer.runs.settings import Settings

# --- recipes ----------------------------------------------------------------------------------------------------


def cells(name: str) -> Iterator[tuple[RecipeRow, RecipeColumn, Settings, Any]]:
    """Rows, columns, settings and methods of a recipe's cells."""
    plan = load_recipe(f"metafed/{name}")
    for column in plan.column:
        for row, values in zip(plan.row, row_settings(column, plan, False), strict=True):
            settings_ = parse_settings(values)
            yield row, column, settings_, make_method(find(settings_.method), settings_)


@pytest.mark.parametrize("name", ["table1", "table2", "table3", "fig5", "fig6", "fig7"])
def test_recipes_tune_all_rows_equally(name: str) -> None:
    """Tuned rows search full grids, MetaFed from the paper's l_t1. Baselines train on its validation samples too."""
    without_validation = set()
    for row, _, settings_, method in cells(name):
        if row.tune:
            assert (
                sum(len(grid) - 1 for grid in find_search_space(method).values())
                < load_recipe(f"metafed/{name}").trials
            ), row.name
            assert "distill_threshold" not in find_search_space(method) or method.distill_threshold == 0.6
            without_validation |= {method.name} if settings_.validation == 0 else set()
    assert without_validation == ({"fedavg", "fedprox", "fedbn", "local"} if name.startswith("table") else set())


def test_recipes_use_the_stated_settings() -> None:
    for _, _, settings_, method in cells("table1"):  # VLCS: 10 % to train on, 10 % to validate, 20 % to test
        remaining = (1 - TEST_FRACTION) * settings_.fraction
        assert (
            remaining == TEST_FRACTION
            and settings_.validation in (0.5, 0.0)
            and getattr(method, "ignore_threshold", 0.4) == 0.4
        )
    for _, column, _, method in cells("fig6"):  # with l_t1 = 1 the distillation weight has no effect
        assert method.name != "metafed" or "weight" not in column.name or method.distill_threshold == 0.6
    for _, _, settings_, method in cells("fig7"):
        assert settings_.rounds * method.local_steps == 100 and getattr(method, "warmup_steps", 0) == 0


# --- recipes and unseen classes ---------------------------------------------------------------------------------


FRL_RECIPES = ("table1", "table2", "table3")


@pytest.mark.parametrize("name", FRL_RECIPES)
def test_every_tuned_row_starts_in_its_grids_and_searches_all_values(name: str) -> None:
    plan = load_recipe(f"frl/{name}")
    rows = zip(plan.row, row_settings(plan.column[0], plan, quick=False), strict=True)
    experiments = [(row, make_method(find(row.method), parse_settings(settings))) for row, settings in rows]
    for row, method in experiments:
        search_space = find_search_space(method)
        start = {option: float(getattr(method, option)) for option in search_space}
        assert "paper's settings" in row.name or row.tune
        if not row.tune:
            continue
        assert all(start[option] in grid for option, grid in search_space.items()), row.name
        seen: list[dict[str, float]] = []
        coordinate_search(lambda point, seen=seen: seen.append(point) or 0.0, search_space, start, plan.trials)  # type: ignore[misc]
        assert len(seen) == plan.trials
        assert all({point[option] for point in seen} >= set(grid) for option, grid in search_space.items()), row.name
    assert {"gamma", "meta_lr"} <= {
        option for row, method in experiments if row.tune for option in find_search_space(method)
    }
    assert not any("gamma" in row.method_options for row in plan.row) and "gamma" not in plan.settings["method_options"]


@pytest.mark.parametrize("name", ["fig2", "fig3"])
def test_figures_use_the_tuned_settings_of_table_2(name: str) -> None:
    table = json.loads((Path(__file__).parents[2] / "docs/results/frl/table2-glyphs.json").read_text())
    chosen = {cell["row"]: cell["ours"]["settings"] for cell in table["cells"]}
    plan = load_recipe(f"frl/{name}")
    for row, settings in zip(plan.row, row_settings(plan.column[0], plan, quick=False), strict=True):
        options = make_method(find(row.method), parse_settings(settings)).model_dump()
        expected = chosen[f"{row.name}, tuned"]
        assert {option: options[option] for option in ("lr", "gamma")} == {
            option: expected[option] for option in ("lr", "gamma")
        }
        for option in {"meta_lr", "pretrain_lr"} & set(options):
            assert options[option] == expected[option], (row.name, option)


def test_every_few_shot_row_searches_all_values_of_its_grids() -> None:
    plan = load_recipe("f2l/table1")
    for settings in row_settings(plan.column[0], plan, quick=False):
        method = make_method(find(settings["method"]), parse_settings(settings))
        search_space = find_search_space(method)
        seen: list[dict[str, float]] = []
        start = {option: float(getattr(method, option)) for option in search_space}
        coordinate_search(lambda point, seen=seen: seen.append(point) or 0.0, search_space, start, plan.trials)  # type: ignore[misc]
        assert all({point[option] for point in seen} >= set(grid) for option, grid in search_space.items()), method.name
