"""The report: one HTML page that needs nothing else, and its pictures and their figures as files."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

from fewer.methods.new_clients import worst_tenth
from fewer.report.figures import Interval, percent
from fewer.report.files import write_files
from fewer.report.gallery import album, client_rows
from fewer.report.html import details, document, figure_of, note_of, table
from fewer.report.run_reader import Run, RunGroup, differing, gather
from fewer.report.verdict import verdict, winner
from fewer.runs.statistics import amount

PAGE = "report.html"
OWN = "each test sample judged by the model of the client that it belongs to"
FOLDER = "pictures"
"""Beside the page: each picture as PNG and SVG, and its figures as CSV."""


def write_report(runs: Sequence[Path], out: Path, pictures: bool = True) -> list[Path]:
    """Write a page on one or more runs into the directory `out`: its path, then those of its pictures.

    Runs of the same method that differ only in the seed are put together. Without `pictures` there is only the page,
    which has them inside, and needs half the time.
    """
    groups, early = gather(runs)
    write_files(out, {})  # if that cannot be, say so before the work
    sections, notes = album(groups)
    notes += [f"{path.name} is left out: no round of it has ended yet." for path in early]
    shown = {section: list(map(figure_of, drawn)) for section, drawn in sections.items()}
    files = {PAGE: _page(groups, shown, notes).encode()}
    for picture in chain(*sections.values()) if pictures else ():
        files |= picture.files(FOLDER)
    return write_files(out, files)


def _page(groups: Sequence[RunGroup], sections: Mapping[str, Sequence[str]], notes: Sequence[str]) -> str:
    runs = [(group, run) for group in groups for run in group.runs]
    title = "; ".join(dict.fromkeys(run.data for _, run in runs))
    notes = [
        *_differences(groups),
        *(f"{group.label} with seed {run.seed} {run.unfinished}." for group, run in runs if run.unfinished),
        *(
            f"{group.label} with seed {run.seed} ran between machines: of its messages, those of measuring among them, "
            f"Flower made {amount(run.packed[0])} MB up and {amount(run.packed[1])} MB down."
            for group, run in runs
            if run.packed
        ),
        *notes,
    ]
    environments = list({json.dumps(run.description["environment"]): run for _, run in runs}.values())
    hashes = [
        [group.label, str(run.seed), run.description["hash"], run.description["data"]["fingerprint"], run.path.name]
        for group, run in runs
    ]
    after = {"Traffic": _traffic(groups), "Clients": _worst(groups)}
    parts = [
        f'<div class="short">{"".join(f"<p>{escape(text)}</p>" for text in verdict(groups))}</div>',
        _results(groups),
        *map(note_of, notes),
        *_paper(groups),
    ]
    for section, figures in sections.items():
        parts += [f"<h2>{section}</h2>", f'<div class="pictures">{"".join(figures)}</div>', after.get(section, "")]
    parts += [
        "<h2>Faults</h2>",
        _faults(groups),
        "<h2>Settings</h2>",
        *(details(group.label, _pairs(_settings(group.runs[0]))) for group in groups),
        details("Seeds and hashes", table(["method", "seed", "settings", "data", "run"], hashes, name="Hashes")),
        "<h2>Environment</h2>",
        *(details(_versions(run), _pairs(run.description["environment"])) for run in environments),
        '<p class="small">This page needs nothing else. <code>fewer report RUN…</code> also writes each picture as PNG '
        "and SVG, and its figures as CSV.</p>",
    ]
    return document(title, parts)


def _results(groups: Sequence[RunGroup]) -> str:
    heads = ["method", "accuracy %", "everywhere %", "rounds", "MB up", "MB down", "seconds", "seeds"]
    best = winner(groups)
    ranked = sorted(groups, key=lambda group: -group.accuracy.mean if group.accuracy else 1)
    rows = [
        [
            group.label,
            percent(group.accuracy),
            percent(group.global_accuracy and Interval(group.global_accuracy.mean, None)),
            group.rounds,
            *(amount(each) for each in group.megabytes),
            f"{group.mean('seconds'):,.1f}",
            ", ".join(str(run.seed) for run in group.runs),
        ]
        for group in ranked
    ]
    several = any(len(group.runs) > 1 for group in groups)
    units = next((group.units for group in groups if group.units), None)
    sure = f" ± 95 % confidence over {units or 'seeds'}"
    return (
        table(heads, rows, [ranked.index(best)] if best else [], name="Results")
        + '<p class="small">accuracy: '
        + {"groups": "what groups make of the prepared model", "tasks": "queries of novel classes"}.get(
            units or "", OWN
        )
        + (f", mean{sure}" if several or units else "")
        + ". everywhere: each client’s model judged on all clients’ test samples. MB and seconds: "
        + ("mean over seeds.</p>" if several else "in all.</p>")
    )


def _paper(groups: Sequence[RunGroup]) -> Iterator[str]:
    """Ours beside the paper's, where runs are of a recipe that has the paper's figures."""
    rows = []
    about = {}
    for group in groups:
        if (place := group.place) is None or place.paper is None or (ours := place.measured(group.runs)) is None:
            continue
        ahead = 100 * ours.mean - place.paper
        rows.append([place.row, place.column, percent(ours), f"{place.paper:.2f}", f"{ahead:+.2f}"])
        about[place.about] = place.quick
    if rows:
        yield "<h2>Ours and the paper’s</h2>"
        yield table(["row", "column", "ours %", "paper %", "ours ahead by"], rows, name="Ours and the paper’s")
        for text, quick in about.items():
            yield f'<p class="small">{escape(text)}</p>'
            if quick:
                yield note_of("These runs are of the recipe’s quick form, not to be compared with the paper.")


def _traffic(groups: Sequence[RunGroup]) -> str:
    """All kinds, also those too small for a name in the picture."""
    rows = [
        [group.label, way, kind, amount(size / 1e6)]
        for group in groups
        for (way, kind), size in sorted(group.traffic.items(), key=lambda item: -item[1])
    ]
    return (
        details("All kinds", table(["method", "direction", "kind", "MB"], rows, name="Traffic by kind")) if rows else ""
    )


def _worst(groups: Sequence[RunGroup]) -> str:
    """Whom a method serves worst."""
    rows = []
    for group in groups:
        ranked = sorted(client_rows([group]), key=lambda row: row[3])
        if len(ranked) < 2:
            continue
        who = ", ".join(
            f"client {client}{f' (seed {seed})' if len(group.runs) > 1 else ''} {100 * value:.1f}"
            for _, seed, client, value in ranked[:3]
        )
        values = [row[3] for row in ranked]
        mean, worst = statistics.fmean(values), worst_tenth(values)
        rows.append([group.label, f"{100 * mean:.1f}", f"{100 * worst:.1f}", who])
    heads = ["method", "mean over clients %", "worst tenth %", "worst clients %"]
    return table(heads, rows, name="Worst clients") if rows else ""


def _faults(groups: Sequence[RunGroup]) -> str:
    """Absent answers by reason, and how often runs broke off and went on."""
    reasons = sorted({reason for group in groups for reason in group.absent})
    breaks = [sum(run.breaks for run in group.runs) for group in groups]
    if not reasons and not any(breaks):
        return "<p>All clients that were asked answered, and no run broke off.</p>"
    rows = [
        [group.label, *(f"{group.absent[reason]:,}" for reason in reasons), f"{group.absent.total():,}", f"{broken:,}"]
        for group, broken in zip(groups, breaks, strict=True)
    ]
    return table(["method", *reasons, "absent in all", "went on after a break"], rows, name="Faults")


def _differences(groups: Sequence[RunGroup]) -> Iterator[str]:
    """Whatever but the method is not the same for all."""
    keys = differing([group.runs[0].facts for group in groups])
    alike: dict[str, list[str]] = {}
    for group in groups:
        told = ", ".join(f"{key} = {group.runs[0].facts[key]}" for key in keys)
        alike.setdefault(told, []).append(group.label)
    if keys:
        texts = (f"{told} ({', '.join(labels)})" for told, labels in alike.items())
        yield f"Not only the methods differ: {'; '.join(texts)}."


def _settings(run: Run) -> dict[str, Any]:
    """All settings of a run, its method's own first, but for the seed and where data lay, which do not belong here."""
    hidden = ("method", "rounds", "cohort", "method_options", "seed", "data_dir")
    others = {key: value for key, value in run.settings.items() if key not in hidden}
    return {"method": run.name, **run.description["method"], **others}


def _versions(run: Run) -> str:
    return ", ".join(f"{name} {run.description['environment'].get(name, '?')}" for name in ("fewer", "torch", "python"))


def _pairs(values: Mapping[str, Any]) -> str:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return table(["name", "value"], [(key, "–" if text == "null" else text) for key, text in texts.items()])
