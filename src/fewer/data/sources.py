"""Data by name: sets that the package carries, sets in a data directory, and files in formats that people have."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from fewer.choices import Partition
from fewer.data import recommendation
from fewer.data.cache import cached
from fewer.data.class_split import OPTIONS, set_apart
from fewer.data.episodes import by_class
from fewer.data.federated import ArrayData, federate
from fewer.data.partition import Division
from fewer.data.raw_dataset import Array, Inputs, RawDataset
from fewer.errors import DataError, SettingError, unknown
from fewer.registry import FORMATS


class DataSource(NamedTuple):
    """A set in a data directory: how it is read, where it lies there, and what is special about it."""

    format: str
    path: str
    text: str
    options: Mapping[str, Any] = {}
    normal: tuple[float, float] | None = None
    in_time: bool = False


_FASHION = (0.2860, 0.3530)
FILES = {
    "mnist": DataSource("idx", "mnist", "handwritten digits, 28×28", normal=(0.1307, 0.3081)),
    "qmnist": DataSource("qmnist", "qmnist", "MNIST with its writers as clients", normal=(0.1307, 0.3081)),
    "fashion-mnist": DataSource("idx", "fashion-mnist", "Fashion-MNIST, 28×28", normal=_FASHION),
    "cifar10": DataSource("cifar10", "cifar10", "CIFAR-10, 3×32×32"),
    "cifar100": DataSource("cifar100", "cifar100", "CIFAR-100, 100 fine classes"),
    "cifar100-coarse": DataSource("cifar100", "cifar100", "CIFAR-100, 20 coarse classes", {"labels": "coarse"}),
    "fc100": DataSource(
        "cifar100", "cifar100", "FC100: CIFAR-100 split 60/20/20", {"labels": "fc100", "split": "60/20/20"}
    ),
    "omniglot": DataSource("omniglot", "omniglot", "characters of 50 alphabets by 20 drawers"),
    "femnist": DataSource("leaf-femnist", "femnist", "LEAF's FEMNIST, 62 classes by writer"),
    "leaf-shakespeare": DataSource(
        "leaf-shakespeare", "leaf-shakespeare", "LEAF's Shakespeare, next character by role"
    ),
    "sent140": DataSource("leaf-sent140", "sent140", "LEAF's Sent140, sentiment of tweets by author"),
    "shakespeare": DataSource("plays", "shakespeare/plays.tar.gz", "plays, next character by role"),
    "20newsgroups": DataSource("newsgroups", "20newsgroups/20news-bydate.tar.gz", "posts in 20 groups by author"),
    "huffpost": DataSource("jsonl", "huffpost/huffpost.jsonl", "headlines in 41 classes", {"text": "raw"}),
    "movielens-100k": DataSource("movielens", "movielens-100k", "films that users rated, in time"),
    "hapt": DataSource("npz", "hapt/hapt.npz", "activities from a smartphone, by subject", in_time=True),
    "pamap2": DataSource("pamap2", "pamap2", "activities from body sensors, by subject"),
    "har": DataSource("har", "har", "UCI HAR activities, by subject"),
}
SLOW = ("omniglot", "leaf-femnist", "leaf-shakespeare", "folder", "pamap2")
"""Formats whose arrays are kept in the cache once they have been read."""


def load(
    name: str,
    *,
    directory: str | Path | None = None,
    data_options: Mapping[str, Any] | None = None,
    seed: int = 0,
    **settings: Any,
) -> ArrayData:
    """The named data, divided among clients.

    `name` is one of `NAMES`, or FORMAT:PATH with one of `FORMATS` (idx:DIR, npz:FILE, csv:FILE, folder:DIR …).
    Files are looked for in `directory`, by default $FEWER_DATA. `data_set` holds the options of the format or set
    (csv: label, client, text; folder: size …), and for any of them `classes`, the only ones that are kept ("0-9,20"),
    `unseen`, those that nobody trains on: all their samples are for testing, and `split`, which divides the classes
    into base, validation and novel ones (20/5/16). The other settings are those of `federate`.
    """
    Division(**{key: settings[key] for key in ("clients", "alpha") if key in settings}).check(seed)
    if (partition := settings.get("partition", "iid")) not in get_args(Partition):
        raise unknown("partition", partition, get_args(Partition))
    raw = read(name, directory, **(data_options or {}))
    origin = {"name": name, "directory": None if directory is None else str(directory), "seed": seed, **settings}
    if data_options:
        origin["data_set"] = dict(data_options)
    return federate(raw, name=name, seed=seed, origin=origin, **settings)


def read(name: str, directory: str | Path | None = None, **options: Any) -> RawDataset:
    """The named data, not yet divided among clients."""
    options = {**(FILES[name].options if name in FILES else {}), **options}
    split = options.pop("split", None)
    own = {key: value for key, value in options.items() if key not in OPTIONS}
    raw = _read(name, directory, own)
    if split is not None and "unseen" in options:
        raise SettingError(f"split and unseen of data '{name}' (allowed: one of them)")
    if len(own) < len(options):
        raw = set_apart(raw, options.get("classes"), options.get("unseen"), name)
    return raw if split is None else by_class(raw, split, name)


def _read(name: str, directory: str | Path | None, options: Mapping[str, Any]) -> RawDataset:
    kind, colon, where = name.partition(":")
    if colon:
        if kind not in FORMATS:
            raise unknown("data format", kind, FORMATS)
        return _from_files(kind, _find(where, directory), options)
    if name in EMBEDDED:
        _check_options(EMBEDDED[name], options, name)
        return EMBEDDED[name](**options)
    if name in FILES:
        known = FILES[name]
        raw = _from_files(known.format, _find(known.path, directory), options)
        return replace(raw, normal=known.normal, in_time=raw.in_time or known.in_time)
    raise unknown("data", name, [*NAMES, *(f"{kind}:PATH" for kind in FORMATS)])


def inputs(
    name: str, directory: str | Path | None = None, options: Mapping[str, Any] | None = None
) -> tuple[Inputs, Array | None]:
    """Inputs to predict for, and labels if there are any: the test part of a set that has one, or else everything."""
    if name.startswith("npz:"):
        path = _find(name.removeprefix("npz:"), directory)
        try:
            with np.load(path, allow_pickle=False) as arrays:
                if "x" in arrays and "y" not in arrays:
                    return arrays["x"], None
        except Exception as error:  # whatever is wrong with it, the reader below says it
            if not isinstance(error, OSError | ValueError | TypeError | KeyError | EOFError):
                raise
    raw = read(name, directory, **(options or {}))
    return raw.test if raw.test is not None else (raw.x, raw.y)


def _from_files(format: str, path: Path, options: Mapping[str, Any]) -> RawDataset:
    reader: Callable[..., RawDataset] = FORMATS[format]
    _check_options(reader, options, format)
    if format not in SLOW:
        return reader(path, **options)
    return _through_cache(format, path, options)


def _through_cache(format: str, path: Path, options: Mapping[str, Any]) -> RawDataset:
    """Read once; later the arrays are mapped from the cache, so that only what is used comes into memory."""
    members = sorted(path.rglob("*")) if path.is_dir() else [path]
    state = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in members if file.is_file()]
    key = hashlib.sha256(repr((format, sorted(options.items()), state)).encode()).hexdigest()[:16]
    parts = ("x", "y", "test_x", "test_y", "client", "test_client", "names", "tokens", "in_time")

    def make() -> dict[str, Any]:
        raw = FORMATS[format](path, **options)
        test = raw.test or (None, None)
        values = (raw.x, raw.y, *test, raw.client_ids, raw.test_client_ids, raw.names, raw.tokens, raw.in_time)
        return {part: np.asarray(value) for part, value in zip(parts, values, strict=True) if value is not None}

    arrays = cached(f"{format}-{key}", make)
    x, y, test_x, test_y, client_ids, test_client_ids, names, tokens, in_time = (arrays.get(part) for part in parts)
    assert x is not None and y is not None and names is not None and tokens is not None
    return RawDataset(
        x,
        y,
        None if test_x is None or test_y is None else (test_x, test_y),
        client_ids,
        test_client_ids,
        tuple(str(name) for name in names),
        tuple(str(token) for token in tokens),
        in_time=bool(in_time),
    )


def _check_options(reader: Callable[..., RawDataset], options: Mapping[str, Any], name: str) -> None:
    allowed = [key for key in inspect.signature(reader).parameters if key != "path"]
    for key in options:
        if key not in allowed:
            raise unknown(f"option of data {name}", key, [*allowed, *OPTIONS])


# --- sets that the package carries ------------------------------------------------------------------------------


def _digits() -> RawDataset:
    """1,797 digits of 8×8 from scikit-learn; every fifth is for testing."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = (x.reshape(-1, 1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    last = np.arange(len(y)) % 5 == 4
    return RawDataset(x[~last], y[~last], (x[last], y[last]), names=tuple("0123456789"))


_CLOTHES = ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


def _fashion_mini() -> RawDataset:
    """600 training and 100 test images of each of the ten classes of Fashion-MNIST."""
    with files("fewer.data").joinpath("embedded/fashion-mini.npz").open("rb") as file, np.load(file) as arrays:
        test = arrays["x_test"], arrays["y_test"]
        return RawDataset(arrays["x"], arrays["y"], test, names=_CLOTHES, normal=_FASHION)


def _glyphs(size: int = 28) -> RawDataset:
    """62 letters and digits by 120 writers, drawn once and kept in the cache."""
    from fewer.data import glyphs

    if size not in (28, 32):
        raise SettingError(f"glyphs: size = {size} (allowed: 28 or 32)")
    made = cached(f"glyphs-{size}", lambda: dict(zip(("x", "y", "client"), glyphs.glyphs(size), strict=True)))
    return RawDataset(made["x"], made["y"], client_ids=made["client"], names=tuple(glyphs.CLASSES), normal=(0.13, 0.26))


def _looks(source: str = "fashion") -> RawDataset:
    """The same classes under four looks (plain, inverted, blurred, rotated): each image under one, its client."""
    from fewer.data import glyphs

    if source not in ("fashion", "glyphs"):
        raise unknown("source of looks", source, ("fashion", "glyphs"))
    if source == "fashion":
        raw = _fashion_mini()
        assert raw.test is not None
        x, y = np.concatenate([raw.x, raw.test[0]]), np.concatenate([raw.y, raw.test[1]])
    else:
        raw = _glyphs()
        x, y = np.asarray(raw.x), raw.y
    look = np.random.default_rng(0).integers(4, size=len(y))
    seen = np.empty_like(x)
    for number in range(4):
        seen[look == number] = glyphs.looks(x[look == number])[number]
    return RawDataset(seen, y, client_ids=np.array(glyphs.LOOKS)[look], names=raw.names, normal=(0.5, 0.5))


def _shakespeare_mini() -> RawDataset:
    """Twelve plays by role: the next character after each 80."""
    with as_file(files("fewer.data").joinpath("embedded/shakespeare-mini.tar.gz")) as path:
        raw: RawDataset = FORMATS["plays"](path)
    return raw


def _usage(own_classes: bool = False) -> RawDataset:
    """Generated: which of 30 services each of 40 users used next; with own=true numbered by user."""
    return recommendation.of_users(recommendation.usage(), own_classes)


EMBEDDED: dict[str, Callable[..., RawDataset]] = {
    "digits": _digits,
    "fashion-mini": _fashion_mini,
    "glyphs": _glyphs,
    "looks": _looks,
    "shakespeare-mini": _shakespeare_mini,
    "usage": _usage,
}
NAMES = (*EMBEDDED, *FILES)


def _find(where: str, directory: str | Path | None) -> Path:
    """A path as given, or below the data directory."""
    root = directory or os.environ.get("FEWER_DATA")
    for path in [Path(where), *([Path(root) / where] if root else [])]:
        if path.exists():
            return path
    hint = f"in {root}" if root else "here, and no data directory is set (--data-dir, FEWER_DATA)"
    raise DataError(f"no '{where}' {hint}")
