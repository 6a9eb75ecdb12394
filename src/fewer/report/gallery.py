"""Which pictures there are on some runs: everything that their directories hold something for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fewer.errors import FewerError, RunError
from fewer.plugins import in_file
from fewer.report.charts import (
    TITLES,
    By,
    Grid,
    Ring,
    bar_picture,
    client_picture,
    curve_picture,
    density_picture,
    heat_picture,
    ring_picture,
    traffic_picture,
)
from fewer.report.figures import Histories, by_client, curve, percent
from fewer.report.html import Picture, Table
from fewer.report.pictures import (
    class_counts,
    class_names,
    cloud_picture,
    made_picture,
    partition_picture,
    sheet_picture,
    sheet_rows,
)
from fewer.report.run_reader import Run, RunGroup, differing
from fewer.report.style import COLORS, Look, look, looks
from fewer.report.verdict import paired
from fewer.runs.statistics import amount

if TYPE_CHECKING:
    from fewer.data import Data
    from fewer.runs.result import Result

MAX_RING = 100
"""At most so many clients are drawn as a ring."""
Album = dict[str, list[Picture]]
"""Pictures by the section that they belong to."""


def album(groups: Sequence[RunGroup]) -> tuple[Album, list[str]]:
    """All pictures that there is something to show for, and why others are left out."""
    found: Album = {
        "Accuracy": [*_accuracy(groups), *_bars(groups)],
        "Two settings": list(_grids(groups)),
        "Traffic": list(_traffic(groups)),
        "Clients": list(_clients(groups)),
        "Rings": [picture for number, group in enumerate(groups) for picture in _ring(group, _suffix(number))],
    }
    data, made, notes = _data_and_made(groups)
    found |= {"What methods made": made, "Data": data}
    return {section: pictures for section, pictures in found.items() if pictures}, notes


def _suffix(number: int) -> str:
    return f"-{number + 1}" if number else ""


# --- from figures ---------------------------------------------------------------------------------------------


def _looks(groups: Sequence[RunGroup]) -> dict[str, Look]:
    """A look for each; where all are variants of one method, with colors of their own."""
    found = looks({group.label: group.name for group in groups})
    if len({group.name for group in groups}) > 1:
        return found
    first = COLORS.index(look(groups[0].name).color)
    return {
        label: each._replace(color=COLORS[(first + place) % len(COLORS)])
        for place, (label, each) in enumerate(found.items())
    }


def _histories(groups: Sequence[RunGroup]) -> Histories:
    return {group.label: [run.history for run in group.runs] for group in groups}


def _accuracy(groups: Sequence[RunGroup]) -> Iterator[Picture]:
    histories, drawn = _histories(groups), _looks(groups)
    several = any(len(group.runs) > 1 for group in groups)
    last = ", ".join(f"{group.label} {percent(group.accuracy)} %" for group in groups)
    heads = ("method", "round", "megabytes", "seconds", "accuracy", "ci95")
    rows = [
        (label, point.round, point.megabytes, point.seconds, point.accuracy.mean, point.accuracy.half)
        for label, runs in histories.items()
        for point in curve(runs)
    ]
    ways: dict[str, tuple[By, str]] = {
        "accuracy-by-round": (
            "round",
            "How accuracy grows by round" + (": mean over seeds, with its 95 % confidence band." if several else "."),
        ),
        "accuracy-by-megabyte": (
            "megabytes",
            "The same by all that clients and server had sent by then: further left is cheaper.",
        ),
        "accuracy-by-second": (
            "seconds",
            "The same by the clock of the machine that it ran on, with everything that ran beside it.",
        ),
    }
    for name, (by, caption) in ways.items():
        if by == "seconds" and not all(row[3] for row in rows):
            continue
        if figure := curve_picture(TITLES[by], {"": histories}, by, drawn):
            alt = f"Line chart: {TITLES[by].lower()}. At the end: {last}."
            yield Picture(name, figure, caption, alt, Table(heads, rows))


def _bars(groups: Sequence[RunGroup]) -> Iterator[Picture]:
    known = {group.label: group.accuracy for group in groups if group.accuracy}
    if len(known) > 1:
        figure = bar_picture(known, _looks(groups))
        rows = [
            (group.label, group.accuracy.mean, group.accuracy.half, len(group.runs))
            for group in groups
            if group.accuracy
        ]
        ends = ", ".join(f"{label} {percent(value)} %" for label, value in known.items())
        yield Picture(
            "accuracy-bars",
            figure,
            f"All methods and variants at the end.{_whiskers(groups)}",
            f"Bars of the accuracy at the end: {ends}.",
            Table(("method", "accuracy", "ci95", "seeds"), rows),
        )


def _whiskers(groups: Sequence[RunGroup]) -> str:
    if all(group.accuracy is None or group.accuracy.half is None for group in groups):
        return ""
    judged = (
        "as seeds are the same for all, who is ahead is judged seed by seed, and may be sure where whiskers overlap"
        if paired(groups)
        else "a winner is named only where they do not overlap"
    )
    return f" Whiskers: 95 % confidence of each mean; {judged}."


def grid_of(groups: Sequence[RunGroup]) -> Grid | None:
    """Accuracies by the two settings in which the runs of one method differ; None where they are not two."""
    facts = [{**group.runs[0].facts, **group.runs[0].description["method"]} for group in groups]
    keys = differing(facts)
    if len(keys) != 2:
        return None
    down, across = sorted(keys, key=lambda key: len({json.dumps(fact[key]) for fact in facts}))
    columns, rows = (_ordered([fact[key] for fact in facts]) for key in (across, down))
    if min(len(columns), len(rows)) < 2:
        return None
    cells = {(json.dumps(f[down]), json.dumps(f[across])): g.accuracy for f, g in zip(facts, groups, strict=True)}
    table = [[cells.get((json.dumps(row), json.dumps(column))) for column in columns] for row in rows]
    return Grid(across, down, columns, rows, table)


def _ordered(values: Sequence[Any]) -> list[Any]:
    """Each value once; numbers in their order."""
    once = [json.loads(text) for text in dict.fromkeys(json.dumps(value) for value in values)]
    return sorted(once) if all(isinstance(value, int | float) for value in once) else once


def _grids(groups: Sequence[RunGroup]) -> Iterator[Picture]:
    """A map for each method that was run with several values of two settings."""
    for number, name in enumerate(dict.fromkeys(group.name for group in groups)):
        same = [group for group in groups if group.name == name and group.accuracy]
        if not (grid := grid_of(same) if len(same) > 2 else None):
            continue
        rows = [
            (row, column, cell.mean, cell.half)
            for row, line in zip(grid.rows, grid.cells, strict=True)
            for column, cell in zip(grid.columns, line, strict=True)
            if cell
        ]
        yield Picture(
            f"settings{_suffix(number)}",
            heat_picture(f"{name}: accuracy % by {grid.across} and {grid.down}", grid),
            f"What two settings of {name} do: the lighter, the better; blank where nothing was run.",
            f"Heat map of {len(rows)} accuracies of {name} by {grid.across} and {grid.down}.",
            Table((grid.down, grid.across, "accuracy", "ci95"), rows),
        )


def _traffic(groups: Sequence[RunGroup]) -> Iterator[Picture]:
    traffic = {group.label: group.traffic for group in groups}
    if figure := traffic_picture(traffic):
        rows = [(label, way, kind, size) for label, each in traffic.items() for (way, kind), size in each.items()]
        sums = ", ".join(
            f"{group.label} {amount(up)} MB up and {amount(down)} MB down"
            for group in groups
            for up, down in [group.megabytes]
        )
        yield Picture(
            "traffic",
            figure,
            "Everything that learning sent, mean over seeds, by what it was for: the names are those of the methods' "
            "own steps. What measuring sent is not counted.",
            f"Bars of bytes by direction and kind: {sums}.",
            Table(("method", "direction", "kind", "bytes"), rows),
        )


def _clients(groups: Sequence[RunGroup]) -> Iterator[Picture]:
    histories, drawn = _histories(groups), _looks(groups)
    table = Table(("method", "seed", "client", "accuracy"), client_rows(groups))
    spread = ", ".join(
        f"{label} from {100 * values[0]:.1f} to {100 * values[-1]:.1f} %"
        for label, runs in histories.items()
        if (values := by_client(runs))
    )
    if figure := client_picture(histories, drawn):
        yield Picture(
            "accuracy-by-client",
            figure,
            "How evenly accuracy is spread: the clients of all runs, each judged on its own test samples, from the "
            "worst to the best, and their mean.",
            f"Clients in the order of their accuracy: {spread}.",
            table,
        )
    if figure := density_picture(histories, drawn):
        yield Picture(
            "accuracy-density",
            figure,
            "How the accuracies of clients are spread: narrow and far to the right is fair and good.",
            f"Density of the accuracies of clients: {spread}.",
            table,
        )


def client_rows(groups: Sequence[RunGroup]) -> list[tuple[str, int, int, float]]:
    """Method, seed, client and its last accuracy."""
    return [
        (group.label, run.seed, int(client), accuracy)
        for group in groups
        for run in group.runs
        for client, accuracy in run.history[-1].get("clients", {}).items()
    ]


def ring_of(run: Run) -> Ring | None:
    """The ring of a run, if its method has one."""
    told = run.history[-1].get("ring")
    if not told:
        return None
    hops: Counter[tuple[int, int]] = Counter()
    for (one, other, _), count in run.hops.items():
        hops[one, other] += count
    kinds = {kind for _, _, kind in run.hops}
    missed = Counter(event["client"] for event in run.missing if event.get("handler") in kinds and "client" in event)
    weights = {int(client): each["weight"] for client, each in told.items()}
    return Ring(hops, missed, weights, {int(client): each["taken"] for client, each in told.items()})


def _ring(group: RunGroup, suffix: str) -> Iterator[Picture]:
    run = group.runs[0]
    ring = ring_of(run)
    if ring is None or not 1 < len(ring.members) <= MAX_RING:
        return
    rows = []
    for client in ring.members:
        to = "; ".join(f"{other} × {count}" for (one, other), count in ring.hops.items() if one == client)
        rows.append((client, ring.weights.get(client), ring.taken.get(client), ring.passed_over.get(client, 0), to))
    yield Picture(
        f"ring{suffix}",
        ring_picture(ring),
        f"{group.label} with seed {run.seed}, all rounds: who handed on to whom, the thicker the oftener, and how "
        "strongly each followed the common model in the end (λ); −n: it was passed over n times.",
        f"Ring of {len(ring.members)} clients with {sum(ring.hops.values())} hops; "
        f"{sum(ring.passed_over.values())} times one was passed over.",
        Table(("client", "lambda", "taken over", "passed over", "gave to"), rows),
    )


# --- from data and checkpoints --------------------------------------------------------------------------------


def _data_and_made(groups: Sequence[RunGroup]) -> tuple[list[Picture], list[Picture], list[str]]:
    """Pictures of the data and of what methods made, and why some are left out."""
    shown: list[Picture] = []
    made: list[Picture] = []
    notes: list[str] = []
    divisions: dict[str, Run] = {}
    for group in groups:
        divisions.setdefault(_division(group), group.runs[0])
    known: dict[str, Data] = {}
    for number, (division, run) in enumerate(divisions.items()):
        if "data" in run.description["own"]:
            continue
        try:
            known[division] = data = _data(run)
            shown += _data_pictures(run, data, _suffix(number))
        except FewerError as error:
            notes.append(f"The data is not shown: {error}.")
    for number, group in enumerate(groups):
        if found := known.get(_division(group)):
            try:
                made += _made_pictures(group, found, _suffix(number))
            except Exception as error:  # whatever a user's own method does, its report is written
                reason = str(error) if isinstance(error, FewerError) else f"{type(error).__name__}: {error}"
                path = group.runs[0].path
                notes.append(f"What {group.label} made is not shown: {reason}.".replace(str(path), path.name))
    return shown, made, notes


def _division(group: RunGroup) -> str:
    return json.dumps(group.runs[0].division)


def _data(run: Run) -> Data:
    """The data of a run, if it is there and as it was."""
    from fewer.runs.experiment import load_data, parse_settings

    data = load_data(parse_settings(run.settings))
    if data.fingerprint() != run.description["data"]["fingerprint"]:
        raise RunError(f"{data.name} is no longer what {run.path.name} was run on")
    return data


def _data_pictures(run: Run, data: Data, suffix: str) -> Iterator[Picture]:
    """The division of the data and some of it."""
    counts = class_counts(data)
    names = class_names(data, range(data.classes))
    held = (counts > 0).sum(1).mean()
    rows = [(p, names[c], int(counts[p, c])) for p, c in zip(*counts.nonzero(), strict=True)]
    yield Picture(
        f"partition{suffix}",
        partition_picture(data),
        f"Who holds what with seed {run.data_seed}: the area of a bubble is the number of training samples. A client "
        f"holds {held:.1f} of the {data.classes} classes on average: the fewer, the harder it is to learn together.",
        f"Bubbles of training samples by client and class: {run.data}.",
        Table(("client", "class", "samples"), rows),
    )
    if sheet := sheet_picture(data):
        yield Picture(
            f"examples{suffix}",
            sheet,
            "Some test samples of each class.",
            f"Examples of {data.name} by class.",
            Table(("class", "sample", "values"), sheet_rows(data)),
        )


def _made_pictures(group: RunGroup, data: Data, suffix: str) -> Iterator[Picture]:
    """Images that the method made in the first run, and how it sees samples, as far as its files are there."""
    from fewer.methods import Method
    from fewer.methods.frl import FewRounds
    from fewer.runs.result import open_result

    run = group.runs[0]
    kind = run.kind
    if kind is None or (kind.image_grids is Method.image_grids and not issubclass(kind, FewRounds)):
        return
    if in_file(str(run.settings["model"])):
        raise RunError("its net is in a file, which is not run for a report")
    result = open_result(run.path, data=data)
    yield from _images(group, data, result, suffix)
    yield from _embedding(group, result, suffix)


def _images(group: RunGroup, data: Data, result: Result, suffix: str) -> Iterator[Picture]:
    beyond = "What lies beyond the range of pixels is cut off."
    if data.test.x.is_floating_point():
        beyond = "The lowest value of all is black, the highest white."
    names = class_names(data, range(data.classes))
    for sheet in result.method.image_grids(result.state):
        rows = {
            name: {label: images.cpu().numpy() for label, images in row.items()} for name, row in sheet.rows.items()
        }
        if figure := made_picture(data, sheet.title, rows, sheet.each):
            values = [
                (name, names[label], number, " ".join(f"{value:.4g}" for value in image.flatten()))
                for name, row in rows.items()
                for label, images in row.items()
                for number, image in enumerate(images[: sheet.each])
            ]
            yield Picture(
                f"{sheet.name}{suffix}",
                figure,
                f"{group.label} with seed {group.runs[0].seed}: {sheet.caption}; blank where there is none. {beyond}",
                f"Synthetic images: {sheet.caption}.",
                Table(("row", "class", "image", "values"), values),
            )


def _embedding(group: RunGroup, result: Result, suffix: str) -> Iterator[Picture]:
    from fewer.experiments.studies import MEMBER, cloud_of

    if (cloud := cloud_of(result)) is None:
        return
    points = [
        (x, y, label, "own sample" if own else "sample")
        for (x, y), label, own in zip(cloud.points.tolist(), cloud.labels.tolist(), cloud.own.tolist(), strict=True)
    ]
    stars = [
        (x, y, label, "prototype")
        for (x, y), label in zip(cloud.stars.tolist(), cloud.star_labels.tolist(), strict=True)
    ]
    yield Picture(
        f"embedding{suffix}",
        cloud_picture("Embedding (t-SNE)", {"": cloud}),
        f"{group.label} with seed {group.runs[0].seed}: {MEMBER}",
        f"Scatter of {len(points)} samples of {len(set(cloud.labels.tolist()))} classes and {len(stars)} prototypes.",
        Table(("x", "y", "class", "what"), [*points, *stars]),
    )
