"""The cache of generated data survives kills and races."""

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
from fewer.errors import DataError


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
