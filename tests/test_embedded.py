"""Sets that need no network, and the cache they are kept in."""

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fewer.data.cache import cached
from fewer.data.glyphs import CLASSES, COPIES, WRITERS, _draw_writer, apply_looks, draw_glyphs
from fewer.errors import DataError


def test_glyphs_are_many_and_always_the_same() -> None:
    begun = time.monotonic()
    x, y, writer = draw_glyphs(28)
    assert time.monotonic() - begun < 90  # 3 s on a quiet core
    assert x.shape == (WRITERS * 62 * COPIES, 28, 28) and x.dtype == np.uint8 and WRITERS >= 100
    assert len(CLASSES) == 62 and np.bincount(y).tolist() == [WRITERS * COPIES] * 62
    assert np.bincount(writer).tolist() == [62 * COPIES] * WRITERS
    assert np.array_equal(x[: 62 * COPIES], _draw_writer(0, 28))
    assert _draw_writer(3, 32).shape == (62 * COPIES, 32, 32)


def test_glyphs_reveal_their_class_and_their_writer() -> None:
    """Nearest mean image: far above chance for the class of unseen writers, and for the writer of a drawing."""
    train = np.stack([_draw_writer(w, 28) for w in range(40)]).reshape(40, 62, COPIES, 784).astype(np.float32)
    stranger = np.stack([_draw_writer(w, 28) for w in range(40, 46)]).reshape(6, 62, COPIES, 784).astype(np.float32)
    means = train.mean(axis=(0, 2))
    distance = ((stranger.reshape(-1, 1, 784) - means[None]) ** 2).sum(axis=2)
    right = (distance.argmin(axis=1).reshape(6, 62, COPIES) == np.arange(62)[None, :, None]).mean()
    assert 0.2 < right < 0.95
    a, b = train[:, :, :2].mean(axis=2), train[:, :, 2:].mean(axis=2)
    same = ((a - b) ** 2).mean()
    others = ((a - np.roll(b, 1, axis=0)) ** 2).mean()
    assert same < 0.6 * others


def test_looks_are_four_views_of_one_thing() -> None:
    images = _draw_writer(0, 28)
    four = apply_looks(images)
    assert four.shape == (4, *images.shape)
    assert np.array_equal(four[0], images) and np.array_equal(four[1], 255 - images)
    assert np.array_equal(np.rot90(four[3], -1, axes=(1, 2)), images)
    assert four[2, 0, 5, 5] == int(images[0, 4:7, 4:7].mean())


# --- cache --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEWER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_cached_is_made_once(cache: Path) -> None:
    calls = []

    def make() -> dict[str, NDArray[np.int64]]:
        calls.append(1)
        return {"x": np.arange(5)}

    for _ in range(2):
        assert cached("five", make)["x"].tolist() == [0, 1, 2, 3, 4]
    assert len(calls) == 1 and isinstance(cached("five", make)["x"], np.memmap)


def _slowly(counter: Path) -> dict[str, NDArray[np.int64]]:
    with counter.open("a") as file:
        file.write("x")
    time.sleep(0.3)
    return {"x": np.arange(3)}


def test_two_processes_make_it_once(cache: Path, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=cached, args=("slow", lambda: _slowly(tmp_path / "n"))) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
        assert one.exitcode == 0
    assert (tmp_path / "n").read_text() == "x"


def _dies() -> dict[str, NDArray[np.int64]]:
    real = np.save

    def save(file: Any, array: Any) -> None:
        real(file, array)
        os.kill(os.getpid(), signal.SIGKILL)

    np.save = save  # type: ignore[assignment]
    return {"x": np.arange(9)}


def test_a_kill_leaves_no_half_entry(cache: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=cached, args=("half", _dies))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL and not (cache / "half").exists()
    assert cached("half", lambda: {"x": np.arange(2)})["x"].tolist() == [0, 1]


def test_a_damaged_entry_is_reported(cache: Path) -> None:
    cached("bad", lambda: {"x": np.arange(2)})
    (cache / "bad/x.npy").write_bytes(b"nothing")
    with pytest.raises(DataError, match="is damaged.*remove it"):
        cached("bad", lambda: {"x": np.arange(2)})
