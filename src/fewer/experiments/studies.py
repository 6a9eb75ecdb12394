"""Studies: what a recipe looks at in its runs besides their accuracy."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fewer.audit import Sheet, audit
from fewer.audit.distance import earth_mover, span_of
from fewer.audit.telling import HEADS, LIMITS, MEANING, figure_rows
from fewer.errors import SettingError, unknown
from fewer.runs.result import Result, open_result
from fewer.runs.statistics import half_width
from fewer.runtime.streams import stream


class Runs(NamedTuple):
    """One cell of a table, and the directories of its runs, one for each seed."""

    row: str
    column: str
    paths: Sequence[Path]


@dataclass(frozen=True)
class Study:
    """What a study found: lines for the page, all figures, and images to draw."""

    lines: list[str]
    figures: dict[str, Any]
    sheets: list[Sheet] = field(default_factory=list)

    def markdown(self, stem: str) -> str:
        """The lines, then the pictures, which lie beside the page as STEM-NAME.png."""
        lines = list(self.lines)
        for sheet in self.sheets:
            lines += ["", f"![{sheet.title}]({stem}-{sheet.name}.png)", "", f"*{sheet.caption}*"]
        return "\n".join([*lines, ""])


def prepared(options: Mapping[str, Any]) -> Callable[[Sequence[Runs]], Study]:
    """The study that a recipe names, with its options; SettingError where it has no such name or option."""
    given = dict(options)
    name = str(given.pop("name", ""))
    if name not in STUDIES:
        raise unknown("study", name, STUDIES)
    known = list(inspect.signature(STUDIES[name]).parameters)[1:]
    for option in given:
        if option not in known:
            raise unknown(f"option of study {name}", option, known)
    if not all(isinstance(value, int | list) for value in given.values()):
        raise SettingError(f"study {name}: options are whole numbers or lists of numbers")
    return partial(STUDIES[name], **given)


def leakage(cells: Sequence[Runs], parties: int = 10, steps: int = 500, starts: int = 2) -> Study:
    """The privacy look at the first run of each cell."""
    lines, figures, sheets = ["", "## What leaks", ""], {}, []
    for row, column, paths in cells:
        found = audit(paths[0], parties=parties, steps=steps, starts=starts)
        figures[f"{row}, {column}"] = found.as_json()
        lines += [f"| {row}, {column} | {HEADS[1]} | {HEADS[2]} |", "|---|---|---|"]
        lines += ["| " + " | ".join(line) + " |" for line in figure_rows(found)]
        lines += ["", *(f"{note}\n" for note in found.notes)]
        where = row if len({cell.column for cell in cells}) == 1 else f"{row} {column}"
        place = "-".join("".join(c if c.isalnum() and c.isascii() else " " for c in where.lower()).split())
        sheets += [replace(s, name=f"{place}-{s.name}", title=f"{row}: {_lower(s.title)}") for s in found.sheets]
    return Study([*lines, MEANING, "", LIMITS], figures, sheets)


def _lower(title: str) -> str:
    return title[0].lower() + title[1:]


def emd(cells: Sequence[Runs], paper: Sequence[float] = ()) -> Study:
    """How far the synthetic data of each column is from that of the first, by earth mover's distance.

    The mean over parties that sent data in both, over classes and over seeds, of the sliced distance, in values of
    which black to white are 1.
    """
    heads, ours, figures = [], [], {}
    for _, column, paths in cells:
        seeds = [
            _apart(open_result(path), open_result(first)) for path, first in zip(paths, cells[0].paths, strict=True)
        ]
        half = half_width(seeds)
        heads.append(column)
        ours.append(f"{statistics.fmean(seeds):.3f}" + (f" ± {half:.3f}" if half is not None else ""))
        figures[column] = seeds
    theirs = [f"{value:.3f}" for value in paper] + ["–"] * (len(heads) - len(paper))
    lines = ["", f"## Earth mover's distance to {heads[0]}", "", "| | " + " | ".join(heads) + " |"]
    lines += ["|---|" + "---|" * len(heads), "| ours | " + " | ".join(ours) + " |"]
    lines += ["| paper | " + " | ".join(theirs) + " |"] if paper else []
    return Study(lines, figures)


def _apart(one: Result, other: Result) -> float:
    low, high = span_of(one.data.test)
    sent, base = (result.method.condensed(result.state) for result in (one, other))
    found = []
    for party in sorted(sent.keys() & base.keys()):
        (images, labels), (others, theirs) = sent[party], base[party]
        for label in sorted(set(labels.tolist()) & set(theirs.tolist())):
            a, b = ((x[y == label] - low) / (high - low) for x, y in ((images, labels), (others, theirs)))
            found.append(earth_mover(a.cpu(), b.cpu(), stream("emd", party, label)))
    if not found:
        raise SettingError("study emd: no party sent synthetic data of the same class in both runs")
    return statistics.fmean(found)


STUDIES: dict[str, Callable[..., Study]] = {"leakage": leakage, "emd": emd}
