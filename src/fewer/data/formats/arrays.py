"""npz archives: plain arrays, or MedMNIST."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from fewer.data.checks import Channels, check_inputs, list_names
from fewer.data.federated import convert_labels, convert_targets, number_classes
from fewer.data.formats.readers import reader
from fewer.data.raw_dataset import Array, RawDataset
from fewer.data.schema import Schema
from fewer.errors import DataError
from fewer.registry import FORMATS

_PLAIN = ("x", "y", "client", "x_test", "y_test", "client_test")
_MEDMNIST = tuple(f"{part}_{kind}" for part in ("train", "val", "test") for kind in ("images", "labels"))


@FORMATS.register("npz")
@reader("an npz archive of plain arrays")
def read_npz(
    path: Path, join_validation: bool = True, channels: Channels | None = None, schema: Schema | None = None
) -> RawDataset:
    """Arrays x and y, and optionally client, x_test, y_test and client_test; or a MedMNIST archive.

    Images are samples × channels × height × width, or height × width × channels if there are 1, 3 or 4 channels.
    `channels` = first or last decides if both are possible.

    MedMNIST has validation samples. They join the training samples, or are dropped if `join_validation` is false.
    With a schema, y may be absent.
    """
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} is not an npz archive, or is truncated")
    with np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files if name in (*_PLAIN, *_MEDMNIST)}
        names = sorted(archive.files)
    present = ", ".join(names) or "none"
    medmnist = "train_images" in arrays
    if schema and "x" in arrays and "y" not in arrays:
        return check_inputs(RawDataset(arrays["x"], np.zeros(0, np.int64)), channels, str(path))
    for name in _MEDMNIST if medmnist else _PLAIN[:2]:
        if name not in arrays:
            raise DataError(f"{path} has no array '{name}' (it has: {present})")
    if medmnist:
        return _read_medmnist(arrays, path, join_validation)
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise DataError(f"{path} has only one of 'x_test' and 'y_test' (it has: {present})")
    labels = [arrays[name] for name in ("y", "y_test") if name in arrays]
    numbered, class_names = number_classes(labels, (), str(path))
    y, *test_y = (convert_targets(part, str(path)) for part in numbered)
    test = (arrays["x_test"], test_y[0]) if test_y else None
    others = sorted(set(names) - set(_PLAIN))
    notes = (f"arrays: ignored {list_names(others)}",) if others else ()
    owners = arrays.get("client"), arrays.get("client_test")
    raw = RawDataset(arrays["x"], y, test, *owners, class_names=class_names, notes=notes)
    return check_inputs(raw, channels, str(path))


def _read_medmnist(arrays: dict[str, Array], path: Path, join_validation: bool) -> RawDataset:
    train, validation, test = (
        (_move_channels_first(arrays[f"{part}_images"]), convert_labels(arrays[f"{part}_labels"], f"{path} ({part})"))
        for part in ("train", "val", "test")
    )
    if join_validation:
        train = np.concatenate([train[0], validation[0]]), np.concatenate([train[1], validation[1]])
    return RawDataset(*train, test)


def _move_channels_first(images: Array) -> Array:
    return np.ascontiguousarray(np.moveaxis(images, -1, 1)) if images.ndim == 4 else images
