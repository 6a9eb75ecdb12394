"""Datasets that need no network, and the cache that stores them."""

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fewer.data.cache import load_or_build
from fewer.data.glyphs import CLASSES, COPIES, WRITERS, _draw_writer, apply_looks, draw_glyphs
from fewer.errors import DataError


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


# --- cache --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEWER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_cached_entry_is_made_once(cache: Path) -> None:
    calls = []

    def make() -> dict[str, NDArray[np.int64]]:
        calls.append(1)
        return {"x": np.arange(5)}

    for _ in range(2):
        assert load_or_build("five", make)["x"].tolist() == [0, 1, 2, 3, 4]
    assert len(calls) == 1 and isinstance(load_or_build("five", make)["x"], np.memmap)


def _make_slowly(counter: Path) -> dict[str, NDArray[np.int64]]:
    with counter.open("a") as file:
        file.write("x")
    time.sleep(0.3)
    return {"x": np.arange(3)}


def test_two_processes_make_an_entry_once(cache: Path, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    arguments = ("slow", lambda: _make_slowly(tmp_path / "n"))
    processes = [fork.Process(target=load_or_build, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert (tmp_path / "n").read_text() == "x"


def _make_and_die() -> dict[str, NDArray[np.int64]]:
    original_save = np.save

    def save(file: Any, array: Any) -> None:
        original_save(file, array)
        os.kill(os.getpid(), signal.SIGKILL)

    np.save = save  # type: ignore[assignment]
    return {"x": np.arange(9)}


def test_a_kill_leaves_no_partial_entry(cache: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=load_or_build, args=("half", _make_and_die))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL and not (cache / "half").exists()
    assert load_or_build("half", lambda: {"x": np.arange(2)})["x"].tolist() == [0, 1]


def test_a_damaged_entry_is_reported(cache: Path) -> None:
    load_or_build("bad", lambda: {"x": np.arange(2)})
    (cache / "bad/x.npy").write_bytes(b"nothing")
    with pytest.raises(DataError, match="is damaged.*remove it"):
        load_or_build("bad", lambda: {"x": np.arange(2)})
