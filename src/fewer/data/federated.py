"""Federated data: the samples of each client, and a global test set."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fewer.choices import Partition
from fewer.data import checks, text
from fewer.data.frames import check_index, columns_of, describe_frame, encode_frame, is_frame
from fewer.data.partition import PartitionSpec, Parts, Rows, hold_out_fraction, partition_labels, partition_like
from fewer.data.raw_dataset import Array, Inputs, RawDataset
from fewer.data.samples import Samples
from fewer.data.schema import Column, Kind, Schema, Targets, is_integer
from fewer.errors import DataError, SettingError, unknown_name

MAX_CLASSES = 1 << 20
"""Labels must be below this. Arrays of class counts are as long as the largest label."""
CLASSLESS_PARTITIONS = ("iid", "quantity", "natural")
"""Partitions of data without classes."""
TEST_FRACTION = 0.2
"""Fraction held out for testing if the data has no test set."""
UNSEEN_CLIENT_FRACTION = 0.2
"""Fraction of its training samples that a new client has."""


class ClientData(NamedTuple):
    """The samples of one client."""

    train: Samples
    """Training samples."""
    validation: Samples
    """Validation samples; may be empty."""
    test: Samples
    """Test samples; may be empty."""


Encoder = Callable[[Samples], Tensor]
"""Maps samples to the features of all rows of their `x`."""


class Data(ABC):
    """The data of all clients. A subclass may load each client on demand."""

    name: str
    """Name in errors and reports."""
    shape: tuple[int, ...]
    """Shape of one input."""
    classes: int
    """Number of classes; of labels or numbers to predict, if targets are floats."""
    tokens: tuple[str, ...] = ()
    """The vocabulary, if inputs are text. Token ids are positions in it."""
    class_names: tuple[str, ...] = ()
    """Names of the classes, if known."""
    columns: tuple[Column, ...] = ()
    """Columns of a table that become inputs, in order."""
    test: Samples
    """The global test set."""
    origin: Mapping[str, Any] | None = None
    """Arguments of `load`, so that a run can resume from its directory alone; None for user data."""
    time_ordered: bool = False
    """True if each client's samples are in temporal order."""
    novel: bool = False
    """True if validation and test samples belong to novel classes. `classes` then counts the training classes only."""
    standardize: bool = False
    """True if each column is standardized before the first round, by the statistics of all clients."""
    unseen_clients: int = 0
    """Clients that never train, the last ones."""
    has_global_test: bool = True
    """False if only one client's data is known, and the global test set is not."""
    notes: tuple[str, ...] = ()
    """What a user should know about the data: columns ignored, images transposed, labels renamed …"""
    raw: Data | None = None
    """The data before a frozen encoder computed features of it; None if inputs are not features of one."""

    @property
    def vocab_size(self) -> int | None:
        """Number of tokens in the vocabulary; None if inputs are not text."""
        return len(self.tokens) or None

    @property
    def targets(self) -> Tensor:
        """Targets of samples, which show what is predicted."""
        return self.test.y

    @property
    def schema(self) -> Schema:
        """What inputs and labels mean, so that other files are mapped by name."""
        samples, options = self.test, (self.origin or {}).get("data_options", {})
        shift, scale = (
            tuple(value.tolist()) if isinstance(value, Tensor) else (value,) for value in (samples.shift, samples.scale)
        )
        dtype = str(samples.x.dtype).removeprefix("torch.")
        return Schema(
            kind=_kind_of(self.shape, self.tokens),
            shape=tuple(self.shape),
            dtype=dtype,
            classes=self.classes,
            class_names=self.class_names,
            columns=self.columns,
            tokens=self.tokens,
            shift=shift,
            scale=scale,
            options=dict(options),
            targets=_targets_of(self.targets),
        )

    @property
    def has_classes(self) -> bool:
        """True if each target is one class; otherwise targets are floats (samples × outputs)."""
        return not self.test.y.is_floating_point()

    def __repr__(self) -> str:
        """Three lines: the number of clients, inputs and targets, and samples."""
        names = self.class_names
        named = bool(names) and names != self.tokens
        listed = f": {', '.join(names[:5])}{', …' if len(names) > 5 else ''}" if named else ""
        inputs = "×".join(map(str, self.shape)) + (f" tokens (vocabulary {len(self.tokens):,})" if self.tokens else "")
        targets = f"{self.classes:,} classes{listed}" if self.has_classes else f"{self.classes:,} outputs"
        try:
            sizes = [self.size(client) for client in range(len(self))] or [0]
            per_client = f"{min(sizes):,} to {max(sizes):,} per client"
            samples = f"{sum(sizes):,} training samples ({per_client}), {len(self.test):,} test samples"
        except DataError as error:  # the samples are not on this machine
            samples = str(error)
        title = f"{type(self).__name__} '{self.name}': {len(self):,} clients"
        return f"{title}\n  inputs {inputs or 1}, {targets}\n  {samples}"

    @abstractmethod
    def __len__(self) -> int:
        """The number of clients."""

    @abstractmethod
    def client(self, index: int) -> ClientData:
        """The samples of one client."""

    @abstractmethod
    def size(self, index: int) -> int:
        """The number of training samples of one client, without loading them."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A checksum that changes with the data or its partition."""

    def members_of(self, client: int) -> Data:
        """The members of one client, if clients are federations."""
        raise SettingError(f"data '{self.name}' has no federations of clients")

    def to(self, device: torch.device) -> Data:
        """Copies the data to a device."""
        return self

    def rescale(self, schema: Schema) -> Data:
        """The same data, normalized as the schema says."""
        raise DataError(f"data '{self.name}' cannot be normalized: it does not implement rescale")

    def as_numbers(self) -> Data:
        """The same data with numbers as targets, for regression."""
        if self.has_classes:
            raise DataError(f"data '{self.name}' has class labels, and a regression needs float targets")
        return self

    def encode(self, encoder: Encoder) -> Data:
        """The same data with the features of an encoder as inputs."""
        raise SettingError(f"freeze = encoder needs ArrayData, but data '{self.name}' is {type(self).__name__}")

    def hold_out(self, fraction: float, seed: int) -> Data:
        """Replaces the test data with a fraction of the training data, for tuning."""
        raise DataError(f"cannot tune on data '{self.name}': it does not implement hold_out")

    @property
    def unseen_classes(self) -> frozenset[int]:
        """Classes of the global test set that no client trains on."""
        return frozenset()

    def hold_out_classes(self, fraction: float, seed: int) -> Data:
        """Like `hold_out`, but also moves all samples of a fraction of the classes to the test set."""
        raise DataError(f"cannot tune on data '{self.name}': it does not implement hold_out_classes")


@dataclass(frozen=True, repr=False)
class ArrayData(Data):
    """Data in arrays, partitioned by row index."""

    name: str
    classes: int
    source: Samples
    """All training and validation samples."""
    train: Parts
    validation: Parts
    test: Samples
    tests: Parts
    """Rows of `test` by client."""
    origin: Mapping[str, Any] | None = None
    tokens: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    time_ordered: bool = False
    novel: bool = False
    row_clients: Array | None = None
    """The original owner of each row of `source`, if time-ordered data is partitioned other than by client."""
    columns: tuple[Column, ...] = ()
    standardize: bool = False
    notes: tuple[str, ...] = ()
    unseen_clients: int = 0
    raw: ArrayData | None = None
    encoder: Encoder | None = None
    """Computes the features of `raw`."""
    class_gap: int = 0
    """Rows before a held-out one of the same class that overlap with it."""

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Shape of one input."""
        return tuple(self.source.x.shape[1:])

    @property
    def targets(self) -> Tensor:
        """Targets of all training and validation samples."""
        return self.source.y

    @property
    def schema(self) -> Schema:
        """What inputs and labels mean, before an encoder."""
        return super().schema if self.raw is None else self.raw.schema

    def encode(self, encoder: Encoder) -> ArrayData:
        """The same data with the features of an encoder as inputs."""
        source, test = (encode_samples(samples, encoder) for samples in (self.source, self.test))
        return replace(self, source=source, test=test, tokens=(), columns=(), raw=self, encoder=encoder)

    def __len__(self) -> int:
        return len(self.train.offsets) - 1

    def client(self, index: int) -> ClientData:
        """The samples of one client."""
        parts = (self.source, self.train), (self.source, self.validation), (self.test, self.tests)
        return ClientData(*(samples.select(torch.from_numpy(rows.rows_of(index))) for samples, rows in parts))

    def size(self, index: int) -> int:
        """The number of training samples of one client."""
        return int(self.train.offsets[index + 1] - self.train.offsets[index])

    def fingerprint(self) -> str:
        """A checksum of all arrays and the partition, the same before and after standardization and encoding."""
        if self.raw is not None:
            return self.raw.fingerprint()
        checksum = 0
        for samples in (self.source, self.test):
            scaling = ("standardize",) if self.standardize else (samples.shift, samples.scale)
            layout = repr((tuple(samples.x.shape), str(samples.x.dtype), *scaling))
            checksum = zlib.crc32(layout.encode(), checksum)
            # Windows of one long text overlap: the first value of each row and the last row cover them all.
            windowed = not samples.x.is_contiguous()
            for tensor in (*((samples.x[:, 0], samples.x[-1]) if windowed else (samples.x,)), samples.y):
                checksum = zlib.crc32(np.ascontiguousarray(tensor.cpu().numpy()).data.cast("B"), checksum)
        for parts in (self.train, self.validation, self.tests):
            for array in parts:
                checksum = zlib.crc32(array.data.cast("B"), checksum)
        return f"{checksum:08x}"

    def to(self, device: torch.device) -> ArrayData:
        """Copies the data to a device."""
        return replace(self, source=self.source.to(device), test=self.test.to(device))

    def rescale(self, schema: Schema) -> ArrayData:
        """The same data, normalized as the schema says."""
        source, test = (samples.rescale(schema.shift, schema.scale) for samples in (self.source, self.test))
        return replace(self, source=source, test=test)

    def as_numbers(self) -> ArrayData:
        """The same data with numbers as targets. Integer labels without names become numbers."""
        if not self.has_classes:
            return self
        if self.tokens or not all(map(is_integer, self.class_names)):
            raise DataError(f"data '{self.name}' has named classes, and a regression needs numbers")
        numbers = torch.tensor([float(name) for name in self.class_names])  # labels that were numbered from 0
        source, test = (
            replace(samples, y=(numbers[samples.y] if self.class_names else samples.y.float())[:, None])
            for samples in (self.source, self.test)
        )
        notes = tuple(note for note in self.notes if not note.startswith(checks.LABELS))
        return replace(self, classes=1, source=source, test=test, class_names=(), notes=notes)

    def hold_out(self, fraction: float, seed: int) -> ArrayData:
        """Replaces the test data with a fraction of each client's training data, for tuning. New clients take no part.

        Time-ordered data is split by time. If clients mix rows of several original owners, each owner's rows are split.
        """
        if self.raw is not None and self.encoder is not None:
            return self.raw.hold_out(fraction, seed).encode(self.encoder)
        if self.unseen_clients:
            train, validation = (
                parts.first(len(self) - self.unseen_clients) for parts in (self.train, self.validation)
            )
            return replace(self, train=train, validation=validation, unseen_clients=0).hold_out(fraction, seed)
        if self.row_clients is None:
            rng = None if self.time_ordered else np.random.default_rng(seed)
            train, held_out = hold_out_fraction(self.train, fraction, rng)
        else:
            latest = self._latest_rows(self.row_clients, fraction)
            late = np.isin(self.train.rows, latest)
            overlaps = np.zeros(0, np.int64)
            if self.class_gap:
                overlaps = _overlapping_rows(latest, self.source.y.cpu().numpy(), self.class_gap)
            train, held_out = self.train.where(~late & ~np.isin(self.train.rows, overlaps)), self.train.where(late)
        tests = Parts(np.arange(len(held_out.rows)), held_out.offsets)
        test = replace(self.source, rows=torch.from_numpy(held_out.rows).to(self.source.y.device))
        return replace(self, train=train, test=test, tests=tests, origin=None)

    def _latest_rows(self, row_clients: Array, fraction: float) -> NDArray[np.int64]:
        """The latest fraction of each original owner's training rows, spread over its classes.

        An owner's classes follow one another in time (one activity after another). Its very last rows could be all
        the rows of one or two classes.
        """
        rows = np.sort(self.train.rows)
        owners = np.unique(row_clients[rows], return_inverse=True)[1].reshape(-1)
        groups = owners * MAX_CLASSES
        if self.has_classes:
            groups += self.source.y.cpu().numpy()[rows]
        _, groups, sizes = np.unique(groups, return_inverse=True, return_counts=True)
        lateness = np.empty(len(rows))  # 0 … 1: the position of a row among those of its owner and class
        lateness[np.argsort(groups, kind="stable")] = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes])
        order = np.lexsort((rows, lateness))
        by_owner = Parts.by_owner(rows[order], owners[order], int(owners.max(initial=0)) + 1)
        return hold_out_fraction(by_owner, fraction, None)[1].rows

    @cached_property
    def unseen_classes(self) -> frozenset[int]:
        """Classes of the global test set that no client trains on."""
        if not self.has_classes:
            return frozenset()
        train_labels = self.source.y.cpu()[torch.from_numpy(self.train.rows)]
        return frozenset(self.test.labels.tolist()) - frozenset(train_labels.tolist())

    def hold_out_classes(self, fraction: float, seed: int) -> ArrayData:
        """Like `hold_out`, but also moves all samples of a fraction of the classes to the test set."""
        if self.raw is not None and self.encoder is not None:
            return self.raw.hold_out_classes(fraction, seed).encode(self.encoder)
        data = self.hold_out(fraction, seed)
        labels = self.source.y.cpu().numpy()
        classes = np.unique(labels[data.train.rows])
        unseen = np.random.default_rng(seed).permutation(classes)[: max(1, round(fraction * len(classes)))]
        if len(unseen) == len(classes):
            raise DataError(f"cannot tune on data '{self.name}': clients train on one class only")
        moved = np.isin(labels[data.train.rows], unseen)
        test_rows = data.test.rows
        assert test_rows is not None
        rows = torch.cat([test_rows, torch.from_numpy(data.train.rows[moved]).to(test_rows.device)])
        return replace(data, train=data.train.where(~moved), test=replace(data.test, rows=rows))


def _kind_of(shape: tuple[int, ...], tokens: tuple[str, ...]) -> Kind:
    """What inputs of this shape and vocabulary are. Texts are encoded by words; other tokens come as numbers."""
    if tokens:
        return "text" if tokens[0] == text.PAD else "tokens"
    kinds: dict[int, Kind] = {2: "series", 3: "images"}
    return kinds.get(len(shape), "features")


def _targets_of(targets: Tensor) -> Targets:
    """What targets of this type, shape and content are."""
    if not targets.is_floating_point():
        return "classes"
    is_binary = targets.shape[1] > 1 and bool(((targets == 0) | (targets == 1)).all())
    return "labels" if is_binary else "numbers"


# --- user arrays ----------------------------------------------------------------------------------------------


def encode_samples(samples: Samples, encoder: Encoder) -> Samples:
    """The same samples with the features of an encoder as inputs."""
    return replace(samples, x=encoder(samples), shift=0.0, scale=1.0, is_text=False)


def from_arrays(
    x: ArrayLike | Tensor | list[str],
    y: ArrayLike | Tensor,
    *,
    test: tuple[ArrayLike | Tensor | list[str], ArrayLike | Tensor] | None = None,
    client_ids: ArrayLike | None = None,
    normalization: tuple[float, float] | None = None,
    channels: checks.Channels | None = None,
    class_names: Sequence[str] = (),
    name: str = "arrays",
    **settings: Any,
) -> ArrayData:
    """Builds federated data from inputs `x` and targets `y`.

    Targets are class labels (integers or names), numbers (floats, n or n × outputs) or sets of labels (a matrix of 0
    and 1). Names of classes are numbered in sorted order.

    `client_ids` names the owner of each sample. Each owner becomes a client; without it, the samples are partitioned.
    Without `test`, a fifth of each client's samples is held out. `class_names` are the names of labels 0, 1, 2, …;
    the columns of a pandas DataFrame keep theirs.

    Images are samples × channels × height × width. Without `channels` ("first" or "last"), a last dimension of 1, 3 or
    4 is taken for the channels. Byte inputs are pixels. `normalization` is their mean and standard deviation on a scale
    of 0 … 1, by default computed from the training data. Texts are converted to token ids. `settings` are those of
    `federate`: `clients`, `partition`, `alpha`, `fraction`, `validation` …
    """
    check_settings(settings)
    owners = None if client_ids is None else _read_owners(client_ids, name)
    if repeated := next((known for known in class_names if list(class_names).count(known) > 1), None):
        raise DataError(f"data '{name}' has two classes with the same name '{repeated}'")
    test_name = f"{name} (test)"
    columns = columns_of(x, name)
    inputs, test_set = _prepare_inputs(encode_frame(x, columns, name), name), None
    check_index(x, y, name)
    (y, *test_labels), class_names = number_classes([y, *([] if test is None else test[1:])], class_names, name)
    targets = convert_targets(y, name)
    if test is not None:
        check_index(*test, test_name)
        test_x = _prepare_inputs(encode_frame(test[0], columns, test_name), test_name)
        test_set = test_x, convert_targets(test_labels[0], test_name)
    if class_names and targets.dtype.kind != "f" and (largest := int(targets.max(initial=0))) >= len(class_names):
        raise DataError(f"data '{name}' has label {largest}, but only {len(class_names)} class names")
    raw = RawDataset(
        inputs,
        targets,
        test_set,
        owners,
        class_names=tuple(class_names),
        normalization=normalization,
        columns=columns,
        notes=describe_frame(x, columns),
    )
    raw = checks.name_labels(checks.check_inputs(raw, channels, name))
    if owners is not None:
        settings["partition"] = "natural"
    return federate(raw, name=name, **settings)


def _read_owners(client_ids: ArrayLike, name: str) -> Array:
    """The owner of each sample; DataError if one is missing."""
    owners = np.asarray(client_ids)
    values = owners.tolist() if owners.dtype.kind in "OfUT" and owners.ndim == 1 else []
    if missing := [sample for sample, owner in enumerate(values) if checks.is_missing(owner)]:
        raise DataError(f"data '{name}' has no client id for {len(missing)} samples (the first: sample {missing[0]})")
    try:
        np.unique(owners)
    except TypeError:
        raise DataError(f"data '{name}' has client ids of several types (expected: names or integers)") from None
    return owners


def number_classes(
    parts: Sequence[ArrayLike | Tensor], class_names: Sequence[str], name: str
) -> tuple[list[ArrayLike | Tensor], tuple[str, ...]]:
    """Numbers labels that are names, or integers < 0, and returns the names. Other labels stay as they are.

    `parts` are the labels of training and test samples.
    """
    for part in parts:
        if not isinstance(part, Tensor):
            checks.check_missing_labels(np.asarray(part), class_names, name)
    if not class_names and any(map(_has_negative, parts)):
        parts = [np.asarray(part).reshape(-1).astype(str) for part in parts]
    if not _has_names(parts[0]):
        return [*parts], tuple(class_names)
    named = [_read_names(part, name) for part in parts]
    known = tuple(class_names) or tuple(sorted(set().union(*named)))
    return [_number_names(labels, known, name) for labels in named], known


def _has_negative(y: ArrayLike | Tensor) -> bool:
    """True if the labels are integers, and some are < 0."""
    labels = np.asarray(y.cpu() if isinstance(y, Tensor) else y)
    is_column = labels.ndim == 1 or (labels.ndim == 2 and labels.shape[1] == 1)
    return labels.dtype.kind == "i" and is_column and bool((labels < 0).any())


def _has_names(y: ArrayLike | Tensor) -> bool:
    """True if the labels are names of classes: strings, or a categorical of pandas."""
    labels = np.empty(0) if isinstance(y, Tensor) else np.asarray(y)
    return labels.dtype.kind == "U" or (labels.dtype == object and any(isinstance(label, str) for label in labels))


def _read_names(y: ArrayLike | Tensor, name: str) -> list[str]:
    """The class of each sample by name; DataError if one is no string, such as a missing value."""
    labels: list[Any] = np.asarray(y).tolist()
    for sample, label in enumerate(labels):
        if not isinstance(label, str):
            raise DataError(f"data '{name}' has label {label!r} in sample {sample} (expected: names or integers)")
    return labels


def _number_names(labels: Sequence[str], class_names: Sequence[str], name: str) -> Rows:
    """The number of each label among the names of the classes."""
    numbers = {class_name: number for number, class_name in enumerate(class_names)}
    if unknown := set(labels) - numbers.keys():
        raise DataError(f"data '{name}' has label '{min(unknown)}' (allowed: {', '.join(class_names)})")
    return np.array([numbers[label] for label in labels], np.int64)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises SettingError for a setting that `federate` does not have."""
    known = [name for name in signature(federate).parameters if name not in ("raw", "name", "origin")]
    for name in settings:
        if name not in known:
            raise unknown_name("setting of the data", name, known)


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
    standardize: bool = False,
    unseen_clients: int = 0,
    seed: int = 0,
    name: str = "arrays",
    origin: Mapping[str, Any] | None = None,
) -> ArrayData:
    """Partitions a data set among clients.

    `partition` is one of iid, dirichlet (with `alpha` and `min_samples_per_client`), dirichlet-pairs, pathological
    (`classes_per_client`), shards (`shards` per client), quantity, and natural (by `client_ids`).

    `fraction` keeps a fraction of the training samples. `validation` is the fraction of each client's training samples
    to hold out. For texts, `vocab_size` limits the vocabulary and `max_length` the tokens per text. For tables,
    `standardize` brings each column to mean 0 and standard deviation 1 before the first round.

    `unseen_clients` clients, the last ones, never train, and keep a fifth of their training samples: the earliest if
    samples are in temporal order, otherwise random ones. They join after the last round.

    If the classes are split, all samples are partitioned first. Each client then trains on its base classes,
    validates on its validation classes, and tests on its novel classes.
    """
    _check_same_length(name, raw.x, raw.y)
    if raw.test is not None:
        _check_same_length(f"{name} (test)", *raw.test)
    if raw.client_ids is not None and len(raw.client_ids) != len(raw.y):
        raise DataError(f"data '{name}' has {len(raw.y)} samples and {len(raw.client_ids)} client ids")
    if raw.split is not None and validation:
        raise SettingError(f"validation must be 0, got {validation:g}: data '{name}' is split by classes")
    if partition == "natural":
        if raw.client_ids is None:
            raise SettingError(f"partition = natural needs client ids, but data '{name}' has none")
        if raw.test_client_ids is not None and set(raw.test_client_ids.tolist()) - set(raw.client_ids.tolist()):
            raw = raw.merge_test()  # the owners of test samples become clients, too
    rng = np.random.default_rng(seed)
    rows = np.arange(len(raw.y))
    if _is_windowed(raw) and raw.client_ids is not None:
        rows = np.flatnonzero(raw.client_ids >= 0)
    owners = None if raw.client_ids is None else np.unique(raw.client_ids[rows])
    test_rows = rows[:0]
    if raw.test is None and raw.split is None:
        rows, test_rows = hold_out_rows(raw, rows, TEST_FRACTION)
    raw, rows = _subsample(raw, rows, fraction, rng)
    targets = convert_targets(raw.y, name)
    if raw.y.ndim == 2 and raw.y.dtype.kind == "f":  # numbers to predict, even if all of them are integers
        targets = raw.y.astype(np.float32)
    test_targets = targets[test_rows] if raw.test is None else convert_targets(raw.test[1], f"{name} (test)")
    labels, test_labels = targets, test_targets
    if targets.dtype.kind == "f" or test_targets.dtype.kind == "f":
        targets, test_targets = _match_targets(targets, test_targets, name)
        labels, test_labels = (np.zeros(len(part), np.int64) for part in (targets, test_targets))  # one class
        if partition not in CLASSLESS_PARTITIONS:
            raise SettingError(
                f"partition = {partition} needs classes, but the targets of data '{name}' are not class labels "
                f"0, 1, 2, … (allowed: {', '.join(CLASSLESS_PARTITIONS)})"
            )
    if partition == "natural":
        assert raw.client_ids is not None and owners is not None
        test_owners = raw.client_ids[test_rows] if raw.test is None else raw.test_client_ids
        train = Parts.by_owner(rows, np.searchsorted(owners, raw.client_ids[rows]), len(owners))
        if test_owners is None:
            tests = partition_like(train, labels, test_labels, rng)
        else:
            known = np.flatnonzero(np.isin(test_owners, owners))
            tests = Parts.by_owner(known, np.searchsorted(owners, test_owners[known]), len(owners))
    else:
        spec = PartitionSpec(partition, clients, alpha, min_samples_per_client, classes_per_client, shards)
        train, tests = partition_labels(spec, labels[rows], test_labels, seed)
        train = Parts(rows[train.rows], train.offsets)
    if raw.time_ordered:
        train = _sort_rows(train)
    held_out = Parts(np.zeros(0, np.int64), np.zeros(len(train.sizes) + 1, np.int64))
    if raw.split is not None:
        train, held_out, tests, test_rows = _split_by_class(train, labels, raw.split)
    by_source = (
        raw.time_ordered and raw.client_ids is not None and (partition != "natural" or raw.class_gap is not None)
    )
    if validation and by_source:  # the latest rows of each original owner, wherever the partition puts them
        rest, latest = hold_out_rows(raw, rows, validation)
        train, held_out = (train.where(np.isin(train.rows, part)) for part in (rest, latest))
    elif validation:
        train, held_out = hold_out_fraction(train, validation, None if raw.time_ordered else rng)
    if unseen_clients:
        train = _thin_unseen_clients(
            train, unseen_clients, None if raw.time_ordered else np.random.default_rng(seed), name
        )
    source, global_test, tokens = _build_samples(raw, targets, test_targets, train, name, vocab_size, max_length)
    if raw.test is None:
        global_test = replace(source, rows=torch.from_numpy(test_rows))
    classes = max(len(raw.class_names), int(max(labels.max(), test_labels.max(initial=0))) + 1)
    if targets.ndim == 2:
        classes = targets.shape[1]
    if raw.split is not None:
        classes = raw.split[0]
    row_clients = raw.client_ids if by_source else None
    notes = raw.notes
    if (origin is None or ":" in name) and not _is_windowed(raw):  # the user's own data
        x: Inputs = source.x
        test_x: Inputs = global_test.x
        if isinstance(raw.x, list):  # texts may become equal when they are encoded
            x, test_x = raw.x, raw.x if raw.test is None else list(raw.test[0])
        notes += checks.describe_split(x, train.rows, test_x, test_rows if raw.test is None else range(len(test_x)))
        if raw.columns and not standardize:
            notes += checks.describe_scales(source.x[train.rows], raw.columns)
        if raw.client_ids is not None:
            notes += checks.describe_clients(raw.client_ids, partition)
        if targets.dtype.kind != "f" and raw.split is None and not raw.tokens:
            notes += checks.describe_labels(labels[train.rows], test_labels, raw.class_names)
    if standardize and (tokens or len(source.x.shape) != 2):
        shape = tuple(source.x.shape[1:])
        raise SettingError(
            f"standardize is for tables, but data '{name}' has {_kind_of(shape, tokens)} of shape {shape}"
        )
    facts = raw.class_names, raw.time_ordered, raw.split is not None, row_clients, raw.columns, standardize, notes
    data = ArrayData(name, classes, source, train, held_out, global_test, tests, origin, tokens, *facts)
    return replace(data, unseen_clients=unseen_clients, class_gap=raw.class_gap or 0)


def _thin_unseen_clients(train: Parts, count: int, rng: np.random.Generator | None, name: str) -> Parts:
    """Keeps a fraction of the training samples of the last `count` clients, at least one of each."""
    if count >= len(train.sizes):
        raise SettingError(
            f"unseen_clients must be < {len(train.sizes)}, the number of clients of '{name}', got {count}"
        )
    kept = hold_out_fraction(train, 1 - UNSEEN_CLIENT_FRACTION, rng)[0]
    trains = train.owners < len(train.sizes) - count
    return train.where(trains | np.isin(train.rows, kept.rows))


def _split_by_class(parts: Parts, labels: Rows, split: tuple[int, int, int]) -> tuple[Parts, Parts, Parts, Rows]:
    """Splits each client's samples into base, validation and novel classes.

    Also returns all rows of novel classes; the third `Parts` holds positions in them.
    """
    group = np.searchsorted(np.cumsum(split), labels[parts.rows], side="right")
    base, validation, novel = (parts.where(group == number) for number in range(3))
    rows = np.sort(novel.rows)
    return base, validation, Parts(np.searchsorted(rows, novel.rows), novel.offsets), rows


def hold_out_rows(raw: RawDataset, rows: Rows, fraction: float) -> tuple[Rows, Rows]:
    """Holds out a fraction of each owner's rows. Returns the remaining and the held-out rows.

    The result does not depend on the seed of the partition. Time-ordered data is split by time; with `class_gap`, each
    class of each owner is. Overlapping windows of a text are thinned out until the held-out ones no longer overlap.
    """
    owners = np.zeros(len(rows), np.int64)
    if raw.client_ids is not None:
        owners = np.unique(raw.client_ids[rows], return_inverse=True)[1].reshape(-1)
    if raw.class_gap is not None:
        owners = np.unique(owners * MAX_CLASSES + raw.y[rows], return_inverse=True)[1].reshape(-1)
    by_owner = Parts.by_owner(rows, owners, int(owners.max(initial=0)) + 1)
    rest, held_out = hold_out_fraction(by_owner, fraction, None if raw.time_ordered else np.random.default_rng(0))
    held_out_rows = np.sort(held_out.rows)
    if _is_windowed(raw):
        held_out_rows = held_out_rows[:: raw.x.shape[1]]  # type: ignore[union-attr]
    rest_rows = np.sort(rest.rows)
    if raw.class_gap:
        rest_rows = np.setdiff1d(rest_rows, _overlapping_rows(held_out_rows, raw.y, raw.class_gap))
    return rest_rows, held_out_rows


def _overlapping_rows(held_out: Rows, labels: NDArray[Any], gap: int) -> Rows:
    """The rows of the same class that lie up to `gap` before a held-out row: windows do not cross between classes."""
    distances = np.arange(1, gap + 1)[:, None]
    neighbors = held_out - distances
    overlap = (neighbors >= 0) & (labels[neighbors] == labels[held_out])
    return np.asarray(neighbors[overlap])


def _sort_rows(parts: Parts) -> Parts:
    """Sorts the rows of each client."""
    return Parts(parts.rows[np.lexsort((parts.rows, parts.owners))], parts.offsets)


def _is_windowed(raw: RawDataset) -> bool:
    """True if inputs are overlapping windows of one long text. They must stay views: a copy would be huge."""
    return isinstance(raw.x, Tensor) and not raw.x.is_contiguous()


def _subsample(raw: RawDataset, rows: Rows, fraction: float, rng: np.random.Generator) -> tuple[RawDataset, Rows]:
    """Keeps a random fraction of the training rows. Also shrinks the arrays if they hold only training rows."""
    if not 0 < fraction <= 1:
        raise SettingError(f"fraction must be > 0 and <= 1, got {fraction:g}")
    if fraction == 1:
        return raw, rows
    subset = np.sort(rng.permutation(rows)[: round(len(rows) * fraction)])
    if not len(subset):
        raise SettingError(f"fraction = {fraction:g} keeps none of {len(rows)} samples; raise it")
    if raw.test is None or isinstance(raw.x, list):
        return raw, subset
    return raw.select(subset), np.arange(len(subset))


def _build_samples(
    raw: RawDataset, targets: Array, test_targets: Array, train: Parts, name: str, vocab_size: int, max_length: int
) -> tuple[Samples, Samples, tuple[str, ...]]:
    """Converts training and test data to tensors. Also returns the vocabulary of texts."""
    x, test_x, tokens = raw.x, None if raw.test is None else raw.test[0], raw.tokens
    if isinstance(x, list):
        tokens = text.build_vocabulary((x[row] for row in train.rows), vocab_size)
        x = text.encode(x, tokens, max_length)
        test_x = None if test_x is None else text.encode(list(test_x), tokens, max_length)
    inputs = convert_inputs(x, name, bool(tokens))
    shift, scale = (0.0, 1.0) if tokens else _compute_normalization(inputs, train.rows, raw.normalization)
    source = Samples(inputs, torch.from_numpy(targets), None, shift, scale, bool(tokens))
    if test_x is None:
        return source, source, tokens
    test_inputs = convert_inputs(test_x, f"{name} (test)", bool(tokens))
    if test_inputs.shape[1:] != inputs.shape[1:] or test_inputs.dtype != inputs.dtype:
        raise DataError(
            f"data '{name}' has training inputs of {_describe(inputs)}, but test inputs of {_describe(test_inputs)}"
        )
    global_test = replace(source, x=test_inputs, y=torch.from_numpy(test_targets))
    return source, global_test, tokens


def _prepare_inputs(x: Any, name: str) -> list[str] | Tensor:
    """Returns a list of texts unchanged, and converts anything else to a tensor."""
    return x if isinstance(x, list) and x and all(isinstance(value, str) for value in x) else convert_inputs(x, name)


def from_clients(clients: Sequence[Any], **settings: Any) -> ArrayData:
    """Builds federated data from a list with the samples of each client: pairs (x, y), or torch Datasets.

    `settings` are those of `from_arrays`. Clients without samples are kept.
    """
    clients, columns = _match_columns(clients)
    pairs = [_as_pair(samples, client) for client, samples in enumerate(clients)]
    non_empty = [pair for pair in pairs if len(pair[1])]
    if not non_empty:
        raise DataError("no client in the list has samples")
    client_ids = np.repeat(np.arange(len(pairs)), [len(y) for _, y in pairs])
    first = non_empty[0][0]
    for client, (x, y) in enumerate(pairs):
        _check_same_length(f"client {client}", x, y)
        if len(x) and (x.shape[1:] != first.shape[1:] or (x.dtype == np.uint8) != (first.dtype == np.uint8)):
            raise DataError(f"client {client} has inputs of {_describe(x)}, but other clients have {_describe(first)}")
    x, y = (np.concatenate([pair[part] for pair in non_empty]) for part in (0, 1))
    inputs = x.tolist() if x.dtype.kind == "U" else x
    if columns:
        import pandas

        inputs = pandas.DataFrame(inputs, columns=columns)
    data = from_arrays(inputs, y, client_ids=client_ids, partition="natural", **settings)
    present = np.unique(client_ids)

    def add_empty_clients(parts: Parts) -> Parts:
        offsets = np.zeros(len(pairs) + 1, np.int64)
        offsets[present + 1] = parts.sizes
        return Parts(parts.rows, np.cumsum(offsets))

    train, held_out, tests = map(add_empty_clients, (data.train, data.validation, data.tests))
    return replace(data, train=train, validation=held_out, tests=tests)


def from_dataset(dataset: Any, **settings: Any) -> ArrayData:
    """Builds federated data from a torch Dataset of (input, target) pairs. `settings` are those of `from_arrays`.

    Inputs may be tensors, arrays or images; targets must be numbers. The Dataset is read once.
    """
    if not len(dataset):
        raise DataError("the Dataset has no samples")
    return from_arrays(*_read_dataset(dataset), **settings)


def _read_dataset(dataset: Any) -> tuple[Array, Array]:
    pairs = [dataset[index] for index in range(len(dataset))]
    inputs, targets = ([np.asarray(pair[part]) for pair in pairs] for part in (0, 1))
    for kind, arrays in (("inputs", inputs), ("targets", targets)):
        if len(shapes := sorted({array.shape for array in arrays})) > 1:
            raise DataError(f"the Dataset has {kind} of different shapes: {shapes[0]}, {shapes[1]} …")
    return np.stack(inputs), np.stack(targets)


def _match_columns(clients: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """Puts the columns of all DataFrames in the order of the first one. Also returns their names.

    DataError if the columns differ, or if only some clients have DataFrames.
    """
    pairs = [isinstance(samples, tuple | list) and len(samples) == 2 for samples in clients]
    frames = [client for client, samples in enumerate(clients) if pairs[client] and is_frame(samples[0])]
    if not frames:
        return [*clients], []
    columns = columns_of(clients[frames[0]][0], f"client {frames[0]}")
    names = [column.name for column in columns]
    matched: list[Any] = []
    for client, samples in enumerate(clients):
        if client not in frames:
            if pairs[client] and not len(samples[1]):
                matched.append(samples)
                continue
            raise DataError(f"client {client} has no DataFrame, but client {frames[0]} has one: use one kind for all")
        x, y = samples
        check_index(x, y, f"client {client}")
        if others := [str(column) for column in x.columns if str(column) not in names]:
            problem = f"has the {'column' if len(others) == 1 else 'columns'} {checks.list_names(others)}"
            raise DataError(f"client {client} {problem}, but client {frames[0]} has: {', '.join(names)}")
        matched.append((encode_frame(x, columns, f"client {client}"), y))
    return matched, names


def _as_pair(samples: Any, client: int) -> tuple[Array, Array]:
    """Returns the inputs and labels of one client, given as a pair or as a torch Dataset."""
    if isinstance(samples, Dataset):
        return _read_dataset(samples) if len(samples) else (np.empty(0), np.empty(0, np.int64))  # type: ignore[arg-type]
    if not isinstance(samples, tuple | list) or len(samples) != 2:
        raise DataError(f"client {client} must be a pair (x, y) or a torch Dataset, got {type(samples).__name__}")
    try:
        return np.asarray(samples[0]), np.asarray(samples[1])
    except ValueError as error:
        raise DataError(f"client {client} has inputs or labels of different shapes: {error}") from error


def convert_inputs(x: ArrayLike | Tensor, name: str, tokens: bool = False) -> Tensor:
    """Converts inputs to a tensor of bytes or float32; with `tokens`, integers are token ids and become int64.

    Byte images without channels get one channel.
    """
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
            raise DataError(
                f"data '{name}' has NaN or infinity in sample {first} ({int((~finite).sum())} samples in total)"
            )
    elif inputs.dtype != torch.uint8:
        inputs = inputs.long() if tokens else inputs.float()
    return inputs.unsqueeze(1) if inputs.ndim == 3 and inputs.dtype == torch.uint8 else inputs


def convert_targets(y: ArrayLike | Tensor, name: str) -> Array:
    """Converts targets to class labels if they are, and otherwise to floats (samples × outputs).

    Floats are class labels if all of them are 0, 1, 2, … A matrix of floats, or of 0 and 1, has several outputs.
    """
    targets = np.asarray(y.cpu() if isinstance(y, Tensor) else y)
    targets = np.array(targets.tolist()) if targets.dtype == object else targets
    is_matrix = targets.ndim == 2 and targets.shape[1] > 1
    is_float = targets.dtype.kind == "f"
    if is_matrix and targets.dtype.kind in "iub" and np.isin(targets, (0, 1)).all():
        return targets.astype(np.float32)
    if not is_float or targets.ndim not in (1, 2):
        return convert_labels(targets, name)
    if not np.isfinite(targets).all():
        raise DataError(f"data '{name}' has NaN or infinity among its targets")
    if not is_matrix and ((targets % 1 == 0) & (targets >= 0) & (targets < MAX_CLASSES)).all():
        return convert_labels(targets, name)
    return targets.astype(np.float32).reshape(len(targets), -1)


def _match_targets(targets: Array, test_targets: Array, name: str) -> tuple[Array, Array]:
    """Both parts as floats, even if all targets of one part are integers."""
    train, test = (part.astype(np.float32).reshape(len(part), -1) for part in (targets, test_targets))
    if train.shape[1] != test.shape[1]:
        raise DataError(
            f"data '{name}' has {train.shape[1]} training targets per sample, but {test.shape[1]} for testing"
        )
    return train, test


def convert_labels(y: ArrayLike | Tensor, name: str) -> NDArray[np.int64]:
    """Converts class labels to a flat array of integers >= 0."""
    labels = np.asarray(y.cpu() if isinstance(y, Tensor) else y)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise DataError(f"data '{name}' has labels of shape {labels.shape} (expected: one integer per sample)")
    is_number = labels.dtype.kind in "iufb"
    with np.errstate(invalid="ignore"):
        integers = labels.astype(np.int64) if is_number else np.full(len(labels), -1)
    wrong = np.flatnonzero((integers < 0) | (integers != labels) if is_number else integers < 0)
    if len(wrong):
        problem = f"label {labels[wrong[0]]} in sample {wrong[0]} (expected: one integer per sample, >= 0)"
        raise DataError(f"data '{name}' has labels that are not class labels: {problem}")
    if (largest := integers.max(initial=0)) >= MAX_CLASSES:
        raise DataError(f"labels of data '{name}' must be < {MAX_CLASSES}, got {largest}")
    return integers


def _describe(inputs: Tensor | Array) -> str:
    return f"{str(inputs.dtype).removeprefix('torch.')} {tuple(inputs.shape[1:])}"


def _check_same_length(name: str, x: Any, y: Any) -> None:
    if len(x) != len(y):
        raise DataError(f"data '{name}' has {len(x)} inputs and {len(y)} labels")


def _compute_normalization(inputs: Tensor, rows: Rows, known: tuple[float, float] | None) -> tuple[float, float]:
    """Shift and scale of byte inputs, from the training rows alone; the identity for other inputs."""
    if inputs.dtype != torch.uint8:
        return 0.0, 1.0
    if known is None:
        counts = torch.bincount(inputs[torch.from_numpy(rows)].reshape(-1), minlength=256).double()
        values = torch.arange(256).double() / 255
        mean = float((counts * values).sum() / counts.sum())
        std = float(((counts * (values - mean) ** 2).sum() / counts.sum()).sqrt())
        known = mean, std or 1.0
    return 255 * known[0], 1 / (255 * known[1])
