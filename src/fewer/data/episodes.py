"""Few-shot work: clients, classes and samples divided into what is learned from and what is judged on."""

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


class Three(NamedTuple):
    """Three disjoint groups of numbers (clients or classes), each in rising order."""

    train: list[int]
    validation: list[int]
    test: list[int]


def split_clients(clients: int, shares: tuple[float, float, float] = (0.8, 0.1, 0.1), seed: int = 0) -> Three:
    """Clients to train with, to choose settings on, and to judge on: none of them in two groups."""
    if min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise SettingError(f"shares {shares} of clients (allowed: three that add up to 1)")
    order = np.random.default_rng(seed).permutation(clients)
    ends = [round(clients * shares[0]), round(clients * (shares[0] + shares[1]))]
    groups = [sorted(int(client) for client in group) for group in np.split(order, ends)]
    if any(share > 0 and not group for share, group in zip(shares, groups, strict=True)):
        raise SettingError(f"{clients} clients cannot be divided in shares {shares}: a group is empty")
    return Three(*groups)


def split_classes(classes: int, base: int, validation: int, novel: int, seed: int | None = None) -> Three:
    """Base, validation and novel classes: in their order, or mixed by a seed."""
    if base < 1 or min(validation, novel) < 0 or base + validation + novel > classes:
        raise SettingError(
            f"{base} base, {validation} validation and {novel} novel classes, but there are {classes} "
            "(allowed: 1 base class or more)"
        )
    order = np.arange(classes) if seed is None else np.random.default_rng(seed).permutation(classes)
    bounds = np.cumsum([0, base, validation, novel])
    return Three(*(sorted(int(c) for c in order[bounds[i] : bounds[i + 1]]) for i in range(3)))


def by_class(raw: RawDataset, split: str, name: str) -> RawDataset:
    """All samples in one pool, classes numbered anew: base, validation, novel ones; those in none of them are dropped.

    `split` has three parts with / between them: how many classes each has (20/5/16), in the order of their numbers, or
    how the names of its classes begin (sci,rec/comp/talk,misc).
    """
    groups = _groups(raw, str(split).split("/"), name, split)
    x, y, client_ids = raw.x, raw.y, raw.client_ids
    if raw.test is not None:
        more = raw.test[0]
        x = x + list(more) if isinstance(x, list) else np.concatenate([np.asarray(x), np.asarray(more)])
        y = np.concatenate([y, raw.test[1]])
        both = client_ids is not None and raw.test_client_ids is not None
        client_ids = np.concatenate([client_ids, raw.test_client_ids]) if both else None
    order = [number for group in groups for number in group]
    numbers = np.full(max(int(y.max(initial=0)), max(order)) + 1, -1)
    numbers[order] = np.arange(len(order))
    kept = np.flatnonzero(numbers[y] >= 0)
    return replace(
        raw,
        x=[x[row] for row in kept] if isinstance(x, list) else x[kept],
        y=numbers[y[kept]],
        test=None,
        client_ids=None if client_ids is None else client_ids[kept],
        test_client_ids=None,
        names=tuple(raw.names[number] for number in order) if raw.names else (),
        split=(len(groups.train), len(groups.validation), len(groups.test)),
    )


def _groups(raw: RawDataset, parts: Sequence[str], name: str, split: str) -> Three:
    """The class numbers that a split means."""
    allowed = "allowed: BASE/VALIDATION/NOVEL, each a number of classes or beginnings of their names with commas"
    if len(parts) != 3:
        raise SettingError(f"split = {split} of data '{name}' ({allowed})")
    if all(part.isdecimal() for part in parts):
        last = max(int(labels.max(initial=-1)) for labels in (raw.y, *(raw.test or ())[1:]))
        return split_classes(max(len(raw.names), last + 1), *map(int, parts))
    groups: list[list[int]] = []
    for part in parts:
        begins = tuple(filter(None, part.split(",")))
        groups.append([number for number, label in enumerate(raw.names) if label.startswith(begins)])
    numbers = [number for group in groups for number in group]
    if not all(groups) or len(set(numbers)) < len(numbers):
        known = ", ".join(raw.names[:8]) + (" …" if len(raw.names) > 8 else "") or "none"
        raise SettingError(f"split = {split} of data '{name}': a part has no classes or two share one (names: {known})")
    return Three(*groups)


def of_classes(samples: Samples, classes: Sequence[int]) -> Samples:
    """The samples of these classes, in their order."""
    labels = samples.labels
    wanted = torch.isin(labels, torch.tensor(list(classes), device=labels.device)).nonzero().squeeze(1)
    return samples.only(wanted)


def support_query(
    samples: Samples, support: float, stream: torch.Generator | None = None, by_class: bool = False
) -> tuple[Samples, Samples]:
    """A share to adapt on and the rest to be judged on: at random, or (no stream) the first ones in time.

    Each part gets at least one sample where there are two. `by_class` takes the share of each class.
    """
    if not 0 < support < 1:
        raise SettingError(f"support = {support:g} (allowed: more than 0, less than 1)")
    rows = torch.arange(len(samples.y)) if samples.rows is None else samples.rows.cpu()
    if not len(rows):
        return samples, samples
    if stream is not None:
        rows = rows[torch.randperm(len(rows), generator=stream)]
    labels = samples.y.cpu()[rows]
    groups = (
        [(labels == label).nonzero().squeeze(1) for label in torch.unique(labels)]
        if by_class
        else [torch.arange(len(rows))]
    )
    first, rest = [], []
    for group in groups:
        count = min(max(1, round(len(group) * support)), max(1, len(group) - 1))
        first.append(rows[group[:count]])
        rest.append(rows[group[count:]])
    device = samples.y.device

    def view(parts: list[Tensor]) -> Samples:
        return replace(samples, rows=torch.cat(parts).to(device))

    return view(first), view(rest)


class Episode(NamedTuple):
    """An N-way K-shot task: labels run from 0 to N − 1, `classes` tells what they were."""

    support_x: Tensor
    support_y: Tensor
    query_x: Tensor
    query_y: Tensor
    classes: Tensor


def episode(samples: Samples, way: int, shot: int, queries: int, stream: torch.Generator) -> Episode:
    """Draw `way` classes that have enough samples, and of each `shot` samples to learn from and `queries` to answer.

    DataError where there are too few such classes: it never looks for ever.
    """
    if min(way, shot, queries) < 1:
        raise SettingError(f"{way}-way {shot}-shot with {queries} queries (allowed: 1 or more of each)")
    labels = samples.labels.cpu()
    counts = torch.bincount(labels)
    eligible = (counts >= shot + queries).nonzero().squeeze(1)
    if len(eligible) < way:
        raise DataError(
            f"{len(eligible)} classes have {shot} + {queries} samples, {way} are needed ({way}-way {shot}-shot)"
        )
    classes = eligible[torch.randperm(len(eligible), generator=stream)[:way]]
    chosen = []
    for label in classes:
        mine = (labels == label).nonzero().squeeze(1)
        chosen.append(mine[torch.randperm(len(mine), generator=stream)[: shot + queries]])
    table = torch.stack(chosen)  # way × (shot + queries)
    support_x, _ = samples.pick(table[:, :shot].reshape(-1))
    query_x, _ = samples.pick(table[:, shot:].reshape(-1))
    numbers = torch.arange(way, device=samples.y.device)
    return Episode(
        support_x,
        numbers.repeat_interleave(shot),
        query_x,
        numbers.repeat_interleave(queries),
        classes.to(numbers.device),
    )
