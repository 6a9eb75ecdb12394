"""Data as a federation holds it: for each client its own samples, and a common test set."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fewer.choices import Partition
from fewer.data import text
from fewer.data.partition import Division, Parts, divide, follow, split_off
from fewer.data.raw_dataset import RawDataset
from fewer.data.samples import Samples
from fewer.errors import DataError, SettingError

MAX_CLASSES = 1 << 20
"""What counts classes is as long as the largest label: numbers beyond this are not labels."""


TEST_SHARE = 0.2
"""What is held out of data that has no test samples of its own."""


class ClientData(NamedTuple):
    """What one client holds."""

    train: Samples
    """What it learns from."""
    validation: Samples
    """What it chooses on; may be empty."""
    test: Samples
    """What it is tested on; may be empty."""


class Data(ABC):
    """Any source of clients. Only what is asked for need be in memory."""

    name: str
    """What messages and reports call it."""
    shape: tuple[int, ...]
    """Shape of one input."""
    classes: int
    """How many classes there are."""
    tokens: tuple[str, ...] = ()
    """What inputs are made of, where they are text: token numbers are places in it."""
    test: Samples
    """The common test set."""
    origin: Mapping[str, Any] | None = None
    """How `load` made it, so that a run can be resumed from its directory alone; None for a user's own."""
    in_time: bool = False
    """Whether each client's samples are in the order of time."""
    novel: bool = False
    """Whether validation and test samples are of classes that nobody trains on; `classes` counts those of training."""
    alone: bool = False
    """Whether it is all that one client has, who does not know the test samples of the others."""

    @property
    def vocabulary(self) -> int | None:
        """How many different tokens there are, where inputs are text."""
        return len(self.tokens) or None

    @abstractmethod
    def __len__(self) -> int:
        """How many clients there are."""

    @abstractmethod
    def client(self, number: int) -> ClientData:
        """The samples of one client."""

    @abstractmethod
    def size(self, number: int) -> int:
        """How many training samples a client has, without loading them."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes when any of the data or its division does."""

    def inside(self, number: int) -> Data:
        """The clients that one of these clients is made of, where it is a federation itself."""
        raise SettingError(f"data '{self.name}' has no federations of clients")

    def to(self, device: torch.device) -> Data:
        """The same data on another device."""
        return self

    def held_out(self, share: float, seed: int) -> Data:
        """The training data alone, a share of it in the place of the test data: to choose settings on."""
        raise DataError(f"data '{self.name}' cannot be tuned on: it does not say how to hold out a share")

    @property
    def unseen(self) -> frozenset[int]:
        """Classes of the common test set that no client trains on."""
        return frozenset()

    def held_classes(self, share: float, seed: int) -> Data:
        """As `held_out`, and all samples of a share of the classes besides: nobody trains on these."""
        raise DataError(f"data '{self.name}' cannot be tuned on: it does not say how to hold out classes")


@dataclass(frozen=True)
class ArrayData(Data):
    """Data in arrays, divided by row numbers."""

    name: str
    classes: int
    source: Samples
    """Rows that clients train (and validate) on."""
    train: Parts
    validation: Parts
    common: Samples
    """Rows that are tested on."""
    tests: Parts
    origin: Mapping[str, Any] | None = None
    tokens: tuple[str, ...] = ()
    """The vocabulary, where inputs are token numbers."""
    names: tuple[str, ...] = ()
    """What the classes are called, where that is known."""
    in_time: bool = False
    """Whether each client's samples are in the order of time."""
    novel: bool = False
    """Whether validation and test samples are of classes that nobody trains on."""
    row_clients: NDArray[Any] | None = None
    """Whose each row of `source` was, where rows in the order of time are divided otherwise than by client."""

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Shape of one input."""
        return tuple(self.source.x.shape[1:])

    @cached_property
    def test(self) -> Samples:  # type: ignore[override]
        """The common test set: all that the clients test on, together."""
        return self.common

    def __len__(self) -> int:
        return len(self.train.offsets) - 1

    def client(self, number: int) -> ClientData:
        """The samples of one client."""

        def view(samples: Samples, parts: Parts) -> Samples:
            return samples.only(torch.from_numpy(parts.of(number)))

        return ClientData(
            view(self.source, self.train), view(self.source, self.validation), view(self.common, self.tests)
        )

    def size(self, number: int) -> int:
        """How many training samples a client has."""
        return int(self.train.offsets[number + 1] - self.train.offsets[number])

    def fingerprint(self) -> str:
        """A checksum of all arrays and of the division."""
        total = 0
        for samples in (self.source, self.common):
            form = repr((tuple(samples.x.shape), str(samples.x.dtype), samples.shift, samples.scale))
            total = zlib.crc32(form.encode(), total)
            windows = not samples.x.is_contiguous()  # of one long text: the first of each row, and the last row
            for tensor in (*((samples.x[:, 0], samples.x[-1]) if windows else (samples.x,)), samples.y):
                total = zlib.crc32(np.ascontiguousarray(tensor.cpu().numpy()).data.cast("B"), total)
        for parts in (self.train, self.validation, self.tests):
            for array in parts:
                total = zlib.crc32(array.data.cast("B"), total)
        return f"{total:08x}"

    def to(self, device: torch.device) -> ArrayData:
        """The same data on another device."""
        return replace(self, source=self.source.to(device), common=self.common.to(device))

    def held_out(self, share: float, seed: int) -> ArrayData:
        """The training data alone, a share of each client's in the place of its test data.

        What is in time is split in time; where clients hold rows of several clients, in that of each client.
        """
        if self.row_clients is None:
            train, held = split_off(self.train, share, None if self.in_time else np.random.default_rng(seed))
        else:
            late = np.isin(self.train.rows, self._latest(self.row_clients, share))
            owners = np.repeat(np.arange(len(self)), self.train.sizes)
            train, held = (Parts.by_owner(self.train.rows[mask], owners[mask], len(self)) for mask in (~late, late))
        parts = Parts(np.arange(len(held.rows)), held.offsets)
        common = replace(self.source, rows=torch.from_numpy(held.rows).to(self.source.y.device))
        return replace(self, train=train, common=common, tests=parts, origin=None)

    def _latest(self, row_clients: NDArray[Any], share: float) -> NDArray[np.int64]:
        """A share of each client's training rows: the last ones of each class.

        A client's classes come in blocks of time (one activity after the other): its very last rows would be all there
        is of a class or two.
        """
        rows = np.sort(self.train.rows)
        owners = np.unique(row_clients[rows], return_inverse=True)[1].reshape(-1)
        kinds = owners * MAX_CLASSES + self.source.y.cpu().numpy()[rows]
        _, kinds, sizes = np.unique(kinds, return_inverse=True, return_counts=True)
        late = np.empty(len(rows))  # 0 … 1, how late a row comes among those of its client and class
        late[np.argsort(kinds, kind="stable")] = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes])
        order = np.lexsort((rows, late))
        by_client = Parts.by_owner(rows[order], owners[order], int(owners.max(initial=0)) + 1)
        return split_off(by_client, share, None)[1].rows

    @cached_property
    def unseen(self) -> frozenset[int]:
        """Classes of the common test set that no client trains on."""
        trained = self.source.y.cpu()[torch.from_numpy(self.train.rows)]
        return frozenset(self.common.labels.tolist()) - frozenset(trained.tolist())

    def held_classes(self, share: float, seed: int) -> ArrayData:
        """As `held_out`, and all samples of a share of the classes besides: nobody trains on these."""
        held = self.held_out(share, seed)
        labels = self.source.y.cpu().numpy()
        trained = np.unique(labels[held.train.rows])
        away = np.random.default_rng(seed).permutation(trained)[: max(1, round(share * len(trained)))]
        if len(away) == len(trained):
            raise DataError(f"data '{self.name}' cannot be tuned on: clients train on one class only")
        gone = np.isin(labels[held.train.rows], away)
        owners = np.repeat(np.arange(len(self)), held.train.sizes)
        rows = held.common.rows
        assert rows is not None
        more = torch.from_numpy(held.train.rows[gone]).to(rows.device)
        train = Parts.by_owner(held.train.rows[~gone], owners[~gone], len(self))
        return replace(held, train=train, common=replace(held.common, rows=torch.cat([rows, more])))


# --- a user's own arrays --------------------------------------------------------------------------------------


def from_arrays(
    x: ArrayLike | Tensor | list[str],
    y: ArrayLike | Tensor,
    *,
    test: tuple[ArrayLike | Tensor | list[str], ArrayLike | Tensor] | None = None,
    client_ids: ArrayLike | None = None,
    normal: tuple[float, float] | None = None,
    name: str = "arrays",
    **settings: Any,
) -> ArrayData:
    """A federation from inputs `x` and labels `y`.

    With `client` (whom each sample belongs to) the clients are the clients, otherwise the samples are divided; without
    `test` a fifth of each client's samples is held out. Bytes are taken as pixels and normalized by `normal` (mean and
    deviation in 0 … 1; by default their own), texts are turned into token numbers. `settings` are those of `federate`:
    `clients`, `partition`, `alpha`, `fraction`, `validation` …
    """
    owners = None if client_ids is None else np.asarray(client_ids)
    tests = (
        None if test is None else (_texts_or_inputs(test[0], f"{name} (test)"), labels_of(test[1], f"{name} (test)"))
    )
    raw = RawDataset(_texts_or_inputs(x, name), labels_of(y, name), tests, owners, normal=normal)
    if owners is not None:
        settings["partition"] = "natural"
    return federate(raw, name=name, **settings)


def federate(
    raw: RawDataset,
    *,
    clients: int = 20,
    partition: Partition = "dirichlet",
    alpha: float = 0.5,
    min_samples_per_client: int = 10,
    classes_per_client: int = 2,
    shards: int = 2,
    fraction: float = 1.0,
    validation: float = 0.0,
    vocab_size: int = 20_000,
    max_length: int = 30,
    seed: int = 0,
    name: str = "arrays",
    origin: Mapping[str, Any] | None = None,
) -> ArrayData:
    """Divide what a source has among clients.

    `partition` is one of iid, dirichlet (with `alpha` and a `minimum` for each client), dirichlet-pairs, pathological
    (`classes_per_client`), shards (`shards` for each client), quantity, and natural (by client). `fraction` keeps only so
    much of the training samples; `validation` holds out a share of each client's. Of texts, at most `words` words are
    known and `length` are read. Where a source divides its classes, all samples are divided among clients, then each
    client's by class: base classes are to train on, validation and novel classes to validate and to test on.
    """
    _same_length(name, raw.x, raw.y)
    if raw.test is not None:
        _same_length(f"{name} (test)", *raw.test)
    if raw.client_ids is not None:
        _same_length(f"{name} (client)", raw.y, raw.client_ids)
    if raw.split is not None and validation:
        raise SettingError(f"validation = {validation:g}, but data '{name}' is divided by classes (allowed: 0)")
    if partition == "natural":
        raw = _one_pool(raw, name)
    draw = np.random.default_rng(seed)
    rows = np.arange(len(raw.y))
    if _windows(raw) and raw.client_ids is not None:
        rows = np.flatnonzero(raw.client_ids >= 0)
    everyone = None if raw.client_ids is None else np.unique(raw.client_ids[rows])
    test_rows = rows[:0]
    if raw.test is None and raw.split is None:
        rows, test_rows = hold_out(raw, rows, TEST_SHARE)
    raw, rows = _some(raw, rows, fraction, draw)
    apart = rows[:0]
    if validation and raw.in_time and raw.client_ids is not None and partition != "natural":
        rows, apart = hold_out(raw, rows, validation)  # in each client's time, whoever gets it
    labels = labels_of(raw.y, name)
    tested = labels[test_rows] if raw.test is None else labels_of(raw.test[1], f"{name} (test)")
    if partition == "natural":
        assert raw.client_ids is not None and everyone is not None
        owner = raw.client_ids[test_rows] if raw.test is None else raw.test_client_ids
        train, tests = _by_client(raw.client_ids, everyone, rows, labels, owner, tested, draw)
    else:
        how = Division(partition, clients, alpha, min_samples_per_client, classes_per_client, shards)
        train, tests = divide(how, labels[rows], tested, seed)
        train = Parts(rows[train.rows], train.offsets)
    if raw.in_time:
        train = _in_order(train)
    held = _empty(len(train.sizes))
    if raw.split is not None:
        train, held, tests, test_rows = _by_class(train, labels, raw.split)
    if len(apart):
        held = follow(train, labels, labels[apart], draw)
        held = _in_order(Parts(apart[held.rows], held.offsets))
    elif validation:
        train, held = split_off(train, validation, None if raw.in_time else draw)
    source, common, tokens = _samples(raw, labels, tested, train, name, vocab_size, max_length)
    if raw.test is None:
        common = replace(source, rows=torch.from_numpy(test_rows))
    classes = max(len(raw.names), int(max(labels.max(), tested.max(initial=0))) + 1)
    if raw.split is not None:
        classes = raw.split[0]
    names, time, novel = raw.names, raw.in_time, raw.split is not None
    row_clients = raw.client_ids if time and partition != "natural" else None
    return ArrayData(name, classes, source, train, held, common, tests, origin, tokens, names, time, novel, row_clients)


def _by_class(
    parts: Parts, labels: NDArray[np.int64], split: tuple[int, int, int]
) -> tuple[Parts, Parts, Parts, NDArray[np.int64]]:
    """Each client's samples of base, validation and novel classes, and all rows of novel ones, which the last count."""
    owners = np.repeat(np.arange(len(parts.sizes)), parts.sizes)
    group = np.searchsorted(np.cumsum(split), labels[parts.rows], side="right")
    base, held, novel = (
        Parts.by_owner(parts.rows[group == number], owners[group == number], len(parts.sizes)) for number in range(3)
    )
    rows = np.sort(novel.rows)
    return base, held, Parts(np.searchsorted(rows, novel.rows), novel.offsets), rows


def hold_out(raw: RawDataset, rows: NDArray[np.int64], share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows to train on and a share of each client's to judge on: always the same, whatever the seed of the division.

    What is in time is split in time. Of overlapping windows only those are tested that do not overlap.
    """
    owners = np.zeros(len(rows), np.int64)
    if raw.client_ids is not None:
        owners = np.unique(raw.client_ids[rows], return_inverse=True)[1].reshape(-1)
    groups = Parts.by_owner(rows, owners, int(owners.max(initial=0)) + 1)
    left, taken = split_off(groups, share, None if raw.in_time else np.random.default_rng(0))
    test_rows = np.sort(taken.rows)
    if _windows(raw):
        test_rows = test_rows[:: raw.x.shape[1]]  # type: ignore[union-attr]
    return np.sort(left.rows), test_rows


def _in_order(parts: Parts) -> Parts:
    """The same division, each client's rows in rising order."""
    owners = np.repeat(np.arange(len(parts.sizes)), parts.sizes)
    return Parts(parts.rows[np.lexsort((parts.rows, owners))], parts.offsets)


def _one_pool(raw: RawDataset, name: str) -> RawDataset:
    """Where the test samples belong to other clients than the training samples, all are clients: one pool."""
    if raw.client_ids is None:
        raise SettingError(f"partition = natural, but data '{name}' does not say who its samples belong to (client)")
    if (
        raw.test is None
        or raw.test_client_ids is None
        or set(raw.test_client_ids.tolist()) <= set(raw.client_ids.tolist())
    ):
        return raw
    x, y = raw.test
    both = raw.x + list(x) if isinstance(raw.x, list) else np.concatenate([np.asarray(raw.x), np.asarray(x)])
    client_ids = np.concatenate([raw.client_ids, raw.test_client_ids])
    return replace(raw, x=both, y=np.concatenate([raw.y, y]), client_ids=client_ids, test=None, test_client_ids=None)


def _windows(raw: RawDataset) -> bool:
    """Whether inputs are overlapping windows of one long text, which must not be copied out: the copy would be huge."""
    return isinstance(raw.x, Tensor) and not raw.x.is_contiguous()


def _some(
    raw: RawDataset, rows: NDArray[np.int64], fraction: float, draw: np.random.Generator
) -> tuple[RawDataset, NDArray[np.int64]]:
    """A share of the training rows. Where nothing else is in the arrays, they shrink with it."""
    if not 0 < fraction <= 1:
        raise SettingError(f"fraction = {fraction:g} (allowed: more than 0, at most 1)")
    if fraction == 1:
        return raw, rows
    kept = np.sort(draw.permutation(rows)[: round(len(rows) * fraction)])
    if not len(kept):
        raise SettingError(f"fraction = {fraction:g} leaves none of {len(rows)} samples (allowed: a larger one)")
    if raw.test is None or isinstance(raw.x, list):
        return raw, kept
    client_ids = None if raw.client_ids is None else raw.client_ids[kept]
    return replace(raw, x=raw.x[kept], y=raw.y[kept], client_ids=client_ids), np.arange(len(kept))


def _by_client(
    client_ids: NDArray[Any],
    names: NDArray[Any],
    rows: NDArray[np.int64],
    labels: NDArray[np.int64],
    test_client_ids: NDArray[Any] | None,
    tested: NDArray[np.int64],
    draw: np.random.Generator,
) -> tuple[Parts, Parts]:
    """One client for each client, in sorted order; test samples by client too, or else as the training samples."""
    train = Parts.by_owner(rows, np.searchsorted(names, client_ids[rows]), len(names))
    if test_client_ids is None:
        return train, follow(train, labels, tested, draw)
    known = np.isin(test_client_ids, names)
    return train, Parts.by_owner(np.flatnonzero(known), np.searchsorted(names, test_client_ids[known]), len(names))


def _samples(
    raw: RawDataset,
    labels: NDArray[np.int64],
    tested: NDArray[np.int64],
    train: Parts,
    name: str,
    vocab_size: int,
    max_length: int,
) -> tuple[Samples, Samples, tuple[str, ...]]:
    """All training and all test samples in the form in which nets take them, and the tokens of texts."""
    x, test_x, tokens = raw.x, None if raw.test is None else raw.test[0], raw.tokens
    if isinstance(x, list):
        tokens = text.vocabulary((x[row] for row in train.rows), vocab_size)
        x = text.encode(x, tokens, max_length)
        test_x = None if test_x is None else text.encode(list(test_x), tokens, max_length)
    inputs = inputs_of(x, name)
    shift, scale = (0.0, 1.0) if tokens else _normalization(inputs, train.rows, raw.normal)
    source = Samples(inputs, torch.from_numpy(labels), None, shift, scale, bool(tokens))
    if test_x is None:
        return source, source, tokens
    test_inputs = inputs_of(test_x, f"{name} (test)")
    if test_inputs.shape[1:] != inputs.shape[1:] or test_inputs.dtype != inputs.dtype:
        raise DataError(
            f"data '{name}' has training inputs of {_kind(inputs)}, but test inputs of {_kind(test_inputs)}"
        )
    common = replace(source, x=test_inputs, y=torch.from_numpy(tested))
    return source, common, tokens


def _texts_or_inputs(x: Any, name: str) -> list[str] | Tensor:
    """A list of texts as it is; anything else as a checked tensor."""
    return x if isinstance(x, list) and x and all(isinstance(each, str) for each in x) else inputs_of(x, name)


def from_clients(clients: Sequence[tuple[Any, Any]], **settings: Any) -> ArrayData:
    """A federation from a list of (x, y), one pair for each client; settings as for `from_arrays`.

    A client without samples stays a client.
    """
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in clients]
    if not sum(len(y) for _, y in pairs):
        raise DataError("no clients with samples in the list")
    for number, (x, y) in enumerate(pairs):
        _same_length(f"client {number}", x, y)
    held = [pair for pair in pairs if len(pair[1])]
    client_ids = np.repeat(np.arange(len(pairs)), [len(y) for _, y in pairs])
    first = held[0][0]
    for number, (x, _) in enumerate(pairs):
        if len(x) and (x.shape[1:] != first.shape[1:] or (x.dtype == np.uint8) != (first.dtype == np.uint8)):
            raise DataError(f"client {number} has inputs of {_kind(x)}, others of {_kind(first)}")
    x, y = (np.concatenate([pair[part] for pair in held]) for part in (0, 1))
    inputs = x.tolist() if x.dtype.kind == "U" else x
    data = from_arrays(inputs, y, client_ids=client_ids, partition="natural", **settings)
    if len(data) == len(pairs):
        return data
    present = np.unique(client_ids)
    wide: dict[str, Any] = {
        name: _widen(getattr(data, name), present, len(pairs)) for name in ("train", "validation", "tests")
    }
    return replace(data, **wide)


def from_dataset(dataset: Any, **settings: Any) -> ArrayData:
    """A federation from a torch Dataset of (input, label) pairs; settings as for `from_arrays`.

    Inputs may be tensors, arrays or images; labels numbers. The whole set is read once.
    """
    pairs = [dataset[number] for number in range(len(dataset))]
    if not pairs:
        raise DataError("the Dataset has no samples")
    inputs = np.stack([np.asarray(x) for x, _ in pairs])
    return from_arrays(inputs, np.asarray([int(y) for _, y in pairs]), **settings)


def _widen(parts: Parts, present: NDArray[np.integer], clients: int) -> Parts:
    """The same rows among more clients, of which only the `present` ones have any."""
    offsets = np.zeros(clients + 1, np.int64)
    offsets[present + 1] = parts.sizes
    return Parts(parts.rows, np.cumsum(offsets))


def _empty(clients: int) -> Parts:
    return Parts(np.zeros(0, np.int64), np.zeros(clients + 1, np.int64))


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
        if not all(map(math.isfinite, torch.aminmax(inputs))):
            finite = torch.isfinite(inputs).reshape(len(inputs), -1).all(dim=1)
            first = int((~finite).nonzero()[0])
            raise DataError(f"data '{name}' has NaN or infinity in sample {first} ({int((~finite).sum())} in all)")
    elif inputs.dtype != torch.uint8:
        inputs = inputs.long()
    return inputs.unsqueeze(1) if inputs.ndim == 3 and inputs.dtype == torch.uint8 else inputs


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


def _normalization(inputs: Tensor, rows: NDArray[np.int64], normal: tuple[float, float] | None) -> tuple[float, float]:
    """Shift and scale for bytes, from the training rows alone; none for anything else."""
    if inputs.dtype != torch.uint8:
        return 0.0, 1.0
    if normal is None:
        counts = torch.bincount(inputs[torch.from_numpy(rows)].reshape(-1), minlength=256).double()
        values = torch.arange(256).double() / 255
        mean = float((counts * values).sum() / counts.sum())
        spread = float(((counts * (values - mean) ** 2).sum() / counts.sum()).sqrt())
        normal = mean, spread or 1.0
    return 255 * normal[0], 1 / (255 * normal[1])
