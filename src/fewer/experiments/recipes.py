"""Recipes: a paper's table or figure as a TOML file, reproduced and printed next to the paper's values."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from fewer.errors import SettingError, setting_error, unknown_name
from fewer.experiments.compare import Row, SeedRunner, assign_options
from fewer.experiments.studies import CELL_STUDIES, COLUMN_STUDIES, CellRuns, Study, parse_study
from fewer.experiments.targets import TargetCost, best_value, cost_to_reach
from fewer.experiments.tune import TRIALS, Trial, mean_client_value, pooled_value
from fewer.methods import find
from fewer.runs.callbacks import Callback
from fewer.runs.experiment import make_method, parse_settings
from fewer.runs.settings import Settings, settings_hash

MEASURES = {"samples": pooled_value, "clients": mean_client_value}
"""How a recipe averages accuracy (`mean`)."""
RECIPE_FILE = "recipe.json"
"""A file next to the runs of a recipe. It maps each run to its row and column, and holds the paper's values."""
_QUICK_FIELDS = ("seeds", "trials", "trial_rounds", "by_round", "study")
"""Fields of the recipe itself that `--quick` may change."""


class RecipeRow(BaseModel):
    """One row of the table: a method with its options, and the paper's value for each column."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    method: str
    method_options: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    """Settings that differ in this row in addition to the method options: the model, data options, …"""
    tune: bool | list[str] = False
    """Tune the options that the method tunes, or only the listed ones."""
    columns: list[str] = []
    """The columns in which the row runs; empty means all."""
    seeds: PositiveInt | None = None
    """Seeds of this row, if it is too slow for those of the recipe."""
    quick: dict[str, Any] = {}
    """Settings that `--quick` changes in this row."""
    reference: bool = False
    """True if the row is no rival, such as training on all samples together. It cannot lead."""
    paper: list[float | None] = []

    def runs_in(self, column: str) -> bool:
        """Whether the table has this row in a column."""
        return not self.columns or column in self.columns


class RecipeColumn(BaseModel):
    """One column: its name and the settings that differ in it."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str
    seeds: PositiveInt | None = None
    """Seeds of this column, if it is too slow for those of the recipe."""
    quick: dict[str, Any] = {}
    """Settings that `--quick` changes in this column."""


class Recipe(BaseModel):
    """A table: its rows, its columns (each a change of settings) and the settings they share."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    about: str = ""
    paper: str
    seeds: PositiveInt = 3
    trials: PositiveInt = TRIALS
    trial_rounds: PositiveInt | None = None
    """Rounds of a trial, if trials shall be shorter than runs."""
    settings: dict[str, Any]
    quick: dict[str, Any] = {}
    """What `--quick` changes: settings, seeds, trials, trial_rounds, by_round and study options."""
    by_round: bool | list[PositiveInt] = False
    """Adds a table of the accuracy after each round, or after the listed rounds."""
    figure: Literal["rounds", "megabytes", "rounds and megabytes", "columns", "heatmap"] | None = None
    """The x-axis of the accuracy plot: rounds, megabytes sent (or a plot of each), or the columns of the table.

    `heatmap` draws the table as a heat map. None: no plot. A plot of accuracy by operations follows in any case.
    """
    study: dict[str, Any] = {}
    """The name and options of a study that measures more than accuracy."""
    mean: Literal["samples", "clients"] = "samples"
    """Average accuracy over all evaluated samples, or over clients, each with its own model and samples."""
    target: str | None = None
    """A row whose best accuracy is the target. The page lists what every row costs to reach it."""
    rivals: list[str] = []
    """Rows that all rows are compared with, paired by the clients or groups that both were evaluated on."""
    column: list[RecipeColumn]
    row: list[RecipeRow]


@dataclass(frozen=True)
class Cell:
    """One cell of the table: our result, and the paper's value if it has one."""

    row: str
    column: str
    ours: Row
    paper: float | None
    target_cost: TargetCost | None = None
    """The cost of reaching the best accuracy of the recipe's target row."""

    def format_accuracy(self) -> str:
        """Our accuracy, and the paper's."""
        return self.ours.format_accuracy() + (f" / {self.paper:.2f}" if self.paper is not None else "")


def list_recipes() -> dict[str, str]:
    """Returns the title of every built-in recipe by its name."""
    return {name: tomllib.loads(file.read_text())["title"] for name, file in _recipe_files().items()}


def load_recipe(name: str) -> Recipe:
    """Loads a built-in recipe by name, or a recipe file."""
    return _parse_recipe(name, _read_recipe(name))


def _read_recipe(name: str) -> dict[str, Any]:
    """Reads a recipe, and what it changes in its `base`: single settings, and the rows of the same name."""
    known = _recipe_files()
    path = known.get(name, Path(name))
    if name not in known and path.suffix != ".toml":
        raise unknown_name("recipe", name, [*known, "FILE.toml"])
    if not path.is_file():
        raise SettingError(f"recipe file '{name}' does not exist")
    try:
        content = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"recipe '{name}' is not valid TOML: {error}") from error
    if "base" not in content:
        return content
    base = _read_recipe(content.pop("base"))
    changes = {row.get("name"): row for row in content.pop("row", [])}
    for wrong in changes.keys() - {row["name"] for row in base["row"]}:
        raise unknown_name(f"row in recipe '{name}'", str(wrong), [row["name"] for row in base["row"]])
    merged = {part: {**base.get(part, {}), **content.pop(part, {})} for part in ("settings", "quick")}
    return {**base, **content, **merged, "row": [{**row, **changes.get(row["name"], {})} for row in base["row"]]}


def _parse_recipe(name: str, content: Mapping[str, Any]) -> Recipe:
    try:
        return Recipe(**content)
    except ValidationError as error:
        raise setting_error(error, f"recipe '{name}': ", list(Recipe.model_fields)) from error


def reproduce(
    name: str,
    out: Path,
    *,
    quick: bool = False,
    columns: Sequence[str] = (),
    rows: Sequence[str] = (),
    published: Path | None = None,
    changes: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    track: Sequence[str] = (),
) -> tuple[Recipe, list[Cell]]:
    """Runs all rows, in `columns` or in all columns. Reuses finished runs in `out` and resumes interrupted ones.

    With `rows`, only these run. The other rows are those of `published`, a JSON file that `write_results` wrote.
    Trackers in `track` log all runs except tuning trials.
    """
    recipe = load_recipe(name)
    known = [column.name for column in recipe.column]
    for wrong in [column for column in columns if column not in known]:
        raise unknown_name("column", wrong, known)
    kept = _load_other_rows(name, recipe, rows, columns or known, published) if rows and published else {}
    if columns and recipe.study.get("name") in COLUMN_STUDIES:
        raise SettingError(f"recipe '{name}' has a study over all its columns; run it without --column")
    if quick:
        changed: dict[str, Any] = {key: recipe.quick[key] for key in _QUICK_FIELDS if key in recipe.quick}
        changed["study"] = {**recipe.study, **changed.get("study", {})}
        recipe = _parse_recipe(name, {**recipe.model_dump(), **changed})
    for wrong in [column for row in recipe.row for column in row.columns if column not in known]:
        raise unknown_name("column", wrong, known)
    for wrong in {*recipe.rivals, *([recipe.target] if recipe.target else [])} - {row.name for row in recipe.row}:
        raise unknown_name("target or rival", wrong, [row.name for row in recipe.row])
    if recipe.study:
        parse_study(recipe.study)  # reports errors before the first run
    out.mkdir(parents=True, exist_ok=True)
    (out / RECIPE_FILE).write_text(json.dumps(_describe_layout(recipe, quick), indent=1) + "\n")
    cells = []
    for index, column in enumerate(recipe.column):
        if columns and column.name not in columns:
            continue
        folder, measure = out / slugify(column.name), MEASURES[recipe.mean]
        runner = SeedRunner(recipe.seeds, recipe.trials, folder, callbacks, measure, track, title=column.name)
        runner.count_flops, runner.trial_rounds = True, recipe.trial_rounds
        for row, settings in zip(recipe.row, row_settings(column, recipe, quick), strict=True):
            if (row.name, column.name) in kept:
                cells.append(kept[row.name, column.name])
                continue
            if not row.runs_in(column.name):
                continue
            runner.seeds = min(count for count in (row.seeds, column.seeds, recipe.seeds) if count)
            ours = runner.run(parse_settings({**settings, **(changes or {})}), slugify(row.name), row.tune)
            cells.append(Cell(row.name, column.name, ours, _paper_value(row, index)))
    return recipe, measure_target_costs(recipe, cells)


def _load_other_rows(
    name: str, recipe: Recipe, rows: Sequence[str], columns: Sequence[str], published: Path
) -> dict[tuple[str, str], Cell]:
    """Returns the published cells of all rows but `rows`. Raises SettingError if they do not follow from the recipe."""
    known = [row.name for row in recipe.row]
    for wrong in [row for row in rows if row not in known]:
        raise unknown_name("row", wrong, known)
    for elsewhere in [row.name for row in recipe.row if row.name in rows and not any(map(row.runs_in, columns))]:
        raise SettingError(f"recipe '{name}' has no row '{elsewhere}' in column {', '.join(map(repr, columns))}")
    if recipe.study and recipe.study.get("name") not in CELL_STUDIES:
        raise SettingError(f"recipe '{name}' has a study over all its rows; run it without --row")
    if not published.is_file():
        raise SettingError(f"--row keeps the other rows of {published}, which does not exist; run all rows first")
    earlier, cells = read_results(json.loads(published.read_text()))
    if earlier.study != recipe.study:
        raise SettingError(f"{published} was made with another study than that of the recipe; run all rows")
    by_place = {(cell.row, cell.column): cell for cell in cells}
    kept = {}
    for row, column in [(row, column) for column in columns for row in recipe.row if row.runs_in(column)]:
        if row.name in rows:
            continue
        cell, place = by_place.get((row.name, column)), f"{published}: row '{row.name}' in column '{column}'"
        if cell is None:
            raise SettingError(f"{place} is missing; run it, too")
        if not _follows_from(recipe, earlier, cell):
            raise SettingError(f"{place} was made with other settings than those of the recipe; run it, too")
        kept[row.name, column] = cell
    return kept


def _follows_from(recipe: Recipe, earlier: Recipe, cell: Cell) -> bool:
    """Whether a recipe plans a cell as an earlier version of it did, with the defaults that its method had then."""
    settings = _plan_cell(recipe, cell)["settings"]
    chosen = {name: cell.ours.settings[name] for name in (cell.ours.trials[0].settings if cell.ours.trials else ())}
    options = {**settings["method_options"], **chosen}
    planned = parse_settings({**settings, "method_options": options, "seed": cell.ours.seeds[0]})
    method = make_method(find(cell.ours.method), planned)
    return plans_alike(recipe, earlier, cell) and settings_hash(planned, method) == cell.ours.hash


def plans_alike(recipe: Recipe, other: Recipe, cell: Cell) -> bool:
    """Whether two versions of a recipe plan a cell in the same way. Defaults of its method may have changed."""
    return _plan_cell(recipe, cell) == _plan_cell(other, cell) != {}


def _plan_cell(recipe: Recipe, cell: Cell) -> dict[str, Any]:
    """What a recipe plans for a cell; nothing if it does not have it."""
    columns = [column for column in recipe.column if column.name == cell.column]
    rows = [index for index, row in enumerate(recipe.row) if row.name == cell.row and row.runs_in(cell.column)]
    if not columns or not rows:
        return {}
    row = recipe.row[rows[0]]
    return {
        "settings": row_settings(columns[0], recipe, quick=False)[rows[0]],
        "tune": (row.tune, recipe.trials, recipe.trial_rounds) if row.tune else None,
        "seeds": (recipe.seeds, columns[0].seeds, row.seeds),
        "mean": recipe.mean,
    }


def _paper_value(row: RecipeRow, column: int) -> float | None:
    return row.paper[column] if column < len(row.paper) else None


def _describe_layout(recipe: Recipe, quick: bool) -> dict[str, Any]:
    """Describes the table: for each folder of runs its row, its column and the paper's value."""
    cells = {}
    for index, column in enumerate(recipe.column):
        for row in [row for row in recipe.row if row.runs_in(column.name)]:
            cell = {"row": row.name, "column": column.name, "paper": _paper_value(row, index)}
            cells[f"{slugify(column.name)}/{slugify(row.name)}"] = cell
    return {"title": recipe.title, "paper": recipe.paper, "mean": recipe.mean, "quick": quick, "cells": cells}


def row_settings(column: RecipeColumn, recipe: Recipe, quick: bool) -> list[dict[str, Any]]:
    """Returns the settings of each row in this column. Shared method options go to the methods that have them."""
    layers = [recipe.settings, column.model_extra or {}]
    if quick:
        quick_settings = {key: value for key, value in recipe.quick.items() if key not in _QUICK_FIELDS}
        layers = [recipe.settings, quick_settings, column.model_extra or {}, column.quick]
    shared = {key: value for layer in layers for key, value in layer.items()}
    method_classes = [find(row.method) for row in recipe.row]
    options = {key: value for layer in layers for key, value in layer.get("method_options", {}).items()}
    common = assign_options(method_classes, options)
    return [
        {
            **shared,
            **row.settings,
            **(row.quick if quick else {}),
            "data_options": {**shared.get("data_options", {}), **row.settings.get("data_options", {})},
            "method": row.method,
            "method_options": {
                **common[method_class.name],
                **row.method_options,
                **(row.quick.get("method_options", {}) if quick else {}),
            },
        }
        for row, method_class in zip(recipe.row, method_classes, strict=True)
    ]


def run_study(recipe: Recipe, cells: list[Cell], out: Path) -> Study | None:
    """Runs the recipe's study, if it has one, on its runs in `out`."""
    if not recipe.study:
        return None
    runs = [CellRuns(cell.row, cell.column, _run_folders(cell.row, cell, out)) for cell in cells]
    return parse_study(recipe.study)(runs)


def _run_folders(row: str, cell: Cell, out: Path) -> list[Path]:
    """Returns the run directories of a row in the column of `cell`."""
    return [out / slugify(cell.column) / f"{slugify(row)}-seed{seed}" for seed in cell.ours.seeds]


def measure_target_costs(recipe: Recipe, cells: list[Cell]) -> list[Cell]:
    """Returns the cells with the costs of reaching the recipe's target, if it has one."""
    if recipe.target is None:
        return cells
    return [replace(cell, target_cost=_measure_target_cost(recipe.target, cell, cells)) for cell in cells]


def _measure_target_cost(target: str, cell: Cell, cells: Sequence[Cell]) -> TargetCost:
    """Returns the cost of reaching the best accuracy of the target row in the same column."""
    (best,) = [other.ours.curves for other in cells if (other.row, other.column) == (target, cell.column)]
    return cost_to_reach(cell.ours.curves, best_value(best))


def read_results(content: Mapping[str, Any]) -> tuple[Recipe, list[Cell]]:
    """Reads the recipe and the cells from the JSON that `write_results` wrote."""
    cells = []
    for cell in content["cells"]:
        ours = Row(**{**cell["ours"], "trials": [Trial(**trial) for trial in cell["ours"]["trials"]]})
        cost = cell["target_cost"] and TargetCost(**cell["target_cost"])
        cells.append(Cell(cell["row"], cell["column"], ours, cell["paper"], cost))
    return Recipe(**content["recipe"]), cells


def cell_settings(recipe: Recipe, cell: Cell) -> Settings:
    """Returns the settings of the cell's first seed, with the method options that the cell's runs used."""
    column = next(column for column in recipe.column if column.name == cell.column)
    position = [row.name for row in recipe.row].index(cell.row)
    settings = row_settings(column, recipe, quick=False)[position]
    return parse_settings({**settings, "method_options": cell.ours.settings, "seed": cell.ours.seeds[0]})


def slugify(text: str) -> str:
    """Turns a text into a part of a file name."""
    words = "".join(c if (c.isalnum() and c.isascii()) or c == "." else " " for c in text.replace("α", "alpha"))
    return "-".join(words.lower().split())


def _recipe_files() -> dict[str, Path]:
    """The built-in recipes by name, such as `fedmk/table1`."""
    folder = Path(__file__).parent / "tables"
    return {f"{file.parent.name}/{file.stem}": file for file in sorted(folder.glob("*/*.toml"))}
