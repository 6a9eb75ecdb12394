"""The report: one self-contained HTML page, with its pictures and their values as files."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from fewer.methods.new_clients import worst_tenth
from fewer.privacy import PrivacySettings
from fewer.report.classes import format_metric, other_metrics, tabulate_classes, tabulate_clients
from fewer.report.files import write_files
from fewer.report.gallery import Gallery, build_gallery, client_rows
from fewer.report.groups import RunGroup, TablePosition, differing_settings, group_runs
from fewer.report.html import Table, render
from fewer.report.metrics import MB
from fewer.report.verdict import verdict, winner
from fewer.runs.figures import LABELS, PERCENT
from fewer.runs.reader import RunReader
from fewer.runs.settings import METHOD_SETTINGS
from fewer.statistics import Interval, format_interval, format_number

PAGE = "report.html"
FOLDER = "pictures"
"""Folder next to the page: each picture as PNG and SVG, and its values as CSV."""
MEANING = {
    None: "each test sample is predicted by its client's model",
    "groups": "accuracy of groups that start from the prepared model",
    "tasks": "accuracy on queries of novel classes",
}


def write_report(runs: Sequence[Path], out: Path, pictures: bool = True) -> list[Path]:
    """Writes a page on one or more runs into the directory `out` and returns all paths, the page first.

    Runs of the same method that differ only in the seed are averaged. Without `pictures`, only the page is written,
    in half the time. It still contains the pictures.
    """
    groups, empty = group_runs(runs)
    write_files(out, {})  # fails early if the directory cannot be written
    gallery, notes = build_gallery(groups)
    notes += [f"{path.name} is left out: it has no completed round yet." for path in empty]
    files = {PAGE: _render_report(groups, gallery, notes).encode()}
    for picture in chain(*gallery.values()) if pictures else ():
        files |= picture.files(FOLDER)
    return write_files(out, files)


def _render_report(groups: Sequence[RunGroup], gallery: Gallery, notes: Sequence[str]) -> str:
    runs = [(group, run) for group in groups for run in group.runs]
    notes = [
        *_describe_differences(groups),
        *(f"{group.label}, seed {run.seed}, {run.unfinished}." for group, run in runs if run.unfinished),
        *(
            f"{group.label}, seed {run.seed}, ran between machines: including evaluation, Flower sent "
            f"{format_number(sent[0] / MB)} MB up and {format_number(sent[1] / MB)} MB down."
            for group, run in runs
            if (sent := run.transport_bytes)
        ),
        *(
            f"{group.label}, seed {run.seed}: differential privacy of {_protected_unit(run)} with "
            f"ε = {last['epsilon']:.3g} at δ = {last['delta']:g}, for the model, if the seed is secret. "
            "Metrics are not covered."
            for group, run in runs
            if run.history and "epsilon" in (last := run.history[-1])
        ),
        *notes,
    ]
    environments = {json.dumps(run.metadata["environment"]): run.metadata["environment"] for _, run in runs}.values()
    hashes = [
        (group.label, run.seed, run.metadata["hash"], run.metadata["data"]["fingerprint"], run.path.name)
        for group, run in runs
    ]
    paper, sources = compare_with_paper(groups)
    return render(
        PAGE,
        title="; ".join(dict.fromkeys(run.data_summary for _, run in runs)),
        verdict=verdict(groups),
        results=tabulate_results(groups),
        explanation=explain_results(groups),
        notes=notes,
        paper=paper,
        sources=sources,
        gallery=gallery,
        traffic=_tabulate_traffic(groups),
        classes=tabulate_classes(groups),
        worst_clients=tabulate_worst_clients(groups),
        clients=tabulate_clients(groups),
        faults=_tabulate_faults(groups),
        settings={group.label: _tabulate_values(_all_settings(group.runs[0])) for group in groups},
        hashes=Table(("method", "seed", "settings", "data", "run"), hashes, "Hashes"),
        environments=[(values, _tabulate_values(values)) for values in environments],
    )


def _protected_unit(run: RunReader) -> str:
    """What differential privacy protects in a run."""
    return "single samples" if PrivacySettings.parse(run.settings["dp"]).level == "record" else "clients"


def tabulate_results(groups: Sequence[RunGroup]) -> Table:
    """The primary metric, traffic and time of each group, the best first."""
    metric = groups[0].metric
    more = {name: f"{label.removesuffix(' baseline')} %" for name, label in LABELS.items()}
    more |= {name: f"{name} %" if name in PERCENT else name for name in other_metrics(groups)}
    more = {name: head for name, head in more.items() if any(group.mean_if_known(name) is not None for group in groups)}
    is_private = any(group.epsilon is not None for group in groups)
    costs = ("rounds", "MB up", "MB down", "seconds", *(["ε"] if is_private else []), "seeds")
    heads = ("method", metric.label, *more.values(), f"global {metric.label}", *costs)
    best = winner(groups)
    ranked = sorted(groups, key=lambda group: -metric.rank(group.value.mean) if group.value else math.inf)
    rows = [
        (
            group.label,
            metric.format_interval(group.value),
            *(format_metric(group.mean_if_known(name), head) for name, head in more.items()),
            metric.format_interval(group.global_value and Interval(group.global_value.mean, None)),
            group.rounds,
            *(format_number(megabytes) for megabytes in group.megabytes),
            f"{group.last_mean('seconds'):,.1f}",
            *(["–" if group.epsilon is None else f"{group.epsilon:.3g}"] if is_private else []),
            ", ".join(str(run.seed) for run in group.runs),
        )
        for group in ranked
    ]
    return Table(heads, rows, "Results", ranked.index(best) if best else None)


def explain_results(groups: Sequence[RunGroup]) -> str:
    """What the numbers in the table of results mean."""
    several_seeds = any(len(group.runs) > 1 for group in groups)
    units = next((group.units for group in groups if group.units), None)
    metric = groups[0].metric
    averaged = f"; mean ± 95 % confidence over {units or 'seeds'}" if several_seeds or units else ""
    totals = "mean over seeds" if several_seeds else "totals"
    terms = ""
    if any(group.mean_if_known("majority_baseline") is not None for group in groups):
        terms = "Majority: accuracy of always predicting the most frequent class. ECE: expected calibration error. "
    return (
        f"{metric.title}: {MEANING[units]}{averaged}. {terms}Global {metric.name}: each client’s model on "
        f"all clients’ test samples. MB and seconds: {totals}."
    )


def compare_with_paper(groups: Sequence[RunGroup]) -> tuple[Table, dict[str, bool]]:
    """Our accuracy next to the paper's, for runs of a recipe that has the paper's values.

    Also returns the recipes, with True for quick settings.
    """
    rows = []
    sources = {}
    for group in groups:
        position = TablePosition.find(group.runs[0])
        if position is None or position.paper is None or (ours := position.measure(group.runs)) is None:
            continue
        difference = f"{100 * ours.mean - position.paper:+.2f}"
        rows.append((position.row, position.column, format_interval(ours), f"{position.paper:.2f}", difference))
        sources[position.about] = position.quick
    return Table(("row", "column", "ours %", "paper %", "difference"), rows, "Comparison with the paper"), sources


def _tabulate_traffic(groups: Sequence[RunGroup]) -> Table:
    """All kinds of messages, including those too small for a label in the picture."""
    rows = [
        (group.label, direction, kind, format_number(size / MB))
        for group in groups
        for (direction, kind), size in sorted(group.traffic.items(), key=lambda item: -item[1])
    ]
    return Table(("method", "direction", "kind", "MB"), rows, "Traffic by kind")


def tabulate_worst_clients(groups: Sequence[RunGroup]) -> Table:
    """The clients with the worst primary metric."""
    metric = groups[0].metric
    rows = []

    def format_value(value: float) -> str:
        return metric.format_interval(Interval(value, None), 1)

    for group in groups:
        ranked = sorted(client_rows([group]), key=lambda row: metric.rank(row[3]))
        if len(ranked) < 2:
            continue
        names = ", ".join(
            f"client {client}{f' (seed {seed})' if len(group.runs) > 1 else ''} {format_value(value)}"
            for _, seed, client, value in ranked[:3]
        )
        values = [row[3] for row in ranked]
        mean, worst = statistics.fmean(values), worst_tenth(values, metric.higher_is_better)
        rows.append((group.label, format_value(mean), format_value(worst), names))
    heads = ("method", *(f"{head}{metric.unit}" for head in ("mean over clients", "worst tenth", "worst clients")))
    return Table(heads, rows, "Worst clients")


def _tabulate_faults(groups: Sequence[RunGroup]) -> Table | None:
    """Absent answers by reason, and how often runs were interrupted and resumed; None without faults."""
    reasons = sorted({reason for group in groups for reason in group.absent_counts})
    interruptions = [sum(run.interruptions for run in group.runs) for group in groups]
    if not reasons and not any(interruptions):
        return None
    rows = []
    for group, count in zip(groups, interruptions, strict=True):
        absent = group.absent_counts
        rows.append((group.label, *(f"{absent[reason]:,}" for reason in reasons), f"{absent.total():,}", f"{count:,}"))
    return Table(("method", *reasons, "absent in total", "resumed"), rows, "Faults")


def _describe_differences(groups: Sequence[RunGroup]) -> Iterator[str]:
    """Describes the settings, other than the method's, that differ between groups."""
    keys = differing_settings([group.runs[0].task_settings for group in groups])
    labels_by_settings: dict[str, list[str]] = {}
    for group in groups:
        settings = ", ".join(f"{key} = {group.runs[0].task_settings[key]}" for key in keys)
        labels_by_settings.setdefault(settings, []).append(group.label)
    if keys:
        texts = (f"{settings} ({', '.join(labels)})" for settings, labels in labels_by_settings.items())
        yield f"Other settings differ too: {'; '.join(texts)}."


def _all_settings(run: RunReader) -> dict[str, Any]:
    """All settings of a run, its method's own first, without the seed and the data directory."""
    hidden = ("method", *METHOD_SETTINGS, "method_options", "seed", "data_dir")
    others = {key: value for key, value in run.settings.items() if key not in hidden}
    return {"method": run.method_name, **run.metadata["method"], **others}


def _tabulate_values(values: Mapping[str, Any]) -> Table:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return Table(("name", "value"), [(key, "–" if text == "null" else text) for key, text in texts.items()])
