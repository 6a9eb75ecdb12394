"""Studies: what a recipe measures in its runs, in addition to accuracy."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fewer.audit import AttackImages, audit
from fewer.audit.attacks import COPY_RATIO, measure_copies
from fewer.audit.canaries import attack_canaries
from fewer.audit.distance import earth_mover, value_range
from fewer.audit.membership import DELTA, membership
from fewer.audit.summary import HEADS, LIMITS, MEANING, summary_rows
from fewer.data import ArrayData
from fewer.errors import SettingError, unknown_name, unknown_option
from fewer.learning.evaluate import EVAL_BATCH_SIZE, Counts, evaluate_net
from fewer.learning.prototypes import prototype_logits
from fewer.methods.capabilities import Embedding, HasEmbeddings, HasSyntheticData
from fewer.methods.registry import names_with
from fewer.runs.experiment import load_data
from fewer.runs.reader import RunReader
from fewer.runs.result import Result, open_run
from fewer.runtime.streams import one_thread, stream
from fewer.statistics import format_interval, interval

EMBEDDING_CAPTION = (
    "t-SNE of a member's embedding after its local training in the last round. Diamonds: its own samples; circles: "
    "samples of the other members; stars: global prototypes; colors: classes."
)


CANARY_MEANING = (
    "A canary is a training sample with a wrong label; half of the runs train on it, drawn at random. Each run is "
    "attacked with the others as shadow models (LiRA). Found: the members that score above all but 1 %, or 0.1 %, of "
    "the nonmembers. ε is at least: what the attack proves, with 95 % confidence if canaries are independent. 0 proves "
    "nothing. A bound above the claimed ε would break the guarantee."
)


class CellRuns(NamedTuple):
    """One cell of a table and its run directories, one per seed."""

    row: str
    column: str
    paths: Sequence[Path]


class Cloud(NamedTuple):
    """Features of samples and prototypes, projected to two dimensions."""

    points: NDArray[np.float64]
    labels: NDArray[np.int64]
    own: NDArray[np.bool_]
    """True for the client's own samples."""
    prototypes: NDArray[np.float64]
    prototype_labels: NDArray[np.int64]


class CloudPlot(NamedTuple):
    """Clouds that are drawn side by side."""

    name: str
    title: str
    caption: str
    clouds: Mapping[str, Cloud]


@dataclass(frozen=True)
class Study:
    """The outcome of a study: lines for the page, all metrics, and images to draw."""

    lines: list[str]
    metrics: dict[str, Any]
    images: list[AttackImages] = field(default_factory=list)
    cloud_plots: list[CloudPlot] = field(default_factory=list)

    def as_json(self, stem: str) -> dict[str, Any]:
        """What a result file holds of the study."""
        return {"study": self.metrics, "study_page": self.render_markdown(stem)}

    def render_markdown(self, stem: str) -> str:
        """Renders the lines, then the pictures, which are stored next to the page as STEM-NAME.png."""
        lines = list(self.lines)
        pictures = [*((image.name, image.title, image.caption) for image in self.images)]
        pictures += [plot[:3] for plot in self.cloud_plots]
        for name, title, caption in pictures:
            lines += ["", f"![{title}]({stem}-{name}.png)", "", f"*{caption}*"]
        return "\n".join([*lines, ""])


def parse_study(options: Mapping[str, Any]) -> Callable[[Sequence[CellRuns]], Study]:
    """Returns the study that a recipe names, with its options; raises SettingError for an unknown name or option."""
    arguments = dict(options)
    name = str(arguments.pop("name", ""))
    if name not in STUDIES:
        raise unknown_name("study", name, STUDIES)
    known = list(inspect.signature(STUDIES[name]).parameters)[1:]
    for option, value in arguments.items():
        if option not in known:
            raise unknown_option(f"study {name}", option, known)
        if not isinstance(value, int | list):
            raise SettingError(f"study {name}: {option} must be an integer or a list of numbers, got {value!r}")
    return partial(STUDIES[name], **arguments)


def join_studies(parts: Sequence[Mapping[str, Any]]) -> Study | None:
    """Joins the studies of several result files into one table. A line of a later file replaces that of an earlier one.

    None if no file has a study.
    """
    parts = [part for part in parts if "study" in part]
    if not parts:
        return None
    pages = [part["study_page"].strip("\n").split("\n") for part in parts]
    table = {line.split(" | ")[0]: line for page in pages for line in page if line.startswith("|")}
    start = next(index for index, line in enumerate(pages[0]) if line.startswith("|"))
    after = [line for line in pages[0][start:] if not line.startswith("|")]
    metrics = {key: value for part in parts for key, value in part["study"].items()}
    return Study(["", *pages[0][:start], *table.values(), *after], metrics)


def keep_cells(part: Mapping[str, Any], labels: Collection[str]) -> dict[str, Any]:
    """A result file's study of single cells, with the metrics and lines of these cells only ("row, column")."""
    lines = part["study_page"].split("\n")
    kept = [line for line in lines if line[:2] != "| " or line[:3] == "| |" or line[2:].split(" | ")[0] in labels]
    metrics = {label: value for label, value in part["study"].items() if label in labels}
    return {"study": metrics, "study_page": "\n".join(kept)}


def leakage(cells: Sequence[CellRuns], clients: int = 10, steps: int = 500, starts: int = 2) -> Study:
    """Audits the privacy of the first run of each cell."""
    lines, metrics, images = ["", "## Privacy audit", ""], {}, []
    for row, column, paths in cells:
        findings = audit(paths[0], clients=clients, steps=steps, starts=starts)
        metrics[f"{row}, {column}"] = findings.as_json()
        lines += [f"| {row}, {column} | {HEADS[1]} | {HEADS[2]} |", "|---|---|---|"]
        lines += ["| " + " | ".join(line) + " |" for line in summary_rows(findings)]
        lines += ["", *(f"{note}\n" for note in findings.notes)]
        label = row if len({cell.column for cell in cells}) == 1 else f"{row} {column}"
        prefix = "-".join("".join(c if c.isalnum() and c.isascii() else " " for c in label.lower()).split())
        images += [
            replace(image, name=f"{prefix}-{image.name}", title=f"{row}: {image.title[0].lower()}{image.title[1:]}")
            for image in findings.images
        ]
    return Study([*lines, MEANING, "", LIMITS], metrics, images)


def copies(cells: Sequence[CellRuns], clients: int = 10) -> Study:
    """Compares the synthetic images of each run with the real images of their clients, if clients send any."""
    lines, metrics = ["", "## Synthetic images and real ones", ""], {}
    lines += ["| | near-copies | images | smallest ratio | median ratio |", "|---|---|---|---|---|"]
    for row, column, paths in cells:
        found = [ratios for path in paths if "near_copies" in (ratios := measure_copies(path, clients))]
        if not found:
            continue
        metrics[f"{row}, {column}"] = found
        shares = format_interval(interval([ratios["near_copies"] for ratios in found]), 2)
        smallest, median = min(r["min"] for r in found), statistics.median(r["median"] for r in found)
        images = sum(ratios["images"] for ratios in found)
        lines.append(f"| {row}, {column} | {shares} % | {images:,} | {smallest:.2f} | {median:.2f} |")
    ratio = "distance to the nearest real image of the client and class, divided by the typical distance between those"
    lines += ["", f"Ratio: {ratio}. A near-copy is below {COPY_RATIO:g}. Rows that are not listed send no images."]
    return Study(lines, metrics)


def canaries(cells: Sequence[CellRuns], clients: int = 20, shadows: int = 16) -> Study:
    """Trains the first run of each cell again, `shadows` times, with mislabeled canaries, and attacks these runs."""
    lines, metrics = ["", "## Mislabeled canaries", ""], {}
    lines.append("| | AUC | found at 1 % FPR | found at 0.1 % FPR | ε is at least | ε claimed |")
    lines.append("|---|---|---|---|---|---|")
    for row, column, paths in cells:
        result = open_run(paths[0])
        delta = result.metrics.get("delta", DELTA)
        scores = attack_canaries(result, RunReader(paths[0]).participants[:clients], shadows)
        attack, claimed = membership(*scores, delta), result.metrics.get("epsilon")
        metrics[f"{row}, {column}"] = {**asdict(attack), "claimed": claimed, "delta": delta}
        found = [attack.true_positive_rate, attack.strict_true_positive_rate]
        rates = ["–" if rate is None else f"{100 * rate:.1f} %" for rate in found]
        auc = f"{attack.auc:.3f} ({attack.low:.3f} … {attack.high:.3f})"
        promise = "none" if claimed is None else f"{claimed:.2f}"
        label = row if len({cell.column for cell in cells}) == 1 else f"{row}, {column}"
        lines.append(f"| {label} | {auc} | {' | '.join(rates)} | {attack.epsilon_bound:.2f} | {promise} |")
    counts = f"{attack.members:,} members and {attack.nonmembers:,} nonmembers"
    return Study([*lines, "", f"{shadows} runs of each row have {counts} in all. {CANARY_MEANING}"], metrics)


def emd(cells: Sequence[CellRuns], paper: Sequence[float] = ()) -> Study:
    """Measures the earth mover's distance between the synthetic data of each column and of the row's first column.

    It is the mean of the sliced distance over seeds, over clients that sent data in both runs, and over classes. Pixel
    values are scaled so that black is 0 and white is 1.
    """
    heads = list(dict.fromkeys(cell.column for cell in cells))
    table, metrics = {}, {}
    for row in dict.fromkeys(cell.row for cell in cells):
        own = [cell for cell in cells if cell.row == row]
        for _, column, paths in own:
            pairs = zip(paths, own[0].paths, strict=True)
            metrics[f"{row}, {column}"] = [_measure_distance(open_run(path), open_run(first)) for path, first in pairs]
        table[row] = [format_interval(interval(metrics[f"{row}, {head}"]), 3, 1) for head in heads]
    if paper:
        table["the paper's values"] = [f"{value:.3f}" for value in paper] + ["–"] * (len(heads) - len(paper))
    lines = ["", f"## Earth mover's distance to {heads[0]}", "", "| | " + " | ".join(heads) + " |"]
    lines += ["|---|" + "---|" * len(heads), *(f"| {row} | {' | '.join(values)} |" for row, values in table.items())]
    return Study(lines, metrics)


def _measure_distance(result: Result, base: Result) -> float:
    low, high = value_range(result.data.test)
    if not isinstance(result.method, HasSyntheticData) or not isinstance(base.method, HasSyntheticData):
        raise SettingError(
            f"study emd: clients send no synthetic data (allowed: {', '.join(names_with(HasSyntheticData))})"
        )
    synthetic, base_synthetic = result.method.synthetic_data(result.state), base.method.synthetic_data(base.state)
    distances = []
    for client in sorted(synthetic.keys() & base_synthetic.keys()):
        (images, labels), (base_images, base_labels) = synthetic[client], base_synthetic[client]
        for label in sorted(set(labels.tolist()) & set(base_labels.tolist())):
            pairs = ((images, labels), (base_images, base_labels))
            a, b = ((x[y == label] - low) / (high - low) for x, y in pairs)
            distances.append(earth_mover(a.cpu(), b.cpu(), stream("emd", client, label)))
    if not distances:
        raise SettingError("study emd: no client sent synthetic data of the same class in both runs")
    return statistics.fmean(distances)


def unused(cells: Sequence[CellRuns]) -> Study:
    """Measures accuracy on the training samples that no client holds (`fraction`). No setting was chosen on these."""
    lines, metrics = ["", "## Accuracy on unused training samples", "", "| | accuracy, % | samples |"], {}
    lines.append("|---|---|---|")
    for row, column, paths in cells:
        scores = [_score_unused(open_run(path)) for path in paths]
        accuracies = [100 * counts.correct / counts.total for counts in scores]
        metrics[f"{row}, {column}"] = accuracies
        accuracy = format_interval(interval(accuracies), 2, 1)
        lines.append(f"| {row}, {column} | {accuracy} | {scores[0].total:,} |")
    return Study(lines, metrics)


def _score_unused(result: Result) -> Counts:
    if not isinstance(result.data, ArrayData) or result.settings.fraction == 1:
        raise SettingError("study unused: clients hold all training samples; set fraction < 1")
    data, full = result.data, load_data(result.settings.model_copy(update={"fraction": 1.0}))
    assert isinstance(full, ArrayData)
    held_rows = np.concatenate([data.train.rows, data.validation.rows])
    test_inputs = data.test.x if data.test.rows is None else data.test.x[data.test.rows]
    used = {sample.tobytes() for x in (data.source.x[held_rows], test_inputs) for sample in x.numpy()}
    rows = [row for row, sample in enumerate(full.source.x.numpy()) if sample.tobytes() not in used]
    unused_samples = replace(data.source, x=full.source.x[rows], y=full.source.y[rows], rows=None)
    return evaluate_net(
        result.model,
        (
            unused_samples.slice(start, start + EVAL_BATCH_SIZE)
            for start in range(0, len(unused_samples), EVAL_BATCH_SIZE)
        ),
    )


def embedding(cells: Sequence[CellRuns], group: int = 0, member: int = 0, max_samples: int = 400) -> Study:
    """Draws the embedding of one member of a group after its last local training, by t-SNE.

    The study also measures the fraction of the group's queries that the embedding puts nearest to the right global
    prototype: for all queries, and for queries of classes that the member does not hold.
    """
    clouds, metrics = {}, {}
    lines = ["", "## One member's embedding", "", "| | all queries | classes it does not hold |", "|---|---|---|"]
    for row, column, paths in cells:
        cloud, accuracy, accuracy_on_others = _embed_member(open_run(paths[0]), group, member, max_samples)
        clouds[row if len({cell.column for cell in cells}) == 1 else f"{row}, {column}"] = cloud
        metrics[f"{row}, {column}"] = {"all": accuracy, "others": accuracy_on_others}
        lines.append(f"| {row}, {column} | {100 * accuracy:.1f} % | {100 * accuracy_on_others:.1f} % |")
    return Study(
        lines,
        metrics,
        cloud_plots=[CloudPlot("embedding", "Embedding of one member of a group", EMBEDDING_CAPTION, clouds)],
    )


def embed_samples(result: Result, max_samples: int = 400) -> Cloud | None:
    """Embeds the samples of a run that makes prototypes; None for other runs."""
    embedding = _find_embedding(result, 0, 0) if len(result.data.test) else None
    return _project(embedding, max_samples) if embedding else None


def _embed_member(result: Result, number: int, member: int, max_samples: int) -> tuple[Cloud, float, float]:
    """Embeds a group's samples with one member's model. Also returns the accuracy, and that on other classes."""
    embedding = _find_embedding(result, number, member)
    if embedding is None:
        raise SettingError(f"study embedding: {result.method.name} has no prototypes with these options")
    nearest = embedding.prototype_labels[prototype_logits(embedding.features, embedding.prototypes).argmax(1)]
    is_correct = nearest == embedding.labels
    is_other_class = ~torch.isin(embedding.labels, torch.unique(embedding.own_labels))
    cloud = _project(embedding, max_samples)
    return cloud, float(is_correct.double().mean()), float(is_correct[is_other_class].double().mean())


def _find_embedding(result: Result, number: int, member: int) -> Embedding | None:
    """The features and prototypes of a group, if the method has any."""
    if not isinstance(result.method, HasEmbeddings):
        return None
    server = result.contexts().server(0, len(result.history))
    with one_thread():
        return result.method.embedding(server, result.state, result.data, number, member)


def _project(embedding: Embedding, max_samples: int) -> Cloud:
    """Projects features of other samples, own samples and prototypes to two dimensions, by one t-SNE."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    others, labels = embedding.features[:max_samples], embedding.labels[:max_samples]
    features = torch.cat([others, embedding.own_features, embedding.prototypes]).cpu().numpy()
    tsne = TSNE(random_state=0, perplexity=max(1, min(30, len(others) // 4)), init="pca")
    with threadpool_limits(1):  # several threads slow each other down on busy cores
        points = tsne.fit_transform(features)
    samples = len(others) + len(embedding.own_features)
    all_labels = torch.cat([labels, embedding.own_labels]).cpu().numpy()
    is_own = np.arange(samples) >= len(others)
    return Cloud(points[:samples], all_labels, is_own, points[samples:], embedding.prototype_labels.cpu().numpy())


STUDIES: dict[str, Callable[..., Study]] = {
    study.__name__: study for study in (leakage, copies, canaries, emd, unused, embedding)
}
COLUMN_STUDIES = {"emd", "embedding"}
"""Studies that need all columns of a table."""
CELL_STUDIES = {"copies", "unused"}
"""Studies that measure one cell at a time and write one line for each, so that a row can run without the others."""
