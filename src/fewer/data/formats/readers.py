"""What all readers share: members of archives, whole files, class numbers, and errors of one line."""

from __future__ import annotations

import gzip
import inspect
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from io import BufferedReader, BytesIO
from pathlib import Path, PurePosixPath
from typing import IO, Any, Concatenate, Literal, ParamSpec

import numpy as np
from numpy.typing import NDArray

from fewer.data.raw_dataset import Array, Inputs, RawDataset
from fewer.errors import DataError, FewerError, unknown

P = ParamSpec("P")
Read = Callable[Concatenate[Path, P], RawDataset]

MAX_CLASSES = 1 << 20
"""Whole numbers below this are class numbers; larger ones are names."""


def reader(what: str) -> Callable[[Read[P]], Read[P]]:
    """Make a function a reader of `what`: whatever goes wrong in it is one line, and what it returns fits together."""

    def wrap(read: Read[P]) -> Read[P]:
        allowed = list(inspect.signature(read).parameters)[1:]

        @wraps(read)
        def guarded(path: Path, /, *args: P.args, **options: P.kwargs) -> RawDataset:
            for name in options:
                if name not in allowed:
                    raise unknown("option", name, allowed)
            path = Path(path)
            try:
                if not path.exists():
                    raise DataError(f"there is no {path} (expected: {what})")
                return _checked(read(path, *args, **options), path)
            except FewerError:
                raise
            except Exception as error:  # damaged or hostile files raise any of dozens of kinds
                reason = " ".join(str(error).split()) or type(error).__name__
                raise DataError(f"{path} cannot be read as {what}: {reason}") from error

        return guarded

    return wrap


def _checked(raw: RawDataset, path: Path) -> RawDataset:
    """The same data, if every input has a label (and a client), and every label is a class."""
    _together(raw.x, raw.y, raw.client_ids, raw.names, f"{path} (training)")
    if raw.test is not None:
        _together(*raw.test, raw.test_client_ids, raw.names, f"{path} (test)")
        shapes = [tuple(x.shape[1:]) for x in (raw.x, raw.test[0]) if not isinstance(x, list)]
        if len(set(shapes)) > 1:
            raise DataError(f"{path} has training inputs of shape {shapes[0]}, but test inputs of shape {shapes[1]}")
    return raw


def _together(x: Inputs, y: Array, client_ids: Array | None, names: Sequence[str], where: str) -> None:
    if not len(x):
        raise DataError(f"{where} has no samples")
    if len(x) != len(y):
        raise DataError(f"{where} has {len(x)} inputs and {len(y)} labels")
    if client_ids is not None and len(client_ids) != len(x):
        raise DataError(f"{where} has {len(x)} inputs and {len(client_ids)} clients")
    last = len(names) or MAX_CLASSES
    wrong = np.flatnonzero((y < 0) | (y >= last))
    if len(wrong):
        raise DataError(f"{where} has label {y[wrong[0]]} in sample {wrong[0]} (allowed: 0 to {last - 1})")


# --- files ----------------------------------------------------------------------------------------------------


def inside(path: Path, *names: str) -> Path:
    """The first of these files or folders that is in a directory; the path itself if none is."""
    return next((path / name for name in names if (path / name).exists()), path)


def contents(path: Path) -> bytes:
    """All of a file, unpacked if its name ends in .gz."""
    raw = path.read_bytes()
    return gzip.decompress(raw) if path.suffix == ".gz" else raw


def text(raw: bytes, where: object) -> str:
    """UTF-8, with or without a byte order mark, and with any ends of lines."""
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 text: {error}") from error


def everything(name: str) -> bool:
    """Want every member."""
    return True


def members(path: Path, wanted: Callable[[str], bool] = everything) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the wanted files of a directory, a tar or a zip archive; nothing is written to disk.

    A zip archive within a zip archive counts as a part of it. Members that climb out of the archive, links and
    devices are refused, whether they are wanted or not.
    """
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            name = file.relative_to(path).as_posix()
            if wanted(name) and file.is_file():
                yield name, file.read_bytes()
    elif zipfile.is_zipfile(path):
        yield from _zip_members(path, str(path), wanted, nested=True)
    else:
        packed = _is_gzip(path)
        with gzip.open(path) if packed else path.open("rb") as stream:
            yield from _tar_members(stream, "r:" if packed else "r:*", str(path), wanted)
            while stream.read(1 << 20):  # only at its end does a packed file show that it is whole
                pass


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _tar_members(
    stream: gzip.GzipFile | BufferedReader, mode: Literal["r:", "r:*"], where: str, wanted: Callable[[str], bool]
) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=stream, mode=mode) as archive:
        for member in archive:
            _refuse_outside(member.name, where)
            if not (member.isreg() or member.isdir()):
                raise DataError(f"{where} has a link or device '{member.name}' (allowed: files and directories)")
            if member.isreg() and wanted(member.name):
                file = archive.extractfile(member)
                assert file is not None  # it is a regular file
                yield member.name, file.read()


def _zip_members(
    file: Path | IO[bytes], where: str, wanted: Callable[[str], bool], nested: bool
) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            _refuse_outside(member.filename, where)
            if stat.S_ISLNK(member.external_attr >> 16):
                raise DataError(f"{where} has a link '{member.filename}' (allowed: files and directories)")
            if nested and member.filename.endswith(".zip"):
                inner = f"{where} ({member.filename})"
                yield from _zip_members(BytesIO(archive.read(member)), inner, wanted, nested=False)
            elif not member.is_dir() and wanted(member.filename):
                yield member.filename, archive.read(member)


def _refuse_outside(name: str, where: str) -> None:
    plain = name.replace("\\", "/")
    if plain.startswith("/") or ".." in PurePosixPath(plain).parts or plain[1:2] == ":":
        raise DataError(f"{where} has a member '{name}' that climbs out of it (allowed: paths below the archive)")


# --- labels ---------------------------------------------------------------------------------------------------


def numbered(labels: Sequence[str] | Sequence[int], where: object) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Class numbers, and names if the labels are not whole numbers already."""
    try:
        values = np.array(labels).astype(np.float64)
    except ValueError:
        values = None
    if values is None or ((values < 0) | (values >= MAX_CLASSES)).any():
        names, numbers = np.unique(np.array([str(label) for label in labels]), return_inverse=True)
        return numbers.reshape(-1).astype(np.int64), tuple(names.tolist())
    if (broken := np.flatnonzero(values % 1 != 0)).size:
        raise DataError(f"{where} has label {labels[broken[0]]} (allowed: whole numbers or names)")
    return values.astype(np.int64), ()


def as_labels(values: Any, where: object) -> NDArray[np.int64]:
    """An array of whole numbers, flat or of one column."""
    array = np.asarray(values)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "iufb" or not np.array_equal(array, array.astype(np.int64)):
        shape = f"shape {array.shape}, type {array.dtype}"
        raise DataError(f"{where} has labels of {shape} (allowed: one whole number for each sample)")
    return array.astype(np.int64)
