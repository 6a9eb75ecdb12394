"""Omniglot: handwritten characters of fifty alphabets, each drawn by twenty people."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np

from fewer.data.formats.readers import inside, members, reader
from fewer.data.raw_dataset import Array, RawDataset
from fewer.errors import DataError, SettingError
from fewer.registry import FORMATS


@FORMATS.register("omniglot")
@reader("Omniglot (images_background.zip and images_evaluation.zip)")
def omniglot(path: Path, size: int = 28, invert: bool = True) -> RawDataset:
    """A directory with both official archives, packed or not: background to train on, evaluation to test on.

    The classes of evaluation go on after those of background, a client is a drawer, and images are `size` × `size`.
    With `invert` strokes are white on black, as in MNIST; without, black on white, as in the files.
    """
    if size < 1:
        raise SettingError(f"size = {size} (allowed: 1 or more)")
    x, y, drawer, names = _characters(path, "images_background", size, invert)
    test_x, test_y, test_drawer, more = _characters(path, "images_evaluation", size, invert)
    return RawDataset(x, y, (test_x, test_y + len(names)), drawer, test_drawer, (*names, *more))


def _characters(path: Path, part: str, size: int, invert: bool) -> tuple[Array, Array, Array, list[str]]:
    """Images, classes, drawers and the names of the classes, in the order of the names."""
    source = inside(path, f"{part}.zip", part)
    if source == path:
        raise DataError(f"no {part}.zip in {path}")
    files = sorted(members(source, lambda name: name.endswith(".png")))
    x = np.empty((len(files), size, size), np.uint8)
    places: list[str] = []
    drawers = np.empty(len(files), np.int64)
    for row, (name, raw) in enumerate(files):
        *_, alphabet, character, file = ("", "", *name.split("/"))
        number = file.removesuffix(".png").rpartition("_")[2]
        if not alphabet or not number.isdecimal():
            raise DataError(f"{source} has '{name}' (expected: Alphabet/characterNN/NNNN_drawer.png)")
        places.append(f"{alphabet}/{character}")
        drawers[row] = int(number)
        x[row] = _image(raw, size, f"{source}: {name}")
    names, classes = np.unique(np.array(places), return_inverse=True)
    return 255 - x if invert else x, classes.reshape(-1).astype(np.int64), drawers, names.tolist()


def _image(raw: bytes, size: int, where: str) -> Array:
    from PIL import Image

    try:
        image = Image.open(BytesIO(raw), formats=("PNG",)).convert("L")
    except Exception as error:
        raise DataError(f"{where} is a broken image: {error}") from error
    return np.asarray(image.resize((size, size), Image.Resampling.BOX))
