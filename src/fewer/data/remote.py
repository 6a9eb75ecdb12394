"""The server's data in a run between machines. The samples of clients stay on their own machines."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Never

from torch import Tensor

from fewer.data.federated import ArrayData, Encoder, encode_samples, federate
from fewer.data.sources import read_training_data
from fewer.errors import DataError


@dataclass(frozen=True, repr=False)
class RemoteData(ArrayData):
    """The data of a server: the task and its test set. It knows how many clients there are, but not their samples."""

    clients: int = field(kw_only=True)

    @classmethod
    def of(cls, data: ArrayData, clients: int) -> RemoteData:
        """The server's data, for this number of clients with their own data."""
        return cls(**{part.name: getattr(data, part.name) for part in fields(ArrayData)}, clients=clients)

    def __len__(self) -> int:
        return self.clients

    def encode(self, encoder: Encoder) -> RemoteData:
        """The same data with the features of an encoder as inputs of the test set. Clients encode their own samples."""
        test = encode_samples(self.test, encoder)
        source = replace(self.source, x=test.x.new_zeros(1, *test.x.shape[1:]).expand(len(self.source.x), -1))
        return replace(self, source=source, test=test, tokens=(), columns=(), raw=self, encoder=encoder)

    def client(self, index: int) -> Never:
        """Raises DataError."""
        raise DataError(f"the data of client {index} is on its own machine")

    def size(self, index: int) -> Never:
        """Raises DataError."""
        self.client(index)


def read_undivided(name: str, data_dir: Path | None, data_options: dict[str, Any], **settings: Any) -> ArrayData:
    """Reads a server's own file. All samples are test samples, unless the file has a test set or splits its classes."""
    raw = read_training_data(name, data_dir, data_options)
    settings |= {"clients": 1, "partition": "iid", "name": name, "origin": {"name": name, "data_options": data_options}}
    is_windowed = isinstance(raw.x, Tensor) and not raw.x.is_contiguous()  # of one text; some windows are held out
    if not is_windowed:
        raw = replace(raw, client_ids=None, test_client_ids=None)
    if raw.test is not None or raw.split is not None or is_windowed:
        return federate(raw, **settings)
    data = federate(replace(raw, test=(raw.x, raw.y)), **settings)
    return replace(data, notes=tuple(note for note in data.notes if not note.startswith("split:")))
