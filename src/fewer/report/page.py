"""The report: one HTML page that needs nothing else, and its pictures as files."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fewer.errors import FewerError, RunError
from fewer.report.pictures import (
    Histories,
    Interval,
    by_party,
    density_picture,
    made_picture,
    megabyte_picture,
    partition_picture,
    party_picture,
    round_picture,
    sheet_picture,
)
from fewer.report.reading import Group, Run, differing, gather
from fewer.report.style import png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fewer.data import Data

PAGE = "report.html"
_SCROLL = '<div class="scroll" tabindex="0" role="group" aria-label="{}">'
"""Around what may be wider than the screen: it can be moved by keys too."""


class Picture(NamedTuple):
    """A picture with what is said about it."""

    name: str
    figure: Figure
    caption: str
    alt: str


def write_report(runs: Sequence[Path], out: Path) -> list[Path]:
    """Write a page on one or more runs, and its pictures, into the directory `out`: the page's path, then the others.

    Runs of the same method that differ only in the seed are put together.
    """
    groups = gather(runs)
    pictures, notes = _pictures(groups)
    files = {f"{picture.name}.png": png(picture.figure) for picture in pictures}
    figures = [figure_of(picture, files[f"{picture.name}.png"]) for picture in pictures]
    return write_files(out, {PAGE: _page(groups, figures, notes).encode(), **files})


def write_files(out: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Write files by name into the directory `out`; their paths."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (out / name).write_bytes(content)
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error.strerror}") from error
    return [out / name for name in files]


# --- pictures -------------------------------------------------------------------------------------------------


def _pictures(groups: Sequence[Group]) -> tuple[list[Picture], list[str]]:
    """All pictures that there is something to show for, and why others are left out."""
    histories: Histories = {group.label: [run.history for run in group.runs] for group in groups}
    several = any(len(group.runs) > 1 for group in groups)
    last = ", ".join(f"{group.label} {_percent(group.accuracy)} %" for group in groups)
    spread = ", ".join(
        f"{label} from {100 * values[0]:.1f} to {100 * values[-1]:.1f} %"
        for label, runs in histories.items()
        if (values := by_party(runs))
    )
    fair = {label: runs for label, runs in histories.items() if any("fairness" in run[-1] for run in runs)}
    drawn = [
        (
            "accuracy-by-round",
            round_picture(histories),
            "How accuracy grows by round" + (": mean over seeds, with its 95 % confidence band." if several else "."),
            f"Line chart of accuracy by round. At the end: {last}.",
        ),
        (
            "accuracy-by-megabyte",
            megabyte_picture(histories),
            "The same by all that parties and coordinator had sent by then.",
            f"Line chart of accuracy by megabytes sent. At the end: {last}.",
        ),
        (
            "accuracy-by-party",
            party_picture(histories),
            "How evenly accuracy is spread: the parties of all runs, each judged on its own test samples, from the "
            "worst to the best, and their mean.",
            f"Parties in the order of their accuracy: {spread}.",
        ),
        (
            "accuracy-density",
            density_picture(fair),
            "How the accuracies of new parties are spread: narrow and far to the right is fair and good.",
            f"Density of the accuracies of new parties: {spread}.",
        ),
    ]
    pictures = [Picture(name, figure, caption, alt) for name, figure, caption, alt in drawn if figure]
    notes = []
    divisions: dict[str, Run] = {}
    for group in groups:
        divisions.setdefault(_division(group), group.runs[0])
    known: dict[str, Data] = {}
    for number, (division, run) in enumerate(divisions.items()):
        if "data" in run.description["own"]:
            continue
        try:
            known[division] = data = _data(run)
            pictures += _data_pictures(run, data, f"-{number + 1}" if number else "")
        except FewerError as error:
            notes.append(f"The data is not shown: {error}.")
    for number, group in enumerate(groups):
        if found := known.get(_division(group)):
            try:
                pictures += _made_pictures(group, found, f"-{number + 1}" if number else "")
            except Exception as error:  # whatever a user's own method does, its report is written
                reason = str(error) if isinstance(error, FewerError) else f"{type(error).__name__}: {error}"
                path = group.runs[0].path
                notes.append(f"Images that {group.label} made are not shown: {reason}.".replace(str(path), path.name))
    return pictures, notes


def _division(group: Group) -> str:
    return json.dumps(group.runs[0].division)


def _data(run: Run) -> Data:
    """The data of a run, if it is there and as it was."""
    from fewer.runs.job import check, load_data

    data = load_data(check(run.settings))
    if data.fingerprint() != run.description["data"]["fingerprint"]:
        raise RunError(f"{data.name} is no longer what {run.path.name} was run on")
    return data


def _data_pictures(run: Run, data: Data, suffix: str) -> Iterator[Picture]:
    """The division of the data and some of it."""
    yield Picture(
        f"partition{suffix}",
        partition_picture(data),
        f"Who holds what with seed {run.data_seed}: the area of a bubble is the number of training samples.",
        f"Bubbles of training samples by party and class: {run.data}.",
    )
    if sheet := sheet_picture(data):
        yield Picture(
            f"examples{suffix}", sheet, "Some test samples of each class.", f"Examples of {data.name} by class."
        )


def _made_pictures(group: Group, data: Data, suffix: str) -> Iterator[Picture]:
    """Images that the method made in the first run, if it makes any and its files are there."""
    from fewer.methods import Method, find
    from fewer.runs.result import open_result

    run = group.runs[0]
    try:
        kind = find(run.settings["method"])
    except FewerError:  # a plug-in that is gone: whether it made images is not known
        return
    if kind.images is Method.images:
        return
    result = open_result(run.path, data=data)
    beyond = "What lies beyond the range of pixels is cut off."
    if data.test.x.is_floating_point():
        beyond = "The lowest value of all is black, the highest white."
    for sheet in result.method.images(result.state):
        rows = {
            name: {label: images.cpu().numpy() for label, images in row.items()} for name, row in sheet.rows.items()
        }
        if figure := made_picture(data, sheet.title, rows, sheet.each):
            yield Picture(
                f"{sheet.name}{suffix}",
                figure,
                f"{group.label} with seed {run.seed}: {sheet.caption}; blank where there is none. {beyond}",
                f"Synthetic images: {sheet.caption}.",
            )


# --- the page -------------------------------------------------------------------------------------------------


def _page(groups: Sequence[Group], figures: Sequence[str], notes: Sequence[str]) -> str:
    runs = [(group, run) for group in groups for run in group.runs]
    title = "; ".join(dict.fromkeys(run.data for _, run in runs))
    notes = [
        *_differences(groups),
        *(f"{group.label} with seed {run.seed} {run.unfinished}." for group, run in runs if run.unfinished),
        *(
            f"{group.label} with seed {run.seed} ran between machines: of its messages, those of measuring among them, "
            f"Flower made {run.packed[0]:.3g} MB up and {run.packed[1]:.3g} MB down."
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
    parts = [
        _results(groups),
        *map(note_of, notes),
        f'<div class="pictures">{"".join(figures)}</div>',
        "<h2>Absent answers</h2>",
        _absent(groups),
        "<h2>Settings</h2>",
        *(_details(group.label, _pairs(_settings(group.runs[0]))) for group in groups),
        _details("Hashes", table(["method", "seed", "settings", "data", "run"], hashes)),
        "<h2>Environment</h2>",
        *(_details(_versions(run), _pairs(run.description["environment"])) for run in environments),
    ]
    return document(title, parts)


def _results(groups: Sequence[Group]) -> str:
    heads = ["method", "accuracy %", "everywhere %", "rounds", "MB up", "MB down", "seconds", "seeds"]
    best = max((group.accuracy.mean for group in groups if group.accuracy), default=None)
    rows = [
        [
            group.label,
            _percent(group.accuracy),
            _percent(group.everywhere and Interval(group.everywhere.mean, None)),
            group.rounds,
            *(f"{each:,.0f}" if each >= 1000 else f"{each:.3g}" for each in group.megabytes),
            f"{group.mean('seconds'):,.1f}",
            ", ".join(str(run.seed) for run in group.runs),
        ]
        for group in groups
    ]
    bold = [number for number, group in enumerate(groups) if group.accuracy and group.accuracy.mean == best]
    several = any(len(group.runs) > 1 for group in groups)
    return (
        table(heads, rows, bold if len(groups) > 1 else ())
        + '<p class="small">accuracy: each test sample judged by the model of the party that it belongs to'
        + (", mean ± 95 % confidence over seeds" if several else "")
        + ". everywhere: each party’s model judged on all parties’ test samples. MB and seconds: "
        + ("mean over seeds.</p>" if several else "in all.</p>")
    )


def _absent(groups: Sequence[Group]) -> str:
    reasons = sorted({why for group in groups for why in group.absent})
    if not reasons:
        return "<p>All parties that were asked answered.</p>"
    rows = [
        [group.label, *(f"{group.absent[why]:,}" for why in reasons), f"{group.absent.total():,}"] for group in groups
    ]
    return table(["method", *reasons, "in all"], rows)


def _differences(groups: Sequence[Group]) -> Iterator[str]:
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
    hidden = ("method", "rounds", "active", "set", "seed", "data_dir")
    others = {key: value for key, value in run.settings.items() if key not in hidden}
    return {"method": run.name, **run.description["method"], **others}


def _versions(run: Run) -> str:
    return ", ".join(f"{name} {run.description['environment'].get(name, '?')}" for name in ("fewer", "torch", "python"))


def _percent(value: Interval | None) -> str:
    if value is None:
        return "–"
    return f"{100 * value.mean:.2f}" + ("" if value.half is None else f" ± {100 * value.half:.2f}")


# --- HTML -----------------------------------------------------------------------------------------------------


def document(title: str, parts: Iterable[str]) -> str:
    """A whole page that needs nothing else, with its title as the first heading."""
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    return _TEMPLATE.format(title=escape(title), style=_STYLE, body=body)


def note_of(text: str) -> str:
    """A word to the reader that is not to be missed."""
    return f'<p class="note">{escape(text)}</p>'


def figure_of(picture: Picture, content: bytes) -> str:
    """A picture, inside the page, with its caption."""
    width, height = (round(96 * inches) for inches in picture.figure.get_size_inches())
    return (
        f"<figure{' class=wide' if width > 700 else ''}>{_SCROLL.format('picture')}"
        f'<img src="data:image/png;base64,{b64encode(content).decode()}" alt="{escape(picture.alt)}" '
        f'width="{width}" height="{height}"></div><figcaption>{escape(picture.caption)}</figcaption></figure>'
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], bold: Sequence[int] = ()) -> str:
    """Rows under heads; those with the numbers in `bold` stand out."""
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in heads)
    body = "".join(
        f"<tr{' class=best' if number in bold else ''}>"
        + f'<th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for number, (first, *cells) in enumerate(rows)
    )
    return f"{_SCROLL.format('table')}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _pairs(values: Mapping[str, Any]) -> str:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return table(["name", "value"], [(key, "–" if text == "null" else text) for key, text in texts.items()])


def _details(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


_STYLE = """
:root { color-scheme: light dark; --ink: #222; --faint: #666; --line: #ddd; --paper: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --faint: #999; --line: #444; --paper: #181a1b; } }
body { margin: 0 auto; padding: 1rem; max-width: 64rem; font: 1rem/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem .3rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
thead th { color: var(--faint); font-weight: normal; }
th:first-child { text-align: left; }
tbody th { font-weight: normal; white-space: normal; }
.best > * { font-weight: bold; }
details td, details th { text-align: left; white-space: normal; overflow-wrap: anywhere; }
summary { cursor: pointer; padding: .3rem 0; }
.small, figcaption { color: var(--faint); font-size: .875rem; }
.note { border-left: 3px solid #d55e00; padding-left: .75rem; overflow-wrap: anywhere; }
.pictures { display: flex; flex-wrap: wrap; gap: 1.5rem; align-items: start; margin: 1.5rem 0; }
figure { margin: 0; flex: 0 1 30rem; min-width: 0; }
figure.wide { flex-basis: 100%; }
img { display: block; max-width: 100%; height: auto; background: #fff; border-radius: .4rem; }
figcaption { margin-top: .4rem; }
@media (max-width: 40rem) {
  th, td { padding-right: .6rem; font-size: .9rem; }
  .wide img { max-width: none; width: 45rem; }
}
@media print {
  body { max-width: none; padding: 0; }
  figure, tr { break-inside: avoid; }
  figure { flex-basis: 45%; }
}
"""

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
