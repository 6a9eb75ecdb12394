"""Few-shot learning: splits of clients and classes, support and query sets, and N-way K-shot episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fewer.data.raw_dataset import RawDataset
from fewer.data.samples import Samples
from fewer.errors import DataError, SettingError


class ThreeWaySplit(NamedTuple):
    """Three disjoint groups of clients or classes, each in ascending order."""

    train: list[int]
    validation: list[int]
    test: list[int]


def split_clients(
    clients: int, fractions: tuple[float, float, float] = (0.8, 0.1, 0.1), seed: int = 0
) -> ThreeWaySplit:
    """Splits clients at random into training, validation and test clients."""
    if min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-6:
        raise SettingError(f"fractions of clients must be >= 0 and sum to 1, got {fractions}")
    order = np.random.default_rng(seed).permutation(clients)
    ends = [round(clients * fractions[0]), round(clients * (fractions[0] + fractions[1]))]
    groups = [sorted(int(client) for client in group) for group in np.split(order, ends)]
    if any(fraction > 0 and not group for fraction, group in zip(fractions, groups, strict=True)):
        raise SettingError(f"cannot split {clients} clients by fractions {fractions}: a group is empty")
    return ThreeWaySplit(*groups)


def split_classes(classes: int, base: int, validation: int, novel: int, seed: int | None = None) -> ThreeWaySplit:
    """Splits classes into base, validation and novel ones: in label order, or shuffled with `seed`."""
    if base < 1 or min(validation, novel) < 0 or base + validation + novel > classes:
        raise SettingError(
            f"{base} base, {validation} validation and {novel} novel classes must sum to at most {classes}, "
            "with at least 1 base class"
        )
    order = np.arange(classes) if seed is None else np.random.default_rng(seed).permutation(classes)
    bounds = np.cumsum([0, base, validation, novel])
    return ThreeWaySplit(*(sorted(int(c) for c in order[bounds[i] : bounds[i + 1]]) for i in range(3)))


def apply_class_split(raw: RawDataset, split: str, name: str) -> RawDataset:
    """Merges training and test samples, and relabels classes in the order base, validation, novel.

    Classes outside the split are dropped. `split` has three parts separated by `/`: the number of classes in each
    (20/5/16), in label order, or prefixes of class names (sci,rec/comp/talk,misc).
    """
    raw = raw.merge_test()
    groups = _parse_split(raw, str(split).split("/"), name, split)
    order = [label for group in groups for label in group]
    new_labels = np.full(max(int(raw.y.max(initial=0)), *order) + 1, -1)
    new_labels[order] = np.arange(len(order))
    raw = raw.select(np.flatnonzero(new_labels[raw.y] >= 0))
    class_names = tuple(raw.class_names[label] for label in order) if raw.class_names else ()
    counts = len(groups.train), len(groups.validation), len(groups.test)
    return replace(raw, y=new_labels[raw.y], class_names=class_names, split=counts)


def _parse_split(raw: RawDataset, parts: Sequence[str], name: str, split: str) -> ThreeWaySplit:
    """Resolves the three parts of a split to class labels."""
    if len(parts) != 3:
        raise SettingError(
            f"split of data '{name}' must be BASE/VALIDATION/NOVEL, each a number of classes or comma-separated "
            f"prefixes of class names, got {split}"
        )
    if all(part.isdecimal() for part in parts):
        return split_classes(max(len(raw.class_names), int(raw.y.max(initial=-1)) + 1), *map(int, parts))
    groups: list[list[int]] = []
    for part in parts:
        prefixes = tuple(filter(None, part.split(",")))
        groups.append([label for label, class_name in enumerate(raw.class_names) if class_name.startswith(prefixes)])
    labels = [label for group in groups for label in group]
    if not all(groups) or len(set(labels)) < len(labels):
        names = ", ".join(raw.class_names[:8]) + (" …" if len(raw.class_names) > 8 else "") or "none"
        raise SettingError(
            f"split = {split} of data '{name}': a part matches no class, or two parts share a class (names: {names})"
        )
    return ThreeWaySplit(*groups)


def select_classes(samples: Samples, classes: Sequence[int]) -> Samples:
    """The samples of these classes, in their original order."""
    labels = samples.labels
    indices = torch.isin(labels, torch.tensor(list(classes), device=labels.device)).nonzero().squeeze(1)
    return samples.select(indices)


def split_support_query(
    samples: Samples, support_fraction: float, generator: torch.Generator | None = None, by_class: bool = False
) -> tuple[Samples, Samples]:
    """Splits samples into a support set to adapt on and a query set to evaluate on.

    The support set is random, or the first samples in time if `generator` is None. With two or more samples, neither
    set is empty. `by_class` applies the fraction within each class.
    """
    if not 0 < support_fraction < 1:
        raise SettingError(f"support_fraction must be > 0 and < 1, got {support_fraction:g}")
    rows = torch.arange(len(samples.y)) if samples.rows is None else samples.rows.cpu()
    if not len(rows):
        return samples, samples
    if generator is not None:
        rows = rows[torch.randperm(len(rows), generator=generator)]
    groups = [rows]
    if by_class:
        labels = samples.y.cpu()[rows]
        groups = [rows[labels == label] for label in torch.unique(labels)]
    support, query = [], []
    for group in groups:
        count = min(max(1, round(len(group) * support_fraction)), max(1, len(group) - 1))
        support.append(group[:count])
        query.append(group[count:])
    support_rows, query_rows = (torch.cat(parts).to(samples.y.device) for parts in (support, query))
    return replace(samples, rows=support_rows), replace(samples, rows=query_rows)


class Episode(NamedTuple):
    """An N-way K-shot task. Its labels are 0 to N − 1; `classes` holds the original ones."""

    support_x: Tensor
    support_y: Tensor
    query_x: Tensor
    query_y: Tensor
    classes: Tensor


def sample_episode(samples: Samples, way: int, shot: int, queries: int, generator: torch.Generator) -> Episode:
    """Samples `way` classes, and `shot` support and `queries` query samples of each.

    Raises DataError if too few classes have enough samples.
    """
    if min(way, shot, queries) < 1:
        raise SettingError(f"way, shot and queries must be >= 1, got {way}, {shot} and {queries}")
    labels = samples.labels.cpu()
    eligible = (torch.bincount(labels) >= shot + queries).nonzero().squeeze(1)
    if len(eligible) < way:
        raise DataError(
            f"{way}-way {shot}-shot needs {way} classes with {shot} + {queries} samples each, got {len(eligible)}"
        )
    classes = eligible[torch.randperm(len(eligible), generator=generator)[:way]]
    chosen = []
    for label in classes:
        indices = (labels == label).nonzero().squeeze(1)
        chosen.append(indices[torch.randperm(len(indices), generator=generator)[: shot + queries]])
    table = torch.stack(chosen)  # way × (shot + queries)
    support_x, query_x = (samples.pick(part.reshape(-1))[0] for part in (table[:, :shot], table[:, shot:]))
    device = samples.y.device
    support_y, query_y = (torch.arange(way, device=device).repeat_interleave(count) for count in (shot, queries))
    return Episode(support_x, support_y, query_x, query_y, classes.to(device))
