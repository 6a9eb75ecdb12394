"""Generated glyphs, and looks of the same images."""

import time

import numpy as np

from fewer.data.glyphs import CLASSES, COPIES, WRITERS, _draw_writer, apply_looks, draw_glyphs


def test_glyphs_are_numerous_and_deterministic() -> None:
    start = time.monotonic()
    x, y, writer = draw_glyphs(28)
    assert time.monotonic() - start < 90  # 3 s on a quiet core
    assert x.shape == (WRITERS * 62 * COPIES, 28, 28) and x.dtype == np.uint8 and WRITERS >= 100
    assert len(CLASSES) == 62 and np.bincount(y).tolist() == [WRITERS * COPIES] * 62
    assert np.bincount(writer).tolist() == [62 * COPIES] * WRITERS
    assert np.array_equal(x[: 62 * COPIES], _draw_writer(0, 28))
    assert _draw_writer(3, 32).shape == (62 * COPIES, 32, 32)


def test_glyphs_reveal_their_class_and_their_writer() -> None:
    """Nearest mean image: far above chance for the class of unseen writers, and for the writer of a drawing."""
    train = np.stack([_draw_writer(w, 28) for w in range(40)]).reshape(40, 62, COPIES, 784).astype(np.float32)
    unseen = np.stack([_draw_writer(w, 28) for w in range(40, 46)]).reshape(6, 62, COPIES, 784).astype(np.float32)
    means = train.mean(axis=(0, 2))
    distance = ((unseen.reshape(-1, 1, 784) - means[None]) ** 2).sum(axis=2)
    accuracy = (distance.argmin(axis=1).reshape(6, 62, COPIES) == np.arange(62)[None, :, None]).mean()
    assert 0.2 < accuracy < 0.95
    a, b = train[:, :, :2].mean(axis=2), train[:, :, 2:].mean(axis=2)
    same = ((a - b) ** 2).mean()
    others = ((a - np.roll(b, 1, axis=0)) ** 2).mean()
    assert same < 0.6 * others


def test_looks_are_four_views_of_the_same_images() -> None:
    images = _draw_writer(0, 28)
    looks = apply_looks(images)
    assert looks.shape == (4, *images.shape)
    assert np.array_equal(looks[0], images) and np.array_equal(looks[1], 255 - images)
    assert np.array_equal(np.rot90(looks[3], -1, axes=(1, 2)), images)
    assert looks[2, 0, 5, 5] == int(images[0, 4:7, 4:7].mean())
