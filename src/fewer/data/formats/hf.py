"""Data sets of the library `datasets`: saved ones, local files, and those of its hub if the user asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from fewer.data.formats.readers import decode_image, number_labels, reader
from fewer.data.raw_dataset import Array, Inputs, RawDataset
from fewer.data.schema import Schema
from fewer.errors import DataError, SettingError
from fewer.registry import FORMATS

FILES = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".arrow": "arrow"}
"""The builder of `datasets` for files with this ending."""
TEST_SPLITS = ("test", "validation", "valid")
"""Splits that become the test set; the first that exists and has labels."""


@FORMATS.register("hf")
@reader("a data set of the library datasets")
def read_hf(
    path: Path,
    text: str | None = None,
    image: str | None = None,
    label: str = "label",
    client: str | None = None,
    size: int = 32,
    gray: bool = False,
    config: str | None = None,
    download: bool = False,
    schema: Schema | None = None,
) -> RawDataset:
    """Images or texts of a saved data set, a file, or NAME on the hub with `download`; options name its columns.

    Images are resized to `size` × `size`. With a schema, labels may be absent.
    """
    if text is not None and image is not None:
        raise SettingError(f"text = {text} and image = {image}: choose one")
    splits = _load_splits(path, config, download)
    train = splits["train"] if "train" in splits else next(iter(splits.values()))
    others = [splits[name] for name in TEST_SPLITS if name in splits and splits[name] is not train]
    test = next((part for part in others if _has_labels(part, label)), None)
    image = image or (None if text else _find_image_column(train))
    columns = {"image": image, "text": None if image else text or "text", "client": client}
    if schema is None or label in train.column_names:
        columns["label"] = label
    parts = []
    for part in (train, test):
        if part is not None:
            _check_columns(part, columns, path)
            parts.append((_read_inputs(part, columns, size, gray, path), _column(part, columns.get("label"))))
    labels = [value for _, values in parts for value in values]
    y, class_names = _number(train, columns.get("label"), labels, path)
    count = len(parts[0][1])
    held_out = None if test is None else (parts[1][0], y[count:])
    return RawDataset(
        parts[0][0],
        y[:count],
        held_out,
        _owners(train, client, path),
        _owners(test, client, path),
        class_names=class_names,
    )


def _load_splits(path: Path, config: str | None, download: bool) -> Mapping[str, Any]:
    """The data sets by the names of their splits."""
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise SettingError("data of hf needs the library datasets: pip install 'fewer[hf]'") from error
    datasets.disable_progress_bars()
    if path.is_dir() and any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        loaded = datasets.load_from_disk(str(path))
    elif path.is_file():
        if path.suffix not in FILES:
            raise DataError(f"{path} has an unknown ending (allowed: {', '.join(FILES)})")
        loaded = datasets.load_dataset(FILES[path.suffix], data_files=str(path))
    else:
        loaded = datasets.load_dataset(str(path), config)
    return loaded if isinstance(loaded, Mapping) else {"train": loaded}


def _find_image_column(part: Any) -> str | None:
    """The first column of images, if there is one."""
    return next((name for name, feature in part.features.items() if type(feature).__name__ == "Image"), None)


def _check_columns(part: Any, columns: Mapping[str, str | None], path: Path) -> None:
    for option, name in columns.items():
        if name is not None and name not in part.column_names:
            has = ", ".join(part.column_names)
            raise DataError(f"{path} has no column '{name}' (it has: {has}); pass --data-option {option}=COLUMN")


def _column(part: Any, name: str | None) -> list[Any]:
    return [] if name is None else list(part[name])


def _has_labels(part: Any, label: str) -> bool:
    """False if all labels are -1 or absent, as in the test sets of competitions."""
    return label not in part.column_names or any(value not in (-1, None) for value in part[label])


def _owners(part: Any, client: str | None, path: Path) -> Array | None:
    if part is None or client is None:
        return None
    owners = list(part[client])
    if None in owners:
        raise DataError(f"{path}, sample {owners.index(None)} has no '{client}', which names its client")
    return np.array(list(map(str, owners)))


def _read_inputs(part: Any, columns: Mapping[str, str | None], size: int, gray: bool, path: Path) -> Inputs:
    """Texts, or the pixels of images."""
    if (name := columns["image"]) is None:
        texts = _column(part, columns["text"])
        if wrong := [position for position, value in enumerate(texts) if not isinstance(value, str)]:
            raise DataError(f"{path}, sample {wrong[0]} has a '{columns['text']}' that is not a string")
        return texts
    encoded = part.cast_column(name, import_module("datasets").Image(decode=False))[name]
    images = [_decode(value, f"{path}, sample {position}", size, gray) for position, value in enumerate(encoded)]
    return np.stack(images)


def _decode(value: Mapping[str, Any] | None, where: str, size: int, gray: bool) -> Array:
    """The pixels of an encoded image, or of the file that it names."""
    if value is None:
        raise DataError(f"{where} has no image")
    file = BytesIO(value["bytes"]) if value.get("bytes") else Path(value["path"])
    pixels, _ = decode_image(file, where, size, "L" if gray else "RGB", "BILINEAR")
    return pixels if gray else np.moveaxis(pixels, -1, 0)


def _number(part: Any, label: str | None, labels: list[Any], path: Path) -> tuple[Array, tuple[str, ...]]:
    """Class labels of all samples, and the names of the classes if they have some."""
    if label is None:
        return np.zeros(0, np.int64), ()
    if names := getattr(part.features[label], "names", None):
        return np.array(labels, np.int64), tuple(names)
    return number_labels(labels, path)
