"""Public data sets fetched from where their makers publish them, checked before they are put in place."""

from __future__ import annotations

import gzip
import hashlib
import sys
import zipfile
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fewer.errors import DataError, unknown

Progress = Callable[[int, int | None], None]
"""Told how many bytes of a file are there, and how many there will be (None if the server does not say)."""

TRIES = 3
"""How often a broken connection is taken up again before giving up."""
TIMEOUT = 30.0
CHUNK = 1 << 18


class Remote(NamedTuple):
    """A file to fetch: from where, into which folder and under which name, and its published checksum."""

    url: str
    folder: str
    name: str
    checksum: str = ""
    """Algorithm and digest, as in "md5:…"; empty where none is published."""


def _idx_files(base: str, folder: str, *checksums: str) -> tuple[Remote, ...]:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(
        Remote(f"{base}/{name}-ubyte.gz", folder, f"{name}-ubyte.gz", f"md5:{checksum}")
        for name, checksum in zip(names, checksums, strict=True)
    )


_MNIST = _idx_files(
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "mnist",
    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "d53e105ee54ea40749a09fcbcd1e9432",
    "9fb629c4189551a2d022fa330f9573f3",
    "ec29112dd5afa0611ce80d1b7f02629c",
)
_QMNIST = "https://raw.githubusercontent.com/facebookresearch/qmnist/master"
_OMNIGLOT = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python"

SETS: dict[str, tuple[Remote, ...]] = {
    "mnist": _MNIST,
    "fashion-mnist": _idx_files(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
        "fashion-mnist",
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
    "qmnist": (
        *(
            Remote(f"{_QMNIST}/{name}", "qmnist", name, f"md5:{checksum}")
            for name, checksum in (
                ("qmnist-train-labels-idx2-int.gz", "0058f8dd561b90ffdd0f734c6a30e5e4"),
                ("qmnist-test-labels-idx2-int.gz", "5b5b05890a5e13444e108efe57b788aa"),
            )
        ),
        *_MNIST,
    ),
    "cifar10": (
        Remote(
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            "cifar10",
            "cifar-10-python.tar.gz",
            "md5:c58f30108f718f92721af3b95e74349a",
        ),
    ),
    "cifar100": (
        Remote(
            "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
            "cifar100",
            "cifar-100-python.tar.gz",
            "md5:eb9058c3a382ffc7106e4002c42a8d85",
        ),
    ),
    "omniglot": tuple(
        Remote(f"{_OMNIGLOT}/{name}", "omniglot", name, f"md5:{checksum}")
        for name, checksum in (
            ("images_background.zip", "68d2efa1b9178cc56df9314c21c6e718"),
            ("images_evaluation.zip", "6b91aef0f799c5bb55b94e3f2daec811"),
        )
    ),
    "20newsgroups": (
        Remote(
            "https://ndownloader.figshare.com/files/5975967",
            "20newsgroups",
            "20news-bydate.tar.gz",
            "sha256:8f1b2514ca22a5ade8fbb9cfa5727df95fa587f4c87b786e15c759fa66d95610",
        ),
    ),
    "movielens-100k": (
        Remote(
            "https://files.grouplens.org/datasets/movielens/ml-100k.zip",
            "movielens-100k",
            "ml-100k.zip",
            "md5:0e33842e24a9c977be4e0107933c0723",
        ),
    ),
    "har": (
        Remote(
            "https://archive.ics.uci.edu/static/public/240/human+activity+recognition+using+smartphones.zip",
            "har",
            "har.zip",
        ),
    ),
}


def get(name: str, directory: str | Path, progress: Progress | None = None) -> Path:
    """Fetch a public data set into a data directory, and return the folder it is in.

    Files that are there already are left alone. `progress` is called for each file in turn. A download that breaks
    off leaves a .part file behind, from which the next call goes on.
    """
    if name not in SETS:
        raise unknown("data to download", name, SETS)
    for remote in SETS[name]:
        target = Path(directory) / remote.folder / remote.name
        if not target.exists():
            _fetch(remote, target, progress)
    return Path(directory) / SETS[name][0].folder


def _fetch(remote: Remote, target: Path, progress: Progress | None) -> None:
    part = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(TRIES):
            try:
                if _receive(remote.url, part, progress):
                    break
                reason = "the connection broke off"
            except HTTPError as error:
                raise DataError(_by_other_means(remote, target, f"the server answered {error.code}")) from error
            except (HTTPException, ConnectionError, TimeoutError) as error:
                reason = str(error) or type(error).__name__
            if attempt == TRIES - 1:
                kept = part.stat().st_size if part.exists() else 0
                raise DataError(_by_other_means(remote, target, f"{reason}; {kept} bytes are kept for the next try"))
        if fault := _fault(part, remote):
            part.unlink()
            raise DataError(f"the download of {remote.url} is corrupt and has been removed: {fault}")
        part.replace(target)
    except OSError as error:
        raise DataError(_by_other_means(remote, target, str(error))) from error


def _receive(url: str, part: Path, progress: Progress | None) -> bool:
    """Add to a partial file what is missing of it; whether it is complete now."""
    have = part.stat().st_size if part.exists() else 0
    request = Request(url, headers={"User-Agent": "fewer", **({"Range": f"bytes={have}-"} if have else {})})
    try:
        response = urlopen(request, timeout=TIMEOUT)
    except HTTPError as error:
        if error.code != 416 or not have:
            raise
        if error.headers["Content-Range"] == f"bytes */{have}":
            return True
        part.unlink()  # it is longer than the file: not a part of it
        return False
    with response:
        if have and not (response.status == 206 and _begins_at(response, have)):
            have = 0  # the server cannot go on from there, and sends everything
        length = response.headers["Content-Length"]
        total = None if length is None else have + int(length)
        with part.open("ab" if have else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                have += len(chunk)
                if progress is not None:
                    progress(have, total)
    return total is None or have == total


def _begins_at(response: Any, place: int) -> bool:
    return str(response.headers["Content-Range"]).startswith(f"bytes {place}-")


def _fault(part: Path, remote: Remote) -> str:
    """What is wrong with a file; nothing if it is what it should be."""
    algorithm, _, expected = (remote.checksum or "sha256:").partition(":")
    with part.open("rb") as file:
        seen = hashlib.file_digest(file, algorithm).hexdigest()
    if expected:
        return "" if seen == expected else f"its {algorithm} is {seen} where {expected} belongs"
    try:
        if remote.name.endswith(".zip"):
            with zipfile.ZipFile(part) as archive:
                if broken := archive.testzip():
                    return f"{broken} in it is damaged"
        else:
            with gzip.open(part) as packed:
                while packed.read(CHUNK):
                    pass
    except Exception as error:  # a damaged archive raises any of many kinds
        return f"it is not a whole archive ({error})"
    print(f"{remote.name}: sha256 {seen} (its makers publish none to compare with)", file=sys.stderr)
    return ""


def _by_other_means(remote: Remote, target: Path, reason: str) -> str:
    return (
        f"cannot download {remote.url}: {reason}. Fetch it by other means and put it at {target}, "
        f"then point --data-dir or FEWER_DATA to {target.parent.parent}"
    )
