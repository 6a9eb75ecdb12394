"""Data by name: built-in data sets, data sets in a data directory, and files in common formats."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch

from fewer.choices import Partition
from fewer.data import recommendation
from fewer.data.cache import load_or_build
from fewer.data.checks import list_names, name_labels
from fewer.data.class_split import OPTIONS, split_seen_unseen
from fewer.data.download import DOWNLOADS
from fewer.data.episodes import apply_class_split
from fewer.data.federated import ArrayData, check_settings, federate
from fewer.data.formats.readers import INTERNAL
from fewer.data.partition import PartitionSpec
from fewer.data.raw_dataset import RawDataset
from fewer.data.schema import Schema, is_integer
from fewer.errors import DataError, SettingError, unknown_name, unknown_option
from fewer.registry import FORMATS


class DataSource(NamedTuple):
    """A data set in a data directory: its format, its path there, and its defaults."""

    format: str
    path: str
    description: str
    options: Mapping[str, Any] = {}
    normalization: tuple[float, float] | None = None
    time_ordered: bool = False
    class_gap: int | None = None


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
    "svhn": DataSource("svhn", "svhn", "SVHN: house numbers, 3×32×32"),
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
    "hapt": DataSource(
        "npz", "hapt/hapt.npz", "activities from a smartphone, by subject", time_ordered=True, class_gap=1
    ),
    "pamap2": DataSource("pamap2", "pamap2", "activities from body sensors, by subject"),
    "har": DataSource("har", "har", "UCI HAR activities, by subject"),
}
SLOW = ("omniglot", "leaf-femnist", "leaf-shakespeare", "folder", "pamap2")
"""Formats that are slow to read. Their arrays are cached."""
LAYOUT_OPTIONS = (
    "client",
    "depth",
    "channels",
    "time",
    "missing",
    "decimal",
    "encoding",
    "features",
    "ignore",
    "categorical",
    "config",
    "download",
)
"""Options that describe one file, drop or sort its samples, or that the columns of a schema replace."""

TEXT_FORMATS = ("csv", "jsonl")
"""Formats in which a label is a text, even if it is a number."""
LOAD_OPTIONS = ("max_per_class", "normalization")
"""Options of `load` that every data set accepts, in addition to those about classes."""
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
    - `max_per_class`: keep at most this many training samples of each class, the first ones.
    - `normalization`: mean and standard deviation of pixels on a scale of 0 … 1; [0.5, 0.5] gives inputs in [−1, 1].
    - `held_out`: for time-ordered data, hold out the last samples of each `class` of a client, or of the `client`.
      The default is class for sensor readings, and client for all other data.
    """
    name = str(name)  # a Path gets the hint of a text
    check_settings(settings)
    PartitionSpec(**{key: settings[key] for key in ("clients", "alpha") if key in settings}).validate(seed)
    if (partition := settings.get("partition", "iid")) not in get_args(Partition):
        raise unknown_name("partition", partition, get_args(Partition))
    raw = read_training_data(name, data_dir, data_options or {})
    origin = {"name": name, "data_dir": None if data_dir is None else str(data_dir), "seed": seed, **settings}
    if data_options:
        origin["data_options"] = dict(data_options)
    return federate(raw, name=name, seed=seed, origin=origin, **settings)


def read_training_data(name: str, data_dir: str | Path | None, data_options: Mapping[str, Any]) -> RawDataset:
    """Reads a data set with all options of `load`. Labels of files such as 3 and 7 are numbered from 0."""
    options = dict(data_options)
    limit, normalization = (options.pop(option, None) for option in LOAD_OPTIONS)
    raw = read(name, data_dir, **options)
    if ":" in name and not {"split", *OPTIONS} & options.keys():  # these options name classes by their labels
        raw = name_labels(raw)
    if limit is not None:
        raw = _keep_first_per_class(raw, limit, name)
    if normalization is not None:
        raw = replace(raw, normalization=_parse_normalization(raw, normalization, name))
    return raw


def read(name: str, data_dir: str | Path | None = None, *, schema: Schema | None = None, **options: Any) -> RawDataset:
    """Reads a data set by name, without partitioning it.

    With a schema, files are read as its data was, and columns and classes are mapped by name. DataError if one is
    missing or unknown.
    """
    raw = _read_labeled_or_not(name, data_dir, schema, options, keep_unlabeled=False)
    if not len(raw.y):
        raise DataError(f"data '{name}' has no labels")
    return raw if schema is None else _name_numbers(raw, name, schema).use_classes_of(schema, name)


def _name_numbers(raw: RawDataset, name: str, schema: Schema) -> RawDataset:
    """If labels are numbers and the schema's classes have names: numbers in a text are names, others are positions."""
    if raw.class_names or raw.split or raw.y.ndim > 1 or raw.y.dtype.kind == "f" or schema.targets != "classes":
        return raw
    format, colon, _ = name.partition(":")
    if not colon or not len(raw.y) or all(map(is_integer, schema.class_names)):
        return raw
    if format in TEXT_FORMATS:
        return replace(raw, class_names=tuple(map(str, range(int(raw.y.max()) + 1))))
    known = [label for label in np.unique(raw.y).tolist() if label < len(schema.labels)]
    meanings = list_names([f"{label} is read as {schema.labels[label]}" for label in known])
    return replace(raw, notes=(*raw.notes, f"labels: {meanings}")) if known else raw


def read_inputs(
    name: str, data_dir: str | Path | None, schema: Schema, *, keep_unlabeled: bool = True, **options: Any
) -> RawDataset:
    """Reads inputs for prediction: the test set if there is one, otherwise all samples. Columns are mapped by name.

    `y` is empty if there are no labels. Labels are numbered as in the file, by `class_names`. With `keep_unlabeled`,
    a table with some missing labels keeps these rows, and has no labels.
    """
    raw = _read_labeled_or_not(name, data_dir, schema, options, keep_unlabeled)
    x, y, rows = (raw.x, raw.y, raw.rows) if raw.test is None else (*raw.test, None)
    raw = replace(raw, x=x, y=y, test=None, client_ids=None, test_client_ids=None, rows=rows)
    return _name_numbers(raw, name, schema)


def _read_labeled_or_not(
    name: str, data_dir: str | Path | None, schema: Schema | None, options: Mapping[str, Any], keep_unlabeled: bool
) -> RawDataset:
    """Reads a data set. Only with a schema, labels may be absent."""
    if not isinstance(schema, Schema | None):
        raise SettingError(f"schema is not an option of data '{name}'")
    options = {**(FILES[name].options if name in FILES else {}), **options}
    split, held_out = options.pop("split", None), options.pop("held_out", None)
    source_options = {key: value for key, value in options.items() if key not in OPTIONS}
    raw = _read_source(name, data_dir, source_options, schema, keep_unlabeled)
    if held_out is not None:
        raw = _set_held_out(raw, held_out, name)
    if split is not None and "unseen_classes" in options:
        raise SettingError(f"data '{name}' cannot have both split and unseen_classes; choose one")
    if (split is not None or len(source_options) < len(options)) and (raw.y.ndim > 1 or raw.y.dtype.kind == "f"):
        raise SettingError(f"data '{name}' has no classes: split, classes and unseen_classes do not apply")
    if len(source_options) < len(options):
        raw = split_seen_unseen(raw, options.get("classes"), options.get("unseen_classes"), name)
    return raw if split is None else apply_class_split(raw, split, name)


def _set_held_out(raw: RawDataset, held_out: str, name: str) -> RawDataset:
    """Sets which samples of time-ordered data are held out."""
    if held_out not in ("class", "client"):
        raise unknown_name("held_out", str(held_out), ("class", "client"))
    if not raw.time_ordered or raw.client_ids is None:
        raise SettingError(
            f"held_out = {held_out} needs clients with samples in temporal order; data '{name}' has none"
        )
    if held_out == "class" and (raw.y.ndim > 1 or raw.y.dtype.kind == "f"):
        raise SettingError(f"held_out = class needs classes, but data '{name}' has none")
    return replace(raw, class_gap=(raw.class_gap or 0) if held_out == "class" else None)


def _read_source(
    name: str, data_dir: str | Path | None, options: Mapping[str, Any], schema: Schema | None, keep_unlabeled: bool
) -> RawDataset:
    format, colon, path = name.partition(":")
    if colon:
        if format not in FORMATS:
            raise unknown_name("data format", format, FORMATS)
        return _read_files(format, _find_or_fetch(format, path, data_dir, options), options, schema, keep_unlabeled)
    if name in EMBEDDED:
        _check_options(EMBEDDED[name], options, name)
        return EMBEDDED[name](**options)
    if name in FILES:
        source = FILES[name]
        try:
            files = _find_path(source.path, data_dir)
        except DataError:
            raise _missing_files(name, data_dir) from None
        raw = _read_files(source.format, files, options, schema, keep_unlabeled)
        time_ordered = raw.time_ordered or source.time_ordered
        class_gap = raw.class_gap if source.class_gap is None else source.class_gap
        return replace(
            raw, normalization=source.normalization, time_ordered=time_ordered, class_gap=class_gap, notes=()
        )
    if file_format := _guess_format(Path(name)):
        raise SettingError(f"unknown data '{name}', did you mean '{file_format}:{name}'?")
    raise unknown_name("data", name, [*NAMES, *(f"{format}:PATH" for format in FORMATS)])


def _guess_format(path: Path) -> str | None:
    """The format of a file by its name, or of a folder of images; None for anything else."""
    suffix = Path(path.name.removesuffix(".gz")).suffix.removeprefix(".")
    known = {"csv": "csv", "tsv": "csv", "npz": "npz", "jsonl": "jsonl"}
    return known.get(suffix.lower()) or ("folder" if path.is_dir() else None)


def _missing_files(name: str, data_dir: str | Path | None) -> DataError:
    """The error for a data set without its files: how to get them."""
    root, path = data_dir or os.environ.get("FEWER_DATA"), FILES[name].path
    folder = path.partition("/")[0]
    get = f"run fewer data get {folder}" if folder in DOWNLOADS else f"put them at {path} in that directory"
    if not root:
        return DataError(f"data '{name}' needs files: set FEWER_DATA or pass --data-dir, then {get}")
    return DataError(f"no files of data '{name}' in {root}: {get}{f' --data-dir {data_dir}' if data_dir else ''}")


def _keep_first_per_class(raw: RawDataset, limit: Any, name: str) -> RawDataset:
    """Keeps the first `limit` training samples of each class."""
    if not isinstance(limit, int) or limit < 1:
        raise SettingError(f"max_per_class of data '{name}' must be an integer >= 1, got {limit!r}")
    if raw.y.ndim > 1 or raw.y.dtype.kind == "f":
        raise SettingError(f"data '{name}' has no classes: max_per_class does not apply")
    rows = [np.flatnonzero(raw.y == label)[:limit] for label in np.unique(raw.y)]
    return raw.select(np.sort(np.concatenate(rows)))


def _parse_normalization(raw: RawDataset, value: Any, name: str) -> tuple[float, float]:
    """The mean and standard deviation of pixels."""
    is_pair = isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(v, int | float) for v in value)
    if not is_pair or value[1] <= 0:
        raise SettingError(f"normalization of data '{name}' must be [mean, deviation > 0], got {value!r}")
    if raw.tokens or getattr(raw.x, "dtype", None) not in (np.uint8, torch.uint8):
        raise SettingError(f"data '{name}' has no pixels (bytes): normalization does not apply")
    return float(value[0]), float(value[1])


def _read_files(
    format: str, path: Path, options: Mapping[str, Any], schema: Schema | None, keep_unlabeled: bool
) -> RawDataset:
    reader: Callable[..., RawDataset] = FORMATS[format]
    _check_options(reader, options, format)
    read_cached = partial(_read_through_cache, format) if format in SLOW else reader
    if schema is None:
        return read_cached(path, **options)
    options = {**_options_like(schema, reader), **options}
    known = inspect.signature(reader).parameters
    internal = {"schema": schema, "keep_unlabeled": keep_unlabeled}
    return read_cached(path, **{key: value for key, value in internal.items() if key in known}, **options)


def _options_like(schema: Schema, reader: Callable[..., RawDataset]) -> dict[str, Any]:
    """The options with which a reader reads files as the data of the schema was read."""
    options = {key: value for key, value in schema.options.items() if key not in LAYOUT_OPTIONS}
    if schema.kind == "images" and schema.shape[1] == schema.shape[2]:
        options |= {"size": schema.shape[1], "gray": schema.shape[0] == 1}
    known = inspect.signature(reader).parameters
    return {key: value for key, value in options.items() if key in known}


def _read_through_cache(format: str, path: Path, schema: Schema | None = None, **options: Any) -> RawDataset:
    """Reads files once and caches their arrays. Later calls memory-map them, so only what is used is loaded."""
    members = sorted(path.rglob("*")) if path.is_dir() else [path]
    state = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in members if file.is_file()]
    names = ("class_names", "tokens", "notes")
    keys = ("x", "y", "test_x", "test_y", "client_ids", "test_client_ids", *names, "time_ordered", "class_gap")
    content = format, sorted(options.items()), state, keys, *(["labels optional"] if schema else [])
    if format == "folder":
        content += ("16 bits",)  # older entries have clipped pixels
    digest = hashlib.sha256(repr(content).encode()).hexdigest()[:16]
    by_name = {"schema": schema} if schema else {}

    def build() -> dict[str, Any]:
        raw = FORMATS[format](path, **options, **by_name)
        test_x, test_y = raw.test or (None, None)
        values = {**vars(raw), "test_x": test_x, "test_y": test_y}
        return {key: np.asarray(values[key]) for key in keys if values[key] is not None}

    arrays: dict[str, Any] = load_or_build(f"{format}-{digest}", build)
    test = (arrays.pop("test_x"), arrays.pop("test_y")) if "test_x" in arrays else None
    texts: dict[str, Any] = {key: tuple(arrays.pop(key).tolist()) for key in names}
    if "class_gap" in arrays:
        texts["class_gap"] = int(arrays.pop("class_gap"))
    return RawDataset(test=test, time_ordered=bool(arrays.pop("time_ordered")), **texts, **arrays)


def _check_options(reader: Callable[..., RawDataset], options: Mapping[str, Any], name: str) -> None:
    allowed = [key for key in inspect.signature(reader).parameters if key not in INTERNAL]
    for key in options:
        if key not in allowed:
            raise unknown_option(f"data {name}", key, [*allowed, *OPTIONS, *LOAD_OPTIONS, "split", "held_out"])


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


def _load_usage(own_classes: bool = False, last_item: bool = False) -> RawDataset:
    """Generated: which of 30 services each of 40 users chooses next; own_classes numbers services per user."""
    return recommendation.build_user_tasks(recommendation.generate_usage(), own_classes, last_item=last_item)


EMBEDDED: dict[str, Callable[..., RawDataset]] = {
    "digits": _load_digits,
    "fashion-mini": _load_fashion_mini,
    "glyphs": _load_glyphs,
    "looks": _load_looks,
    "shakespeare-mini": _load_shakespeare_mini,
    "usage": _load_usage,
}
NAMES = (*EMBEDDED, *FILES)


def find_files(name: str, data_dir: str | Path | None) -> None:
    """Raises DataError if the files of a data set do not exist."""
    _, colon, path = name.partition(":")
    if colon or name in FILES:
        _find_path(path if colon else FILES[name].path, data_dir)


def _find_or_fetch(format: str, path: str, data_dir: str | Path | None, options: Mapping[str, Any]) -> Path:
    """Finds a path. With the option `download`, the reader may fetch it instead."""
    try:
        return _find_path(path, data_dir)
    except DataError as error:
        if "download" not in inspect.signature(FORMATS[format]).parameters:
            raise
        if not options.get("download"):
            raise DataError(f"{error}; --data-option download=true fetches {format}:{path}") from None
        return Path(path)


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
