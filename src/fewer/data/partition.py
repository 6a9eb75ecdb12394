"""How samples are divided among clients. A division is `Parts`: the rows of all clients end to end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fewer.choices import Partition
from fewer.errors import DataError, SettingError, unknown

Rows = NDArray[np.int64]
TRIES = 1000


class Parts(NamedTuple):
    """Client p has `rows[offsets[p]:offsets[p + 1]]`: two arrays, however many clients there are."""

    rows: Rows
    offsets: Rows

    def of(self, client: int) -> Rows:
        """The rows of one client."""
        return self.rows[self.offsets[client] : self.offsets[client + 1]]

    @property
    def sizes(self) -> Rows:
        """How many rows each client has."""
        return np.diff(self.offsets)

    @classmethod
    def by_owner(cls, rows: Rows, owners: NDArray[np.integer], clients: int) -> Parts:
        """Parts from the owner of each row; rows of a client stay in the order given."""
        order = np.argsort(owners, kind="stable")
        offsets = np.zeros(clients + 1, np.int64)
        np.cumsum(np.bincount(owners, minlength=clients), out=offsets[1:])
        return cls(rows[order], offsets)


@dataclass(frozen=True)
class Division:
    """How to divide: the way, and the settings that some ways have."""

    kind: Partition = "dirichlet"
    clients: int = 20
    alpha: float = 0.5
    """Skew of the dirichlet ways and of quantity: small is skewed."""
    min_samples: int = 10
    """Training samples that each client gets at least (dirichlet ways and quantity)."""
    classes: int = 2
    """Classes that each client holds (pathological)."""
    shards: int = 2
    """Shards that each client gets (shards)."""

    def check(self, seed: int = 0) -> None:
        """SettingError where no data could be divided so."""
        if seed < 0:
            raise SettingError(f"seed = {seed} (allowed: 0 or more)")
        if self.clients < 1:
            raise SettingError(f"clients = {self.clients} (allowed: 1 or more)")
        if self.alpha <= 0:
            raise SettingError(f"alpha = {self.alpha:g} (allowed: more than 0)")


def iid(labels: Rows, how: Division, draw: np.random.Generator) -> Parts:
    """Even shares at random."""
    count = len(labels)
    return Parts.by_owner(draw.permutation(count), np.arange(count) * how.clients // max(count, 1), how.clients)


def dirichlet(labels: Rows, how: Division, draw: np.random.Generator) -> Parts:
    """Each class is divided in proportions drawn from Dirichlet(alpha), anew until each client has the minimum."""
    classes = int(labels.max(initial=-1)) + 1
    counts = np.bincount(labels, minlength=classes)
    for _ in range(TRIES):
        shares = draw.dirichlet(np.full(how.clients, how.alpha), classes)
        if _cut(shares, counts).sum(axis=0).min() >= how.min_samples:
            return deal(labels, shares, draw)
    raise SettingError(
        f"{how.kind} with alpha = {how.alpha:g} leaves some of {how.clients} clients with fewer than {how.min_samples} of "
        f"{len(labels)} samples (allowed: a larger alpha, fewer clients, or a smaller minimum)"
    )


def dirichlet_pairs(labels: Rows, how: Division, draw: np.random.Generator) -> Parts:
    """Even random shares go to pairs of clients, and each pair divides its share by dirichlet (as MetaFed's data)."""
    pairs = iid(labels, replace(how, clients=(how.clients + 1) // 2), draw)
    owners = np.empty(len(labels), np.int64)
    for pair in range(len(pairs.sizes)):
        rows, first = pairs.of(pair), 2 * pair
        inside = dirichlet(labels[rows], replace(how, clients=min(2, how.clients - first)), draw)
        owners[rows[inside.rows]] = first + np.repeat(np.arange(len(inside.sizes)), inside.sizes)
    return Parts.by_owner(np.arange(len(labels)), owners, how.clients)


def pathological(labels: Rows, how: Division, draw: np.random.Generator) -> Parts:
    """Each client holds a few classes only; those who hold a class share it evenly."""
    held = np.unique(labels)
    if not 1 <= how.classes <= len(held):
        raise SettingError(
            f"{how.classes} classes for each client, but there are {len(held)} (allowed: 1 … {len(held)})"
        )
    if how.clients * how.classes < len(held):
        raise SettingError(f"{how.clients} clients with {how.classes} classes each cannot hold all {len(held)} classes")
    shares = np.zeros((int(held.max()) + 1, how.clients))
    used = np.zeros(len(held), np.int64)
    for client in range(how.clients):  # the classes that fewest have so far, ties at random
        chosen = np.lexsort((draw.random(len(held)), used))[: how.classes]
        used[chosen] += 1
        shares[held[chosen], client] = 1
    return deal(labels, shares / np.maximum(shares.sum(axis=1, keepdims=True), 1), draw)


def shards(labels: Rows, how: Division, draw: np.random.Generator) -> Parts:
    """Shards of one class each, and each client is dealt a few of them; a class has as many as its share of the samples.

    Where there are fewer shards than classes, samples sorted by class are cut into equal shards.
    """
    count = how.clients * how.shards
    if not how.shards >= 1 or count > len(labels):
        raise SettingError(f"{count} shards of {len(labels)} samples (allowed: shards = 1 or more, a sample in each)")
    order = draw.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    owners = np.empty(count, np.int64)
    owners[draw.permutation(count)] = np.arange(count) // how.shards
    return Parts.by_owner(order, np.repeat(owners, _shard_sizes(labels, count)), how.clients)


def _shard_sizes(labels: Rows, count: int) -> Rows:
    """How many samples each of `count` shards has, class by class."""
    _, sizes = np.unique(labels, return_counts=True)
    if count < len(sizes):
        sizes = np.array([len(labels)])
    each = np.maximum(1, count * sizes // len(labels))
    while each.sum() < count:
        each[np.argmax(sizes / each)] += 1
    while each.sum() > count:
        each[np.argmin(np.where(each > 1, sizes / each, np.inf))] -= 1
    return np.concatenate([np.diff(-(-np.arange(n + 1) * size // n)) for n, size in zip(each, sizes, strict=True)])


def quantity(labels: Rows, how: Division, draw: np.random.Generator) -> Parts:
    """Clients of very different size, their sizes drawn from Dirichlet(alpha); classes as in the whole."""
    return dirichlet(np.zeros_like(labels), how, draw)


def follow(parts: Parts, labels: Rows, tested: Rows, draw: np.random.Generator) -> Parts:
    """Test samples divided like the training samples: of each class, a client tests on the share it trains on."""
    clients = len(parts.sizes)
    classes = int(max(labels.max(initial=-1), tested.max(initial=-1))) + 1
    owners = np.repeat(np.arange(clients), parts.sizes)
    counts = np.bincount(labels[parts.rows] * clients + owners, minlength=classes * clients).reshape(classes, clients)
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.where(totals > 0, counts / np.maximum(totals, 1), 1 / clients)  # a class that nobody trains on: evenly
    return deal(tested, shares, draw)


def deal(labels: Rows, shares: NDArray[np.float64], draw: np.random.Generator) -> Parts:
    """Divide the samples of each class among clients in the given shares (classes × clients), which add up to 1."""
    order = draw.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    sizes = _cut(shares, np.bincount(labels, minlength=len(shares)))
    owners = np.tile(np.arange(shares.shape[1]), len(shares))
    return Parts.by_owner(order, np.repeat(owners, sizes.reshape(-1)), shares.shape[1])


def _cut(shares: NDArray[np.float64], counts: Rows) -> Rows:
    """How many samples each client gets of each class, all of them given out."""
    bounds = np.cumsum(shares, axis=1)
    ends = np.floor(bounds * counts[:, None] + 1e-9).astype(np.int64)
    ends[:, -1] = np.where(bounds[:, -1] > 0, counts, 0)
    return np.diff(ends, axis=1, prepend=0)


WAYS = {
    "iid": iid,
    "dirichlet": dirichlet,
    "dirichlet-pairs": dirichlet_pairs,
    "pathological": pathological,
    "shards": shards,
    "quantity": quantity,
}


def split_off(parts: Parts, fraction: float, draw: np.random.Generator | None) -> tuple[Parts, Parts]:
    """Take a share of each client's rows away, at random or (no `draw`) the last ones: what is left, what was taken."""
    if not 0 < fraction < 1:
        raise SettingError(f"a share of {fraction:g} cannot be held out (allowed: more than 0, less than 1)")
    owners = np.repeat(np.arange(len(parts.sizes)), parts.sizes)
    place = np.arange(len(owners)) - np.repeat(parts.offsets[:-1], parts.sizes)
    shuffled = parts.rows
    if draw is None:
        place = np.repeat(parts.sizes, parts.sizes) - 1 - place  # counted from the end
    else:
        shuffled = shuffled[np.lexsort((draw.random(len(owners)), owners))]  # within each client
    taken = place < np.repeat(np.floor(parts.sizes * fraction), parts.sizes)

    def keep(mask: NDArray[np.bool_]) -> Parts:
        return Parts.by_owner(shuffled[mask], owners[mask], len(parts.sizes))

    return keep(~taken), keep(taken)


def divide(how: Division, train: Rows, test: Rows, seed: int) -> tuple[Parts, Parts]:
    """Divide training labels among clients as `how` says, and test labels alike."""
    if how.kind not in WAYS:
        raise unknown("partition", how.kind, WAYS)
    how.check()
    if len(train) < how.clients:
        raise DataError(f"{len(train)} training samples cannot be divided among {how.clients} clients")
    draw = np.random.default_rng(seed)
    parts = WAYS[how.kind](train, how, draw)
    return parts, follow(parts, train, test, draw)
