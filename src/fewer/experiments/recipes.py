"""Recipes: a paper's table or figure as a TOML file, reproduced and printed next to the paper's values."""

from __future__ import annotations

import json
import os
import platform
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

import fewer
from fewer.errors import SettingError, setting_error, unknown_name
from fewer.experiments.compare import Row, SeedRunner, assign_options
from fewer.experiments.studies import COLUMN_STUDIES, CellRuns, Study, parse_study
from fewer.experiments.targets import TargetCost, best_value, cost_to_reach
from fewer.experiments.tune import TRIALS, Trial, mean_client_value, pooled_value, settings_at_edge
from fewer.methods import find
from fewer.runs.callbacks import Callback
from fewer.runs.experiment import make_method, parse_settings
from fewer.runs.reader import RunReader
from fewer.runs.settings import Settings, settings_hash
from fewer.statistics import Interval, format_interval, format_number, half_width, interval

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
    if recipe.target is not None:
        cells = [replace(cell, target_cost=_measure_target_cost(recipe.target, cell, out)) for cell in cells]
    return recipe, cells


def _load_other_rows(
    name: str, recipe: Recipe, rows: Sequence[str], columns: Sequence[str], published: Path
) -> dict[tuple[str, str], Cell]:
    """Returns the published cells of all rows but `rows`. Raises SettingError if they do not follow from the recipe."""
    known = [row.name for row in recipe.row]
    for wrong in [row for row in rows if row not in known]:
        raise unknown_name("row", wrong, known)
    if recipe.study or recipe.target:
        raise SettingError(f"recipe '{name}' compares the runs of all its rows; run it without --row")
    if not published.is_file():
        raise SettingError(f"--row keeps the other rows of {published}, which does not exist; run all rows first")
    earlier, cells = read_results(json.loads(published.read_text()))
    by_place = {(cell.row, cell.column): cell for cell in cells}
    kept = {}
    for row, column in [(row, column) for column in columns for row in recipe.row if row.runs_in(column)]:
        if row.name in rows:
            continue
        cell, place = by_place.get((row.name, column)), f"{published}: row '{row.name}' in column '{column}'"
        if cell is None:
            raise SettingError(f"{place} is missing; run it, too")
        if not _has_same_plan(recipe, earlier, cell):
            raise SettingError(f"{place} was made with other settings than those of the recipe; run it, too")
        kept[row.name, column] = cell
    return kept


def _has_same_plan(recipe: Recipe, earlier: Recipe, cell: Cell) -> bool:
    """Whether a recipe plans a cell as an earlier version of it did, with the defaults that its method had then."""
    plans = []
    for version in (recipe, earlier):
        row = next(row for row in version.row if row.name == cell.row)
        column = next(column for column in version.column if column.name == cell.column)
        trials = version.trials if row.tune else None
        plans.append([version.seeds, trials, version.mean, row.tune, row.seeds, column])
    position = [row.name for row in recipe.row].index(cell.row)
    settings = row_settings(column, recipe, quick=False)[position]
    chosen = {name: cell.ours.settings[name] for name in (cell.ours.trials[0].settings if cell.ours.trials else ())}
    options = {**settings["method_options"], **chosen}
    planned = parse_settings({**settings, "method_options": options, "seed": cell.ours.seeds[0]})
    method = make_method(find(cell.ours.method), planned)
    return plans[0] == plans[1] and settings_hash(planned, method) == cell.ours.hash


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
            "method_options": {**common[method_class.name], **row.method_options},
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


def _measure_target_cost(target: str, cell: Cell, out: Path) -> TargetCost:
    """Returns the cost of reaching the best accuracy of the target row in the same column."""

    def histories(row: str) -> list[list[dict[str, Any]]]:
        return [RunReader(folder).history for folder in _run_folders(row, cell, out)]

    return cost_to_reach(histories(cell.row), best_value(histories(target)))


def write_results(
    name: str,
    recipe: Recipe,
    cells: list[Cell],
    folder: Path,
    command: str,
    quick: bool,
    pictures: Mapping[str, bytes] | None = None,
    study: Study | None = None,
    later: Sequence[str] = (),
) -> list[Path]:
    """Writes the table as Markdown, all data behind it as JSON, and its pictures (see `FIGURES`) as PNG.

    `later` are rows that were made after the others.
    """
    stem = folder / (name + ("-quick" if quick else ""))
    stem.parent.mkdir(parents=True, exist_ok=True)
    page, data = (stem.with_name(stem.name + kind) for kind in (".md", ".json"))
    endings = FIGURES | ({"rounds": "-rounds.png"} if pictures and {"rounds", "megabytes"} <= set(pictures) else {})
    images = {kind: stem.with_name(stem.name + endings[kind]) for kind in pictures or {}}
    table = render_markdown(recipe, cells, command, quick, {kind: path.name for kind, path in images.items()})
    if later:
        table += f"\nRows made later than the others (`--row`): {', '.join(later)}.\n"
    page.write_text(table + (study.render_markdown(stem.name) if study else ""))
    content = {
        "recipe": recipe.model_dump(mode="json"),
        "command": command,
        "machine": describe_machine(),
        **({"later": list(later)} if later else {}),
        "cells": [asdict(cell) for cell in cells],
        **({"study": study.metrics} if study else {}),
    }
    data.write_text(json.dumps(content, indent=1) + "\n")
    for kind, path in images.items():
        path.write_bytes((pictures or {})[kind])
    return [page, data, *images.values()]


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


def render_markdown(
    recipe: Recipe,
    cells: list[Cell],
    command: str,
    quick: bool,
    images: Mapping[str, str] | None = None,
    machine: str | None = None,
) -> str:
    """Renders our results next to the paper's, and how they were made.

    `images` are file names by kind of figure. `machine` defaults to this machine.
    """
    columns = list(dict.fromkeys(cell.column for cell in cells))
    lines = [f"# {recipe.title}", "", recipe.about.strip().replace("\n", " "), "", f"Paper: {recipe.paper}.", ""]
    if quick:
        lines += ["**Quick mode**: smaller data and fewer rounds, to try the recipe. Do not compare it with the paper."]
        lines += [""]
    first = cells[0].ours
    several_seeds = len(first.seeds) > 1
    units = f"{first.groups} {first.units}" if first.groups else "seeds" if several_seeds else None
    interval = f"mean ± 95 % CI over {units}" if units else "one seed"
    accuracy = "Accuracy" if recipe.mean == "samples" else "Mean accuracy over clients, each with its own model,"
    lines += [f"{accuracy} in %, {interval}; the paper's value after the slash.", ""]
    by_row = {row: [cell for cell in cells if cell.row == row] for row in dict.fromkeys(cell.row for cell in cells)}
    costs = ["MB up", "MB down", *(["GFLOP", "seconds"] if _counts_flops(cells) else [])]
    by_column = _costs_by_column(cells)
    table = [
        [row, *_format_columns(group, columns, Cell.format_accuracy), *([] if by_column else _format_costs(group))]
        for row, group in by_row.items()
    ]
    lines += _render_table(["method", *columns, *([] if by_column else costs)], table)
    if by_column:
        table = [[cell.row, cell.column, *_format_costs([cell])] for cells in by_row.values() for cell in cells]
        lines += ["", "Cost of a run:", "", *_render_table(["method", "column", *costs], table)]
    if _counts_flops(cells):
        lines += ["", "GFLOP: what all clients of a run spend on training, counted with the first seed."]
    lines += _render_fewer_seeds(by_row) + _render_unseen_clients(by_row, columns)
    for kind, image in (images or {}).items():
        lines += ["", f"![{_ALT_TEXTS[kind]} of each row]({image})"]
    if recipe.by_round:
        lines += _render_rounds(recipe, cells)
    lines += _render_differences(recipe, cells) + _render_target_costs(recipe, cells)
    tuned = [cell for cell in cells if cell.ours.trials]
    if tuned:
        lines += ["", "Chosen settings of tuned rows: " + "; ".join(_format_chosen(cell) for cell in tuned) + "."]
        lines += _render_trials(recipe, tuned)
    hashes = ", ".join(f"{cell.row} {cell.column} `{cell.ours.hash}`" for cell in cells)
    seeds = f"seeds {first.seeds[0]} … {first.seeds[-1]}" if several_seeds else f"seed {first.seeds[0]}"
    lines += ["", f"Made by `{command}`, {seeds}, on {machine or describe_machine()}."]
    lines += ["", f"<details><summary>Settings hashes</summary>{hashes}</details>", ""]
    return "\n".join(lines)


def describe_machine() -> str:
    """Describes this machine and the versions of Python, torch and Fewer."""
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, Fewer {fewer.__version__}"
    )


def _format_columns(cells: Sequence[Cell], columns: Sequence[str], format: Callable[[Cell], str]) -> list[str]:
    """One text per column; a dash for a column in which the row did not run."""
    texts = {cell.column: format(cell) for cell in cells}
    return [texts.get(column, "–") for column in columns]


def _render_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Renders a Markdown table."""
    return [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles), *(f"| {' | '.join(row)} |" for row in rows)]


def _render_target_costs(recipe: Recipe, cells: list[Cell]) -> list[str]:
    """Renders the cost of reaching the target, if the recipe has one."""
    rows = []
    for cell in cells:
        if (cost := cell.target_cost) is not None:
            values = [cost.round, cost.mb and format_number(cost.mb), cost.gflop and format_number(cost.gflop)]
            texts = ["never" if cost.round is None else "–" if value is None else str(value) for value in values]
            rows.append([cell.row, cell.column, f"{100 * cost.target:.2f}", *texts])
    if not rows:
        return []
    title = f"Cost of reaching the best accuracy of *{recipe.target}* (mean over seeds, evaluated rounds only):"
    titles = ("method", "column", "target", "rounds", "MB, up and down", "GFLOP of clients")
    return ["", title, "", *_render_table(titles, rows)]


def _render_differences(recipe: Recipe, cells: list[Cell]) -> list[str]:
    """Renders the differences between each row and its rivals, if the recipe has rivals."""
    if not recipe.rivals:
        return []
    groups, several_seeds = cells[0].ours.groups, len(cells[0].ours.seeds) > 1
    units = cells[0].ours.units if groups else "clients"
    title = f"Difference to a rival in points: mean and 95 % CI over all {units} that both rows were evaluated on. "
    title += f"Within a seed, {units} share one trained model"
    title += "; the CI over the seeds' means is in brackets." if several_seeds else "."
    accuracies = {(cell.row, cell.column): cell.ours.unit_accuracies for cell in cells}
    if recipe.mean == "samples" and several_seeds and not groups:
        title = "Difference to a rival in points, paired by seed: mean and 95 % CI over seeds."
        accuracies = {(cell.row, cell.column): [{"": value} for value in cell.ours.accuracies] for cell in cells}
    rows = [
        [row, column, *(_format_difference(ours, accuracies.get((rival, column), ())) for rival in recipe.rivals)]
        for (row, column), ours in accuracies.items()
    ]
    count = sum(text != "–" for row in rows for text in row[2:])
    title += f" Of {count} comparisons, about {count / 20:.1f} exclude 0 by chance:"
    return ["", title, "", *_render_table(["method", "column", *(f"minus {rival}" for rival in recipe.rivals)], rows)]


def _format_difference(ours: Sequence[Mapping[str, float]], rivals: Sequence[Mapping[str, float]]) -> str:
    """Formats the paired differences; a dash for the rival itself, or if no unit was evaluated in both rows."""
    if not rivals:
        return "–"
    pairs = zip(ours, rivals, strict=False)  # a slow row has only the first seeds
    seeds = [[a[unit] - b[unit] for unit in a if unit in b] for a, b in pairs]
    if ours is rivals or not all(seeds):
        return "–"
    half = half_width([statistics.fmean(differences) for differences in seeds])
    mean = format_interval(interval([difference for differences in seeds for difference in differences]), 1)
    return mean + ("" if half is None or max(map(len, seeds)) == 1 else f" (± {100 * half:.1f})")


_ALT_TEXTS = {
    "rounds": "Accuracy by round",
    "megabytes": "Accuracy by megabytes sent, up and down together,",
    "columns": "Accuracy by column",
    "heatmap": "Accuracy by column, as a heat map,",
    "gflop": "Accuracy by GFLOP of all clients",
}
FIGURES = {"rounds": ".png", "megabytes": ".png", "columns": ".png", "heatmap": ".png", "gflop": "-gflop.png"}
"""The end of the file name of each kind of figure."""


def _render_rounds(recipe: Recipe, cells: list[Cell]) -> list[str]:
    """Renders a table of the accuracy after the requested rounds for each column."""
    lines = []
    for column in dict.fromkeys(cell.column for cell in cells):
        by_row = {
            cell.row: [{entry["round"]: entry["accuracy"] for entry in seed} for seed in cell.ours.curves]
            for cell in cells
            if cell.column == column
        }
        table = []
        all_rounds = sorted({number for seeds in by_row.values() for seed in seeds for number in seed})
        rounds = recipe.by_round if isinstance(recipe.by_round, list) else all_rounds
        for row, seeds in by_row.items():
            by_round = [[seed[number] for seed in seeds if number in seed] for number in rounds]
            texts = [format_interval(interval(values), 1) if len(values) == len(seeds) else "–" for values in by_round]
            table.append([row, *texts])
        lines += ["", f"Accuracy by round, {column}:", "", *_render_table(["method", *map(str, rounds)], table)]
    return lines


def _render_fewer_seeds(by_row: Mapping[str, list[Cell]]) -> list[str]:
    """Says which rows, or which columns, have fewer seeds than the others."""
    cells = [cell for row in by_row.values() for cell in row]
    most = max(len(cell.ours.seeds) for cell in cells)
    lines = []
    for kind, field in (("Rows", "row"), ("Columns", "column")):
        names: list[str] = [getattr(cell, field) for cell in cells]
        groups = {
            key: [len(cell.ours.seeds) for cell, name in zip(cells, names, strict=True) if name == key] for key in names
        }
        fewer_seeds = [f"{key} {max(counts)}" for key, counts in groups.items() if max(counts) < most]
        if fewer_seeds:
            lines += ["", f"{kind} with fewer seeds, because they are slow: {', '.join(fewer_seeds)}."]
    return lines


def _render_unseen_clients(by_row: Mapping[str, list[Cell]], columns: Sequence[str]) -> list[str]:
    """Renders a table of the accuracy on clients that never trained, if there are any."""
    if not any(cell.ours.unseen_clients for cells in by_row.values() for cell in cells):
        return []

    def format(cell: Cell) -> str:
        return cell.ours.format_unseen_clients() if cell.ours.unseen_clients else "–"

    table = [[row, *_format_columns(cells, columns, format)] for row, cells in by_row.items()]
    return ["", "Accuracy in % on clients that never trained:", "", *_render_table(["method", *columns], table)]


def _costs_by_column(cells: Sequence[Cell]) -> bool:
    """Whether costs cannot be averaged over columns: a row has other numbers of rounds in some, or does not run."""
    columns = {cell.column for cell in cells}
    rounds: dict[str, list[int]] = {}
    for cell in cells:
        rounds.setdefault(cell.row, []).append(cell.ours.rounds)
    return any(len(set(found)) > 1 or len(found) < len(columns) for found in rounds.values())


def _counts_flops(cells: Sequence[Cell]) -> bool:
    return all(cell.ours.gflop is not None for cell in cells)


def _format_costs(cells: list[Cell]) -> list[str]:
    """Megabytes up and down, and GFLOP and seconds if operations were counted: means over the columns."""
    costs = [[cell.ours.mb_up for cell in cells], [cell.ours.mb_down for cell in cells]]
    if _counts_flops(cells):
        costs += [[cell.ours.gflop or 0.0 for cell in cells], [cell.ours.seconds for cell in cells]]
    return [format_number(statistics.fmean(values)) for values in costs]


def _render_trials(recipe: Recipe, tuned: Sequence[Cell]) -> list[str]:
    """Renders the spread of the trials of each tuned row, and the settings that ended at the edge of their range."""
    rows, at_edge = [], []
    for cell in tuned:
        trials = cell.ours.trials
        usable = [trial for trial in trials if trial.usable]
        values = [trial.accuracy or 0.0 for trial in usable]
        if not values or any(trial.ci95 is None for trial in usable):
            continue
        best = max(usable, key=lambda trial: trial.accuracy or 0.0)
        others = [format_interval(Interval(value, None), 1) for value in (min(values), statistics.median(values))]
        chosen = format_interval(Interval(best.accuracy or 0.0, best.ci95), 1)
        diverged = len(trials) - len(values)
        rows.append([cell.row, cell.column, str(len(trials)), *others, chosen, str(diverged or "–")])
        for name in settings_at_edge(trials, cell.ours.settings, find(cell.ours.method)):
            at_edge.append(f"{cell.row} {cell.column}: {name} {cell.ours.settings[name]:g}")
    if not rows:
        return []
    titles = ("method", "column", "trials", "worst", "median", "best ± 95 % CI", "diverged")
    edge = "; ".join(at_edge) or "none"
    note = f"Best value at the edge of those tried, so that a better one may lie beyond: {edge}."
    length = f", after {recipe.trial_rounds} rounds" if recipe.trial_rounds else ""
    return ["", f"Trials on held-out data{length}, accuracy in %:", "", *_render_table(titles, rows), "", note]


def _format_chosen(cell: Cell) -> str:
    values = ", ".join(f"{name} {cell.ours.settings[name]:g}" for name in cell.ours.trials[0].settings)
    return f"{cell.row} {cell.column}: {values}"


def slugify(text: str) -> str:
    """Turns a text into a part of a file name."""
    words = "".join(c if (c.isalnum() and c.isascii()) or c == "." else " " for c in text.replace("α", "alpha"))
    return "-".join(words.lower().split())


def _recipe_files() -> dict[str, Path]:
    """The built-in recipes by name, such as `fedmk/table1`."""
    folder = Path(__file__).parent / "tables"
    return {f"{file.parent.name}/{file.stem}": file for file in sorted(folder.glob("*/*.toml"))}
