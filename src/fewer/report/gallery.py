"""Draws the pictures of a report: all that the runs have data for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

from fewer.data import Data
from fewer.data.remote import RemoteData
from fewer.errors import FewerError, RunError
from fewer.experiments.studies import EMBEDDING_CAPTION, embed_samples
from fewer.methods.capabilities import HasEmbeddings, HasImageGrids, ImageGrid
from fewer.plugins import needs_import
from fewer.report import charts, pictures
from fewer.report.charts import TITLES, By, Grid, Ring
from fewer.report.classes import draw_classes
from fewer.report.groups import RunGroup, differing_settings, find_method
from fewer.report.html import Picture, Table
from fewer.report.metrics import Histories, client_values, metric_curve
from fewer.report.style import LineStyle, assign_label_styles, assign_styles
from fewer.report.verdict import is_paired
from fewer.runs.reader import RunReader
from fewer.runs.result import Result, load_run_data, open_run
from fewer.statistics import Interval, format_number

MAX_RING = 100
"""Maximum number of clients drawn as a ring."""
Gallery = dict[str, list[Picture]]
"""Pictures by section of the report."""


def build_gallery(groups: Sequence[RunGroup]) -> tuple[Gallery, list[str]]:
    """Draws all pictures that there is data for; also returns notes on pictures that are left out."""
    styles = _assign_styles(groups)
    gallery: Gallery = {
        groups[0].metric.title: [*_draw_curves(groups, styles), *_draw_bars(groups, styles)],
        "Two settings": list(_draw_heatmaps(groups)),
        "Traffic": list(_draw_traffic(groups)),
        "Classes": list(draw_classes(groups, styles)),
        "Clients": list(_draw_clients(groups, styles)),
        "Rings": [picture for index, group in enumerate(groups) for picture in _draw_ring(group, _suffix(index))],
    }
    data, synthetic, notes = _draw_data_and_models(groups)
    gallery |= {"Synthetic data and embeddings": synthetic, "Data": data}
    return {section: drawn for section, drawn in gallery.items() if drawn}, notes


def _suffix(index: int) -> str:
    return f"-{index + 1}" if index else ""


# --- from metrics ---------------------------------------------------------------------------------------------


def _assign_styles(groups: Sequence[RunGroup]) -> dict[str, LineStyle]:
    """The line style of each group; variants of a method share its color, unless there is only one method."""
    methods = {group.label: group.method_name for group in groups}
    return assign_styles(methods) if len(set(methods.values())) == 1 else assign_label_styles(methods)


def _histories(groups: Sequence[RunGroup]) -> Histories:
    return {group.label: [run.history for run in group.runs] for group in groups}


def _draw_curves(groups: Sequence[RunGroup], styles: dict[str, LineStyle]) -> Iterator[Picture]:
    histories = _histories(groups)
    several_seeds = any(len(group.runs) > 1 for group in groups)
    metric = groups[0].metric
    last = ", ".join(f"{group.label} {metric.format_interval(group.value)}{metric.unit}" for group in groups)
    heads = ("method", "round", "megabytes", "gflop", "seconds", metric.name, "ci95")
    rows = [
        (label, point.round, point.megabytes, point.gflop, point.seconds, point.value.mean, point.value.half)
        for label, runs in histories.items()
        for point in metric_curve(runs, metric)
    ]
    band = ": mean over seeds with its 95 % confidence band." if several_seeds else "."
    captions: dict[By, str] = {
        "round": f"round{band}",
        "megabytes": "megabytes sent so far, up and down. Curves further left are cheaper.",
        "gflop": "operations that all clients spent on training so far.",
        "seconds": "wall-clock time. It depends on the machine and on what else was running.",
    }
    for by, caption in captions.items():
        if not all(row[heads.index(by)] for row in rows):  # not recorded
            continue
        title = f"{metric.title} {TITLES[by]}"
        if figure := charts.plot_curves(title, {"": histories}, by, styles, metric, _baselines(groups)):
            alt = f"Line chart: {metric.name} {TITLES[by]}. Last: {last}."
            name = f"{metric.name}-by-{by.removesuffix('s')}"
            yield Picture(name, figure, f"{metric.title} by {caption}", alt, Table(heads, rows))


def _baselines(groups: Sequence[RunGroup]) -> dict[str, float]:
    """The majority baselines by label: one if all methods share it, else with the methods that it is for."""
    labels: dict[float, list[str]] = {}
    for group in groups:
        if (baseline := group.mean_if_known("majority_baseline")) is not None and group.metric.name == "accuracy":
            labels.setdefault(round(baseline, 6), []).append(group.label)
    if len(labels) == 1:
        return dict.fromkeys(("majority baseline",), *labels)
    return {f"majority baseline of {_list_names(names)}": baseline for baseline, names in labels.items()}


def _list_names(names: Sequence[str]) -> str:
    """At most three names; of more, the first and the number of the others."""
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} others"


def _draw_bars(groups: Sequence[RunGroup], styles: dict[str, LineStyle]) -> Iterator[Picture]:
    metric = groups[0].metric
    groups = [group for group in groups if group.metric == metric]
    results = {group.label: group.value for group in groups if group.value}
    if len(results) > 1:
        figure = charts.plot_bars(results, styles, metric)
        rows = [(group.label, group.value.mean, group.value.half, len(group.runs)) for group in groups if group.value]
        values = ", ".join(f"{label} {metric.format_interval(value)}{metric.unit}" for label, value in results.items())
        yield Picture(
            f"{metric.name}-bars",
            figure,
            f"Final {metric.name} of all methods and variants.{_explain_whiskers(groups)}",
            f"Bar chart of final {metric.name}: {values}.",
            Table(("method", metric.name, "ci95", "seeds"), rows),
        )


def _explain_whiskers(groups: Sequence[RunGroup]) -> str:
    if all(group.value is None or group.value.half is None for group in groups):
        return ""
    rule = (
        "All methods have the same seeds and are compared seed by seed, so a lead may be significant although "
        "whiskers overlap."
        if is_paired(groups)
        else "A winner is named only if they do not overlap."
    )
    return f" Whiskers: 95 % confidence interval of each mean. {rule}"


def build_grid(groups: Sequence[RunGroup]) -> Grid | None:
    """Results by the two settings in which the runs of one method differ; None if there are not exactly two."""
    settings = [{**group.runs[0].task_settings, **group.runs[0].metadata["method"]} for group in groups]
    keys = differing_settings(settings)
    if len(keys) != 2:
        return None
    y_name, x_name = sorted(keys, key=lambda key: len({json.dumps(values[key]) for values in settings}))
    columns, rows = (_unique_values([values[key] for values in settings]) for key in (x_name, y_name))
    if min(len(columns), len(rows)) < 2:
        return None
    cells = {
        (json.dumps(values[y_name]), json.dumps(values[x_name])): group.value
        for values, group in zip(settings, groups, strict=True)
    }
    table = [[cells.get((json.dumps(row), json.dumps(column))) for column in columns] for row in rows]
    return Grid(x_name, y_name, columns, rows, table)


def _unique_values(values: Sequence[Any]) -> list[Any]:
    """Each value once; numbers in ascending order."""
    unique = [json.loads(text) for text in dict.fromkeys(json.dumps(value) for value in values)]
    return sorted(unique) if all(isinstance(value, int | float) for value in unique) else unique


def _draw_heatmaps(groups: Sequence[RunGroup]) -> Iterator[Picture]:
    """A heat map for each method that was run with several values of two settings."""
    for index, name in enumerate(dict.fromkeys(group.method_name for group in groups)):
        variants = [group for group in groups if group.method_name == name and group.value]
        if not (grid := build_grid(variants) if len(variants) > 2 else None):
            continue
        rows = [
            (row, column, cell.mean, cell.half)
            for row, cells in zip(grid.rows, grid.cells, strict=True)
            for column, cell in zip(grid.columns, cells, strict=True)
            if cell
        ]
        metric = variants[0].metric
        yield Picture(
            f"settings{_suffix(index)}",
            charts.plot_heatmap(f"{name}: {metric.label} by {grid.x_name} and {grid.y_name}", grid, metric),
            f"{metric.title} of {name} by {grid.x_name} and {grid.y_name}. "
            "Lighter is better; blank cells were not run.",
            f"Heat map of {len(rows)} values of {name} by {grid.x_name} and {grid.y_name}.",
            Table((grid.y_name, grid.x_name, metric.name, "ci95"), rows),
        )


def _draw_traffic(groups: Sequence[RunGroup]) -> Iterator[Picture]:
    traffic = {group.label: group.traffic for group in groups}
    if figure := charts.plot_traffic(traffic):
        rows = [(label, *key, size) for label, sizes in traffic.items() for key, size in sizes.items()]
        totals = ", ".join(
            "{} {} MB up and {} MB down".format(group.label, *map(format_number, group.megabytes)) for group in groups
        )
        yield Picture(
            "traffic",
            figure,
            "Training traffic by kind of message, mean over seeds. Kinds are named after the methods' handlers. "
            "Evaluation traffic is not included.",
            f"Bar chart of bytes by direction and kind: {totals}.",
            Table(("method", "direction", "kind", "bytes"), rows),
        )


def _draw_clients(groups: Sequence[RunGroup], styles: dict[str, LineStyle]) -> Iterator[Picture]:
    histories = _histories(groups)
    metric = groups[0].metric
    table = Table(("method", "seed", "client", metric.name), client_rows(groups))
    ranges = ", ".join(
        f"{label} from {metric.format_interval(Interval(values[0], None), 1)} "
        f"to {metric.format_interval(Interval(values[-1], None), 1)}{metric.unit}"
        for label, runs in histories.items()
        if (values := client_values(runs, metric))
    )
    if figure := charts.plot_clients(histories, styles, metric):
        yield Picture(
            f"{metric.name}-by-client",
            figure,
            f"{metric.title} of each client on its own test samples, from worst to best, over all runs, and the mean.",
            f"Clients in order of {metric.name}: {ranges}.",
            table,
        )
    if figure := charts.plot_density(histories, styles, metric):
        side = "right" if metric.higher_is_better else "left"
        yield Picture(
            f"{metric.name}-density",
            figure,
            f"Distribution of {metric.name} over clients. A narrow peak on the {side} means that all clients do well.",
            f"Density of {metric.name} over clients: {ranges}.",
            table,
        )


def client_rows(groups: Sequence[RunGroup]) -> list[tuple[str, int, int, float]]:
    """Returns method, seed, client and last primary metric, one row per client and run."""
    return [
        (group.label, run.seed, int(client), accuracy)
        for group in groups
        for run in group.runs
        for client, accuracy in run.history[-1].get("clients", {}).items()
    ]


def build_ring(run: RunReader) -> Ring | None:
    """The ring of a run; None if its method has none."""
    statistics = run.history[-1].get("ring")
    if not statistics:
        return None
    hops: Counter[tuple[int, int]] = Counter()
    for (source, target, _), count in run.hops.items():
        hops[source, target] += count
    kinds = {kind for _, _, kind in run.hops}
    skipped: Counter[int] = Counter()
    for absence, count in run.absences.items():
        if absence.handler in kinds and absence.client is not None:
            skipped[absence.client] += count
    weights, adopted = (
        {int(client): values[name] for client, values in statistics.items()} for name in ("distill_weight", "adopted")
    )
    return Ring(hops, skipped, weights, adopted)


def _draw_ring(group: RunGroup, suffix: str) -> Iterator[Picture]:
    run = group.runs[0]
    ring = build_ring(run)
    if ring is None or not 1 < len(ring.members) <= MAX_RING:
        return
    rows = []
    for client in ring.members:
        targets = "; ".join(f"{target} × {count}" for (source, target), count in ring.hops.items() if source == client)
        rows.append((client, ring.weights.get(client), ring.adopted.get(client), ring.skipped.get(client, 0), targets))
    yield Picture(
        f"ring{suffix}",
        charts.plot_ring(ring),
        f"{group.label}, seed {run.seed}, all rounds. Arrows show who passed the model to whom; thicker means more "
        "often. λ is each client's final distillation weight. −n: the client was skipped n times.",
        f"Ring of {len(ring.members)} clients with {sum(ring.hops.values())} hops; clients were skipped "
        f"{sum(ring.skipped.values())} times.",
        Table(("client", "lambda", "models adopted", "times skipped", "sent to"), rows),
    )


# --- from data and checkpoints --------------------------------------------------------------------------------


def _draw_data_and_models(groups: Sequence[RunGroup]) -> tuple[list[Picture], list[Picture], list[str]]:
    """Pictures of the data, pictures from the models, and notes on pictures that are left out."""
    data_pictures: list[Picture] = []
    model_pictures: list[Picture] = []
    notes: list[str] = []
    first_runs: dict[str, RunReader] = {}
    for group in groups:
        first_runs.setdefault(_data_key(group), group.runs[0])
    loaded: dict[str, Data] = {}
    for index, (key, run) in enumerate(first_runs.items()):
        if "data" in run.metadata["objects"]:
            continue
        try:
            loaded[key] = data = load_run_data(run)
            data_pictures += _draw_data(run, data, _suffix(index))
            if isinstance(data, RemoteData):
                notes.append("The clients' data is on their own machines and is not shown.")
        except FewerError as error:
            notes.append(f"The data is not shown: {error}.".replace(str(run.path), run.path.name))
    for index, group in enumerate(groups):
        if group_data := loaded.get(_data_key(group)):
            try:
                model_pictures += _draw_models(group, group_data, _suffix(index))
            except Exception as error:  # a user's method may fail in any way; the report is still written
                reason = str(error) if isinstance(error, FewerError) else f"{type(error).__name__}: {error}"
                reason = reason.replace(str(group.runs[0].path), group.runs[0].path.name)
                notes.append(f"Pictures from the model of {group.label} are not shown: {reason}.")
    return data_pictures, model_pictures, notes


def _data_key(group: RunGroup) -> str:
    return json.dumps(group.runs[0].data_settings)


def _draw_data(run: RunReader, data: Data, suffix: str) -> Iterator[Picture]:
    """The partition and examples of the data, if it has classes."""
    if not data.has_classes:
        return
    if not isinstance(data, RemoteData):
        yield _draw_partition(run, data, suffix)
    if figure := pictures.plot_examples(data):
        yield Picture(
            f"examples{suffix}",
            figure,
            "Test samples of each class.",
            f"Examples of {data.name} by class.",
            Table(("class", "sample", "values"), pictures.example_rows(data)),
        )


def _draw_partition(run: RunReader, data: Data, suffix: str) -> Picture:
    counts = pictures.class_counts(data)
    names = pictures.class_names(data, range(data.classes))
    classes_per_client = (counts > 0).sum(1).mean()
    rows = [(client, names[label], int(counts[client, label])) for client, label in zip(*counts.nonzero(), strict=True)]
    return Picture(
        f"partition{suffix}",
        pictures.plot_partition(data),
        f"Label distribution by client (seed {run.data_seed}). The area of a bubble is the number of training samples. "
        f"On average a client holds {classes_per_client:.1f} of {data.classes} classes.",
        f"Bubble chart of training samples by client and class: {run.data_summary}.",
        Table(("client", "class", "samples"), rows),
    )


def _draw_models(group: RunGroup, data: Data, suffix: str) -> Iterator[Picture]:
    """Synthetic images and embeddings of the first run, if its method has them."""
    run = group.runs[0]
    method = find_method(run)
    if method is None or not issubclass(method, HasImageGrids | HasEmbeddings):
        return
    if needs_import(str(run.settings["model"])):
        raise RunError("its model is in a file, and reports do not execute user files")
    result = open_run(run.path, data=data)
    if isinstance(result.method, HasImageGrids):
        yield from _draw_synthetic_images(group, data, result.method.image_grids(result.state), suffix)
    yield from _draw_embedding(group, result, suffix)


def _draw_synthetic_images(
    group: RunGroup, data: Data, image_grids: Sequence[ImageGrid], suffix: str
) -> Iterator[Picture]:
    scale = "Values outside the pixel range are clipped."
    if data.test.x.is_floating_point():
        scale = "The lowest value is black, the highest white."
    names = pictures.class_names(data, range(data.classes))
    for grid in image_grids:
        rows = {name: {label: images.cpu().numpy() for label, images in row.items()} for name, row in grid.rows.items()}
        if figure := pictures.plot_image_grid(data, grid.title, rows, grid.max_per_class):
            values = [
                (name, names[label], number, " ".join(f"{value:.4g}" for value in image.flatten()))
                for name, row in rows.items()
                for label, images in row.items()
                for number, image in enumerate(images[: grid.max_per_class])
            ]
            yield Picture(
                f"{grid.name}{suffix}",
                figure,
                f"{group.label}, seed {group.runs[0].seed}: {grid.caption}. Blank cells have no image. {scale}",
                f"Synthetic images: {grid.caption}.",
                Table(("row", "class", "image", "values"), values),
            )


def _draw_embedding(group: RunGroup, result: Result, suffix: str) -> Iterator[Picture]:
    if (cloud := embed_samples(result)) is None:
        return
    kinds = ["own sample" if own else "sample" for own in cloud.own.tolist()]
    points = zip(cloud.points.tolist(), cloud.labels.tolist(), kinds, strict=True)
    prototypes = zip(cloud.prototypes.tolist(), cloud.prototype_labels.tolist(), repeat("prototype"), strict=False)
    classes = len(set(cloud.labels.tolist()))
    yield Picture(
        f"embedding{suffix}",
        pictures.plot_embeddings("Embedding (t-SNE)", {"": cloud}),
        f"{group.label}, seed {group.runs[0].seed}: {EMBEDDING_CAPTION}",
        f"Scatter plot of {len(kinds)} samples of {classes} classes and {len(cloud.prototypes)} prototypes.",
        Table(("x", "y", "class", "kind"), [(*point, label, kind) for point, label, kind in (*points, *prototypes)]),
    )
