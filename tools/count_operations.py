"""Counts the operations of results that were made before operations were counted.

    FEWER_DATA=DIR python -m tools.count_operations [NAME…] [--rounds 3] [--row ROW…]

For each cell of docs/results without counted operations, it repeats the first rounds of the first seed with the
recorded options, and counts. Each later round adds the mean of these without the first. That is exact if all rounds
cost the same, and about right if cohorts differ. A method whose rounds change later needs all of them: `--row` counts
single rows, also those that have such an estimate. Pages and plots are written again; no accuracy is touched.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fewer.experiments.pages import FIGURES
from fewer.experiments.recipes import Cell, cell_settings, measure_target_costs, read_results
from fewer.report.style import png
from fewer.report.tables import plot_recipe
from fewer.runs.callbacks import Callback, Run
from fewer.runs.engine import run_experiment
from fewer.runs.experiment import build_experiment
from fewer.runs.settings import Settings
from tools.render_results import RESULTS, render_all


class _Counted(Exception):
    """Enough rounds were counted."""


class _Counter(Callback):
    """Notes the operations after each round, and ends the run after `rounds` of them."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.totals: list[int] = []

    def on_round_end(self, run: Run, metrics: Mapping[str, Any]) -> None:
        self.totals.append(metrics["flops"])
        if len(self.totals) == self.rounds:
            raise _Counted


def count_rounds(settings: Settings, rounds: int) -> list[int]:
    """Returns the operations of all clients up to and including each of the first rounds."""
    counter = _Counter(rounds)
    counted = settings.model_copy(update={"count_flops": True, "evaluate_every": 10**6})
    with contextlib.suppress(_Counted):
        run_experiment(build_experiment(counted), None, [counter])
    return counter.totals


def continue_counts(totals: Sequence[int], round: int) -> int:
    """Returns the operations up to and including a round; every round after the counted ones adds their mean."""
    if round <= len(totals):
        return totals[round - 1]
    mean = (totals[-1] - totals[0]) / (len(totals) - 1)
    return int(totals[-1] + (round - len(totals)) * mean)


def add_counts(cell: Cell, totals: Sequence[int]) -> Cell:
    """Returns the cell with the operations of its first seed, at each evaluated round and in total."""
    points = next(iter(cell.ours.curves), [])
    first = [{**point, "flops": continue_counts(totals, int(point["round"]))} for point in points]
    curves = [first, *cell.ours.curves[1:]] if first else cell.ours.curves
    gflop = continue_counts(totals, cell.ours.rounds) / 1e9
    counted = len(totals) if len(totals) < cell.ours.rounds else None
    return replace(cell, ours=replace(cell.ours, curves=curves, gflop=gflop, counted_rounds=counted))


def count_page(data: Path, rounds: int, rows: Sequence[str] = ()) -> int:
    """Counts the operations of the cells that lack them, and writes them to the JSON file. Returns their number.

    With `rows`, it counts these rows only, unless they are counted in full.
    """
    content = json.loads(data.read_text())
    recipe, cells = read_results(content)
    counted = 0
    for number, cell in enumerate(cells):
        lacking = cell.ours.gflop is None or (rows and cell.ours.counted_rounds)
        if lacking and (not rows or cell.row in rows):
            cells[number] = add_counts(cell, count_rounds(cell_settings(recipe, cell), rounds))
            print(f"{data.stem}: {cell.row}, {cell.column}: {cells[number].ours.gflop:.4g} GFLOP", flush=True)
            counted += 1
    cells = measure_target_costs(recipe, cells)
    data.write_text(json.dumps({**content, "cells": [asdict(cell) for cell in cells]}, indent=1) + "\n")
    if figure := plot_recipe(recipe, cells).get("gflop"):
        data.with_name(data.stem + FIGURES["gflop"]).write_bytes(png(figure))
    return counted


def main() -> None:
    """Counts the named results, or all, and writes the pages again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="results such as fedmk/table3 [default: all]")
    parser.add_argument("--rounds", type=int, default=3, help="rounds to count, at least 2 [default: 3]")
    parser.add_argument("--row", action="append", default=[], help="count this row only, also if it has an estimate")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    for data in sorted(args.results.glob("*/*.json")):
        if not args.names or f"{data.parent.name}/{data.stem}" in args.names:
            count_page(data, max(args.rounds, 2), args.row)
    render_all(args.results)


if __name__ == "__main__":
    main()
