"""Federations of clients: neighboring clients that stand together as one."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch

from fewer.data.federated import ArrayData, Data
from fewer.data.partition import Parts
from fewer.errors import SettingError


@dataclass(frozen=True)
class Federations(ArrayData):
    """Data whose clients are federations: each holds what its members hold together."""

    members: ArrayData = field(kw_only=True)
    """The data with all members as clients of their own, in the order of their federations."""

    def inside(self, number: int) -> ArrayData:
        """The members of one federation, as the clients of their own."""
        first, last = _bounds(len(self.members), len(self))[number : number + 2]

        def cut(parts: Parts) -> Parts:
            offsets = parts.offsets[first : last + 1]
            return Parts(parts.rows[offsets[0] : offsets[-1]], offsets - offsets[0])

        data = self.members
        return replace(data, train=cut(data.train), validation=cut(data.validation), tests=cut(data.tests), origin=None)

    def to(self, device: torch.device) -> Federations:
        """The same data on another device."""
        return federations(self.members.to(device), len(self))

    def held_out(self, share: float, seed: int) -> Federations:
        """The training data alone, a share of each member's in the place of its test data."""
        return federations(self.members.held_out(share, seed), len(self))


def federations(data: Data, count: int) -> Federations:
    """The clients of some data in `count` federations, as even as can be."""
    if not isinstance(data, ArrayData):
        raise SettingError(
            f"federations = {count}: data '{data.name}' cannot be put together (allowed: data in arrays)"
        )
    if not 1 <= count <= len(data):
        raise SettingError(f"federations = {count}, but there are {len(data)} clients (allowed: 1 … {len(data)})")
    bounds = _bounds(len(data), count)
    whole = {part.name: getattr(data, part.name) for part in fields(ArrayData)}
    for name in ("train", "validation", "tests"):
        whole[name] = Parts(whole[name].rows, whole[name].offsets[bounds])
    return Federations(**whole, members=data)


def _bounds(clients: int, count: int) -> np.ndarray:
    """The first member of each federation, and the end."""
    return np.arange(count + 1) * clients // count
