"""Partitions of samples among clients. A partition is a `Parts`: the rows of all clients, concatenated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fewer.choices import Partition
from fewer.errors import DataError, SettingError, unknown_name

Rows = NDArray[np.int64]
MAX_DRAWS = 1000


class Parts(NamedTuple):
    """Row indices by client: client c has `rows[offsets[c]:offsets[c + 1]]`. Two arrays hold any number of clients."""

    rows: Rows
    offsets: Rows

    def rows_of(self, client: int) -> Rows:
        """The rows of one client."""
        return self.rows[self.offsets[client] : self.offsets[client + 1]]

    @property
    def sizes(self) -> Rows:
        """The number of rows of each client."""
        return np.diff(self.offsets)

    @property
    def owners(self) -> Rows:
        """The client of each row."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def first(self, clients: int) -> Parts:
        """The rows of the first clients."""
        return Parts(self.rows[: self.offsets[clients]], self.offsets[: clients + 1])

    def where(self, mask: NDArray[np.bool_]) -> Parts:
        """The rows at which `mask` is true."""
        return Parts.by_owner(self.rows[mask], self.owners[mask], len(self.sizes))

    @classmethod
    def by_owner(cls, rows: Rows, owners: NDArray[np.integer], clients: int) -> Parts:
        """Groups rows by owner. The rows of a client keep their order."""
        order = np.argsort(owners, kind="stable")
        offsets = np.zeros(clients + 1, np.int64)
        np.cumsum(np.bincount(owners, minlength=clients), out=offsets[1:])
        return cls(rows[order], offsets)


@dataclass(frozen=True)
class PartitionSpec:
    """The kind of partition and its settings."""

    kind: Partition = "dirichlet"
    clients: int = 20
    alpha: float = 0.5
    """Dirichlet concentration (dirichlet, dirichlet-pairs, quantity). Small values skew more."""
    min_samples: int = 10
    """Minimum training samples per client (dirichlet, dirichlet-pairs, quantity)."""
    classes: int = 2
    """Classes per client (pathological)."""
    shards: int = 2
    """Shards per client (shards)."""

    def validate(self, seed: int = 0) -> None:
        """Raises SettingError if no data can be partitioned with these settings."""
        if seed < 0:
            raise SettingError(f"seed must be >= 0, got {seed}")
        if self.clients < 1:
            raise SettingError(f"clients must be >= 1, got {self.clients}")
        if self.alpha <= 0:
            raise SettingError(f"alpha must be > 0, got {self.alpha:g}")


def partition_iid(labels: Rows, spec: PartitionSpec, rng: np.random.Generator) -> Parts:
    """Gives equal random shares to all clients."""
    count = len(labels)
    return Parts.by_owner(rng.permutation(count), np.arange(count) * spec.clients // max(count, 1), spec.clients)


def partition_dirichlet(labels: Rows, spec: PartitionSpec, rng: np.random.Generator) -> Parts:
    """Splits each class in proportions drawn from Dirichlet(alpha). Redraws until each client has `min_samples`."""
    classes = int(labels.max(initial=-1)) + 1
    counts = np.bincount(labels, minlength=classes)
    for _ in range(MAX_DRAWS):
        proportions = rng.dirichlet(np.full(spec.clients, spec.alpha), classes)
        if _count_by_client(proportions, counts).sum(axis=0).min() >= spec.min_samples:
            return split_by_proportions(labels, proportions, rng)
    raise SettingError(
        f"{spec.kind} with alpha = {spec.alpha:g} leaves some of {spec.clients} clients with fewer than "
        f"{spec.min_samples} of {len(labels)} samples; raise --alpha, lower --clients or --min-samples-per-client, "
        "or choose --partition natural if the data names its clients"
    )


def partition_dirichlet_pairs(labels: Rows, spec: PartitionSpec, rng: np.random.Generator) -> Parts:
    """Gives equal random shares to pairs of clients. Each pair splits its share by dirichlet."""
    pairs = partition_iid(labels, replace(spec, clients=(spec.clients + 1) // 2), rng)
    owners = np.empty(len(labels), np.int64)
    for pair in range(len(pairs.sizes)):
        rows, first = pairs.rows_of(pair), 2 * pair
        halves = partition_dirichlet(labels[rows], replace(spec, clients=min(2, spec.clients - first)), rng)
        owners[rows[halves.rows]] = first + halves.owners
    return Parts.by_owner(np.arange(len(labels)), owners, spec.clients)


def partition_pathological(labels: Rows, spec: PartitionSpec, rng: np.random.Generator) -> Parts:
    """Gives each client only a few classes. All clients with a class get equal shares of it."""
    present = np.unique(labels)
    if not 1 <= spec.classes <= len(present):
        raise SettingError(
            f"classes_per_client must be 1 to {len(present)} (the classes in the data), got {spec.classes}"
        )
    if spec.clients * spec.classes < len(present):
        raise SettingError(
            f"{spec.clients} clients with {spec.classes} classes each cannot hold all {len(present)} classes; "
            "raise clients or classes_per_client"
        )
    proportions = np.zeros((int(present.max()) + 1, spec.clients))
    holders = np.zeros(len(present), np.int64)
    for client in range(spec.clients):  # the classes with the fewest holders so far, ties broken at random
        chosen = np.lexsort((rng.random(len(present)), holders))[: spec.classes]
        holders[chosen] += 1
        proportions[present[chosen], client] = 1
    return split_by_proportions(labels, proportions / np.maximum(proportions.sum(axis=1, keepdims=True), 1), rng)


def partition_shards(labels: Rows, spec: PartitionSpec, rng: np.random.Generator) -> Parts:
    """Cuts each class into shards and assigns a few random shards to each client.

    A class has shards in proportion to its samples. With fewer shards than classes, samples sorted by class are cut
    into equal shards.
    """
    count = spec.clients * spec.shards
    if spec.shards < 1:
        raise SettingError(f"shards must be >= 1, got {spec.shards}")
    if count > len(labels):
        raise SettingError(f"{count} shards need at least {count} samples, got {len(labels)}; lower clients or shards")
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    owners = np.empty(count, np.int64)
    owners[rng.permutation(count)] = np.arange(count) // spec.shards
    return Parts.by_owner(order, np.repeat(owners, _compute_shard_sizes(labels, count)), spec.clients)


def _compute_shard_sizes(labels: Rows, count: int) -> Rows:
    """The number of samples in each of `count` shards, class by class."""
    _, sizes = np.unique(labels, return_counts=True)
    if count < len(sizes):
        sizes = np.array([len(labels)])
    shards = np.maximum(1, count * sizes // len(labels))
    while shards.sum() < count:
        shards[np.argmax(sizes / shards)] += 1
    while shards.sum() > count:
        shards[np.argmin(np.where(shards > 1, sizes / shards, np.inf))] -= 1
    return np.concatenate([np.diff(-(-np.arange(n + 1) * size // n)) for n, size in zip(shards, sizes, strict=True)])


def partition_quantity(labels: Rows, spec: PartitionSpec, rng: np.random.Generator) -> Parts:
    """Skews client sizes by Dirichlet(alpha). Class proportions stay those of the whole data set."""
    return partition_dirichlet(np.zeros_like(labels), spec, rng)


PARTITIONERS = {
    "iid": partition_iid,
    "dirichlet": partition_dirichlet,
    "dirichlet-pairs": partition_dirichlet_pairs,
    "pathological": partition_pathological,
    "shards": partition_shards,
    "quantity": partition_quantity,
}


def partition_like(parts: Parts, labels: Rows, test_labels: Rows, rng: np.random.Generator) -> Parts:
    """Partitions test samples like the training samples: each client gets the same proportion of each class."""
    clients = len(parts.sizes)
    classes = int(max(labels.max(initial=-1), test_labels.max(initial=-1))) + 1
    cells = labels[parts.rows] * clients + parts.owners
    counts = np.bincount(cells, minlength=classes * clients).reshape(classes, clients)
    totals = counts.sum(axis=1, keepdims=True)
    # Classes without training samples are split equally.
    proportions = np.where(totals > 0, counts / np.maximum(totals, 1), 1 / clients)
    return split_by_proportions(test_labels, proportions, rng)


def split_by_proportions(labels: Rows, proportions: NDArray[np.float64], rng: np.random.Generator) -> Parts:
    """Splits each class at random in the given proportions (classes × clients), which sum to 1 over clients."""
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    sizes = _count_by_client(proportions, np.bincount(labels, minlength=len(proportions)))
    owners = np.tile(np.arange(proportions.shape[1]), len(proportions))
    return Parts.by_owner(order, np.repeat(owners, sizes.reshape(-1)), proportions.shape[1])


def _count_by_client(proportions: NDArray[np.float64], counts: Rows) -> Rows:
    """Converts proportions to sample counts (classes × clients) that use every sample once."""
    bounds = np.cumsum(proportions, axis=1)
    ends = np.floor(bounds * counts[:, None] + 1e-9).astype(np.int64)
    ends[:, -1] = np.where(bounds[:, -1] > 0, counts, 0)
    return np.diff(ends, axis=1, prepend=0)


def hold_out_fraction(parts: Parts, fraction: float, rng: np.random.Generator | None) -> tuple[Parts, Parts]:
    """Holds out a fraction of each client's rows: random ones, or the last ones if `rng` is None.

    Returns the remaining and the held-out rows.
    """
    if not 0 < fraction < 1:
        raise SettingError(f"the fraction to hold out must be > 0 and < 1, got {fraction:g}")
    position = np.arange(len(parts.rows)) - np.repeat(parts.offsets[:-1], parts.sizes)
    if rng is None:
        position = np.repeat(parts.sizes, parts.sizes) - 1 - position  # from the end
    else:
        shuffled = np.lexsort((rng.random(len(parts.rows)), parts.owners))  # within each client
        parts = Parts(parts.rows[shuffled], parts.offsets)
    held_out = position < np.repeat(np.floor(parts.sizes * fraction), parts.sizes)
    return parts.where(~held_out), parts.where(held_out)


def partition_labels(spec: PartitionSpec, train_labels: Rows, test_labels: Rows, seed: int) -> tuple[Parts, Parts]:
    """Partitions training samples by `spec`, and test samples in the same class proportions."""
    if spec.kind not in PARTITIONERS:
        raise unknown_name("partition", spec.kind, PARTITIONERS)
    spec.validate()
    if len(train_labels) < spec.clients:
        raise DataError(f"cannot partition {len(train_labels)} training samples among {spec.clients} clients")
    rng = np.random.default_rng(seed)
    parts = PARTITIONERS[spec.kind](train_labels, spec, rng)
    return parts, partition_like(parts, train_labels, test_labels, rng)
