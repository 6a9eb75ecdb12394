"""Federations of clients: neighboring clients grouped so that each group acts as one client."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch

from fewer.data.federated import ArrayData, Data, Encoder
from fewer.data.partition import Parts
from fewer.data.schema import Schema
from fewer.errors import SettingError


@dataclass(frozen=True, repr=False)
class Federations(ArrayData):
    """Data whose clients are federations. Each holds all samples of its members."""

    members: ArrayData = field(kw_only=True)
    """The same data with every member as a client, ordered by federation."""

    def members_of(self, client: int) -> ArrayData:
        """The members of one federation, as clients."""
        first, last = _federation_bounds(len(self.members), len(self))[client : client + 2]

        def slice_parts(parts: Parts) -> Parts:
            offsets = parts.offsets[first : last + 1]
            return Parts(parts.rows[offsets[0] : offsets[-1]], offsets - offsets[0])

        data = self.members
        train, validation, tests = map(slice_parts, (data.train, data.validation, data.tests))
        return replace(data, train=train, validation=validation, tests=tests, origin=None)

    def to(self, device: torch.device) -> Federations:
        """Copies the data to a device."""
        return group_clients(self.members.to(device), len(self))

    def rescale(self, schema: Schema) -> Federations:
        """The same data, normalized as the schema says."""
        return group_clients(self.members.rescale(schema), len(self))

    def encode(self, encoder: Encoder) -> Federations:
        """The same data with the features of an encoder as inputs."""
        return replace(group_clients(self.members.encode(encoder), len(self)), raw=self)

    def hold_out(self, fraction: float, seed: int) -> Federations:
        """Replaces the test data with a fraction of each member's training data."""
        return group_clients(self.members.hold_out(fraction, seed), len(self))


def group_clients(data: Data, count: int) -> Federations:
    """Groups neighboring clients into `count` federations of nearly equal size."""
    if not isinstance(data, ArrayData):
        raise SettingError(f"federations = {count} needs ArrayData, but data '{data.name}' is {type(data).__name__}")
    if not 1 <= count <= len(data):
        raise SettingError(f"federations must be 1 to {len(data)} (the number of clients), got {count}")
    bounds = _federation_bounds(len(data), count)
    values = {attribute.name: getattr(data, attribute.name) for attribute in fields(ArrayData)}
    for name in ("train", "validation", "tests"):
        values[name] = Parts(values[name].rows, values[name].offsets[bounds])
    return Federations(**values, members=data)


def _federation_bounds(clients: int, count: int) -> np.ndarray:
    """The first member of each federation, followed by the number of clients."""
    return np.arange(count + 1) * clients // count
