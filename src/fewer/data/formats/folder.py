"""Images in folders: a folder for each class, and above them, if there are several, one for each domain."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from fewer.data.formats.readers import reader
from fewer.data.raw_dataset import Array, RawDataset
from fewer.errors import DataError, SettingError
from fewer.registry import FORMATS

_SPLITS = {"train", "val", "test"}


@FORMATS.register("folder")
@reader("folders of images")
def folder(path: Path, size: int = 32, gray: bool = False, depth: int | None = None) -> RawDataset:
    """Images in class/image or domain/class/image, resized to `size` × `size`; a domain is a client.

    `depth` says which it is (1 or 2 folders; more below them do not matter); without, it is what all images agree in.
    If the uppermost folders are train and test (or val), they are that, and neither classes nor domains.
    """
    if size < 1:
        raise SettingError(f"size = {size} (allowed: 1 or more)")
    if depth not in (None, 1, 2):
        raise SettingError(f"depth = {depth} (allowed: 1 for class/image, 2 for domain/class/image)")
    files = _images(path)
    places = [file.relative_to(path).parts[:-1] for file in files]
    tested = np.zeros(len(files), bool)
    tops = {place[0] for place in places if place}
    if "train" in tops and tops <= _SPLITS and len(tops) > 1:
        tested = np.array([place[:1] == ("test" if "test" in tops else "val",) for place in places])
        places = [place[1:] for place in places]
    depth = depth or _depth(places, path)
    for file, place in zip(files, places, strict=True):
        if len(place) < depth:
            raise DataError(f"{file} is not in a folder of a class (expected: {depth} folders above each image)")
    names, y = np.unique(np.array([place[depth - 1] for place in places]), return_inverse=True)
    y = y.reshape(-1).astype(np.int64)
    domain = np.array([place[0] for place in places]) if depth == 2 else None
    with ThreadPoolExecutor() as pool:
        x = np.stack(list(pool.map(partial(_pixels, size=size, gray=gray), files)))
    return RawDataset(
        x[~tested],
        y[~tested],
        (x[tested], y[tested]) if tested.any() else None,
        None if domain is None else domain[~tested],
        None if domain is None or not tested.any() else domain[tested],
        tuple(names.tolist()),
    )


def _images(path: Path) -> list[Path]:
    from PIL import Image

    known = {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    files = [file for file in sorted(path.rglob("*")) if file.suffix.lower() in known and file.is_file()]
    if not files:
        raise DataError(f"no images in {path} (expected: class/image or domain/class/image)")
    return files


def _depth(places: list[tuple[str, ...]], path: Path) -> int:
    depths = {len(place) for place in places}
    if len(depths) > 1 or not depths <= {1, 2}:
        found = ", ".join(map(str, sorted(depths)))
        raise DataError(f"images in {path} are {found} folders deep (allowed: all 1, all 2, or say which with depth)")
    return depths.pop()


def _pixels(file: Path, size: int, gray: bool) -> Array:
    from PIL import Image

    try:
        with Image.open(file) as image:
            image.draft("L" if gray else "RGB", (size, size))
            small = image.convert("L" if gray else "RGB").resize((size, size), Image.Resampling.BILINEAR)
    except Exception as error:
        raise DataError(f"{file} is a broken image: {error}") from error
    pixels = np.asarray(small)
    return pixels if gray else np.moveaxis(pixels, -1, 0)
