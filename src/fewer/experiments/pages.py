"""Pages of results: one sentence, the table, the plots; then the setting, and details that readers can unfold."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import fewer
from fewer.experiments.compare import Row
from fewer.experiments.recipes import Cell, Recipe, read_results
from fewer.experiments.studies import Study
from fewer.experiments.tune import settings_at_edge
from fewer.methods import find
from fewer.statistics import Interval, format_interval, format_number, half_width, interval

FIGURES = {"rounds": ".png", "megabytes": ".png", "columns": ".png", "heatmap": ".png", "gflop": "-gflop.png"}
"""The end of the file name of each kind of figure."""
_ALT_TEXTS = {
    "rounds": "Accuracy by round",
    "megabytes": "Accuracy by megabytes sent, up and down together,",
    "columns": "Accuracy by column",
    "heatmap": "Accuracy by column, as a heat map,",
    "gflop": "Accuracy by GFLOP of all clients",
}
_GFLOP_NOTE = (
    "GFLOP: what all clients of a run spend in training rounds, counted with the first seed. Evaluations do not count, "
    "nor does what happens in them: a model that is adapted or chosen there. Seconds depend on what else "
    "the machine did."
)
_MAX_SPELLED = 3
"""The result names the leader of each column if there are at most this many columns, and counts them otherwise."""
_SENTENCES = 3
"""Sentences in a paragraph of the setting."""


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
    notes: Sequence[str] = (),
) -> list[Path]:
    """Writes the data of a page as JSON, the page as Markdown, and its pictures (see `FIGURES`) as PNG.

    `later` are rows that were made after the others, and `notes` end the page.
    """
    stem = folder / (name + ("-quick" if quick else ""))
    stem.parent.mkdir(parents=True, exist_ok=True)
    page, data = (stem.with_name(stem.name + kind) for kind in (".md", ".json"))
    images = _image_paths(stem, pictures or {})
    content = {
        "recipe": recipe.model_dump(mode="json"),
        "command": command,
        "machine": describe_machine(),
        **({"later": list(later)} if later else {}),
        "cells": [asdict(cell) for cell in cells],
        **(study.as_json(stem.name) if study else {}),
        **({"notes": list(notes)} if notes else {}),
    }
    data.write_text(json.dumps(content, indent=1) + "\n")
    for kind, path in images.items():
        path.write_bytes((pictures or {})[kind])
    page.write_text(render_file(data))
    return [page, data, *images.values()]


def render_file(data: Path, notes: Sequence[str] = ()) -> str:
    """Renders the page of a JSON file that `write_results` wrote, with the pictures that are next to it.

    `notes` follow those in the file.
    """
    content = json.loads(data.read_text())
    recipe, cells = read_results(content)
    kinds = [*(recipe.figure.split(" and ") if recipe.figure else ()), "gflop"]
    images = {kind: path for kind, path in _image_paths(data.with_suffix(""), kinds).items() if path.exists()}
    return render_markdown(
        recipe,
        cells,
        content["command"],
        " --quick" in content["command"],
        {kind: path.name for kind, path in images.items()},
        content["machine"],
        later=content.get("later", ()),
        study_page=content.get("study_page", ""),
        notes=[*content.get("notes", ()), *notes],
    )


def _image_paths(stem: Path, kinds: Mapping[str, Any] | Sequence[str]) -> dict[str, Path]:
    endings = FIGURES | ({"rounds": "-rounds.png"} if {"rounds", "megabytes"} <= {*kinds} else {})
    return {kind: stem.with_name(stem.name + endings[kind]) for kind in kinds}


def render_markdown(
    recipe: Recipe,
    cells: list[Cell],
    command: str,
    quick: bool,
    images: Mapping[str, str] | None = None,
    machine: str | None = None,
    *,
    later: Sequence[str] = (),
    study_page: str = "",
    notes: Sequence[str] = (),
) -> str:
    """Renders our results next to the paper's, and how they were made.

    `images` are file names by kind of figure. `machine` defaults to this machine. `later` are rows that were made after
    the others, and `study_page` is what the study adds.
    """
    columns = list(dict.fromkeys(cell.column for cell in cells))
    by_row = {row: [cell for cell in cells if cell.row == row] for row in dict.fromkeys(cell.row for cell in cells)}
    references = {row.name for row in recipe.row if row.reference}
    result = describe_result([cell for cell in cells if cell.row not in references])
    lines = [f"# {recipe.title}", "", f"**Result:** {result}", ""]
    if quick:
        lines += ["**Quick mode**: smaller data and fewer rounds, to try the recipe. Do not compare it with the paper."]
        lines += [""]
    first = cells[0].ours
    several_seeds = len(first.seeds) > 1
    units = f"{first.groups} {first.units}" if first.groups else "seeds" if several_seeds else None
    coverage = f"mean ± 95 % CI over {units}" if units else "one seed"
    accuracy = "Accuracy" if recipe.mean == "samples" else "Mean accuracy over clients, each with its own model,"
    paper = "; the paper's value after the slash" if any(cell.paper is not None for cell in cells) else ""
    counted = [cell.ours.gflop is not None for cell in cells]
    costs = ["MB up", "MB down", *(["GFLOP", "seconds"] if any(counted) else [])]
    by_column = _costs_by_column(cells)
    lines += [f"{accuracy} in %, {coverage}{paper}.{_describe_test(cells)}", ""]
    table = [
        [
            *(row, *_format_columns(group, columns, Cell.format_accuracy)),
            *([] if by_column else _format_costs(group, any(counted))),
        ]
        for row, group in by_row.items()
    ]
    lines += _render_table(["method", *columns, *([] if by_column else costs)], table)
    if any(counted):
        lines += ["", _GFLOP_NOTE]
        if rounds := sorted({cell.ours.counted_rounds or 0 for cell in cells} - {0}):
            lines[-1] += (
                f" ≈: counted later, in the first {' or '.join(map(str, rounds))} rounds; every other round adds the "
                "mean of these without the first. Cohorts differ, so this may be off by some percent."
            )
        if not all(counted):
            lines += ["", "–: not shown, because operations were not counted when this row was made."]
    elif not any(cell.target_cost and cell.target_cost.gflop for cell in cells):
        lines += ["", "Operations were not counted when this result was made."]
    lines += _render_fewer_seeds(by_row)
    for kind, image in (images or {}).items():
        rows = "each row" if kind != "gflop" or all(cell.ours.gflop for cell in cells) else "each row that trains"
        lines += ["", f"![{_ALT_TEXTS[kind]} of {rows}]({image})"]
    if study_page:
        lines += ["", study_page.strip("\n")]
    seeds = f"seeds {first.seeds[0]} … {first.seeds[-1]}" if several_seeds else f"seed {first.seeds[0]}"
    lines += ["", "## Setting", "", *_split_paragraphs(recipe.about), f"Paper: {recipe.paper}.", ""]
    lines += [f"Made by `{command}`, {seeds}, on {machine or describe_machine()}.", "", "## Details"]
    lines += _render_unseen_clients(by_row, columns)
    if by_column:
        ordered = [cell for group in by_row.values() for cell in group]
        table = [[cell.row, cell.column, *_format_costs([cell], any(counted))] for cell in ordered]
        lines += _fold("Cost of a run", _render_table(["method", "column", *costs], table))
    if recipe.by_round:
        lines += _render_rounds(recipe, cells)
    lines += _render_differences(recipe, by_row, columns) + _render_target_costs(recipe, cells)
    lines += _render_tuning(recipe, [cell for cell in cells if cell.ours.trials])
    hashes = [[row, *_format_columns(group, columns, _format_hash)] for row, group in by_row.items()]
    lines += _fold("Settings hashes", _render_table(["method", *columns], hashes))
    if later:
        lines += _fold("Rows made later", ["With `--row`, after the others:", "", *(f"- {row}" for row in later)])
    if notes:
        lines += _fold("Notes", [line for note in notes for line in _split_paragraphs(note)][:-1])
    return "\n".join([*lines, ""])


def describe_result(cells: Sequence[Cell]) -> str:
    """Says in one sentence which row leads in which column, and whether its lead is significant."""
    by_column: dict[str, list[Cell]] = {}
    for cell in cells:
        by_column.setdefault(cell.column, []).append(cell)
    ranked = [sorted(group, key=_rank) for group in by_column.values()]
    if all(len(group) == 1 for group in ranked):
        firsts = sorted((group[0] for group in ranked), key=_rank)
        if len(firsts) == 1:
            return f"*{firsts[0].row}* reaches {_format_value(firsts[0])}."
        best, worst = (f"{_format_value(cell)} ({cell.column})" for cell in (firsts[0], firsts[-1]))
        return f"from {worst} to {best}."
    if len(ranked) == 1:
        return _describe_leader(ranked[0])
    leads = [(group[0], all(_is_ahead(group[0].ours, cell.ours) for cell in group[1:])) for group in ranked]
    end = "; one seed only." if cells[0].ours.ci95 is None else "."
    if len(ranked) <= _MAX_SPELLED:
        leaders: dict[str, list[str]] = {}
        for first, clear in leads:
            doubt = "" if clear or first.ours.ci95 is None else ", not significantly"
            leaders.setdefault(first.row, []).append(f"{_format_value(first)} ({first.column}{doubt})")
        return "; ".join(f"*{row}* leads with {', '.join(values)}" for row, values in leaders.items()) + end
    counts = Counter(first.row for first, _ in leads).most_common(_MAX_SPELLED)
    rest = len(ranked) - sum(count for _, count in counts)
    texts = [f"*{row}* in {count}" for row, count in counts] + ([f"others in {rest}"] if rest else [])
    clear_leads = f"; {sum(clear for _, clear in leads)} of these leads are significant" if end == "." else ""
    return f"best in {len(ranked)} columns: {', '.join(texts)}{clear_leads}{end}"


def _describe_leader(ranked: Sequence[Cell]) -> str:
    first, *others = ranked
    metric, value = first.ours.primary, _format_value(first)
    ahead = f"ahead of *{others[0].row}* with {_format_value(others[0])}"
    if first.ours.ci95 is None:
        return f"*{first.row}* has the {metric.best} {metric.name}, {value}, {ahead}; one seed only."
    close = [cell for cell in others if not _is_ahead(first.ours, cell.ours)]
    if not close:
        return f"*{first.row}* leads significantly with {value}, {ahead}."
    if len(close) == len(others):
        return f"*{first.row}* has the {metric.best} mean, {value}, {ahead}, but no lead is significant."
    exceptions = f"*{close[0].row}* with {_format_value(close[0])}" + (
        f" and {len(close) - 1} more" if len(close) > 1 else ""
    )
    return f"*{first.row}* has the {metric.best} mean, {value}, significantly ahead of all but {exceptions}."


def _rank(cell: Cell) -> float:
    return -cell.ours.primary.rank(cell.ours.accuracy)


def _format_value(cell: Cell) -> str:
    return cell.ours.format_accuracy() + cell.ours.primary.unit


def _is_ahead(first: Row, second: Row) -> bool:
    """Whether a row is significantly better, at 95 %: paired if possible, else if the intervals do not overlap."""
    rank = first.primary.rank
    if first.ci95 is None or second.ci95 is None:
        return False
    if first.seeds != second.seeds:
        return rank(first.accuracy) - first.ci95 > rank(second.accuracy) + second.ci95
    samples = [list(zip(first.accuracies, second.accuracies, strict=True))]
    if first.groups:
        by_unit = zip(first.unit_accuracies, second.unit_accuracies, strict=True)
        samples.append([(a[unit], b[unit]) for a, b in by_unit for unit in a if unit in b])
    leads = [interval([rank(a) - rank(b) for a, b in pairs]) for pairs in samples if len(pairs) > 1]
    return bool(leads) and all(lead.mean > (lead.half or 0) for lead in leads)


def _describe_test(cells: Sequence[Cell]) -> str:
    """Says what significant means, if any rows can be compared."""
    first = cells[0].ours
    if first.ci95 is None or len({cell.row for cell in cells}) == 1:
        return ""
    paired = [first.units.removesuffix("s")] if first.groups else []
    paired += ["seed"] if len(first.seeds) > 1 else []
    columns = Counter(cell.column for cell in cells)
    count = sum(columns.values()) - len(columns)
    tests = f"{count} tests" if count > 1 else "one test"
    return f" Significant: at 95 %, paired by {' and by '.join(paired)}, each rival tested separately ({tests})."


def describe_machine() -> str:
    """Describes this machine and the versions of Python, torch and Fewer."""
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, Fewer {fewer.__version__}"
    )


def _split_paragraphs(text: str) -> list[str]:
    """Splits the paragraphs of a text into some of a few sentences, each followed by an empty line."""
    lines = []
    for paragraph in text.strip().split("\n\n"):
        sentences = re.split(r"(?<=[^.\s]{2}[.?]) (?=[A-Z0-9])", " ".join(paragraph.split()))
        for start in range(0, len(sentences), _SENTENCES):
            lines += [" ".join(sentences[start : start + _SENTENCES]), ""]
    return lines


def _fold(title: str, lines: Sequence[str]) -> list[str]:
    """Renders lines that readers can unfold, on GitHub and on the site."""
    return ["", "<details markdown>", f"<summary>{title}</summary>", "", *lines, "", "</details>"]


def _format_columns(cells: Sequence[Cell], columns: Sequence[str], format: Callable[[Cell], str]) -> list[str]:
    """One text per column; a dash for a column in which the row did not run."""
    texts = {cell.column: format(cell) for cell in cells}
    return [texts.get(column, "–") for column in columns]


def _format_hash(cell: Cell) -> str:
    return f"`{cell.ours.hash}`"


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
    titles = ("method", "column", "target", "rounds", "MB, up and down", "GFLOP of clients")
    note = "Mean over seeds; evaluated rounds only."
    return _fold(f"Cost of reaching the best accuracy of {recipe.target}", [*_render_table(titles, rows), "", note])


def _render_differences(recipe: Recipe, by_row: Mapping[str, list[Cell]], columns: Sequence[str]) -> list[str]:
    """Renders the differences between each row and its rivals, if the recipe has rivals: a table for each column."""
    if not recipe.rivals:
        return []
    cells = [cell for group in by_row.values() for cell in group]
    groups, several_seeds = cells[0].ours.groups, len(cells[0].ours.seeds) > 1
    units = cells[0].ours.units if groups else "clients"
    meaning = [f"Mean and 95 % CI over all {units} that both rows were evaluated on."]
    meaning.append(f"Within a seed, {units} share one trained model")
    meaning[-1] += "; the CI over the seeds' means is in brackets." if several_seeds else "."
    accuracies = {(cell.row, cell.column): cell.ours.unit_accuracies for cell in cells}
    if recipe.mean == "samples" and several_seeds and not groups:
        meaning = ["Paired by seed: mean and 95 % CI over seeds."]
        accuracies = {(cell.row, cell.column): [{"": value} for value in cell.ours.accuracies] for cell in cells}
    lines = []
    compared = set()
    for column in columns:
        rows = [
            [row, *(_format_difference(ours, accuracies.get((rival, column), ())) for rival in recipe.rivals)]
            for row in by_row
            if (ours := accuracies.get((row, column))) is not None
        ]
        pairs = [
            (frozenset((row[0], rival)), text)
            for row in rows
            for rival, text in zip(recipe.rivals, row[1:], strict=True)
        ]
        compared |= {(column, pair) for pair, text in pairs if text != "–"}
        lines += [f"{column}:", ""] if len(columns) > 1 else []
        lines += [*_render_table(["method", *(f"minus {rival}" for rival in recipe.rivals)], rows), ""]
    meaning.append(f"Of {len(compared)} comparisons, about {len(compared) / 20:.1f} exclude 0 by chance.")
    return _fold("Paired differences, in points", [*lines, " ".join(meaning)])


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
        lines += [f"{column}:", "", *_render_table(["method", *map(str, rounds)], table), ""]
    return _fold("Accuracy by round", lines[:-1])


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
    return _fold("Accuracy in % on clients that never trained", _render_table(["method", *columns], table))


def _costs_by_column(cells: Sequence[Cell]) -> bool:
    """Whether costs cannot be averaged over columns: a row has other numbers of rounds in some, or does not run."""
    columns = {cell.column for cell in cells}
    rounds: dict[str, list[int]] = {}
    for cell in cells:
        rounds.setdefault(cell.row, []).append(cell.ours.rounds)
    return any(len(set(counts)) > 1 or len(counts) < len(columns) for counts in rounds.values())


def _format_costs(cells: list[Cell], with_operations: bool) -> list[str]:
    """Megabytes up and down, and `with_operations` GFLOP and seconds (– if not counted): means over the columns."""
    rows = [cell.ours for cell in cells]
    texts = [
        format_number(statistics.fmean(values))
        for values in ([row.mb_up for row in rows], [row.mb_down for row in rows])
    ]
    if not with_operations:
        return texts
    gflops = [row.gflop for row in rows if row.gflop is not None]
    if len(gflops) < len(rows):
        return [*texts, "–", "–"]
    about = "≈ " if any(row.counted_rounds and row.gflop for row in rows) else ""
    seconds = statistics.fmean(row.seconds for row in rows)
    return [*texts, about + format_number(statistics.fmean(gflops)), format_number(seconds)]


def _render_tuning(recipe: Recipe, tuned: Sequence[Cell]) -> list[str]:
    """Renders the chosen settings of each tuned row, marked if at the edge of those tried, and how trials scored."""
    rows = []
    for cell in tuned:
        trials, settings = cell.ours.trials, cell.ours.settings
        usable = [trial for trial in trials if trial.usable]
        scores, edge = ["–", "–", "–", "–"], settings_at_edge(trials, settings, find(cell.ours.method))
        if usable:
            values = [trial.accuracy or 0.0 for trial in usable]
            best = max(usable, key=lambda trial: trial.accuracy or 0.0)
            intervals = [Interval(min(values), None), Interval(statistics.median(values), None)]
            intervals.append(Interval(best.accuracy or 0.0, best.ci95))
            diverged = len(trials) - len(usable)
            scores = [*(format_interval(value, 1) for value in intervals), str(diverged or "–")]
        chosen = ", ".join(f"{name} {settings[name]:g}{'*' * (name in edge)}" for name in trials[0].settings)
        rows.append([cell.row, cell.column, chosen.replace("*", "\\*"), str(len(trials)), *scores])
    if not rows:
        return []
    titles = ["method", "column", "chosen", "trials", "worst", "median", "best ± 95 % CI", "diverged"]
    if all(row[4:] == ["–"] * 4 for row in rows):
        return _fold("Tuning", _render_table(titles[:4], [row[:4] for row in rows]))
    length = f", after at most {recipe.trial_rounds} rounds" if recipe.trial_rounds else ""
    notes = [f"Trials: accuracy in % on held-out data{length}."]
    if any("*" in row[2] for row in rows):
        notes.append("\\*: the best value is at the edge of those tried, so a better one may lie beyond.")
    return _fold("Tuning", [*_render_table(titles, rows), "", " ".join(notes)])
