"""glyphs: 62 letters and digits by 120 writers, drawn from the fonts that matplotlib ships.

Each writer has their own typeface, slant, stroke weight, width, size, tilt, jitter and background. Each drawing varies
a little. Everything is seeded by the writer's index, so the set is the same on every machine with the same versions of
Pillow and matplotlib. It needs no download, unlike FEMNIST.

`apply_looks` shows the same images in four looks, for feature shift: plain, inverted, blurred and rotated.
"""

from __future__ import annotations

import string
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

CLASSES = string.digits + string.ascii_uppercase + string.ascii_lowercase
"""In the order of FEMNIST: digits, upper case, lower case."""
WRITERS = 120
COPIES = 4
"""Drawings per class and writer."""
TYPEFACES = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Bold",
    "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralBol",
    "STIXGeneralItalic", "STIXGeneralBolIta", "cmr10", "cmss10", "cmtt10", "cmti10", "cmb10",
)  # fmt: skip
_CANVAS = 96


def draw_glyphs(size: int = 28) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Returns images (n × size × size, white on black), labels and writers, ordered by writer and class."""
    images = np.concatenate([_draw_writer(writer, size) for writer in range(WRITERS)])
    labels = np.tile(np.repeat(np.arange(len(CLASSES)), COPIES), WRITERS)
    writers = np.repeat(np.arange(WRITERS), len(CLASSES) * COPIES)
    return images, labels, writers


LOOKS = ("plain", "inverted", "blurred", "rotated")


def apply_looks(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns square images in all four looks: 4 × n × size × size."""
    padded = np.pad(images.astype(np.float32), ((0, 0), (1, 1), (1, 1)), mode="edge")
    size = images.shape[-1]
    blurred = np.mean([padded[:, i : i + size, j : j + size] for i in range(3) for j in range(3)], axis=0)
    return np.stack([images, 255 - images, blurred.astype(np.uint8), np.rot90(images, axes=(1, 2))])


def _draw_writer(writer: int, size: int) -> NDArray[np.uint8]:
    """Draws all images of one writer."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    rng = np.random.default_rng([20200523, writer, size])
    typeface = TYPEFACES[writer % len(TYPEFACES)]
    fonts = Path(matplotlib.get_data_path()) / "fonts/ttf"
    font = ImageFont.truetype(str(fonts / f"{typeface}.ttf"), int(rng.uniform(58, 74)))
    weight = int(rng.integers(0, 4))
    slant, tilt = rng.normal(0, 0.18), rng.normal(0, 0.08)
    width, height = np.exp(rng.normal(0, 0.12, 2))
    jitter_scale = rng.uniform(0.02, 0.07)
    background, ink, noise_scale = rng.uniform(0, 25), rng.uniform(170, 255), rng.uniform(2, 14)
    drawings = np.empty((len(CLASSES) * COPIES, size, size), np.float32)
    for label, character in enumerate(CLASSES):
        canvas = Image.new("L", (_CANVAS, _CANVAS))
        ImageDraw.Draw(canvas).text(
            (_CANVAS / 2,) * 2, character, fill=255, font=font, anchor="mm", stroke_width=weight, stroke_fill=255
        )
        for copy in range(COPIES):
            jitter = rng.normal(0, jitter_scale, 5)
            angle, shear = tilt + jitter[0], slant + jitter[1]
            width_scale, height_scale = width * np.exp(jitter[2]), height * np.exp(jitter[3])
            # The inverse map: from a pixel of the drawing to a point on the canvas, both relative to their centers.
            c, s = np.cos(angle), np.sin(angle)
            forward = np.array([[c, -s], [s, c]]) @ np.array([[width_scale, shear], [0, height_scale]])
            a, b, d, e = (np.linalg.inv(forward) * (_CANVAS / size)).ravel()
            center = (size - 1) / 2 + rng.normal(0, 20 * jitter_scale, 2)
            x, y = np.array([_CANVAS / 2, _CANVAS / 2]) - np.array([[a, b], [d, e]]) @ center
            matrix = (a, b, x, d, e, y)
            drawing = canvas.transform((size, size), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
            drawings[label * COPIES + copy] = np.asarray(drawing)
    noise = rng.normal(0, noise_scale, drawings.shape).astype(np.float32)
    pixels = np.clip(background + drawings * ((ink - background) / 255) + noise, 0, 255)
    images: NDArray[np.uint8] = pixels.astype(np.uint8)
    return images
