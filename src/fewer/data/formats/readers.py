"""Helpers for all readers: archive members, file contents, class labels, and one-line errors."""

from __future__ import annotations

import gzip
import inspect
import re
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from io import BufferedReader, BytesIO
from pathlib import Path, PurePosixPath
from typing import IO, Concatenate, Literal, ParamSpec

import numpy as np
from numpy.typing import NDArray

from fewer.data.federated import MAX_CLASSES
from fewer.data.raw_dataset import Array, Inputs, RawDataset
from fewer.errors import DataError, FewerError, unknown_name

P = ParamSpec("P")
Reader = Callable[Concatenate[Path, P], RawDataset]
INTERNAL = ("path", "schema", "keep_unlabeled")
"""Parameters of readers that are not options of the user."""


def reader(description: str) -> Callable[[Reader[P]], Reader[P]]:
    """Decorates a reader: every failure becomes a one-line `DataError`, and the result is checked."""

    def decorate(read: Reader[P]) -> Reader[P]:
        allowed = [name for name in inspect.signature(read).parameters if name not in INTERNAL]

        @wraps(read)
        def read_checked(path: Path, /, *args: P.args, **options: P.kwargs) -> RawDataset:
            for name in options:
                if name not in (*allowed, *INTERNAL[1:]):
                    raise unknown_name("option", name, allowed)
            path = Path(path)
            try:
                if not path.exists() and not options.get("download"):
                    raise DataError(f"{path} does not exist (expected: {description})")
                raw = read(path, *args, **options)
                _check_dataset(raw, path, labels_optional=options.get("schema") is not None)
                return raw
            except FewerError:
                raise
            except Exception as error:  # damaged or hostile files raise many kinds of errors
                reason = " ".join(str(error).split()) or type(error).__name__
                raise DataError(f"cannot read {path} as {description}: {reason}") from error

        return read_checked

    return decorate


def _check_dataset(raw: RawDataset, path: Path, labels_optional: bool) -> None:
    """Checks that every input has a label (and a client id), and every label is a class."""
    if labels_optional and len(raw.x) and not len(raw.y):
        return
    _check_part(raw.x, raw.y, raw.client_ids, raw.class_names, f"{path} (training)")
    if raw.test is not None:
        _check_part(*raw.test, raw.test_client_ids, raw.class_names, f"{path} (test)")
        shapes = [tuple(x.shape[1:]) for x in (raw.x, raw.test[0]) if not isinstance(x, list)]
        if len(set(shapes)) > 1:
            raise DataError(f"{path} has training inputs of shape {shapes[0]}, but test inputs of shape {shapes[1]}")


def _check_part(x: Inputs, y: Array, client_ids: Array | None, class_names: Sequence[str], where: str) -> None:
    if not len(x):
        raise DataError(f"{where} has no samples")
    if len(x) != len(y):
        raise DataError(f"{where} has {len(x)} inputs and {len(y)} labels")
    if client_ids is not None and len(client_ids) != len(x):
        raise DataError(f"{where} has {len(x)} inputs and {len(client_ids)} client ids")
    if y.ndim == 2 or y.dtype.kind == "f":  # numbers or sets of labels, checked when the data is partitioned
        return
    classes = len(class_names) or MAX_CLASSES
    invalid = np.flatnonzero((y < 0) | (y >= classes))
    if len(invalid):
        raise DataError(f"{where} has label {y[invalid[0]]} in sample {invalid[0]} (allowed: 0 to {classes - 1})")


# --- files ----------------------------------------------------------------------------------------------------


def find_inside(path: Path, *names: str) -> Path:
    """Returns the first of these files or folders that exists in a directory, or the path itself."""
    return next((path / name for name in names if (path / name).exists()), path)


def read_contents(path: Path) -> bytes:
    """Reads a file, and decompresses it if its name ends in .gz."""
    content = path.read_bytes()
    return gzip.decompress(content) if path.suffix == ".gz" else content


def decode_text(content: bytes, where: object) -> str:
    """Decodes UTF-8, with or without a byte order mark, and with Unix or Windows line endings."""
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 text: {error}") from error


def decode_image(
    file: Path | BytesIO, where: str, size: int, mode: str, resampling: str, *formats: str
) -> tuple[Array, int]:
    """The pixels of an image in one of these formats, or in any if none is given, resized to `size` × `size`.

    A gray image of 16 bits is divided by 257. Also returns its largest value; 0 for an image of 8 bits.
    """
    from PIL import Image

    try:
        with Image.open(file, formats=formats or None) as image:
            image.draft(mode, (size, size))
            source: Image.Image = image
            largest = 0
            if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
                values = np.asarray(image)
                source, largest = Image.fromarray((values / 257).round().astype(np.uint8)), int(values.max())
            elif image.mode in ("I", "F"):
                raise DataError(f"{where} has pixels of mode {image.mode}, 32 bits (allowed: 8 or 16 bits per channel)")
            return np.asarray(source.convert(mode).resize((size, size), Image.Resampling[resampling])), largest
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{where} is a broken image: {error}") from error


def iter_members(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yields names and contents of the wanted files in a directory, tar or zip archive. Writes nothing to disk.

    A zip archive inside a zip archive is read too. Any link, device or member with a path outside the archive is an
    error, wanted or not.
    """
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            name = file.relative_to(path).as_posix()
            if wanted(name) and file.is_file():
                yield name, file.read_bytes()
    elif zipfile.is_zipfile(path):
        yield from _iter_zip_members(path, str(path), wanted, nested=True)
    else:
        with path.open("rb") as archive:
            compressed = archive.read(2) == b"\x1f\x8b"
        with gzip.open(path) if compressed else path.open("rb") as stream:
            yield from _iter_tar_members(stream, "r:" if compressed else "r:*", str(path), wanted)
            while stream.read(1 << 20):  # gzip checks integrity only at the end of the file
                pass


class Members(dict[str, bytes]):
    """The wanted files of a directory or archive, by name without folders. A missing one raises `DataError`."""

    def __init__(self, path: Path, wanted: Callable[[str], bool]) -> None:
        super().__init__((name.rpartition("/")[2], content) for name, content in iter_members(path, wanted))
        self.path = path

    def __missing__(self, name: str) -> bytes:
        raise DataError(f"no {name} in {self.path}")


def _iter_tar_members(
    stream: gzip.GzipFile | BufferedReader, mode: Literal["r:", "r:*"], where: str, wanted: Callable[[str], bool]
) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=stream, mode=mode) as archive:
        for member in archive:
            _check_member_path(member.name, where)
            if not (member.isreg() or member.isdir()):
                raise DataError(f"{where} has a link or device '{member.name}' (allowed: files and directories)")
            if member.isreg() and wanted(member.name):
                file = archive.extractfile(member)
                assert file is not None  # it is a regular file
                yield member.name, file.read()


def _iter_zip_members(
    file: Path | IO[bytes], where: str, wanted: Callable[[str], bool], nested: bool
) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            _check_member_path(member.filename, where)
            if stat.S_ISLNK(member.external_attr >> 16):
                raise DataError(f"{where} has a link '{member.filename}' (allowed: files and directories)")
            if nested and member.filename.endswith(".zip"):
                inner = f"{where} ({member.filename})"
                yield from _iter_zip_members(BytesIO(archive.read(member)), inner, wanted, nested=False)
            elif not member.is_dir() and wanted(member.filename):
                yield member.filename, archive.read(member)


def _check_member_path(name: str, where: str) -> None:
    path = name.replace("\\", "/")
    if path.startswith("/") or ".." in PurePosixPath(path).parts or path[1:2] == ":":
        raise DataError(f"{where} has a member '{name}' outside the archive (allowed: relative paths without ..)")


# --- labels ---------------------------------------------------------------------------------------------------


def number_labels(labels: Sequence[str] | Sequence[int], where: object) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Converts names or integers to class labels. Also returns the class names if labels are not integers already.

    If one label has leading zeros (007), all are names.
    """
    try:
        values = np.array(labels).astype(np.float64)
    except ValueError:
        values = None
    has_zeros = any(re.match(r"[+-]?0\d", str(label)) for label in set(labels))
    if values is None or has_zeros or ((values < 0) | (values >= MAX_CLASSES)).any():
        names, indices = np.unique(np.array([str(label) for label in labels]), return_inverse=True)
        return indices.reshape(-1).astype(np.int64), tuple(names.tolist())
    if (fractional := np.flatnonzero(values % 1 != 0)).size:
        raise DataError(
            f"{where} has label {labels[fractional[0]]} (allowed: integers or names; --loss mse predicts numbers)"
        )
    return values.astype(np.int64), ()
