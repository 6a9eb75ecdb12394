"""Omniglot: handwritten characters of fifty alphabets, each drawn by twenty people."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np

from fewer.data.formats.readers import decode_image, find_inside, iter_members, reader
from fewer.data.raw_dataset import Array, RawDataset
from fewer.errors import DataError, SettingError
from fewer.registry import FORMATS


@FORMATS.register("omniglot")
@reader("Omniglot (images_background.zip and images_evaluation.zip)")
def read_omniglot(path: Path, size: int = 28, invert: bool = True) -> RawDataset:
    """A directory with both official archives, zipped or unpacked: train on background, test on evaluation.

    Labels of evaluation classes follow those of background classes. A client is a drawer. Images are `size` × `size`.
    `invert` makes strokes white on black, as in MNIST; the files have black on white.
    """
    if size < 1:
        raise SettingError(f"size must be >= 1, got {size}")
    x, y, drawers, class_names = _read_characters(path, "images_background", size, invert)
    test_x, test_y, test_drawers, test_names = _read_characters(path, "images_evaluation", size, invert)
    test = test_x, test_y + len(class_names)
    return RawDataset(x, y, test, drawers, test_drawers, (*class_names, *test_names))


def _read_characters(path: Path, part: str, size: int, invert: bool) -> tuple[Array, Array, Array, list[str]]:
    """Reads images, labels, drawers and class names, sorted by class name."""
    source = find_inside(path, f"{part}.zip", part)
    if source == path:
        raise DataError(f"no {part}.zip in {path}")
    files = sorted(iter_members(source, lambda name: name.endswith(".png")))
    x = np.empty((len(files), size, size), np.uint8)
    characters: list[str] = []
    drawers = np.empty(len(files), np.int64)
    for row, (name, content) in enumerate(files):
        *_, alphabet, character, file = ("", "", *name.split("/"))
        drawer = file.removesuffix(".png").rpartition("_")[2]
        if not alphabet or not drawer.isdecimal():
            raise DataError(f"{source} has '{name}' (expected: Alphabet/characterNN/NNNN_drawer.png)")
        characters.append(f"{alphabet}/{character}")
        drawers[row] = int(drawer)
        x[row], _ = decode_image(BytesIO(content), f"{source}: {name}", size, "L", "BOX", "PNG")
    class_names, y = np.unique(np.array(characters), return_inverse=True)
    return 255 - x if invert else x, y.reshape(-1).astype(np.int64), drawers, class_names.tolist()
