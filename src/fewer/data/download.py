"""Downloads public data sets from their official sources and verifies them before use."""

from __future__ import annotations

import gzip
import hashlib
import sys
import zipfile
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fewer.errors import DataError, unknown_name

Progress = Callable[[int, int | None], None]
"""Callback that receives the bytes downloaded so far and the total size (None if unknown)."""

MAX_ATTEMPTS = 3
"""Attempts per file. Each resumes the partial download."""
TIMEOUT = 30.0
"""Seconds without data after which a connection counts as broken."""
CHUNK = 1 << 18


class RemoteFile(NamedTuple):
    """A file to download: its URL, target folder and name, and published checksum."""

    url: str
    folder: str
    name: str
    checksum: str = ""
    """Algorithm and digest, as in "md5:…"; empty if none is published."""


def _list_files(base: str, folder: str, checksums: Mapping[str, str]) -> tuple[RemoteFile, ...]:
    """Files at the same address, by name."""
    return tuple(RemoteFile(f"{base}/{name}", folder, name, checksum) for name, checksum in checksums.items())


def _list_idx_files(base: str, folder: str, *checksums: str) -> tuple[RemoteFile, ...]:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    files = {f"{name}-ubyte.gz": f"md5:{checksum}" for name, checksum in zip(names, checksums, strict=True)}
    return _list_files(base, folder, files)


_MNIST = _list_idx_files(
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "mnist",
    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "d53e105ee54ea40749a09fcbcd1e9432",
    "9fb629c4189551a2d022fa330f9573f3",
    "ec29112dd5afa0611ce80d1b7f02629c",
)
_TORONTO = "https://www.cs.toronto.edu/~kriz"

DOWNLOADS: dict[str, tuple[RemoteFile, ...]] = {
    "mnist": _MNIST,
    "fashion-mnist": _list_idx_files(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
        "fashion-mnist",
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
    "qmnist": (
        *_list_files(
            "https://raw.githubusercontent.com/facebookresearch/qmnist/master",
            "qmnist",
            {
                "qmnist-train-labels-idx2-int.gz": "md5:0058f8dd561b90ffdd0f734c6a30e5e4",
                "qmnist-test-labels-idx2-int.gz": "md5:5b5b05890a5e13444e108efe57b788aa",
            },
        ),
        *_MNIST,
    ),
    "cifar10": _list_files(_TORONTO, "cifar10", {"cifar-10-binary.tar.gz": "md5:c32a1d4ab5d03f1284b67883e8d87530"}),
    "cifar100": _list_files(_TORONTO, "cifar100", {"cifar-100-binary.tar.gz": "md5:03b5dce01913d631647c71ecec9e9cb8"}),
    "omniglot": _list_files(
        "https://raw.githubusercontent.com/brendenlake/omniglot/master/python",
        "omniglot",
        {
            "images_background.zip": "md5:68d2efa1b9178cc56df9314c21c6e718",
            "images_evaluation.zip": "md5:6b91aef0f799c5bb55b94e3f2daec811",
        },
    ),
    "20newsgroups": (
        RemoteFile(
            "https://ndownloader.figshare.com/files/5975967",
            "20newsgroups",
            "20news-bydate.tar.gz",
            "sha256:8f1b2514ca22a5ade8fbb9cfa5727df95fa587f4c87b786e15c759fa66d95610",
        ),
    ),
    "movielens-100k": _list_files(
        "https://files.grouplens.org/datasets/movielens",
        "movielens-100k",
        {"ml-100k.zip": "md5:0e33842e24a9c977be4e0107933c0723"},
    ),
    "har": (
        RemoteFile(
            "https://archive.ics.uci.edu/static/public/240/human+activity+recognition+using+smartphones.zip",
            "har",
            "har.zip",
        ),
    ),
}


def download(name: str, directory: str | Path, progress: Progress | None = None) -> Path:
    """Downloads a public data set into a data directory and returns its folder.

    Existing files are kept. `progress` is called for each file in turn. An interrupted download leaves a .part file,
    which the next call resumes.
    """
    if name not in DOWNLOADS:
        raise unknown_name("data to download", name, DOWNLOADS)
    for remote in DOWNLOADS[name]:
        target = Path(directory) / remote.folder / remote.name
        if not target.exists():
            _fetch(remote, target, progress)
    return Path(directory) / DOWNLOADS[name][0].folder


def _fetch(remote: RemoteFile, target: Path, progress: Progress | None) -> None:
    part = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(MAX_ATTEMPTS):
            try:
                if _receive(remote.url, part, progress):
                    break
                reason = "the connection broke"
            except HTTPError as error:
                raise DataError(_describe_failure(remote, target, f"the server returned HTTP {error.code}")) from error
            except (HTTPException, ConnectionError, TimeoutError) as error:
                reason = str(error) or type(error).__name__
            if attempt == MAX_ATTEMPTS - 1:
                size = part.stat().st_size if part.exists() else 0
                raise DataError(_describe_failure(remote, target, f"{reason}; kept {size} bytes for the next attempt"))
        if fault := _find_fault(part, remote):
            part.unlink()
            raise DataError(f"removed the corrupt download of {remote.url}: {fault}")
        part.replace(target)
    except OSError as error:
        raise DataError(_describe_failure(remote, target, str(error))) from error


def _receive(url: str, part: Path, progress: Progress | None) -> bool:
    """Resumes a partial file. Returns True once it is complete."""
    received = part.stat().st_size if part.exists() else 0
    request = Request(url, headers={"User-Agent": "fewer", **({"Range": f"bytes={received}-"} if received else {})})
    try:
        response = urlopen(request, timeout=TIMEOUT)
    except HTTPError as error:
        if error.code != 416 or not received:
            raise
        if error.headers["Content-Range"] == f"bytes */{received}":
            return True
        part.unlink()  # longer than the remote file, so not a part of it
        return False
    with response:
        if received and not (response.status == 206 and _starts_at(response, received)):
            received = 0  # the server does not support ranges and sends the whole file
        length = response.headers["Content-Length"]
        total = None if length is None else received + int(length)
        with part.open("ab" if received else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                received += len(chunk)
                if progress is not None:
                    progress(received, total)
    return total is None or received == total


def _starts_at(response: Any, offset: int) -> bool:
    return str(response.headers["Content-Range"]).startswith(f"bytes {offset}-")


def _find_fault(part: Path, remote: RemoteFile) -> str:
    """Describes what is wrong with a file. Returns "" if the file is correct."""
    algorithm, _, expected = (remote.checksum or "sha256:").partition(":")
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, algorithm).hexdigest()
    if expected:
        return "" if digest == expected else f"its {algorithm} is {digest}, expected {expected}"
    try:
        if remote.name.endswith(".zip"):
            with zipfile.ZipFile(part) as archive:
                if damaged := archive.testzip():
                    return f"its member {damaged} is damaged"
        else:
            with gzip.open(part) as packed:
                while packed.read(CHUNK):
                    pass
    except Exception as error:  # damaged archives raise many kinds of errors
        return f"it is not a complete archive ({error})"
    print(f"{remote.name}: sha256 {digest} (no published checksum to compare with)", file=sys.stderr)
    return ""


def _describe_failure(remote: RemoteFile, target: Path, reason: str) -> str:
    return (
        f"cannot download {remote.url}: {reason}. Download it manually to {target}, "
        f"then set --data-dir or FEWER_DATA to {target.parent.parent}"
    )
