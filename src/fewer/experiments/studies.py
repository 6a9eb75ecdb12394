"""Studies: what a recipe looks at in its runs besides their accuracy."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fewer.audit import AttackImages, audit
from fewer.audit.distance import earth_mover, span_of
from fewer.audit.summary import HEADS, LIMITS, MEANING, figure_rows
from fewer.data import ArrayData
from fewer.errors import SettingError, unknown
from fewer.learning.prototypes import nearness
from fewer.learning.score import Counts, score
from fewer.methods.base import CHUNK, ContextFactory, Server
from fewer.methods.frl import FewRounds, Prepared, batch_statistics, features_of
from fewer.models import parts_of
from fewer.runs.engine import one_thread
from fewer.runs.experiment import load_data
from fewer.runs.result import Result, open_result
from fewer.runs.statistics import half_width
from fewer.runtime.streams import stream

MEMBER = (
    "t-SNE of a member's embedding after its local training in the last round. Diamonds: its own samples; circles: "
    "those of the other members; stars: global prototypes; colors: classes."
)


class Runs(NamedTuple):
    """One cell of a table, and the directories of its runs, one for each seed."""

    row: str
    column: str
    paths: Sequence[Path]


class Cloud(NamedTuple):
    """Features of samples and prototypes in the plane."""

    points: NDArray[np.float64]
    labels: NDArray[np.int64]
    own: NDArray[np.bool_]
    """Which of the samples are the client's own."""
    stars: NDArray[np.float64]
    star_labels: NDArray[np.int64]


class Map(NamedTuple):
    """Clouds to draw side by side."""

    name: str
    title: str
    caption: str
    clouds: Mapping[str, Cloud]


@dataclass(frozen=True)
class Study:
    """What a study found: lines for the page, all figures, and images to draw."""

    lines: list[str]
    figures: dict[str, Any]
    sheets: list[AttackImages] = field(default_factory=list)
    maps: list[Map] = field(default_factory=list)

    def markdown(self, stem: str) -> str:
        """The lines, then the pictures, which lie beside the page as STEM-NAME.png."""
        lines = list(self.lines)
        shown = [*((s.name, s.title, s.caption) for s in self.sheets), *(m[:3] for m in self.maps)]
        for name, title, caption in shown:
            lines += ["", f"![{title}]({stem}-{name}.png)", "", f"*{caption}*"]
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


def leakage(cells: Sequence[Runs], clients: int = 10, steps: int = 500, starts: int = 2) -> Study:
    """The privacy look at the first run of each cell."""
    lines, figures, sheets = ["", "## What leaks", ""], {}, []
    for row, column, paths in cells:
        found = audit(paths[0], clients=clients, steps=steps, starts=starts)
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

    The mean over clients that sent data in both, over classes and over seeds, of the sliced distance, in values of
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
    for client in sorted(sent.keys() & base.keys()):
        (images, labels), (others, theirs) = sent[client], base[client]
        for label in sorted(set(labels.tolist()) & set(theirs.tolist())):
            a, b = ((x[y == label] - low) / (high - low) for x, y in ((images, labels), (others, theirs)))
            found.append(earth_mover(a.cpu(), b.cpu(), stream("emd", client, label)))
    if not found:
        raise SettingError("study emd: no client sent synthetic data of the same class in both runs")
    return statistics.fmean(found)


def unused(cells: Sequence[Runs]) -> Study:
    """Accuracy on training samples that no client was given (`fraction`): nothing was ever chosen by these."""
    lines, figures = ["", "## On training samples that nobody was given", "", "| | accuracy, % | samples |"], {}
    lines.append("|---|---|---|")
    for row, column, paths in cells:
        found = [_on_unused(open_result(path)) for path in paths]
        seeds = [100 * counts.correct / counts.total for counts in found]
        half = half_width(seeds)
        figures[f"{row}, {column}"] = seeds
        told = f"{statistics.fmean(seeds):.2f}" + (f" ± {half:.2f}" if half is not None else "")
        lines.append(f"| {row}, {column} | {told} | {found[0].total:,} |")
    return Study(lines, figures)


def _on_unused(result: Result) -> Counts:
    if not isinstance(result.data, ArrayData) or result.settings.fraction == 1:
        raise SettingError("study unused: all training samples are given to clients (allowed: fraction below 1)")
    data, whole = result.data, load_data(result.settings.model_copy(update={"fraction": 1.0}))
    assert isinstance(whole, ArrayData)
    given = np.concatenate([data.train.rows, data.validation.rows])
    tested = data.common.x if data.common.rows is None else data.common.x[data.common.rows]
    used = {each.tobytes() for x in (data.source.x[given], tested) for each in x.numpy()}
    rows = [row for row, each in enumerate(whole.source.x.numpy()) if each.tobytes() not in used]
    rest = replace(data.source, x=whole.source.x[rows], y=whole.source.y[rows], rows=None)
    return score(result.model, (rest.slice(at, at + CHUNK) for at in range(0, len(rest), CHUNK)))


def embedding(cells: Sequence[Runs], group: int = 0, member: int = 0, most: int = 400) -> Study:
    """The embedding of one member of a group after its last local training, by t-SNE (FRL's Figure 3).

    Besides the picture: how many queries of the whole group the member's embedding puts nearest to the right global
    prototype, all of them and those of classes that the member does not hold.
    """
    clouds, figures = {}, {}
    lines = ["", "## One member's embedding", "", "| | all queries | classes it does not hold |", "|---|---|---|"]
    for row, column, paths in cells:
        cloud, everything, others = _member(open_result(paths[0]), group, member, most)
        clouds[row if len({cell.column for cell in cells}) == 1 else f"{row}, {column}"] = cloud
        figures[f"{row}, {column}"] = {"all": everything, "others": others}
        lines.append(f"| {row}, {column} | {100 * everything:.1f} % | {100 * others:.1f} % |")
    return Study(lines, figures, maps=[Map("embedding", "Embedding of one member of a group", MEMBER, clouds)])


def cloud_of(result: Result, most: int = 400) -> Cloud | None:
    """How a run that makes prototypes sees samples: what a member of its first group does, or all of a deployed group.

    None of other methods.
    """
    method, state = result.method, result.state
    if not isinstance(method, FewRounds) or method.head == "linear" or not len(result.data.test):
        return None
    with one_thread():
        if isinstance(method, Prepared):
            return _member(result, 0, 0, most)[0]
        with torch.no_grad():
            x, y = result.data.test.slice(0, min(len(result.data.test), most))
            features = parts_of(result.model.get_submodule("net"))[0](x)
    return _flat(features, y, features[:0], y[:0], state.means, state.classes)


def _member(result: Result, number: int, member: int, most: int) -> tuple[Cloud, float, float]:
    """What a member of a group sees before the last round is averaged."""
    method = result.method
    if not isinstance(method, Prepared) or method.head == "linear":
        raise SettingError(
            f"study embedding: {method.name} has no prototypes (allowed: frl and its baselines, not linear)"
        )
    server = ContextFactory(result.data, result.task, result.settings.seed, Path())(-1, 0)
    assert isinstance(server, Server)
    drawn = method.draw_group(server.common, *method.classes_of(result.data, server.seed), server.seed, number)
    rounds = method.deploy_rounds or method.group_rounds
    _, end = method.played(server, method.broadcast(result.state), drawn.supports, number, rounds)
    net, before = method.played(server, method.broadcast(result.state), drawn.supports, number, rounds - 1)
    own = drawn.supports[member]
    known = (before.classes, before.means) if method.tells(before) else None
    method.update(net, own, known, False, stream(server.seed, "embedding"))
    batch_statistics(net)
    with torch.no_grad():
        x, y = drawn.queries.slice(0, len(drawn.queries))
        features = features_of(net, x)
        right = end.classes[nearness(features, end.means).argmax(1)] == y
    elsewhere = ~torch.isin(y, torch.unique(own.labels))
    with torch.no_grad():
        mine, labels = own.slice(0, len(own))
        cloud = _flat(features[:most], y[:most], features_of(net, mine), labels, end.means, end.classes)
    return cloud, float(right.double().mean()), float(right[elsewhere].double().mean())


def _flat(others: Tensor, labels: Tensor, own: Tensor, own_labels: Tensor, means: Tensor, classes: Tensor) -> Cloud:
    """Features of samples, of own ones and of prototypes in the plane, by t-SNE of all of them together."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    parts = torch.cat([others, own, means]).cpu().numpy()
    sne = TSNE(random_state=0, perplexity=max(1, min(30, len(others) // 4)), init="pca")
    with threadpool_limits(1):  # several threads on busy cores spin against each other
        flat = sne.fit_transform(parts)
    stars = len(classes)
    marks = np.arange(len(flat) - stars) >= len(others)
    return Cloud(
        flat[:-stars], torch.cat([labels, own_labels]).cpu().numpy(), marks, flat[-stars:], classes.cpu().numpy()
    )


STUDIES: dict[str, Callable[..., Study]] = {
    "leakage": leakage,
    "emd": emd,
    "unused": unused,
    "embedding": embedding,
}
