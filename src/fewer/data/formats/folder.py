"""Folders of images: one folder per class, optionally inside one folder per domain."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from fewer.data.checks import list_names
from fewer.data.formats.readers import decode_image, reader
from fewer.data.raw_dataset import Array, RawDataset
from fewer.data.schema import Schema
from fewer.errors import DataError, SettingError
from fewer.registry import FORMATS

_SPLITS = {"train", "val", "test"}


@FORMATS.register("folder")
@reader("folders of images")
def read_folder(
    path: Path, size: int = 32, gray: bool = False, depth: int | None = None, schema: Schema | None = None
) -> RawDataset:
    """Images in class/image or domain/class/image, resized to `size` × `size`; a client is a domain.

    `depth` is the number of folders above each image: 1 or 2. Deeper folders are ignored. By default it is inferred,
    and must be the same for all images. Top-level folders named train and test (or val) are splits, not classes or
    domains. Gray images of 16 bits are divided by 257. With a schema, images without folders have no labels.
    """
    if size < 1:
        raise SettingError(f"size must be >= 1, got {size}")
    if depth not in (None, 1, 2):
        raise SettingError(f"depth must be 1 (class/image) or 2 (domain/class/image), got {depth}")
    files, notes = _find_images(path)
    folders = [file.relative_to(path).parts[:-1] for file in files]
    is_test = np.zeros(len(files), bool)
    top_folders = {parts[0].lower() for parts in folders if parts}
    if "train" in top_folders and top_folders <= _SPLITS and len(top_folders) > 1:
        is_test = np.array(
            ["".join(parts[:1]).lower() == ("test" if "test" in top_folders else "val") for parts in folders]
        )
        folders = [parts[1:] for parts in folders]
    if schema and depth is None and not any(folders):
        x, image_notes = _read_images(files, size, gray)
        return RawDataset(x, np.zeros(0, np.int64), notes=(*notes, *image_notes))
    depth = depth or _infer_depth(folders, path)
    for file, parts in zip(files, folders, strict=True):
        if len(parts) < depth:
            raise DataError(f"{file} is not in a class folder (expected: {depth} folders above each image)")
    class_names, y = np.unique(np.array([parts[depth - 1] for parts in folders]), return_inverse=True)
    domains = np.array([parts[0] for parts in folders]) if depth == 2 else None
    x, image_notes = _read_images(files, size, gray)
    notes += image_notes
    names, clients = tuple(class_names.tolist()), None if domains is None else domains[~is_test]
    if not is_test.any():
        return RawDataset(x, y, client_ids=clients, class_names=names, notes=notes)
    test_clients = None if domains is None else domains[is_test]
    test = x[is_test], y[is_test]
    return RawDataset(x[~is_test], y[~is_test], test, clients, test_clients, names, notes=notes)


def _find_images(path: Path) -> tuple[list[Path], tuple[str, ...]]:
    """All images, and a note if there are other files."""
    from PIL import Image

    suffixes = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    all_files = [file for file in sorted(path.rglob("*")) if file.is_file() and not file.name.startswith(".")]
    files = [file for file in all_files if file.suffix.lower() in suffixes]
    others = [file.name for file in all_files if file.suffix.lower() not in suffixes]
    if not files:
        raise DataError(f"no images in {path} (expected: class/image or domain/class/image)")
    return files, (f"files: ignored {list_names(others)} (no images)",) if others else ()


def _infer_depth(folders: list[tuple[str, ...]], path: Path) -> int:
    depths = {len(parts) for parts in folders}
    if len(depths) > 1 or not depths <= {1, 2}:
        listed = ", ".join(map(str, sorted(depths)))
        raise DataError(f"images in {path} are {listed} folders deep (expected: all 1 or all 2); set depth")
    return depths.pop()


def _read_images(files: list[Path], size: int, gray: bool) -> tuple[Array, tuple[str, ...]]:
    """The pixels of all images, and a note if some have 16 bits."""
    with ThreadPoolExecutor() as pool:
        images, largest = zip(*pool.map(partial(_read_pixels, size=size, gray=gray), files), strict=True)
    if not (wide := [value for value in largest if value]):
        return np.stack(images), ()
    scale = f"are divided by 257, so their largest value {max(wide)} becomes {round(max(wide) / 257)} of 255"
    return np.stack(images), (f"images: {len(wide)} of {len(files)} have 16 bits and {scale}",)


def _read_pixels(file: Path, size: int, gray: bool) -> tuple[Array, int]:
    pixels, largest = decode_image(file, str(file), size, "L" if gray else "RGB", "BILINEAR")
    return (pixels if gray else np.moveaxis(pixels, -1, 0)), largest
