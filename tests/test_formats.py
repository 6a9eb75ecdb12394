"""Readers: small valid and invalid files of every format, and the real datasets if FEWER_DATA is set."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from fewer.data.formats.movielens import FEATURES
from fewer.data.formats.plays import ALPHABET, NO_CLIENT, encode_characters, read_roles
from fewer.data.raw_dataset import RawDataset
from fewer.errors import DataError, FewerError, SettingError
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


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
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


# --- files of every format ------------------------------------------------------------------------------------


def encode_idx(array: Array) -> bytes:
    kind = {"uint8": 8, "int32": 12}[str(array.dtype)]
    return (
        bytes([0, 0, kind, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.astype(array.dtype.newbyteorder(">")).tobytes()
    )


DIGITS = np.arange(12) % 10


def write_mnist(folder: Path, packed: bool = True) -> Path:
    for part, count in (("train", 12), ("t10k", 5)):
        images = np.arange(count * 16, dtype=np.uint8).reshape(count, 4, 4)
        for name, array in (("images-idx3", images), ("labels-idx1", DIGITS[:count].astype(np.uint8))):
            raw = encode_idx(array)
            write(folder / f"{part}-{name}-ubyte{'.gz' * packed}", gzip.compress(raw) if packed else raw)
    return folder


def write_qmnist(folder: Path) -> Path:
    write_mnist(folder / "mnist")
    for part, rows in (("train", 12), ("test", 8)):
        table = np.zeros((rows, 8), np.int32)
        table[:, 0] = DIGITS[:rows]
        table[:, 2] = 2000 + np.arange(rows) // 3
        write(folder / "qmnist" / f"qmnist-{part}-labels-idx2-int.gz", gzip.compress(encode_idx(table)))
    return folder / "qmnist"


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


def cifar100_files() -> dict[str, bytes]:
    names = {b"fine_label_names": [b"cat", b"dog", b"owl"], b"coarse_label_names": [b"animal"]}
    return {"train": cifar_batch(), "test": cifar_batch(2), "meta": pickle.dumps(names, 2)}


def write_omniglot(folder: Path) -> Path:
    image = Image.new("1", (105, 105), 1)
    image.paste(0, (0, 0, 52, 105))  # the left half is ink
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    for part, alphabets, first in (("background", ("Greek", "Latin"), 1), ("evaluation", ("Runes",), 5)):
        names = [f"{alphabet}/character{number:02}" for alphabet in alphabets for number in (1, 2)]
        files = {
            f"images_{part}/{name}/{first + index:04}_{drawer:02}.png": buffer.getvalue()
            for index, name in enumerate(names)
            for drawer in range(1, 4)
        }
        write_zip(folder / f"images_{part}.zip", dict(reversed(files.items())))
    return folder


def write_leaf(folder: Path, users: dict[str, tuple[list[Any], list[Any]]], file: str = "data/train/0.json") -> Path:
    data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    content = {"users": list(users), "num_samples": [len(y) for _, y in users.values()], "user_data": data}
    write(folder / file, json.dumps(content))
    return folder


PLAY = """THE TITLE

by Somebody

Dramatis Personae

KING.
A man of whom much is said before the play begins.

ACT I.

SCENE I. A room in the palace.

[Enter the KING and
a FOOL.]

KING.
Hear me [Aside.] now, good fool: the day is long,
And night is “longer”—so they say…

[Exit a servant.]

And so it goes on after a direction.

FIRST FOOL.
Ay.
KING.
Right after, without an empty line.

Nobody says this.

SCENE II. Another room,
with a long name.

FIRST FOOL.
(Exit.)
_Exeunt all._
Enter a Messenger.
Alone.
"""


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


def write_pamap2(folder: Path) -> Path:
    for subject, activities in ((101, (0, 4, 4, 1)), (102, (4, 1))):
        rows = np.repeat(activities, 20)
        table = np.tile(np.arange(54.0), (len(rows), 1)) + np.arange(len(rows))[:, None]
        table[:, 1] = rows
        table[::2, 2] = np.nan
        table[:, 16:20] = np.nan  # orientation is not used
        text = io.StringIO()
        np.savetxt(text, table, fmt="%g")
        write(folder / "Protocol" / f"subject{subject}.dat", text.getvalue().replace("nan", "NaN"))
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


def write_hapt(folder: Path, labels: str = "1 1 5 1 200\n1 1 7 201 300\n2 7 1 11 150\n") -> Path:
    for name, rows in (("exp01_user01", 300), ("exp02_user07", 160)):
        for kind, value in (("acc", 1), ("gyro", 2)):
            lines = "".join(f"{value} {row} {-row}\n" for row in range(rows))
            write(folder / "RawData" / f"{kind}_{name}.txt", lines)
    write(folder / "RawData" / "labels.txt", labels)
    return folder


# --- idx ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
def test_idx(tmp_path: Path, packed: bool) -> None:
    raw = read("idx", write_mnist(tmp_path, packed))
    assert shapes(raw) == ((12, 4, 4), (5, 4, 4)) and isinstance(raw.x, np.ndarray)
    assert raw.x.dtype == np.uint8 and raw.x[1, 0].tolist() == [16, 17, 18, 19]
    assert raw.y.tolist() == DIGITS.tolist() and raw.client_ids is None


def test_qmnist_adds_writers_to_the_images_of_mnist(tmp_path: Path) -> None:
    raw = read("qmnist", write_qmnist(tmp_path))
    assert shapes(raw) == ((12, 4, 4), (5, 4, 4))
    assert raw.client_ids is not None and raw.client_ids.tolist() == (2000 + np.arange(12) // 3).tolist()
    assert raw.test_client_ids is not None and raw.test_client_ids.tolist() == [2000, 2000, 2000, 2001, 2001]
    (tmp_path / "mnist").rename(tmp_path / "digits")
    assert len(read("qmnist", tmp_path / "qmnist", images="digits").y) == 12
    check_refused("qmnist", tmp_path / "qmnist", "mnist does not exist")


def test_bad_idx_files_are_refused(tmp_path: Path) -> None:
    folder = write_mnist(tmp_path / "good", packed=False)
    name = "train-labels-idx1-ubyte"
    good = (folder / name).read_bytes()
    for bad, message in (
        (b"\1" + good[1:], "wrong magic"),
        (good[:3] + b"\2" + good[4:], "wrong magic"),
        (good[:-1], "truncated"),
        (good + b"\0", "too long"),
        (good[:2], "wrong magic"),
        (encode_idx(DIGITS[:11].astype(np.uint8)), "12 inputs and 11 labels"),
    ):
        write(folder / name, bad)
        check_refused("idx", folder, message)
    (folder / name).unlink()
    check_refused("idx", folder, "no train-labels-idx1-ubyte")
    write(folder / f"{name}.gz", gzip.compress(good)[:-6])
    check_refused("idx", folder, "cannot decompress")


def test_qmnist_of_other_images_is_refused(tmp_path: Path) -> None:
    folder = write_qmnist(tmp_path)
    table = np.zeros((12, 8), np.int32)
    file = folder / "qmnist-train-labels-idx2-int.gz"
    write(file, gzip.compress(encode_idx(table)))
    check_refused("qmnist", folder, "digits that differ")
    write(file, gzip.compress(encode_idx(table[:5])))
    check_refused("qmnist", folder, "12 rows or more")


# --- CIFAR ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_cifar10_in_every_pickle_protocol(tmp_path: Path, protocol: int) -> None:
    raw = read("cifar10", write_cifar10(tmp_path / "cifar-10-python.tar.gz", protocol))
    assert shapes(raw) == ((20, 3, 32, 32), (2, 3, 32, 32)) and raw.class_names == ("cat", "dog", "owl")
    assert isinstance(raw.x, np.ndarray) and raw.x.dtype == np.uint8 and raw.x[1, 0, 0, 0] == 3072 % 256
    assert raw.y.tolist() == [0, 1, 2, 0] * 5


def test_cifar10_pickled_by_python_2(tmp_path: Path) -> None:
    """Has Python 2 strings and numpy's old path of the array constructor."""
    old = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87"
        b"Rq\x05(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK\x00tb\x89T\x00\x0c\x00\x00" + bytes(3072) + b"tbU\x06labelsq\x08]q\x09K\x02au."
    )
    raw = read("cifar10", write_cifar10(tmp_path / "c.tar.gz", replaced={"test_batch": old}))
    assert raw.test is not None and raw.test[1].tolist() == [2]


def test_cifar100_archive_folder_and_directory(tmp_path: Path) -> None:
    files = cifar100_files()
    for name, content in files.items():
        write(tmp_path / "unpacked" / "cifar-100-python" / name, content)
    archive = write_tar(tmp_path / "cifar-100-python.tar.gz", {f"cifar-100-python/{n}": c for n, c in files.items()})
    for path in (archive, tmp_path, tmp_path / "unpacked", tmp_path / "unpacked" / "cifar-100-python"):
        raw = read("cifar100", path)
        assert shapes(raw) == ((4, 3, 32, 32), (2, 3, 32, 32)) and raw.class_names == ("cat", "dog", "owl")
    raw = read("cifar100", archive, labels="coarse")
    assert raw.class_names == ("animal",) and not raw.y.any()
    check_refused("cifar100", archive, "unknown labels 'course', did you mean 'coarse'", SettingError, labels="course")


class CallOnLoad:
    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def nested(operation: bytes, levels: int = 300_000) -> bytes:
    return b"\x80\x02}K\x00" + operation * levels + b"K\x00s."


def test_hostile_pickles_execute_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    command = f"open({str(trace)!r}, 'w')"
    for bad, message in (
        (pickle.dumps(CallOnLoad(os.system, f"touch {trace}"), 2), "posix.system|nt.system"),
        (pickle.dumps(CallOnLoad(eval, command), 2), "eval"),
        (pickle.dumps(CallOnLoad(eval, command), 4), "eval"),
        (b"(S'" + command.encode() + b"'\nibuiltins\neval\n.", "plain data"),  # INST
        (b"(cnumpy\ndtype\nS'" + command.encode() + b"'\no.", "plain data"),  # OBJ
        (b"\x80\x02cnumpy\nload\n(X\x01\x00\x00\x00atR.", "numpy.load"),
        (b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.tobyt\x93.", "ndarray.tobyt"),
        (b"\x80\x02cnumpy\ndtype\n}X\x04\x00\x00\x00codeK\x01sb.", "sets the state"),
        (b"\x80\x02cnumpy\ndtype\nX\x01\x00\x00\x00O\x85R.", "type 'O'"),
        (b"\x80\x02X\x01\x00\x00\x00aQ.", "plain data"),  # persistent
        (b"\x80\x02\x82\x01.", "plain data"),  # extension
        (nested(b"\x85"), "nests"),  # (((…))) as a key
        (nested(b"](") + b"", "damaged|dictionary"),
        (b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b".", "nests"),
        (b"\x80\x02]" + b"]a" * 100_000 + b".", "dictionary"),
        (pickle.dumps([1, 2]), "not a dictionary"),
        (pickle.dumps({1: 2}), "not a dictionary with string keys"),
        (pickle.dumps({"data": np.zeros((1, 3072), np.float32), "labels": [0]}, 2), "type 'f4'"),
        (pickle.dumps({"data": np.array([{}], object), "labels": [0]}, 2), "type 'O8'"),
        (pickle.dumps({"data": np.zeros((1, 3073), np.uint8), "labels": [0]}, 2), "3,072 bytes"),
        (pickle.dumps({"labels": [0]}, 2), "has no 'data'"),
        (pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": ["a"]}, 2), "integers"),
        (cifar_batch()[:-100], "damaged"),
        (b"", "damaged"),
    ):
        check_refused("cifar10", write_cifar10(tmp_path / "c.tar.gz", replaced={"data_batch_3": bad}), message)
        assert not trace.exists()


def test_cifar_labels_beyond_the_names_are_refused(tmp_path: Path) -> None:
    path = write_cifar10(tmp_path / "c.tar.gz", replaced={"test_batch": cifar_batch(4, classes=4)})
    check_refused("cifar10", path, r"label 3 in sample 3 \(allowed: 0 to 2\)")
    check_refused(
        "cifar10",
        write_tar(path, {"cifar-10-batches-py/test_batch": cifar_batch()}),
        "has no batches.meta, data_batch_1",
    )
    check_refused("cifar10", write_cifar10(path, replaced={"batches.meta": pickle.dumps({})}), "no list 'label_names'")


# --- archives -------------------------------------------------------------------------------------------------


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


# --- Omniglot -------------------------------------------------------------------------------------------------


def test_omniglot(tmp_path: Path) -> None:
    raw = read("omniglot", write_omniglot(tmp_path))
    assert shapes(raw) == ((12, 28, 28), (6, 28, 28)) and raw.test is not None
    assert raw.class_names[0] == "Greek/character01" and raw.class_names[4] == "Runes/character01"
    assert raw.y.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 and raw.test[1].tolist() == [4] * 3 + [5] * 3
    assert raw.client_ids is not None and raw.client_ids.tolist() == [1, 2, 3] * 4
    assert isinstance(raw.x, np.ndarray) and raw.x.dtype == np.uint8
    assert (raw.x[:, :, :13] == 255).all() and (raw.x[:, :, 15:] == 0).all()
    plain = read("omniglot", tmp_path, size=14, invert=False)
    assert isinstance(plain.x, np.ndarray) and plain.x.shape[1:] == (14, 14) and (plain.x[:, :, 8:] == 255).all()


def test_omniglot_unpacked_and_broken(tmp_path: Path) -> None:
    write_omniglot(tmp_path)
    for part in ("background", "evaluation"):
        with zipfile.ZipFile(tmp_path / f"images_{part}.zip") as archive:
            archive.extractall(tmp_path / "unpacked")
    assert len(read("omniglot", tmp_path / "unpacked").y) == 12
    check_refused("omniglot", tmp_path, "size must be >= 1, got 0", SettingError, size=0)
    write_zip(tmp_path / "images_evaluation.zip", {"images_evaluation/A/character01/0001_01.png": png()[:50]})
    check_refused("omniglot", tmp_path, "0001_01.png is a broken image")
    write_zip(tmp_path / "images_evaluation.zip", {"images_evaluation/stray.png": png()})
    check_refused("omniglot", tmp_path, "expected: Alphabet/characterNN")
    (tmp_path / "images_evaluation.zip").unlink()
    check_refused("omniglot", tmp_path, "no images_evaluation.zip")


# --- LEAF -----------------------------------------------------------------------------------------------------


def test_femnist(tmp_path: Path) -> None:
    white, black = [1.0] * 784, [0.0] * 784
    write_leaf(tmp_path, {"f01_1": ([white, black], [0, 61]), "none": ([], [])}, "data/train/a.json")
    write_leaf(tmp_path, {"f02_2": ([black], [10])}, "data/train/b.json")
    write_leaf(tmp_path, {"f01_1": ([white], [36])}, "data/test/a.json")
    raw = read("leaf-femnist", tmp_path)
    assert shapes(raw) == ((3, 28, 28), (1, 28, 28)) and isinstance(raw.x, np.ndarray) and raw.x.dtype == np.uint8
    assert raw.x[:, 0, 0].tolist() == [255, 0, 0] and raw.y.tolist() == [0, 61, 10]
    assert raw.client_ids is not None and raw.client_ids.tolist() == [0, 0, 1]
    assert raw.test_client_ids is not None and raw.test_client_ids.tolist() == [0]
    assert len(raw.class_names) == 62 and raw.class_names[10] == "A" and raw.class_names[36] == "a"


def test_leaf_shakespeare_and_sent140(tmp_path: Path) -> None:
    write_leaf(tmp_path / "s", {"HAMLET": (["a" * 79 + "é", "b" * 80], ["\n", "}"])}, "data/all_data/all.json")
    raw = read("leaf-shakespeare", tmp_path / "s")
    assert shapes(raw) == ((2, 80), None) and raw.tokens == tuple(ALPHABET) and raw.time_ordered
    assert isinstance(raw.x, np.ndarray) and raw.x[0, -1] == ALPHABET.index(" ") and raw.y.tolist() == [0, 79]
    tweet = ["1", "date", "NO_QUERY", "ann", "so glad", "x"]
    write_leaf(tmp_path / "t", {"ann": ([tweet, tweet], [1, 0])}, "train/all.json")
    raw = read("leaf-sent140", tmp_path / "t")
    assert raw.x == ["so glad", "so glad"] and raw.y.tolist() == [1, 0] and raw.test is None


def test_bad_leaf_files_are_refused(tmp_path: Path) -> None:
    image = [0.5] * 784
    for users, message in (
        ({"ann": ([image], [0, 1])}, "user 'ann' has 1 inputs and 2 labels"),
        ({"ann": ([image], [62])}, r"label 62 .* \(allowed: 0 to 61\)"),
        ({"ann": ([image], ["a"])}, "not an integer"),
        ({"ann": ([[0.5] * 783], [0])}, "784 numbers from 0 to 1"),
        ({"ann": ([[255.0] * 784], [0])}, "784 numbers from 0 to 1"),
        ({"ann": ([[float("nan")] * 784], [0])}, "784 numbers from 0 to 1"),
        ({"ann": ([["a"] * 784], [0])}, "not numbers"),
        ({"ann": ([image, [0.5]], [0, 1])}, "not numbers"),
        ({"ann": ([], [])}, "no samples"),
    ):
        check_refused("leaf-femnist", write_leaf(tmp_path, users), message)
    for content, message in (
        ('{"users": ["a"], "num_samples"', "0.json is not JSON"),
        ("[" * 100_000, "0.json is not JSON"),
        ("[]", "not a LEAF file"),
        ('{"users": ["a"], "num_samples": [1], "user_data": {}}', "not a LEAF file"),
        (
            '{"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [1], "y": [1]}}}',
            "1 samples, but num_samples says 2",
        ),
        ('{"users": ["a"], "num_samples": [1], "user_data": {"a": [1]}}', "no lists 'x' and 'y'"),
        ('{"users": ["a"], "num_samples": [], "user_data": {"a": {}}}', "cannot read"),
    ):
        write(tmp_path / "data/train/0.json", content)
        check_refused("leaf-femnist", tmp_path, message)
    check_refused("leaf-shakespeare", write_leaf(tmp_path, {"ann": (["short"], ["a"])}), "80 characters")
    check_refused("leaf-shakespeare", write_leaf(tmp_path, {"ann": (["a" * 80], ["ab"])}), "one character")
    check_refused("leaf-sent140", write_leaf(tmp_path, {"ann": ([["a", "b"]], [1])}), "not a tweet")
    check_refused("leaf-sent140", write_leaf(tmp_path, {"ann": ([["a"] * 5], [2])}), "label 2")


# --- arrays ---------------------------------------------------------------------------------------------------


def test_npz(tmp_path: Path) -> None:
    x, y = RNG.random((6, 3)), np.arange(6) % 2
    np.savez(tmp_path / "a.npz", x=x, y=y.astype(float), client=np.array(list("aabbcc")), unused=np.zeros(3))
    raw = read("npz", tmp_path / "a.npz")
    assert np.array_equal(np.asarray(raw.x), x) and raw.y.dtype == np.int64 and raw.test is None
    assert raw.client_ids is not None and raw.client_ids.tolist() == list("aabbcc")
    np.savez(tmp_path / "b.npz", x=x, y=y, x_test=x[:2], y_test=y[:2, None], client_test=np.arange(2))
    raw = read("npz", tmp_path / "b.npz")
    assert shapes(raw) == ((6, 3), (2, 3)) and raw.test_client_ids is not None


@pytest.mark.parametrize("color", [False, True])
def test_medmnist(tmp_path: Path, color: bool) -> None:
    arrays: dict[str, Any] = {}
    for number, (part, count) in enumerate((("train", 5), ("val", 3), ("test", 2))):
        arrays[f"{part}_images"] = np.full((count, 28, 28, *(3,) * color), number, np.uint8)
        arrays[f"{part}_labels"] = np.full((count, 1), number, np.uint8)
    np.savez(tmp_path / "organ.npz", **arrays)
    raw = read("npz", tmp_path / "organ.npz")
    assert shapes(raw) == ((8, *(3,) * color, 28, 28), (2, *(3,) * color, 28, 28))
    assert raw.y.tolist() == [0] * 5 + [1] * 3
    assert len(read("npz", tmp_path / "organ.npz", join_validation=False).y) == 5
    np.savez(tmp_path / "chest.npz", **{**arrays, "train_labels": np.zeros((5, 14), np.uint8)})
    check_refused("npz", tmp_path / "chest.npz", "one integer per sample")
    del arrays["val_labels"]
    np.savez(tmp_path / "part.npz", **arrays)
    check_refused("npz", tmp_path / "part.npz", "no array 'val_labels'")


def test_bad_npz_files_are_refused(tmp_path: Path) -> None:
    x, y = np.zeros((4, 2)), np.arange(4)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"x": x}, r"no array 'y' \(it has: x\)"),
        ({"x": x, "y": y[:3]}, "4 inputs and 3 labels"),
        ({"x": x, "y": y, "client": y[:2]}, "4 inputs and 2 client ids"),
        ({"x": x, "y": y - 1}, "label -1 in sample 0"),
        ({"x": x, "y": y + 0.5}, "one integer per sample"),
        ({"x": x, "y": np.array(list("abcd"))}, "one integer per sample"),
        ({"x": x, "y": y, "x_test": x}, "only one of"),
        ({"x": x, "y": y, "x_test": x[:, :1], "y_test": y}, r"shape \(2,\), but test inputs of shape \(1,\)"),
        ({"x": x[:0], "y": y[:0]}, "no samples"),
        ({"x": np.array([{}] * 4, object), "y": y}, "cannot read .* as an npz"),
    ]
    for arrays, message in wrong:
        np.savez(tmp_path / "a.npz", **arrays)
        check_refused("npz", tmp_path / "a.npz", message)
    np.savez(tmp_path / "a.npz", x=x, y=y)
    check_refused("npz", write(tmp_path / "cut.npz", (tmp_path / "a.npz").read_bytes()[:-30]), "truncated")


# --- csv and jsonl --------------------------------------------------------------------------------------------


def test_csv_of_features(tmp_path: Path) -> None:
    table = '\ufeffwidth,name,height,kind,who\r\n1,tall one,2.5,owl,7\r\n3,x,-4e1,cat,8\r\n\r\n5,"a, b",6,owl,7\r\n'
    raw = read("csv", write(tmp_path / "a.csv", table), label="kind", client="who")
    assert np.array_equal(np.asarray(raw.x), np.array([[1, 2.5], [3, -40], [5, 6]], np.float32))
    assert raw.y.tolist() == [1, 0, 1] and raw.class_names == ("cat", "owl")
    assert raw.client_ids is not None and raw.client_ids.tolist() == ["7", "8", "7"]
    packed = write(tmp_path / "a.csv.gz", gzip.compress(b"a;label\n1;3\n2;0\n"))
    assert read("csv", packed).y.tolist() == [3, 0] and not read("csv", packed).class_names


def test_csv_of_text(tmp_path: Path) -> None:
    raw = read("csv", write(tmp_path / "a.tsv", "text\tlabel\nhello\t1\nthere, you\t0\n"), text="text")
    assert raw.x == ["hello", "there, you"] and raw.y.tolist() == [1, 0]


def test_bad_csv_is_refused(tmp_path: Path) -> None:
    for table, message in (
        ("a,kind\n1,2\n", r"no column 'label' \(it has: a, kind\)"),
        ("a,label\n1,2\n1\n", "line 3 has 1 columns, expected 2"),
        ("a,label\n1,2\nx,3\n", "column 'a', row 2 is not a number: 'x'"),
        ("a,label\n1,2\n,3\n", "column 'a', row 2 is not a number: ''"),
        ("a,label\n1,2\nnan,3\n", "column 'a', row 2 is not a finite number"),
        ("a,label\n1,2\n2,0.5\n", "has label 0.5"),
        ("a,label\nx,2\n", "no column of numbers"),
        ("label\n1\n", "no column of numbers"),
        ("a,a,label\n1,2,3\n", "same name"),
        ("a,label\n", "no rows"),
        ('a,label\n"1,2\n', "cannot read .* as CSV"),
    ):
        check_refused("csv", write(tmp_path / "a.csv", table), message)
    check_refused("csv", write(tmp_path / "a.csv", b"a,label\n\xff,1\n"), "not UTF-8")


def test_jsonl(tmp_path: Path) -> None:
    lines = [{"raw": "bad news", "label": 20, "by": 3}, {"raw": "été", "label": 2, "by": "x"}]
    path = write(tmp_path / "a.jsonl", "\n\n".join(json.dumps(line) for line in lines) + "\n")
    raw = read("jsonl", path, text="raw", client="by")
    assert raw.x == ["bad news", "été"] and raw.y.tolist() == [20, 2] and not raw.class_names
    assert raw.client_ids is not None and raw.client_ids.tolist() == ["3", "x"]
    check_refused("jsonl", path, r"line 1 has no 'text' \(it has: by, label, raw\)")
    named = write(tmp_path / "b.jsonl", '{"text": "a", "label": "sport"}\n{"text": "b", "label": "art"}\n')
    assert read("jsonl", named).class_names == ("art", "sport")


def test_bad_jsonl_is_refused(tmp_path: Path) -> None:
    good = '{"text": "a", "label": 1}\n'
    for content, message in (
        (good + '{"text": "a", "label"\n', "line 2 is not JSON"),
        (good + "[" * 100_000, "line 2 is not JSON"),
        (good + "[1]", "line 2 is not an object"),
        (good + '{"text": 1, "label": 1}', "line 2 has a 'text' that is not a string"),
        (good + '{"text": "a", "label": [1]}', "'label' that is not a string or integer"),
        (good + "{}", r"line 2 has no 'text' \(it has: nothing\)"),
        ("\n\n", "no samples"),
    ):
        check_refused("jsonl", write(tmp_path / "a.jsonl", content), message)


# --- folders of images ----------------------------------------------------------------------------------------


def test_folder_of_classes(tmp_path: Path) -> None:
    write(tmp_path / "cat" / "a.png", png(40, 20, color=(255, 0, 0)))
    write(tmp_path / "owl" / "b.PNG", png(color=(0, 255, 0)))
    write(tmp_path / "owl" / "notes.txt", "no image")
    Image.new("L", (9, 9), 7).save(tmp_path / "owl" / "c.jpg")
    raw = read("folder", tmp_path)
    assert shapes(raw) == ((3, 3, 32, 32), None) and raw.class_names == ("cat", "owl") and raw.y.tolist() == [0, 1, 1]
    assert isinstance(raw.x, np.ndarray) and raw.x.dtype == np.uint8 and raw.client_ids is None
    assert raw.x[0, :, 5, 5].tolist() == [255, 0, 0] and raw.x[1, :, 5, 5].tolist() == [0, 255, 0]
    assert read("folder", tmp_path, size=8, gray=True).x.shape == (3, 8, 8)  # type: ignore[union-attr]


def test_folder_of_domains_and_of_splits(tmp_path: Path) -> None:
    for domain in ("photo", "sketch"):
        for kind in ("dog", "guitar"):
            write(tmp_path / "pacs" / domain / kind / "1.png", png())
    raw = read("folder", tmp_path / "pacs", size=4)
    assert raw.client_ids is not None and raw.client_ids.tolist() == ["photo", "photo", "sketch", "sketch"]
    assert raw.y.tolist() == [0, 1, 0, 1] and raw.class_names == ("dog", "guitar")
    assert read("folder", tmp_path / "pacs", depth=1).class_names == ("photo", "sketch")
    check_refused("folder", tmp_path / "pacs", "depth must be 1 .* got 3", SettingError, depth=3)
    for part in ("train", "val", "test"):
        write(tmp_path / "split" / part / "dog" / "1.png", png())
    raw = read("folder", tmp_path / "split", size=4)
    assert shapes(raw) == ((2, 3, 4, 4), (1, 3, 4, 4)) and raw.class_names == ("dog",) and raw.client_ids is None


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "cat" / "good.png", png())
    write(tmp_path / "cat" / "broken.png", png(64, 64)[:60])
    check_refused("folder", tmp_path, "broken.png is a broken image")
    write(tmp_path / "cat" / "broken.png", b"no image at all")
    check_refused("folder", tmp_path, "broken.png is a broken image")
    write(tmp_path / "cat" / "broken.png", png())
    write(tmp_path / "cat" / "deep" / "a.png", png())
    check_refused("folder", tmp_path, "are 1, 2 folders deep")
    write(tmp_path / "stray.png", png())
    check_refused("folder", tmp_path, "stray.png is not in a class folder", depth=1)
    check_refused("folder", tmp_path, "size must be >= 1, got 0", SettingError, size=0)


# --- newsgroups -----------------------------------------------------------------------------------------------

POST = (
    b"Subject: caf\xe9\nFrom: Ann Other <Ann@Example.org>\n\nann@x.org writes:\n> quoted\n"
    b"| quoted too\nIn article <1> bob wrote:\nMy own w\xf6rds.\n\nMore -- of them.\n-- \nAnn\nSignature\n"
)


def test_newsgroups(tmp_path: Path) -> None:
    files = {
        "20news-bydate-train/sci.med/1": POST,
        "20news-bydate-train/alt.atheism/2": b"From: bob@here.edu (Bob)\r\n\r\nOnly this.\r\n",
        "20news-bydate-test/sci.med/3": b"From: nobody\n\n> all is quoted\n",
        "20news-bydate-test/sci.med/4": b"no blank line",
    }
    write_tar(tmp_path / "20news-bydate.tar.gz", files)
    for name, content in files.items():
        write(tmp_path / "tree" / name, content)
    for path in (tmp_path, tmp_path / "20news-bydate.tar.gz", tmp_path / "tree"):
        raw = read("newsgroups", path)
        assert raw.x == ["Only this.", "My own wörds.\n\nMore -- of them."] and raw.y.tolist() == [0, 1]
        assert raw.class_names == ("alt.atheism", "sci.med") and raw.test is not None and raw.test[1].tolist() == [1, 1]
        assert raw.client_ids is not None and raw.client_ids.tolist() == ["bob@here.edu", "ann@example.org"]
        assert raw.test_client_ids is not None and raw.test_client_ids.tolist() == ["nobody", "unknown"]
    check_refused(
        "newsgroups", write_tar(tmp_path / "a.tar.gz", {"somewhere/sci.med/1": POST}), "expected: 20news-bydate-train"
    )


# --- plays ----------------------------------------------------------------------------------------------------


def test_the_alphabet_is_the_one_of_leaf() -> None:
    assert len(ALPHABET) == len(set(ALPHABET)) == 80 and ALPHABET[0] == "\n" and ALPHABET[-1] == "}"
    assert encode_characters("\n}é’a\U0001f600").tolist() == [0, 79, 1, ALPHABET.index("'"), ALPHABET.index("a"), 1]


def test_speeches_are_separated_from_directions_and_headings(tmp_path: Path) -> None:
    roles = read_roles(write(tmp_path / "lear.txt", PLAY), min_characters=1)
    assert roles == {
        "lear/KING": "Hear me now, good fool: the day is long,\nAnd night is “longer”—so they say…\n"
        "And so it goes on after a direction.\nRight after, without an empty line.\n",
        "lear/FIRST FOOL": "Ay.\nAlone.\n",
    }
    without_periods = PLAY.replace("KING.\n", "KING\n").replace("FOOL.\n", "FOOL\n")
    assert read_roles(write(tmp_path / "lear.txt", without_periods), min_characters=1) == roles
    title_case = PLAY.replace("KING.\n", "King.\n").replace("FIRST FOOL.\n", "1 Fool.\n")
    assert list(read_roles(write(tmp_path / "lear.txt", title_case), min_characters=1)) == ["lear/King", "lear/1 Fool"]


def test_plays_are_windows_into_one_copy_of_the_text(tmp_path: Path) -> None:
    lines = {"ANN": "Ann says this. " * 20, "BOB": "Bob says that! " * 30, "CAT": "Little."}
    play = "ACT I.\n\n" + "\n\n".join(f"{name}.\n{line}" for name, line in lines.items()) + "\n"
    raw = read(
        "plays", write_tar(tmp_path / "plays.tar.gz", {"plays/a.txt": play.encode(), "plays/b.txt": play.encode()})
    )
    assert isinstance(raw.x, torch.Tensor) and raw.x.dtype == torch.uint8 and raw.client_ids is not None
    roles = read_roles(tmp_path)
    assert list(roles) == ["a/ANN", "a/BOB", "b/ANN", "b/BOB"]
    text = "".join(roles.values())
    assert raw.x.untyped_storage().nbytes() == len(text) and raw.x.shape == (len(text) - 80, 80)
    assert len(raw.y) == len(raw.client_ids) == len(text) - 80 and raw.time_ordered and len(raw.tokens) == 80
    windows = dict.fromkeys(range(4), 0)
    for row, client in enumerate(raw.client_ids.tolist()):
        if client != NO_CLIENT:
            window = "".join(ALPHABET[code] for code in [*raw.x[row].tolist(), raw.y[row]])
            assert list(roles.values())[client][windows[client] :].startswith(window)
            windows[client] += 1
    assert list(windows.values()) == [len(role) - 80 for role in roles.values()]
    check_refused("plays", tmp_path, "min_characters must be > 80, got 80", SettingError, min_characters=80)
    check_refused("plays", tmp_path, "no role of at least 9999", min_characters=9999)


# --- MovieLens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", ["", "userid\titemid\trating\ttimestamp\n"])
def test_movielens(tmp_path: Path, header: str) -> None:
    write_movielens(tmp_path)
    write(tmp_path / "u.data", header + (tmp_path / "u.data").read_text())
    raw = read("movielens", tmp_path)
    assert isinstance(raw.x, np.ndarray) and raw.x.shape == (4, 103) == (4, len(set(FEATURES))) and raw.time_ordered
    assert raw.client_ids is not None and raw.client_ids.tolist() == [1, 1, 1, 2] and raw.y.tolist() == [0, 2, 1, 0]
    assert raw.class_names == ("Film 1 (1995)", "Film 2 ()", "Film 3 (1970)")
    features = [{FEATURES[column]: float(row[column]) for column in np.flatnonzero(row)} for row in raw.x]
    user = {"user: age / 50": 0.5, "user: female": 1.0, "user: writer": 1.0}
    assert features[0] == {**user, "time: hour 1": 1.0, "time: Thursday": 1.0}
    expected = {
        "last film: comedy": 1.0,
        "last film: year of release (decades after 1950)": 2.0,
        "last film: rated 5": 1.0,
        "films so far: share of action": 0.5,
        "films so far: share of comedy": 1.0,
        "films so far: mean rating / 5": 0.8,
        "films so far: log(1 + number) / 5": np.log(3) / 5,
        "time: hour 2": 1.0,
        "time: Thursday": 1.0,
        "time: log(1 + seconds since the first film) / 10": np.log(3601) / 10,
    }
    assert features[2] == pytest.approx({**user, **expected})
    assert features[3] == {
        "user: age / 50": 1.0,
        "user: male": 1.0,
        "user: other": 1.0,
        "time: hour 0": 1.0,
        "time: Friday": 1.0,
    }


def test_movielens_zipped_and_bad(tmp_path: Path) -> None:
    files = {f"ml-100k/{file.name}": file.read_bytes() for file in write_movielens(tmp_path / "a").iterdir()}
    write_zip(tmp_path / "zip" / "ml-100k.zip", files)
    assert len(read("movielens", tmp_path / "zip").y) == 4
    for ratings, message in (
        ("1\t1\t3\n", "u.data, line 1 has 3 columns, expected 4"),
        ("1\t1\t3\tnoon\n", "cannot read .* as MovieLens"),
        ("3\t1\t3\t1\n", r"user 3 or 3 \(allowed: 1 to 2\)"),
        ("1\t4\t3\t1\n", r"film 4 or 4 \(allowed: 1 to 3\)"),
        ("1\t1\t6\t1\n", r"rating 6 or 6 \(allowed: 1 to 5\)"),
        ("", "no ratings"),
    ):
        check_refused("movielens", write_movielens(tmp_path / "b", ratings), message)
    write(write_movielens(tmp_path / "b") / "u.item", film_line(2, "1995", {1}))
    check_refused("movielens", tmp_path / "b", "film ids in u.item must be")
    (tmp_path / "b" / "u.user").unlink()
    check_refused("movielens", tmp_path / "b", "no u.user")


# --- sensors --------------------------------------------------------------------------------------------------


def test_pamap2(tmp_path: Path) -> None:
    raw = read("pamap2", write_pamap2(tmp_path), window=10, stride=5, standardize=False)
    assert isinstance(raw.x, np.ndarray) and raw.x.dtype == np.float32 and raw.class_names == ("lying", "walking")
    assert raw.client_ids is not None and raw.client_ids.tolist() == [101] * 10 + [102] * 6
    assert raw.y.tolist() == [1] * 7 + [0] * 3 + [1] * 3 + [0] * 3
    assert raw.x.shape == (16, 40, 10) and np.isfinite(raw.x).all() and raw.time_ordered
    assert raw.x[0, 0].tolist() == [2 + row for row in range(20, 30)]  # heart rate, every second value interpolated
    assert raw.x[0, 1, 0] == 23 and raw.x[0, 14, 0] == 40
    standardized = read("pamap2", tmp_path / "Protocol", window=10, stride=5).x
    assert isinstance(standardized, np.ndarray)
    assert np.allclose(standardized.mean(axis=(0, 2)), 0, atol=1e-5) and np.allclose(
        standardized.std(axis=(0, 2)), 1, atol=1e-4
    )


def test_bad_pamap2_is_refused(tmp_path: Path) -> None:
    file = write_pamap2(tmp_path) / "Protocol" / "subject101.dat"
    good = file.read_text()
    for content, message in (
        (good + "1 2 3\n", "not a table of numbers"),
        (good.replace("NaN", "none"), "not a table of numbers"),
        ("1 2 3\n", "has 3 columns"),
        ("", "is empty"),
        ("\n".join(" ".join(["1", "8"] + ["0"] * 52) for _ in range(20)), "activity 8"),
        ("\n".join(" ".join(["1", "1", "NaN"] + ["0"] * 51) for _ in range(20)), "no values in channel 0"),
    ):
        write(file, content)
        check_refused("pamap2", tmp_path, message, window=10, stride=5)
    check_refused("pamap2", tmp_path, "window and stride must be >= 1, got 0 and 64", SettingError, window=0)
    file.rename(file.with_name("subjectX.dat"))
    check_refused("pamap2", tmp_path, "does not name a subject")


def test_har(tmp_path: Path) -> None:
    files = {f"UCI HAR Dataset/{name}": content for name, content in har_files().items()}
    inner = write_zip(tmp_path / "inner.zip", files).read_bytes()
    write_zip(tmp_path / "nested" / "har.zip", {"UCI HAR Dataset.zip": inner})
    for name, content in files.items():
        write(tmp_path / "tree" / name, content)
    for path in (tmp_path / "inner.zip", tmp_path / "nested", tmp_path / "tree", tmp_path / "tree" / "UCI HAR Dataset"):
        raw = read("har", path)
        assert shapes(raw) == ((4, 9, 128), (2, 9, 128)) and raw.class_names[0] == "walking" and raw.time_ordered
        assert isinstance(raw.x, np.ndarray) and raw.x[0, :, 0].tolist() == list(range(9))
        assert raw.y.tolist() == [0, 1, 2, 3]
        assert raw.client_ids is not None and raw.client_ids.tolist() == [1, 1, 2, 2]
    train = tmp_path / "tree" / "UCI HAR Dataset" / "train"
    write(train / "y_train.txt", "1\n2\n3\n7\n")
    check_refused("har", tmp_path / "tree", r"label 6 in sample 3 \(allowed: 0 to 5\)")
    write(train / "y_train.txt", "1\n2\n3\n")
    check_refused("har", tmp_path / "tree", "4 inputs and 3 labels")
    signal = train / "Inertial Signals" / "body_acc_x_train.txt"
    write(signal, signal.read_bytes()[: -16 * 128])
    check_refused("har", tmp_path / "tree", "train signals of unequal lengths|not a table")
    signal.unlink()
    check_refused("har", tmp_path / "tree", "no body_acc_x_train.txt")


def test_hapt(tmp_path: Path) -> None:
    raw = read("hapt", write_hapt(tmp_path), window=50, stride=25)
    assert raw.y.tolist() == [4] * 7 + [0] * 4 and raw.time_ordered and len(raw.class_names) == 6
    assert raw.client_ids is not None and raw.client_ids.tolist() == [1] * 7 + [7] * 4
    assert isinstance(raw.x, np.ndarray) and raw.x.shape == (11, 6, 50) and raw.x.dtype == np.float32
    assert raw.x[7, :, 0].tolist() == [1, 10, -10, 2, 10, -10]
    with_transitions = read("hapt", tmp_path / "RawData", window=50, stride=25, transitions=True)
    assert (
        with_transitions.y.tolist() == [4] * 7 + [6] * 3 + [0] * 4 and with_transitions.class_names[6] == "stand to sit"
    )
    for labels, message in (
        ("1 1 13 1 200\n", "labels.txt has '1 1 13 1 200'"),
        ("1 1 5 1 301\n", "within 300 rows"),
        ("1 1 5 1\n", "has 4 columns"),
        ("3 1 5 1 9\n", "no acc_exp03_user01.txt"),
        ("1 1 5 1 9\n", "has no samples"),
    ):
        check_refused("hapt", write_hapt(tmp_path, labels), message)
    write(write_hapt(tmp_path) / "RawData" / "gyro_exp01_user01.txt", "1 2 3\n")
    check_refused("hapt", tmp_path, r"shapes \(300, 3\) and \(1, 3\)")


# --- real datasets ---------------------------------------------------------------------------------------------

needs_real_data = pytest.mark.skipif("FEWER_DATA" not in os.environ, reason="FEWER_DATA is not set")


def read_real(name: str, folder: str, **options: Any) -> RawDataset:
    return read(name, Path(os.environ["FEWER_DATA"]) / folder, **options)


def count(values: Array | None) -> int:
    assert values is not None
    return len(np.unique(values))


@needs_real_data
def test_real_mnist_is_fast() -> None:
    times = []
    for _ in range(3):
        start = time.process_time()
        raw = read_real("idx", "mnist")
        times.append(time.process_time() - start)
    assert shapes(raw) == ((60_000, 28, 28), (10_000, 28, 28)) and min(times) <= 0.7


@needs_real_data
def test_real_qmnist() -> None:
    raw = read_real("qmnist", "qmnist")
    assert shapes(raw) == ((60_000, 28, 28), (10_000, 28, 28)) and raw.client_ids is not None
    assert (count(raw.client_ids), count(raw.test_client_ids)) == (539, 297)
    sizes = np.unique(raw.client_ids, return_counts=True)[1]
    assert (sizes.min(), sizes.max()) == (19, 131)
    assert raw.test_client_ids is not None and not set(raw.client_ids.tolist()) & set(raw.test_client_ids.tolist())


@needs_real_data
@pytest.mark.parametrize(("labels", "classes"), [("fine", 100), ("coarse", 20)])
def test_real_cifar100(labels: str, classes: int) -> None:
    raw = read_real("cifar100", "cifar100", labels=labels)
    assert shapes(raw) == ((25_000, 3, 32, 32), (5_000, 3, 32, 32)) and len(raw.class_names) == classes
    assert np.bincount(raw.y).tolist() == [25_000 // classes] * classes


@needs_real_data
def test_real_omniglot() -> None:
    raw = read_real("omniglot", "omniglot")
    assert shapes(raw) == ((964 * 20, 28, 28), (659 * 20, 28, 28)) and len(raw.class_names) == 964 + 659
    assert np.bincount(raw.y).tolist() == [20] * 964 and count(raw.client_ids) == 20
    assert len({name.partition("/")[0] for name in raw.class_names}) == 50
    assert raw.test is not None and np.bincount(raw.test[1])[964:].tolist() == [20] * 659


@needs_real_data
def test_real_newsgroups() -> None:
    raw = read_real("newsgroups", "20newsgroups")
    assert shapes(raw) == ((11_314,), (7_532,)) and len(raw.class_names) == count(raw.y) == 20
    assert isinstance(raw.x, list) and sum(not text for text in raw.x) < 0.05 * len(raw.x)


@needs_real_data
def test_real_huffpost() -> None:
    raw = read_real("jsonl", "huffpost/huffpost.jsonl", text="raw")
    assert shapes(raw) == ((36_900,), None) and np.bincount(raw.y).tolist() == [900] * 41


@needs_real_data
def test_real_plays() -> None:
    path = Path(os.environ["FEWER_DATA"]) / "shakespeare"
    raw = read("plays", path)
    assert (
        1300 < len(read_roles(path, min_characters=1)) < 1500
        and len({role.partition("/")[0] for role in read_roles(path)}) == 37
    )
    assert isinstance(raw.x, torch.Tensor) and raw.x.untyped_storage().nbytes() < 5_000_000 < raw.x.numel()
    assert count(raw.client_ids) == len(read_roles(path)) + 1


@needs_real_data
def test_real_hapt() -> None:
    raw = read_real("npz", "hapt/hapt.npz")
    assert shapes(raw) == ((10_017, 6, 128), None) and count(raw.y) == 6 and count(raw.client_ids) == 30


@needs_real_data
def test_real_movielens() -> None:
    raw = read_real("movielens", "movielens-100k")
    assert shapes(raw) == ((100_000, 103), None) and len(raw.class_names) == 1682
    sizes = np.unique(np.asarray(raw.client_ids), return_counts=True)[1]
    assert len(sizes) == 943 and (sizes.min(), sizes.max()) == (20, 737)
    assert isinstance(raw.x, np.ndarray) and np.abs(raw.x).max() < 6


def test_leaf_does_not_hold_everything_in_memory(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    for number in range(3):
        users = [f"writer{number}-{n}" for n in range(4)]
        data = {user: {"x": [[number / 4] * 784] * 5, "y": [number] * 5} for user in users}
        content = {"users": users, "num_samples": [5] * 4, "user_data": data}
        (folder / f"{number}.json").write_text(json.dumps(content))
    raw = FORMATS["leaf-femnist"](tmp_path)
    assert isinstance(raw.x, np.memmap) and raw.x.shape == (60, 28, 28)
    assert raw.client_ids is not None and np.bincount(raw.client_ids).tolist() == [5] * 12
    assert raw.x[:, 0, 0].tolist() == [0] * 20 + [64] * 20 + [128] * 20
