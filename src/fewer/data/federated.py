"""Data as a federation holds it: for each party its own samples, and a common test set."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fewer.data.partition import Parts, divide, iid, split_off
from fewer.data.samples import Samples
from fewer.errors import DataError, SettingError
from fewer.vocabulary import Partition

MAX_CLASSES = 1 << 20
"""What counts classes is as long as the largest label: numbers beyond this are not labels."""


class PartyData(NamedTuple):
    """What one party holds."""

    train: Samples
    validation: Samples
    test: Samples


class Data(ABC):
    """Any source of parties. Only what is asked for need be in memory."""

    name: str
    shape: tuple[int, ...]
    """Shape of one input."""
    classes: int
    vocabulary: int | None = None
    """How many different tokens inputs are made of, where they are text."""
    test: Samples
    """The common test set."""
    origin: Mapping[str, Any] | None = None
    """How `load` made it, so that a run can be resumed from its directory alone; None for a user's own."""

    @abstractmethod
    def __len__(self) -> int:
        """How many parties there are."""

    @abstractmethod
    def party(self, number: int) -> PartyData:
        """The samples of one party."""

    @abstractmethod
    def size(self, number: int) -> int:
        """How many training samples a party has, without loading them."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes when any of the data or its division does."""

    def to(self, device: torch.device) -> Data:
        """The same data on another device."""
        return self

    def held_out(self, share: float, seed: int) -> Data:
        """The training data alone, a share of it in the place of the test data: to choose settings on."""
        raise DataError(f"data '{self.name}' cannot be tuned on: it does not say how to hold out a share")


@dataclass(frozen=True)
class ArrayData(Data):
    """Data in arrays, divided by row numbers."""

    name: str
    classes: int
    source: Samples
    """Rows that parties train (and validate) on."""
    train: Parts
    validation: Parts
    common: Samples
    """Rows that are tested on."""
    tests: Parts
    origin: Mapping[str, Any] | None = field(default=None)

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Shape of one input."""
        return tuple(self.source.x.shape[1:])

    @cached_property
    def test(self) -> Samples:  # type: ignore[override]
        """The common test set: all that the parties test on, together."""
        return self.common

    def __len__(self) -> int:
        return len(self.train.offsets) - 1

    def party(self, number: int) -> PartyData:
        """The samples of one party."""

        def view(samples: Samples, parts: Parts) -> Samples:
            rows = torch.from_numpy(parts.of(number)).to(samples.y.device)
            return replace(samples, rows=rows if samples.rows is None else samples.rows[rows])

        return PartyData(
            view(self.source, self.train), view(self.source, self.validation), view(self.common, self.tests)
        )

    def size(self, number: int) -> int:
        """How many training samples a party has."""
        return int(self.train.offsets[number + 1] - self.train.offsets[number])

    def fingerprint(self) -> str:
        """A checksum of all arrays and of the division."""
        total = 0
        for samples in (self.source, self.common):
            form = repr((tuple(samples.x.shape), str(samples.x.dtype), samples.shift, samples.scale))
            total = zlib.crc32(form.encode(), total)
            for tensor in (samples.x, samples.y):
                total = zlib.crc32(np.ascontiguousarray(tensor.cpu().numpy()).data.cast("B"), total)
        for parts in (self.train, self.validation, self.tests):
            for array in parts:
                total = zlib.crc32(array.data.cast("B"), total)
        return f"{total:08x}"

    def to(self, device: torch.device) -> ArrayData:
        """The same data on another device."""
        return replace(self, source=self.source.to(device), common=self.common.to(device))

    def held_out(self, share: float, seed: int) -> ArrayData:
        """The training data alone, a share of each party's in the place of its test data."""
        train, held = split_off(self.train, share, np.random.default_rng(seed))
        parts = Parts(np.arange(len(held.rows)), held.offsets)
        common = replace(self.source, rows=torch.from_numpy(held.rows).to(self.source.y.device))
        return replace(self, train=train, common=common, tests=parts, origin=None)


# --- a user's own arrays --------------------------------------------------------------------------------------


def from_arrays(
    x: ArrayLike | Tensor,
    y: ArrayLike | Tensor,
    *,
    test: tuple[ArrayLike | Tensor, ArrayLike | Tensor] | None = None,
    client: ArrayLike | None = None,
    parties: int = 20,
    partition: Partition = "dirichlet",
    alpha: float = 0.5,
    fraction: float = 1.0,
    validation: float = 0.0,
    minimum: int = 10,
    seed: int = 0,
    name: str = "arrays",
    normal: tuple[float, float] | None = None,
    origin: Mapping[str, Any] | None = None,
) -> ArrayData:
    """A federation from inputs `x` and labels `y`.

    With `client` (who each sample belongs to) the parties are the clients; otherwise the samples are divided among
    `parties` by `partition`. Without `test` a fifth of each party's samples is held out. `validation` holds out a
    share of each party's training samples. `fraction` keeps only so much of the training samples. Bytes are taken
    as pixels and normalised by `normal` (mean and deviation of the pixels in 0 … 1; by default their own).
    """
    inputs, labels = inputs_of(x, name), labels_of(y, name)
    _same_length(name, inputs, labels)
    draw = np.random.default_rng(seed)
    owners = None
    if client is not None:
        names, owners = np.unique(np.asarray(client), return_inverse=True)
        owners, parties = owners.reshape(-1), len(names)
        _same_length(f"{name} (client)", inputs, owners)
    if not 0 < fraction <= 1:
        raise SettingError(f"fraction = {fraction:g} (allowed: more than 0, at most 1)")
    if not round(len(labels) * fraction):
        raise SettingError(f"fraction = {fraction:g} leaves none of {len(labels)} samples (allowed: a larger one)")
    if fraction < 1:
        kept = np.sort(draw.permutation(len(labels))[: round(len(labels) * fraction)])
        inputs, labels = inputs[torch.from_numpy(kept)], labels[kept]
        owners = None if owners is None else owners[kept]
    if owners is None and partition == "natural":
        raise SettingError(f"partition = natural, but data '{name}' does not say who its samples belong to (client)")
    tested = labels[:0]
    if test is not None:
        test_inputs, tested = inputs_of(test[0], f"{name} (test)"), labels_of(test[1], f"{name} (test)")
        _same_length(f"{name} (test)", test_inputs, tested)
        if test_inputs.shape[1:] != inputs.shape[1:] or test_inputs.dtype != inputs.dtype:
            raise DataError(
                f"data '{name}' has training inputs of {_kind(inputs)}, but test inputs of {_kind(test_inputs)}"
            )
    if owners is not None:
        train = Parts.by_owner(np.arange(len(labels)), owners, parties)
        tests = iid(labels, tested, parties, draw)[1]
    else:
        train, tests = divide(partition, labels, tested, parties, seed, alpha, minimum)
    if test is None:
        train, held = split_off(train, 0.2, draw)
        test_inputs, tested = inputs[torch.from_numpy(held.rows)], labels[held.rows]
        tests = Parts(np.arange(len(tested)), held.offsets)
    train, held = split_off(train, validation, draw) if validation else (train, _empty(parties))
    shift, scale = _normalisation(inputs, normal)
    return ArrayData(
        name=name,
        classes=int(max(labels.max(), tested.max(initial=0))) + 1,
        source=Samples(inputs, torch.from_numpy(labels), None, shift, scale),
        train=train,
        validation=held,
        common=Samples(test_inputs, torch.from_numpy(tested), None, shift, scale),
        tests=tests,
        origin=origin,
    )


def from_parties(parties: Sequence[tuple[Any, Any]], **settings: Any) -> ArrayData:
    """A federation from a list of (x, y), one pair for each party; settings as for `from_arrays`.

    A party without samples stays a party.
    """
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in parties]
    if not sum(len(y) for _, y in pairs):
        raise DataError("no parties with samples in the list")
    for number, (x, y) in enumerate(pairs):
        _same_length(f"party {number}", x, y)
    held = [pair for pair in pairs if len(pair[1])]
    client = np.repeat(np.arange(len(pairs)), [len(y) for _, y in pairs])
    first = held[0][0]
    for number, (x, _) in enumerate(pairs):
        if len(x) and (x.shape[1:] != first.shape[1:] or (x.dtype == np.uint8) != (first.dtype == np.uint8)):
            raise DataError(f"party {number} has inputs of {_kind(x)}, others of {_kind(first)}")
    x, y = (np.concatenate([pair[part] for pair in held]) for part in (0, 1))
    data = from_arrays(x, y, client=client, partition="natural", **settings)
    if len(data) == len(pairs):
        return data
    present = np.unique(client)
    wide: dict[str, Any] = {
        name: _widen(getattr(data, name), present, len(pairs)) for name in ("train", "validation", "tests")
    }
    return replace(data, **wide)


def _widen(parts: Parts, present: NDArray[np.integer], parties: int) -> Parts:
    """The same rows among more parties, of which only the `present` ones have any."""
    offsets = np.zeros(parties + 1, np.int64)
    offsets[present + 1] = parts.sizes
    return Parts(parts.rows, np.cumsum(offsets))


def _empty(parties: int) -> Parts:
    return Parts(np.zeros(0, np.int64), np.zeros(parties + 1, np.int64))


def inputs_of(x: ArrayLike | Tensor, name: str) -> Tensor:
    """Inputs as bytes, integers or float32; images of two dimensions get a channel."""
    try:
        inputs = x.detach().cpu() if isinstance(x, Tensor) else torch.from_numpy(np.ascontiguousarray(x))
    except (TypeError, ValueError) as error:
        raise DataError(f"data '{name}' has inputs that are not an array of numbers: {error}") from error
    if inputs.dtype.is_complex:
        raise DataError(f"data '{name}' has complex inputs (allowed: bytes, integers, floats)")
    if inputs.ndim == 0 or len(inputs) == 0:
        raise DataError(f"data '{name}' has no samples")
    if inputs.dtype.is_floating_point:
        inputs = inputs.float()
        finite = torch.isfinite(inputs).reshape(len(inputs), -1).all(dim=1)
        if not bool(finite.all()):
            first = int((~finite).nonzero()[0])
            raise DataError(f"data '{name}' has NaN or infinity in sample {first} ({int((~finite).sum())} in all)")
    elif inputs.dtype != torch.uint8:
        inputs = inputs.long()
    return inputs.unsqueeze(1) if inputs.ndim == 3 else inputs


def labels_of(y: ArrayLike | Tensor, name: str) -> NDArray[np.int64]:
    """Labels as whole numbers from 0 on."""
    labels = np.asarray(y.cpu() if isinstance(y, Tensor) else y)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise DataError(f"data '{name}' has labels of shape {labels.shape} (allowed: one number for each sample)")
    with np.errstate(invalid="ignore"):
        whole = labels.astype(np.int64) if labels.dtype.kind in "iufb" else None
    if whole is None or not np.array_equal(whole, labels) or whole.min(initial=0) < 0:
        raise DataError(f"data '{name}' has labels that are not class numbers (allowed: 0, 1, 2, …)")
    if (most := whole.max(initial=0)) >= MAX_CLASSES:
        raise DataError(f"data '{name}' has a label of {most} (allowed: class numbers below {MAX_CLASSES})")
    return whole


def _kind(inputs: Tensor | NDArray[Any]) -> str:
    return f"{str(inputs.dtype).removeprefix('torch.')} {tuple(inputs.shape[1:])}"


def _same_length(name: str, x: Any, y: Any) -> None:
    if len(x) != len(y):
        raise DataError(f"data '{name}' has {len(x)} inputs and {len(y)} labels")


def _normalisation(inputs: Tensor, normal: tuple[float, float] | None) -> tuple[float, float]:
    """Shift and scale for bytes; none for anything else."""
    if inputs.dtype != torch.uint8:
        return 0.0, 1.0
    if normal is None:
        counts = torch.bincount(inputs.reshape(-1), minlength=256).double()
        values = torch.arange(256).double() / 255
        mean = float((counts * values).sum() / counts.sum())
        spread = float(((counts * (values - mean) ** 2).sum() / counts.sum()).sqrt())
        normal = mean, spread or 1.0
    return 255 * normal[0], 1 / (255 * normal[1])
