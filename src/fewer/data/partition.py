"""How samples are divided among parties. A division is `Parts`: the rows of all parties end to end."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fewer.errors import DataError, SettingError, unknown
from fewer.vocabulary import Partition

Rows = NDArray[np.int64]
TRIES = 1000


class Parts(NamedTuple):
    """Party p has `rows[offsets[p]:offsets[p + 1]]`: two arrays, however many parties there are."""

    rows: Rows
    offsets: Rows

    def of(self, party: int) -> Rows:
        """The rows of one party."""
        return self.rows[self.offsets[party] : self.offsets[party + 1]]

    @property
    def sizes(self) -> Rows:
        """How many rows each party has."""
        return np.diff(self.offsets)

    @classmethod
    def by_owner(cls, rows: Rows, owners: NDArray[np.integer], parties: int) -> Parts:
        """Parts from the owner of each row; rows of a party stay in the order given."""
        order = np.argsort(owners, kind="stable")
        offsets = np.zeros(parties + 1, np.int64)
        np.cumsum(np.bincount(owners, minlength=parties), out=offsets[1:])
        return cls(rows[order], offsets)


def iid(train: Rows, test: Rows, parties: int, draw: np.random.Generator) -> tuple[Parts, Parts]:
    """Even shares at random. `train` and `test` are the labels; the division goes over their positions."""

    def deal(count: int) -> Parts:
        return Parts.by_owner(draw.permutation(count), np.arange(count) * parties // max(count, 1), parties)

    return deal(len(train)), deal(len(test))


def dirichlet(
    train: Rows, test: Rows, parties: int, draw: np.random.Generator, alpha: float, minimum: int
) -> tuple[Parts, Parts]:
    """Each class is divided in proportions drawn from Dirichlet(alpha), test samples in the same proportions.

    Drawn anew until each party has at least `minimum` training samples.
    """
    classes = int(max(train.max(initial=-1), test.max(initial=-1))) + 1
    counts = np.bincount(train, minlength=classes)
    for _ in range(TRIES):
        bounds = np.cumsum(draw.dirichlet(np.full(parties, alpha), classes), axis=1)
        bounds[:, -1] = 1.0
        cuts = np.floor(bounds * counts[:, None]).astype(np.int64)
        if np.diff(cuts, axis=1, prepend=0).sum(axis=0).min() >= minimum:
            break
    else:
        raise SettingError(
            f"dirichlet with alpha = {alpha:g} leaves some of {parties} parties with fewer than {minimum} of "
            f"{len(train)} samples (allowed: a larger alpha, fewer parties, or a smaller minimum)"
        )

    def deal(labels: Rows) -> Parts:
        order = draw.permutation(len(labels))
        order = order[np.argsort(labels[order], kind="stable")]
        owners = []
        for label, count in enumerate(np.bincount(labels, minlength=classes)):
            sizes = np.diff(np.floor(bounds[label] * count).astype(np.int64), prepend=0)
            owners.append(np.repeat(np.arange(parties), sizes))
        return Parts.by_owner(order, np.concatenate(owners), parties)

    return deal(train), deal(test)


def split_off(parts: Parts, fraction: float, draw: np.random.Generator) -> tuple[Parts, Parts]:
    """Take a share of each party's rows away, at random: what is left, and what was taken."""
    if not 0 < fraction < 1:
        raise SettingError(f"a share of {fraction:g} cannot be held out (allowed: more than 0, less than 1)")
    owners = np.repeat(np.arange(len(parts.sizes)), parts.sizes)
    order = np.lexsort((draw.random(len(owners)), owners))  # shuffled within each party
    place = np.arange(len(owners)) - np.repeat(parts.offsets[:-1], parts.sizes)
    taken = place < np.repeat(np.floor(parts.sizes * fraction), parts.sizes)
    shuffled = parts.rows[order]

    def keep(mask: NDArray[np.bool_]) -> Parts:
        return Parts.by_owner(shuffled[mask], owners[mask], len(parts.sizes))

    return keep(~taken), keep(taken)


def divide(
    kind: Partition,
    train: Rows,
    test: Rows,
    parties: int,
    seed: int,
    alpha: float,
    minimum: int,
) -> tuple[Parts, Parts]:
    """Divide training and test labels among parties by one of the named ways."""
    if parties < 1:
        raise SettingError(f"parties = {parties} (allowed: 1 or more)")
    if len(train) < parties:
        raise DataError(f"{len(train)} training samples cannot be divided among {parties} parties")
    if alpha <= 0:
        raise SettingError(f"alpha = {alpha:g} (allowed: more than 0)")
    draw = np.random.default_rng(seed)
    ways: dict[str, Callable[[], tuple[Parts, Parts]]] = {
        "iid": lambda: iid(train, test, parties, draw),
        "dirichlet": lambda: dirichlet(train, test, parties, draw, alpha, minimum),
    }
    if kind not in ways:
        raise unknown("partition", kind, ways)
    return ways[kind]()
