"""Data by name: built-in data sets, data sets in a data directory, and files in common formats."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from fewer.choices import Partition
from fewer.data import recommendation
from fewer.data.cache import load_or_build
from fewer.data.class_split import OPTIONS, split_seen_unseen
from fewer.data.episodes import apply_class_split
from fewer.data.federated import ArrayData, check_settings, federate
from fewer.data.partition import PartitionSpec
from fewer.data.raw_dataset import Array, Inputs, RawDataset
from fewer.errors import DataError, SettingError, unknown_name
from fewer.registry import FORMATS


class DataSource(NamedTuple):
    """A data set in a data directory: its format, its path there, and its defaults."""

    format: str
    path: str
    description: str
    options: Mapping[str, Any] = {}
    normalization: tuple[float, float] | None = None
    time_ordered: bool = False


_FASHION = (0.2860, 0.3530)
FILES = {
    "mnist": DataSource("idx", "mnist", "handwritten digits, 28×28", normalization=(0.1307, 0.3081)),
    "qmnist": DataSource("qmnist", "qmnist", "MNIST, by writer", normalization=(0.1307, 0.3081)),
    "fashion-mnist": DataSource("idx", "fashion-mnist", "Fashion-MNIST, 28×28", normalization=_FASHION),
    "cifar10": DataSource("cifar10", "cifar10", "CIFAR-10, 3×32×32"),
    "cifar100": DataSource("cifar100", "cifar100", "CIFAR-100, 100 fine classes"),
    "cifar100-coarse": DataSource("cifar100", "cifar100", "CIFAR-100, 20 coarse classes", {"labels": "coarse"}),
    "fc100": DataSource(
        "cifar100", "cifar100", "FC100: CIFAR-100 split 60/20/20", {"labels": "fc100", "split": "60/20/20"}
    ),
    "omniglot": DataSource("omniglot", "omniglot", "characters of 50 alphabets, by 20 drawers"),
    "femnist": DataSource("leaf-femnist", "femnist", "LEAF's FEMNIST: 62 classes, by writer"),
    "leaf-shakespeare": DataSource(
        "leaf-shakespeare", "leaf-shakespeare", "LEAF's Shakespeare: next character, by role"
    ),
    "sent140": DataSource("leaf-sent140", "sent140", "LEAF's Sent140: sentiment of tweets, by author"),
    "shakespeare": DataSource("plays", "shakespeare/plays.tar.gz", "plays: next character, by role"),
    "20newsgroups": DataSource("newsgroups", "20newsgroups/20news-bydate.tar.gz", "posts in 20 newsgroups, by author"),
    "huffpost": DataSource("jsonl", "huffpost/huffpost.jsonl", "headlines in 41 classes", {"text": "raw"}),
    "movielens-100k": DataSource("movielens", "movielens-100k", "films rated by users, in time order"),
    "hapt": DataSource("npz", "hapt/hapt.npz", "activities from a smartphone, by subject", time_ordered=True),
    "pamap2": DataSource("pamap2", "pamap2", "activities from body sensors, by subject"),
    "har": DataSource("har", "har", "UCI HAR activities, by subject"),
}
SLOW = ("omniglot", "leaf-femnist", "leaf-shakespeare", "folder", "pamap2")
"""Formats that are slow to read. Their arrays are cached."""
GLOVE = "glove.6B.100d"
"""The word vectors that the name `glove` means."""


def load(
    name: str,
    *,
    data_dir: str | Path | None = None,
    data_options: Mapping[str, Any] | None = None,
    seed: int = 0,
    **settings: Any,
) -> ArrayData:
    """Loads a data set by name and partitions it among clients.

    `name` is one of `NAMES`, or FORMAT:PATH with a format of `FORMATS` (idx:DIR, npz:FILE, csv:FILE, folder:DIR …).
    Files are looked up in `data_dir`, by default $FEWER_DATA. `settings` are those of `federate`.

    `data_options` are options of the data set or format (csv: label, client, text; folder: size …). All data sets
    also accept these:

    - `classes`: keep only these classes ("0-9,20").
    - `unseen_classes`: no client trains on these classes. All their samples are test samples.
    - `split`: split the classes into base, validation and novel ones (20/5/16).
    """
    check_settings(settings)
    PartitionSpec(**{key: settings[key] for key in ("clients", "alpha") if key in settings}).validate(seed)
    if (partition := settings.get("partition", "iid")) not in get_args(Partition):
        raise unknown_name("partition", partition, get_args(Partition))
    raw = read(name, data_dir, **(data_options or {}))
    origin = {"name": name, "data_dir": None if data_dir is None else str(data_dir), "seed": seed, **settings}
    if data_options:
        origin["data_options"] = dict(data_options)
    return federate(raw, name=name, seed=seed, origin=origin, **settings)


def read(name: str, data_dir: str | Path | None = None, **options: Any) -> RawDataset:
    """Reads a data set by name, without partitioning it."""
    options = {**(FILES[name].options if name in FILES else {}), **options}
    split = options.pop("split", None)
    source_options = {key: value for key, value in options.items() if key not in OPTIONS}
    raw = _read_source(name, data_dir, source_options)
    if split is not None and "unseen_classes" in options:
        raise SettingError(f"data '{name}' cannot have both split and unseen_classes; choose one")
    if (split is not None or len(source_options) < len(options)) and (raw.y.ndim > 1 or raw.y.dtype.kind == "f"):
        raise SettingError(f"data '{name}' has no classes: split, classes and unseen_classes do not apply")
    if len(source_options) < len(options):
        raw = split_seen_unseen(raw, options.get("classes"), options.get("unseen_classes"), name)
    return raw if split is None else apply_class_split(raw, split, name)


def _read_source(name: str, data_dir: str | Path | None, options: Mapping[str, Any]) -> RawDataset:
    format, colon, path = name.partition(":")
    if colon:
        if format not in FORMATS:
            raise unknown_name("data format", format, FORMATS)
        return _read_files(format, _find_path(path, data_dir), options)
    if name in EMBEDDED:
        _check_options(EMBEDDED[name], options, name)
        return EMBEDDED[name](**options)
    if name in FILES:
        source = FILES[name]
        raw = _read_files(source.format, _find_path(source.path, data_dir), options)
        return replace(raw, normalization=source.normalization, time_ordered=raw.time_ordered or source.time_ordered)
    raise unknown_name("data", name, [*NAMES, *(f"{format}:PATH" for format in FORMATS)])


def read_inputs(
    name: str, data_dir: str | Path | None = None, options: Mapping[str, Any] | None = None
) -> tuple[Inputs, Array | None]:
    """Reads inputs for prediction, and labels if known: the test set if there is one, otherwise all samples."""
    if name.startswith("npz:"):
        path = _find_path(name.removeprefix("npz:"), data_dir)
        errors = OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile  # the reader below reports them
        with suppress(*errors), np.load(path, allow_pickle=False) as arrays:
            if "x" in arrays and "y" not in arrays:
                return arrays["x"], None
    raw = read(name, data_dir, **(options or {}))
    return raw.test if raw.test is not None else (raw.x, raw.y)


def _read_files(format: str, path: Path, options: Mapping[str, Any]) -> RawDataset:
    reader: Callable[..., RawDataset] = FORMATS[format]
    _check_options(reader, options, format)
    return _read_through_cache(format, path, options) if format in SLOW else reader(path, **options)


def _read_through_cache(format: str, path: Path, options: Mapping[str, Any]) -> RawDataset:
    """Reads files once and caches their arrays. Later calls memory-map them, so only what is used is loaded."""
    members = sorted(path.rglob("*")) if path.is_dir() else [path]
    state = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in members if file.is_file()]
    keys = ("x", "y", "test_x", "test_y", "client_ids", "test_client_ids", "class_names", "tokens", "time_ordered")
    digest = hashlib.sha256(repr((format, sorted(options.items()), state, keys)).encode()).hexdigest()[:16]

    def build() -> dict[str, Any]:
        raw = FORMATS[format](path, **options)
        test_x, test_y = raw.test or (None, None)
        values = {**vars(raw), "test_x": test_x, "test_y": test_y}
        return {key: np.asarray(values[key]) for key in keys if values[key] is not None}

    arrays: dict[str, Any] = load_or_build(f"{format}-{digest}", build)
    test = (arrays.pop("test_x"), arrays.pop("test_y")) if "test_x" in arrays else None
    names: dict[str, Any] = {key: tuple(arrays.pop(key).tolist()) for key in ("class_names", "tokens")}
    return RawDataset(test=test, time_ordered=bool(arrays.pop("time_ordered")), **names, **arrays)


def _check_options(reader: Callable[..., RawDataset], options: Mapping[str, Any], name: str) -> None:
    allowed = [key for key in inspect.signature(reader).parameters if key != "path"]
    for key in options:
        if key not in allowed:
            raise unknown_name(f"option of data {name}", key, [*allowed, *OPTIONS])


# --- built-in data sets ----------------------------------------------------------------------------------------


def _load_digits() -> RawDataset:
    """1,797 digits of 8×8 pixels from scikit-learn; every fifth is a test sample."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = (x.reshape(-1, 1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    test = np.arange(len(y)) % 5 == 4
    return RawDataset(x[~test], y[~test], (x[test], y[test]), class_names=tuple("0123456789"))


_CLOTHES = ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


def _load_fashion_mini() -> RawDataset:
    """Fashion-MNIST with 600 training and 100 test images per class."""
    with files("fewer.data").joinpath("embedded/fashion-mini.npz").open("rb") as file, np.load(file) as arrays:
        test = arrays["x_test"], arrays["y_test"]
        return RawDataset(arrays["x"], arrays["y"], test, class_names=_CLOTHES, normalization=_FASHION)


def _load_glyphs(size: int = 28) -> RawDataset:
    """62 letters and digits by 120 writers, drawn once and cached."""
    from fewer.data import glyphs

    if size not in (28, 32):
        raise SettingError(f"size of glyphs must be 28 or 32, got {size}")
    arrays = load_or_build(
        f"glyphs-{size}", lambda: dict(zip(("x", "y", "client"), glyphs.draw_glyphs(size), strict=True))
    )
    x, y, writers, class_names = arrays["x"], arrays["y"], arrays["client"], tuple(glyphs.CLASSES)
    return RawDataset(x, y, client_ids=writers, class_names=class_names, normalization=(0.13, 0.26))


def _load_looks(source: str = "fashion") -> RawDataset:
    """Images, each in one of four looks (plain, inverted, blurred, rotated); a client is a look."""
    from fewer.data import glyphs

    if source not in ("fashion", "glyphs"):
        raise unknown_name("source of looks", source, ("fashion", "glyphs"))
    raw = (_load_fashion_mini() if source == "fashion" else _load_glyphs()).merge_test()
    x = np.asarray(raw.x)
    looks = np.random.default_rng(0).integers(4, size=len(x))
    images = np.empty_like(x)
    for look in range(4):
        images[looks == look] = glyphs.apply_looks(x[looks == look])[look]
    return replace(raw, x=images, client_ids=np.array(glyphs.LOOKS)[looks], normalization=(0.5, 0.5))


def _load_shakespeare_mini() -> RawDataset:
    """Twelve plays by role: predict the next character from the last 80."""
    with as_file(files("fewer.data").joinpath("embedded/shakespeare-mini.tar.gz")) as path:
        raw: RawDataset = FORMATS["plays"](path)
    return raw


def _load_usage(own_classes: bool = False) -> RawDataset:
    """Generated: which of 30 services each of 40 users chooses next; own_classes numbers services per user."""
    return recommendation.build_user_tasks(recommendation.generate_usage(), own_classes)


EMBEDDED: dict[str, Callable[..., RawDataset]] = {
    "digits": _load_digits,
    "fashion-mini": _load_fashion_mini,
    "glyphs": _load_glyphs,
    "looks": _load_looks,
    "shakespeare-mini": _load_shakespeare_mini,
    "usage": _load_usage,
}
NAMES = (*EMBEDDED, *FILES)


def _find_path(path: str, data_dir: str | Path | None) -> Path:
    """Finds a path as given, or below the data directory."""
    root = data_dir or os.environ.get("FEWER_DATA")
    if Path(path).exists():
        return Path(path)
    if root and (Path(root) / path).exists():
        return Path(root) / path
    if root:
        raise DataError(f"no '{path}' in {root}")
    raise DataError(f"'{path}' does not exist, and no data directory is set: pass --data-dir or set FEWER_DATA")


def names_word_vectors(name: str) -> bool:
    """True for the name of public word vectors, such as glove or glove.6B.300d. Every client finds its own file."""
    return re.fullmatch(r"glove(\.\w+)*\.\d+d|glove", name) is not None


def find_word_vectors(name: str, data_dir: str | Path | None = None) -> Path:
    """Finds a file of word vectors by path, or by name as glove/NAME.txt or glove/NAME.txt.gz in the data directory."""
    root = data_dir or os.environ.get("FEWER_DATA")
    if not names_word_vectors(name):
        if not (path := Path(name)).is_file():
            raise DataError(f"vectors = {name}: there is no such file (allowed: own, glove, {GLOVE} or a file)")
        return path
    folder, file = Path(root or "DIR") / "glove", f"{GLOVE if name == 'glove' else name}.txt"
    for path in (folder / file, folder / f"{file}.gz"):
        if path.is_file():
            return path
    place = "" if root else "; pass --data-dir DIR or set FEWER_DATA"
    source = "(source: https://nlp.stanford.edu/projects/glove)"
    raise DataError(f"vectors = {name} needs {file} or {file}.gz in {folder}{place} {source}")
