"""Downloads public data sets from their official sources and verifies them before use."""

from __future__ import annotations

import gzip
import hashlib
import sys
import zipfile
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
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


def _parse_downloads(table: str) -> dict[str, tuple[RemoteFile, ...]]:
    """Parses a table: a line with a data set's folder and address, then an indented line for each of its files.

    That line has the checksum (or -), the name, and the name at the address if it differs.
    """
    downloads: dict[str, tuple[RemoteFile, ...]] = {}
    folder = base = ""
    for line in table.strip().splitlines():
        if not line.startswith(" "):
            folder, base = line.split()
            downloads[folder] = ()
        else:
            checksum, name, *remote_name = line.split()
            url = f"{base}/{remote_name[0] if remote_name else name}"
            downloads[folder] += (RemoteFile(url, folder, name, checksum.removeprefix("-")),)
    return downloads


DOWNLOADS = _parse_downloads("""
mnist https://ossci-datasets.s3.amazonaws.com/mnist
    md5:f68b3c2dcbeaaa9fbdd348bbdeb94873 train-images-idx3-ubyte.gz
    md5:d53e105ee54ea40749a09fcbcd1e9432 train-labels-idx1-ubyte.gz
    md5:9fb629c4189551a2d022fa330f9573f3 t10k-images-idx3-ubyte.gz
    md5:ec29112dd5afa0611ce80d1b7f02629c t10k-labels-idx1-ubyte.gz
fashion-mnist https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion
    md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d train-images-idx3-ubyte.gz
    md5:25c81989df183df01b3e8a0aad5dffbe train-labels-idx1-ubyte.gz
    md5:bef4ecab320f06d8554ea6380940ec79 t10k-images-idx3-ubyte.gz
    md5:bb300cfdad3c16e7a12a480ee83cd310 t10k-labels-idx1-ubyte.gz
qmnist https://raw.githubusercontent.com/facebookresearch/qmnist/master
    md5:0058f8dd561b90ffdd0f734c6a30e5e4 qmnist-train-labels-idx2-int.gz
    md5:5b5b05890a5e13444e108efe57b788aa qmnist-test-labels-idx2-int.gz
cifar10 https://www.cs.toronto.edu/~kriz
    md5:c32a1d4ab5d03f1284b67883e8d87530 cifar-10-binary.tar.gz
cifar100 https://www.cs.toronto.edu/~kriz
    md5:03b5dce01913d631647c71ecec9e9cb8 cifar-100-binary.tar.gz
omniglot https://raw.githubusercontent.com/brendenlake/omniglot/master/python
    md5:68d2efa1b9178cc56df9314c21c6e718 images_background.zip
    md5:6b91aef0f799c5bb55b94e3f2daec811 images_evaluation.zip
20newsgroups https://ndownloader.figshare.com/files
    sha256:8f1b2514ca22a5ade8fbb9cfa5727df95fa587f4c87b786e15c759fa66d95610 20news-bydate.tar.gz 5975967
movielens-100k https://files.grouplens.org/datasets/movielens
    md5:0e33842e24a9c977be4e0107933c0723 ml-100k.zip
har https://archive.ics.uci.edu/static/public/240
    - har.zip human+activity+recognition+using+smartphones.zip
""")
DOWNLOADS["qmnist"] += DOWNLOADS["mnist"]  # its images


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
        for _ in range(MAX_ATTEMPTS):
            try:
                if _receive(remote.url, part, progress):
                    break
                reason = "the connection broke"
            except HTTPError as error:
                raise DataError(_describe_failure(remote, target, f"the server returned HTTP {error.code}")) from error
            except (HTTPException, ConnectionError, TimeoutError) as error:
                reason = str(error) or type(error).__name__
        else:
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
        resumes = str(response.headers["Content-Range"]).startswith(f"bytes {received}-")
        if received and not (response.status == 206 and resumes):
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
