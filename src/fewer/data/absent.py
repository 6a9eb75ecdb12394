"""Data that is gone: its schema is left, and a trained model needs no more."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewer.data.federated import ClientData, Data
from fewer.data.samples import Samples
from fewer.data.schema import Schema
from fewer.errors import DataError


@dataclass(frozen=True, repr=False)
class AbsentData(Data):
    """Data that is gone. Its schema remains, so that a trained model can be used without it."""

    has_global_test = False
    name: str
    clients: int
    recorded: Schema
    """The schema of the data."""
    reason: str
    """Why the data is absent."""

    def __post_init__(self) -> None:
        schema = self.recorded
        for name in ("shape", "classes", "tokens", "class_names", "columns"):
            object.__setattr__(self, name, getattr(schema, name))
        x = torch.zeros(0, *schema.shape, dtype=getattr(torch, schema.dtype))
        test = Samples(x, self.targets[:0], is_text=bool(schema.tokens))
        object.__setattr__(self, "test", test.rescale(schema.shift, schema.scale))

    @property
    def schema(self) -> Schema:
        """The recorded schema."""
        return self.recorded

    @property
    def targets(self) -> Tensor:
        """An example of a target."""
        if self.recorded.targets == "classes":
            return torch.zeros(1, dtype=torch.int64)
        return torch.full((1, self.recorded.classes), 0.5 if self.recorded.targets == "numbers" else 1.0)

    def __len__(self) -> int:
        return self.clients

    def client(self, index: int) -> ClientData:
        """Raises DataError: the samples are gone."""
        raise DataError(self.reason)

    def size(self, index: int) -> int:
        """Raises DataError: the samples are gone."""
        raise DataError(self.reason)

    def fingerprint(self) -> str:
        """Raises DataError: the samples are gone."""
        raise DataError(self.reason)

    def to(self, device: torch.device) -> AbsentData:
        """Copies the empty test set to a device."""
        data = replace(self)
        object.__setattr__(data, "test", self.test.to(device))
        return data
