"""Archives with members outside, links, truncation or damage are refused."""

from __future__ import annotations

import gzip
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fewer.errors import FewerError, SettingError
from fewer.registry import FORMATS
from tests.data.formats.files import (
    RNG,
    check_refused,
    har_files,
    read,
    write,
    write_cifar10,
    write_movielens,
    write_tar,
    write_zip,
)


def test_members_outside_the_archive_are_refused(tmp_path: Path) -> None:
    for name in ("../evil.txt", "/etc/evil.txt", "a/../../evil.txt", "C:\\evil.txt", "..\\evil.txt"):
        check_refused("plays", write_tar(tmp_path / "p.tar.gz", {name: b"x"}), "outside the archive")
        check_refused("movielens", write_zip(tmp_path / "p.zip", {name: b"x"}), "outside the archive")


def test_links_and_devices_are_refused(tmp_path: Path) -> None:
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
        path = tmp_path / "links.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            member = tarfile.TarInfo("play.txt")
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
        check_refused("plays", path, "link or device 'play.txt'")
    path = tmp_path / "links.zip"
    with zipfile.ZipFile(path, "w") as packed:
        entry = zipfile.ZipInfo("ml-100k/u.data")
        entry.external_attr = 0o120777 << 16
        packed.writestr(entry, "/etc/passwd")
    check_refused("movielens", path, "has a link")


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 0.99])
def test_truncated_archives_are_refused(tmp_path: Path, keep: float) -> None:
    for name, good in (
        ("cifar10", write_cifar10(tmp_path / "c.tar.gz")),
        ("plays", write_tar(tmp_path / "p.tar.gz", {"a.txt": RNG.bytes(50_000)})),
        ("har", write_zip(tmp_path / "h.zip", har_files())),
    ):
        raw = good.read_bytes()
        check_refused(name, write(tmp_path / f"cut-{good.name}", raw[: int(len(raw) * keep)]), "cut-")


@pytest.mark.parametrize("name", FORMATS)
def test_missing_corrupt_and_empty_paths_are_refused(tmp_path: Path, name: str) -> None:
    if name == "hf":
        pytest.importorskip("datasets")
    check_refused(name, tmp_path / "missing", "does not exist")
    check_refused(name, write(tmp_path / "rubbish.txt", RNG.bytes(1000)), "rubbish")
    (tmp_path / "empty").mkdir()
    check_refused(name, tmp_path / "empty", "empty")
    check_refused(name, tmp_path, "unknown option 'color'", SettingError, color="red")


def test_damaged_files_raise_no_other_errors(tmp_path: Path) -> None:
    """With random bytes changed, a file is read or refused with a FewerError."""
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 3), np.float32), y=np.arange(4))
    good = {
        "npz": tmp_path / "a.npz",
        "cifar10": write_cifar10(tmp_path / "c.tar"),
        "jsonl": write(tmp_path / "a.jsonl", '{"text": "a", "label": 0}\n' * 4),
        "csv": write(tmp_path / "a.csv", "a,label\n" + "1.5,0\n" * 5),
        "movielens": write_zip(
            tmp_path / "m.zip", {file.name: file.read_bytes() for file in write_movielens(tmp_path).glob("u.*")}
        ),
    }
    for name, path in good.items():
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if name == "cifar10" else raw
        for _ in range(40):
            damaged = bytearray(raw)
            for index in RNG.integers(len(raw), size=3):
                damaged[index] = RNG.integers(256)
            try:
                read(name, write(tmp_path / f"damaged{path.suffix}", bytes(damaged)))
            except FewerError as error:
                assert "\n" not in str(error)
