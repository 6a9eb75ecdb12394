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
from fewer.runs.settings import Settings, settings_in_group

RESULTS = Path(__file__).parents[2] / "docs/results"


def points_of_search(search_space: Any, start: dict[str, float], trials: int) -> list[dict[str, float]]:
    """The points that a search tries if all of them are equally good."""
    points: list[dict[str, float]] = []
    coordinate_search(lambda point: points.append(point) or 0.0, search_space, start, trials)  # type: ignore[func-returns-value]
    return points


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
    """Tuned rows search full grids, MetaFed from the paper's l_t1 unless it is given."""
    for row, _, _, method in cells(name):
        if row.tune:
            searched = find_search_space(method)
            tuned = list(searched) if isinstance(row.tune, bool) else row.tune
            assert set(tuned) <= searched.keys()
            assert sum(len(searched[option]) - 1 for option in tuned) < load_recipe(f"metafed/{name}").trials, row.name
            assert "distill_threshold" not in tuned or method.distill_threshold == 0.6


@pytest.mark.parametrize("name", ["table1", "table2", "table3", "fig5", "fig6", "fig7"])
def test_all_rows_choose_a_model_by_validation_samples_or_none_does(name: str) -> None:
    """In a column, all rows also train, validate and test on the same samples, and evaluate after every round."""
    columns: dict[str, set[Any]] = {}
    for _, column, settings_, method in cells(name):
        data = settings_.model_dump_json(include=settings_in_group("Data"))
        columns.setdefault(column.name, set()).add((method.keep, bool(settings_.validation), data))
        assert settings_.evaluate_every == 1 or method.keep == "last" or name == "fig5"
        assert settings_.data != "hapt" or settings_.data_options == {"held_out": "class"}
    for choices in columns.values():
        ((keep, validated, _),) = choices
        assert (keep == "best") == validated
    assert any(keep == "last" for choices in columns.values() for keep, *_ in choices) == name.startswith("table")


@pytest.mark.parametrize(("name", "federations"), [("table1", 4), ("table2", 20), ("table3", 20)])
def test_controls_take_as_many_steps_in_a_row_as_the_passing_model(name: str, federations: int) -> None:
    column = load_recipe(f"metafed/{name}").column[0].name
    rows = {row.name: method for row, in_column, _, method in cells(name) if in_column.name == column}
    metafed = rows["MetaFed, tuned"]
    in_a_row = federations * metafed.local_steps * (metafed.rounds - 1)  # Stage I
    for kind in ("FedAvg", "FedBN"):
        (method,) = (rows[row] for row in rows if row.startswith(f"{kind}, {in_a_row:,} steps in a row"))
        assert method.name == kind.lower() and method.local_steps * method.rounds == in_a_row
    one_pass, ten_passes, fine_tuned = (
        rows[f"{row}, tuned"] for row in ("FedSeq, one pass", "FedSeq, ten passes", "FedAvg, last local pass")
    )
    per_federation = metafed.local_steps * (metafed.rounds + 1)
    assert (one_pass.rounds, one_pass.local_steps) == (1, per_federation)
    assert ten_passes.rounds * ten_passes.local_steps == per_federation
    assert fine_tuned.ft_steps is None and fine_tuned.local_steps * (fine_tuned.rounds + 1) == per_federation
    thresholds = [method.distill_threshold for row, method in rows.items() if row.startswith("MetaFed, l_t1")]
    assert thresholds == [0.6, 1.1] and rows["MetaFed, fine-tuning, tuned"].transfer == "fine-tune"


def test_recipes_use_the_stated_settings() -> None:
    for _, _, settings_, method in cells("table1"):  # VLCS: 10 % to train on, 10 % to validate, 20 % to test
        remaining = (1 - TEST_FRACTION) * settings_.fraction
        assert (
            remaining == TEST_FRACTION
            and settings_.validation in (0.5, 0.0)  # 0 in the column without validation samples
            and getattr(method, "ignore_threshold", 0.4) == 0.4
        )
    for _, column, _, method in cells("fig6"):  # with l_t1 = 1 the distillation weight has no effect
        assert method.name != "metafed" or "weight" not in column.name or method.distill_threshold == 0.6
    for _, _, settings_, method in cells("fig7"):
        assert settings_.rounds * method.local_steps == 100 and getattr(method, "warmup_steps", 0) == 0


# --- recipes and unseen classes ---------------------------------------------------------------------------------


def test_every_tuned_row_starts_in_its_grids_and_searches_all_values() -> None:
    plan = load_recipe("frl/table2")
    rows = zip(plan.row, row_settings(plan.column[0], plan, quick=False), strict=True)
    experiments = [(row, make_method(find(row.method), parse_settings(settings))) for row, settings in rows]
    for row, method in experiments:
        search_space = find_search_space(method)
        start = {option: float(getattr(method, option)) for option in search_space}
        assert "paper's settings" in row.name or row.tune
        if not row.tune:
            continue
        assert all(start[option] in grid for option, grid in search_space.items()), row.name
        seen = points_of_search(search_space, start, plan.trials)
        assert len(seen) == plan.trials
        assert all({point[option] for point in seen} >= set(grid) for option, grid in search_space.items()), row.name
    assert {"gamma", "meta_lr"} <= {
        option for row, method in experiments if row.tune for option in find_search_space(method)
    }
    assert not any("gamma" in row.method_options for row in plan.row) and "gamma" not in plan.settings["method_options"]


@pytest.mark.parametrize("name", ["table1", "table3"])
def test_other_tables_start_from_the_choice_of_table_2_and_tune_the_same_options(name: str) -> None:
    table = json.loads((RESULTS / "frl/table2-glyphs.json").read_text())
    chosen = {cell["row"]: cell["ours"]["settings"] for cell in table["cells"]}
    plan = load_recipe(f"frl/{name}")
    for row, settings in zip(plan.row, row_settings(plan.column[0], plan, quick=False), strict=True):
        method = make_method(find(row.method), parse_settings(settings))
        options = [option for option in find_search_space(method) if option != "gamma"]
        if "paper's settings" in row.name:
            assert not row.tune
        else:
            assert row.tune is True or row.tune == options
            preparation = [option for option in options if option != "lr"]
            earlier = chosen[row.name.replace(", temperature 10", "")]
            assert all(getattr(method, option) == earlier[option] for option in preparation), row.name


@pytest.mark.parametrize("name", ["fig2", "fig3"])
def test_figures_use_the_tuned_settings_of_table_2(name: str) -> None:
    table = json.loads((RESULTS / "frl/table2-glyphs.json").read_text())
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
    for row, settings in zip(plan.row, row_settings(plan.column[0], plan, quick=False), strict=True):
        method = make_method(find(settings["method"]), parse_settings(settings))
        assert row.tune is True or "paper's settings" in row.name
        if not row.tune:
            continue
        search_space = find_search_space(method)
        start = {option: float(getattr(method, option)) for option in search_space}
        seen = points_of_search(search_space, start, plan.trials)
        assert all({point[option] for point in seen} >= set(grid) for option, grid in search_space.items()), method.name


def test_rows_without_a_guarantee_cannot_lead_the_privacy_table() -> None:
    rows = load_recipe("privacy/mnist").row
    assert [row.name for row in rows if row.reference] == [row.name for row in rows if "dp" not in row.settings]
