"""Recipes: a paper's table as a file, run here and printed beside the paper's figures."""

from __future__ import annotations

import json
import os
import platform
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

import fewer
from fewer.errors import SettingError, unknown
from fewer.experiments.compare import Row, Series, Watch, own_settings
from fewer.experiments.studies import Runs, Study, prepared
from fewer.experiments.targets import Reached, best, reach
from fewer.experiments.tune import TRIALS, by_client, pooled
from fewer.methods import find
from fewer.runs.directory import RunDirectory
from fewer.runs.experiment import parse_settings, setting_error
from fewer.runs.statistics import amount, half_width

_MEASURES = {"samples": pooled, "clients": by_client}
RECIPE = "recipe.json"
"""Beside the runs of a recipe: which of them stands where in its table, and what the paper has there."""
_OWN = ("seeds", "trials", "by_round", "study")
"""What of a recipe itself `--quick` may change."""


class RecipeRow(BaseModel):
    """One row of the table: a method with settings of its own, and what the paper has for each column."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    method: str
    method_options: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    """What differs in this row besides the method's own settings: its net, options of the data …"""
    tune: bool = False
    paper: list[float | None] = []


class RecipeColumn(BaseModel):
    """One column: its name, and the settings that differ in it."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str
    quick: dict[str, Any] = {}
    """What `--quick` changes in this column."""


class Recipe(BaseModel):
    """A table: rows, columns (each a change of settings), and what they share."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    about: str = ""
    paper: str
    seeds: PositiveInt = 3
    trials: PositiveInt = TRIALS
    settings: dict[str, Any]
    quick: dict[str, Any] = {}
    """What `--quick` changes: settings, seeds, trials, by_round and options of the study."""
    by_round: bool | list[PositiveInt] = False
    """Whether there is a table of the accuracy after each round too, or after which ones."""
    figure: Literal["rounds", "megabytes", "columns"] | None = None
    """What a picture shows the accuracy over, if there is one: rounds, traffic, or the columns of the table."""
    study: dict[str, Any] = {}
    """What is looked at in the runs besides their accuracy: the name of a study, and its options."""
    mean: Literal["samples", "clients"] = "samples"
    """What the accuracy is the mean over: all samples judged, or clients, each with its model on its own samples."""
    target: str | None = None
    """A row whose best accuracy is the target: what every row costs to reach it is told too."""
    rivals: list[str] = []
    """Rows that all rows are compared with, one by one of the clients or groups that both were judged on."""
    column: list[RecipeColumn]
    row: list[RecipeRow]


@dataclass(frozen=True)
class Cell:
    """One figure of the table: ours, and the paper's where it has one."""

    row: str
    column: str
    ours: Row
    paper: float | None
    reached: Reached | None = None
    """What it costs to reach the best accuracy of the recipe's target."""


def names() -> dict[str, str]:
    """All recipes with their titles."""
    return {name: tomllib.loads(file.read_text())["title"] for name, file in sorted(_files().items())}


def recipe(name: str) -> Recipe:
    """The recipe of this name, or in this file."""
    known = _files()
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise SettingError(f"no recipe file '{name}'")
        text = path.read_text()
    elif name in known:
        text = known[name].read_text()
    else:
        raise unknown("recipe", name, [*known, "FILE.toml"])
    try:
        return _checked(name, tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"recipe '{name}' is not TOML: {error}") from error


def _checked(name: str, content: Mapping[str, Any]) -> Recipe:
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
    changes: Mapping[str, Any] | None = None,
    watch: Watch = lambda what: None,
    track: Sequence[str] = (),
) -> tuple[Recipe, list[Cell]]:
    """Run all rows, and all or these columns. Finished runs in `out` are taken as they are, broken ones go on.

    Trackers in `track` get all runs, but for trials.
    """
    plan = recipe(name)
    known = [column.name for column in plan.column]
    for wrong in [column for column in columns if column not in known]:
        raise unknown("column", wrong, known)
    if columns and plan.study:
        raise SettingError(f"recipe '{name}' studies its columns together: --column does not go with it")
    if quick:
        own: dict[str, Any] = {key: plan.quick[key] for key in _OWN if key in plan.quick}
        own["study"] = {**plan.study, **own.get("study", {})}
        plan = _checked(name, {**plan.model_dump(), **own})
    for wrong in {*plan.rivals, *([plan.target] if plan.target else [])} - {row.name for row in plan.row}:
        raise unknown("target or rival", wrong, [row.name for row in plan.row])
    if plan.study:
        prepared(plan.study)  # what is wrong with it shows before the first run
    out.mkdir(parents=True, exist_ok=True)
    (out / RECIPE).write_text(json.dumps(_places(plan, quick), indent=1) + "\n")
    cells = []
    for place, column in enumerate(plan.column):
        title = column.name
        if columns and title not in columns:
            continue
        series = Series(plan.seeds, plan.trials, out / slug(title), _titled(watch, title), _MEASURES[plan.mean], track)
        for row, settings in zip(plan.row, settings_in(column, plan, quick), strict=True):
            ours = series.run(parse_settings({**settings, **(changes or {})}), slug(row.name), row.tune)
            cells.append(Cell(row.name, title, ours, _theirs(row, place)))
    if plan.target is not None:
        cells = [replace(cell, reached=_reached(plan.target, cell, out)) for cell in cells]
    return plan, cells


def _theirs(row: RecipeRow, place: int) -> float | None:
    """The paper's figure in the column at this place."""
    return row.paper[place] if place < len(row.paper) else None


def _places(plan: Recipe, quick: bool) -> dict[str, Any]:
    """What the table is, and for each folder of runs its row, its column and the paper's figure."""
    cells = {
        f"{slug(column.name)}/{slug(row.name)}": {
            "row": row.name,
            "column": column.name,
            "paper": _theirs(row, place),
        }
        for place, column in enumerate(plan.column)
        for row in plan.row
    }
    return {"title": plan.title, "paper": plan.paper, "mean": plan.mean, "quick": quick, "cells": cells}


def _titled(watch: Watch, title: str) -> Watch:
    return lambda what: watch(f"{title} {what}")


def settings_in(column: RecipeColumn, plan: Recipe, quick: bool) -> list[dict[str, Any]]:
    """The settings of each row in this column. What they `set` in common goes to the methods that have it."""
    layers = [plan.settings, column.model_extra or {}]
    if quick:
        fast = {key: value for key, value in plan.quick.items() if key not in _OWN}
        layers = [plan.settings, fast, column.model_extra or {}, column.quick]
    shared = {key: value for layer in layers for key, value in layer.items()}
    kinds = [find(row.method) for row in plan.row]
    common = own_settings(
        kinds, {key: value for layer in layers for key, value in layer.get("method_options", {}).items()}
    )
    return [
        {
            **shared,
            **row.settings,
            "data_options": {**shared.get("data_options", {}), **row.settings.get("data_options", {})},
            "method": row.method,
            "method_options": {**common[kind.name], **row.method_options},
        }
        for row, kind in zip(plan.row, kinds, strict=True)
    ]


def carry_out(plan: Recipe, cells: list[Cell], out: Path) -> Study | None:
    """The study that a recipe names, on its runs in `out`."""
    if not plan.study:
        return None
    runs = [
        Runs(c.row, c.column, [out / slug(c.column) / f"{slug(c.row)}-seed{seed}" for seed in c.ours.seeds])
        for c in cells
    ]
    return prepared(plan.study)(runs)


def _reached(target: str, cell: Cell, out: Path) -> Reached:
    """What a cell costs to reach the best accuracy of the target's row in the same column."""

    def histories(row: str) -> list[list[dict[str, Any]]]:
        runs = [out / slug(cell.column) / f"{slug(row)}-seed{seed}" for seed in cell.ours.seeds]
        return [RunDirectory.open(run).history() for run in runs]

    return reach(histories(cell.row), best(histories(target)))


def write(
    name: str,
    plan: Recipe,
    cells: list[Cell],
    folder: Path,
    command: str,
    quick: bool,
    picture: bytes | None = None,
    study: Study | None = None,
) -> list[Path]:
    """The table as Markdown, everything behind it as JSON, and beside them its picture (a PNG)."""
    stem = folder / (name + ("-quick" if quick else ""))
    stem.parent.mkdir(parents=True, exist_ok=True)
    page, data, image = (stem.with_name(stem.name + kind) for kind in (".md", ".json", ".png"))
    table = markdown(plan, cells, command, quick, image.name if picture else None)
    page.write_text(table + (study.markdown(stem.name) if study else ""))
    content = {
        "recipe": plan.model_dump(mode="json"),
        "command": command,
        "machine": machine(),
        "cells": [asdict(c) for c in cells],
        **({"study": study.figures} if study else {}),
    }
    data.write_text(json.dumps(content, indent=1) + "\n")
    if picture:
        image.write_bytes(picture)
    return [page, data, *([image] if picture else [])]


def markdown(plan: Recipe, cells: list[Cell], command: str, quick: bool, image: str | None = None) -> str:
    """Ours beside theirs, and how it was made."""
    columns = list(dict.fromkeys(cell.column for cell in cells))
    lines = [f"# {plan.title}", "", plan.about.strip().replace("\n", " "), "", f"Paper: {plan.paper}.", ""]
    if quick:
        lines += [
            "**Quick mode**: smaller data and fewer rounds, to try the recipe; not to be compared with the paper.",
            "",
        ]
    first = cells[0].ours
    several = len(first.seeds) > 1
    spread = f"{first.groups} {first.units}" if first.groups else "seeds" if several else None
    over = f"mean ± 95 % CI over {spread}" if spread else "one seed"
    what = "Accuracy" if plan.mean == "samples" else "Mean accuracy over clients, each with its own model,"
    lines += [f"{what} in %, {over}; the paper's figure behind a stroke.", ""]
    lines += ["| method | " + " | ".join(columns) + " | MB up | MB down |", "|---|" + "---|" * (len(columns) + 2)]
    for row in dict.fromkeys(cell.row for cell in cells):
        mine = [cell for cell in cells if cell.row == row]
        lines.append(f"| {row} | " + " | ".join(_figure(cell) for cell in mine) + f" | {_traffic(mine)} |")
    if image and plan.figure:
        lines += ["", f"![{_ALTS[plan.figure]} of each row]({image})"]
    if plan.by_round:
        lines += _by_round(plan, cells)
    lines += _duels(plan, cells) + _costs(plan, cells)
    tuned = [cell for cell in cells if cell.ours.trials]
    if tuned:
        lines += ["", "Chosen settings of tuned rows: " + "; ".join(_chosen(cell) for cell in tuned) + "."]
    hashes = ", ".join(f"{cell.row} {cell.column} `{cell.ours.hash}`" for cell in cells)
    seeds = f"seeds {first.seeds[0]} … {first.seeds[-1]}" if several else f"seed {first.seeds[0]}"
    lines += ["", f"Made by `{command}`, {seeds}, on {machine()}."]
    lines += ["", f"<details><summary>Settings hashes</summary>{hashes}</details>", ""]
    return "\n".join(lines)


def machine() -> str:
    """Where figures come from."""
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, Fewer {fewer.__version__}"
    )


def _costs(plan: Recipe, cells: list[Cell]) -> list[str]:
    """What it costs to reach the target, where the recipe has one."""
    told = [(cell, cell.reached) for cell in cells if cell.reached is not None]
    if not told:
        return []
    lines = ["", f"To reach the best accuracy of *{plan.target}* (mean over seeds, in the rounds evaluated):", ""]
    lines += ["| method | column | target | rounds | MB, up and down | GFLOP of clients |", "|---|---|---|---|---|---|"]
    for cell, reached in told:
        figures = [reached.round, reached.mb and amount(reached.mb), reached.gflop and amount(reached.gflop)]
        shown = " | ".join("never" if reached.round is None else "–" if f is None else str(f) for f in figures)
        lines.append(f"| {cell.row} | {cell.column} | {100 * reached.target:.2f} | {shown} |")
    return lines


def _duels(plan: Recipe, cells: list[Cell]) -> list[str]:
    """How far each row is ahead of its rivals, where the recipe has some."""
    if not plan.rivals:
        return []
    units = cells[0].ours.units if cells[0].ours.groups else "clients"
    lines = [
        "",
        f"How far a row is ahead, in points: mean and 95 % CI of the differences over all {units} that both were "
        f"judged on. Within a seed {units} share one trained model"
        + ("; in brackets, the CI over the seeds' means:" if len(cells[0].ours.seeds) > 1 else ":"),
        "",
        "| method | column | " + " | ".join(f"ahead of {rival}" for rival in plan.rivals) + " |",
        "|---|---|" + "---|" * len(plan.rivals),
    ]
    judged = {(cell.row, cell.column): cell.ours.judged for cell in cells}
    for (row, column), mine in judged.items():
        shown = " | ".join(_ahead(mine, judged[rival, column]) for rival in plan.rivals)
        lines.append(f"| {row} | {column} | {shown} |")
    return lines


def _ahead(mine: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> str:
    """A dash where it is the row itself, or nothing was judged in both."""
    ways = [[a[one] - b[one] for one in a if one in b] for a, b in zip(mine, theirs, strict=True)]
    if mine is theirs or not all(ways):
        return "–"
    half = half_width([statistics.fmean(way) for way in ways])
    return _mean([way for seed in ways for way in seed]) + ("" if half is None else f" (± {100 * half:.1f})")


def _figure(cell: Cell) -> str:
    ours = f"{100 * cell.ours.accuracy:.2f}" + (f" ± {100 * cell.ours.ci95:.2f}" if cell.ours.ci95 is not None else "")
    return ours + (f" / {cell.paper:.2f}" if cell.paper is not None else "")


_ALTS = {
    "rounds": "Accuracy by round",
    "megabytes": "Accuracy by megabytes sent, up and down together,",
    "columns": "Accuracy by column",
}


def _by_round(plan: Recipe, cells: list[Cell]) -> list[str]:
    """For each column a table of the accuracy after the rounds that are asked for."""
    lines = []
    for column in dict.fromkeys(cell.column for cell in cells):
        mine = {
            cell.row: [{line["round"]: line["accuracy"] for line in seed} for seed in cell.ours.curves]
            for cell in cells
            if cell.column == column
        }
        every = sorted({number for seeds in mine.values() for seed in seeds for number in seed})
        shown = plan.by_round if isinstance(plan.by_round, list) else every
        lines += [
            "",
            f"Accuracy after so many rounds, {column}:",
            "",
            "| method | " + " | ".join(map(str, shown)) + " |",
        ]
        lines += ["|---|" + "---|" * len(shown)]
        for row, seeds in mine.items():
            found = [[seed[number] for seed in seeds if number in seed] for number in shown]
            texts = [_mean(values) if len(values) == len(seeds) else "–" for values in found]
            lines.append(f"| {row} | " + " | ".join(texts) + " |")
    return lines


def _mean(values: list[float]) -> str:
    half = half_width(values)
    return f"{100 * statistics.fmean(values):.1f}" + ("" if half is None else f" ± {100 * half:.1f}")


def _traffic(cells: list[Cell]) -> str:
    return " | ".join(amount(sum(getattr(c.ours, way) for c in cells) / len(cells)) for way in ("mb_up", "mb_down"))


def _chosen(cell: Cell) -> str:
    values = ", ".join(f"{name} {cell.ours.settings[name]:g}" for name in cell.ours.trials[0].settings)
    return f"{cell.row} {cell.column}: {values}"


def slug(text: str) -> str:
    """The text as part of a file name."""
    words = "".join(c if (c.isalnum() and c.isascii()) or c == "." else " " for c in text.replace("α", "alpha"))
    return "-".join(words.lower().split())


def _files() -> dict[str, Traversable]:
    found = {}
    for group in files("fewer.experiments").joinpath("tables").iterdir():
        if group.is_dir():
            for file in group.iterdir():
                if file.name.endswith(".toml"):
                    found[f"{group.name}/{file.name.removesuffix('.toml')}"] = file
    return found
