"""Writes small files of every format."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from fewer.data.raw_dataset import RawDataset
from fewer.errors import DataError, FewerError
from fewer.registry import FORMATS

Array = NDArray[Any]
RNG = np.random.default_rng(0)


def read(name: str, path: Path, **options: Any) -> RawDataset:
    raw: RawDataset = FORMATS[name](path, **options)
    return raw


def check_refused(name: str, path: Path, message: str, kind: type[FewerError] = DataError, **options: Any) -> None:
    """Checks that reading fails with a one-line error that matches `message`."""
    with pytest.raises(kind, match=message) as caught:
        read(name, path, **options)
    assert "\n" not in str(caught.value)


def shapes(raw: RawDataset) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    def size_of(x: Any) -> tuple[int, ...]:
        return (len(x),) if isinstance(x, list) else tuple(x.shape)

    return size_of(raw.x), None if raw.test is None else size_of(raw.test[0])


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_tar(path: Path, files: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def write_zip(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def png(width: int = 8, height: int = 8, mode: str = "RGB", color: Any = 255) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (width, height), color).save(buffer, "PNG")
    return buffer.getvalue()


def cifar_batch(count: int = 4, classes: int = 3, protocol: int = 2, **more: Any) -> bytes:
    images = np.arange(count * 3072, dtype=np.uint32).astype(np.uint8).reshape(count, 3072)
    labels = [number % classes for number in range(count)]
    batch = {b"data": images, b"labels": labels, b"fine_labels": labels, b"coarse_labels": [0] * count}
    return pickle.dumps({**batch, b"filenames": [b"a.png"] * count, **more}, protocol)


def write_cifar10(path: Path, protocol: int = 2, replaced: dict[str, bytes] | None = None) -> Path:
    files = {f"data_batch_{number}": cifar_batch(protocol=protocol) for number in range(1, 6)}
    files |= {"test_batch": cifar_batch(2, protocol=protocol)}
    files |= {"batches.meta": pickle.dumps({b"label_names": [b"cat", b"dog", b"owl"]}, protocol)}
    return write_tar(path, {f"cifar-10-batches-py/{name}": raw for name, raw in (files | (replaced or {})).items()})


def film_line(number: int, year: str, genres: set[int]) -> str:
    flags = "|".join(str(int(genre in genres)) for genre in range(19))
    return f"{number}|Film {number} ({year})|{f'01-Jan-{year}' if year else ''}||http://x|{flags}\n"


def write_movielens(
    folder: Path, ratings: str = "2\t1\t4\t86400\n1\t3\t5\t7200\n1\t1\t3\t3600\n1\t2\t4\t7200\n"
) -> Path:
    write(folder / "u.item", film_line(1, "1995", {1, 5}) + film_line(2, "", {0}) + film_line(3, "1970", {5}))
    write(folder / "u.user", "1|25|F|writer|00000\n2|50|M|astronaut|T8H1N\n")
    write(folder / "u.data", ratings)
    return folder


def har_files() -> dict[str, bytes]:
    files = {}
    for part, rows in (("train", 4), ("test", 2)):
        for number, signal in enumerate(("body_acc", "body_gyro", "total_acc")):
            for offset, axis in enumerate("xyz"):
                line = "  " + " ".join([f"{3 * number + offset:.7e}"] * 128) + "\n"
                files[f"{part}/Inertial Signals/{signal}_{axis}_{part}.txt"] = (line * rows).encode()
        files[f"{part}/y_{part}.txt"] = "".join(f"{1 + row % 6}\n" for row in range(rows)).encode()
        files[f"{part}/subject_{part}.txt"] = "".join(f"{1 + row // 2}\n" for row in range(rows)).encode()
        files[f"{part}/X_{part}.txt"] = b"not read"
    return files


needs_real_data = pytest.mark.skipif("FEWER_DATA" not in os.environ, reason="FEWER_DATA is not set")


def read_real(name: str, folder: str, **options: Any) -> RawDataset:
    return read(name, Path(os.environ["FEWER_DATA"]) / folder, **options)


def count(values: Array | None) -> int:
    assert values is not None
    return len(np.unique(values))
