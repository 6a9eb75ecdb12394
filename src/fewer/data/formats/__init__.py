"""Readers of what people have on disk, by short name. Each takes a path and its own options, and returns `Raw`."""

from __future__ import annotations

from collections.abc import Callable

from fewer.data.formats import (
    arrays,
    cifar,
    csv,
    folder,
    idx,
    jsonl,
    leaf,
    movielens,
    newsgroups,
    omniglot,
    plays,
    sensors,
)
from fewer.data.raw import Raw

FORMATS: dict[str, Callable[..., Raw]] = {
    "idx": idx.idx,
    "qmnist": idx.qmnist,
    "cifar10": cifar.cifar10,
    "cifar100": cifar.cifar100,
    "omniglot": omniglot.omniglot,
    "leaf-femnist": leaf.femnist,
    "leaf-shakespeare": leaf.shakespeare,
    "leaf-sent140": leaf.sent140,
    "npz": arrays.npz,
    "csv": csv.csv,
    "jsonl": jsonl.jsonl,
    "folder": folder.folder,
    "newsgroups": newsgroups.newsgroups,
    "plays": plays.plays,
    "movielens": movielens.movielens,
    "pamap2": sensors.pamap2,
    "har": sensors.har,
    "hapt": sensors.hapt,
}

__all__ = ["FORMATS"]
