"""glyphs: 62 letters and digits by 120 writers, drawn from the fonts that matplotlib ships.

Each writer has a typeface, slant, weight, width, size and tilt of their own, a steady or a shaky hand, and paper of
their own; each of their drawings differs a little. Everything comes from the writer's number, so the set is the same on
every machine with the same versions of Pillow and matplotlib. It needs no network, as FEMNIST does.

`looks` are the same classes under four looks, for feature shift: plain, inverted, blurred and rotated.
"""

from __future__ import annotations

import string
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

CLASSES = string.digits + string.ascii_uppercase + string.ascii_lowercase
"""In the order of FEMNIST: digits, capitals, small letters."""
WRITERS = 120
COPIES = 4
"""Drawings of each class by each writer."""
FACES = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Bold",
    "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralBol",
    "STIXGeneralItalic", "STIXGeneralBolIta", "cmr10", "cmss10", "cmtt10", "cmti10", "cmb10",
)  # fmt: skip
_BIG = 96


def glyphs(size: int = 28) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Images (n × size × size, white on black), labels and writers, writer by writer, class by class."""
    count = WRITERS * len(CLASSES) * COPIES
    images = np.empty((count, size, size), np.uint8)
    for writer in range(WRITERS):
        block = len(CLASSES) * COPIES
        images[writer * block : (writer + 1) * block] = _write(writer, size)
    labels = np.tile(np.repeat(np.arange(len(CLASSES)), COPIES), WRITERS)
    writers = np.repeat(np.arange(WRITERS), len(CLASSES) * COPIES)
    return images, labels, writers


LOOKS = ("plain", "inverted", "blurred", "rotated")


def looks(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The four looks of square images: 4 × n × size × size."""
    wide = np.pad(images.astype(np.float32), ((0, 0), (1, 1), (1, 1)), mode="edge")
    size = images.shape[-1]
    blurred = np.mean([wide[:, i : i + size, j : j + size] for i in range(3) for j in range(3)], axis=0)
    return np.stack([images, 255 - images, blurred.astype(np.uint8), np.rot90(images, axes=(1, 2))])


def _write(writer: int, size: int) -> NDArray[np.uint8]:
    """All drawings of one writer."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    hand = np.random.default_rng([20200523, writer, size])
    face = FACES[writer % len(FACES)]
    fonts = Path(matplotlib.get_data_path()) / "fonts/ttf"
    font = ImageFont.truetype(str(fonts / f"{face}.ttf"), int(hand.uniform(58, 74)))
    weight = int(hand.integers(0, 4))
    slant, tilt = hand.normal(0, 0.18), hand.normal(0, 0.08)
    wide, high = np.exp(hand.normal(0, 0.12, 2))
    shake = hand.uniform(0.02, 0.07)
    paper, ink, grain = hand.uniform(0, 25), hand.uniform(170, 255), hand.uniform(2, 14)
    drawings = np.empty((len(CLASSES) * COPIES, size, size), np.float32)
    for number, character in enumerate(CLASSES):
        sheet = Image.new("L", (_BIG, _BIG))
        ImageDraw.Draw(sheet).text(
            (_BIG / 2, _BIG / 2), character, fill=255, font=font, anchor="mm", stroke_width=weight, stroke_fill=255
        )
        for copy in range(COPIES):
            jitter = hand.normal(0, shake, 5)
            turn, lean = tilt + jitter[0], slant + jitter[1]
            across, down = wide * np.exp(jitter[2]), high * np.exp(jitter[3])
            scale = _BIG / size
            # The inverse map, from a pixel of the drawing to a point of the sheet, about both centers.
            c, s = np.cos(turn), np.sin(turn)
            forward = np.array([[c, -s], [s, c]]) @ np.array([[across, lean], [0, down]])
            a, b, d, e = (np.linalg.inv(forward) * scale).ravel()
            middle = (size - 1) / 2 + hand.normal(0, 20 * shake, 2)
            x, y = np.array([_BIG / 2, _BIG / 2]) - np.array([[a, b], [d, e]]) @ middle
            matrix = (a, b, x, d, e, y)
            turned = sheet.transform((size, size), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
            drawings[number * COPIES + copy] = np.asarray(turned)
    noise = hand.normal(0, grain, drawings.shape).astype(np.float32)
    shaded: NDArray[np.uint8] = np.clip(paper + drawings * ((ink - paper) / 255) + noise, 0, 255).astype(np.uint8)
    return shaded
