"""CIFAR archives, and pickles that try to execute code."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fewer.errors import SettingError
from tests.data.formats.files import (
    check_refused,
    cifar_batch,
    needs_real_data,
    read,
    read_real,
    shapes,
    write,
    write_cifar10,
    write_tar,
)

# --- files of every format --------------------------------------------------------------------------------------


def cifar100_files() -> dict[str, bytes]:
    names = {b"fine_label_names": [b"cat", b"dog", b"owl"], b"coarse_label_names": [b"animal"]}
    return {"train": cifar_batch(), "test": cifar_batch(2), "meta": pickle.dumps(names, 2)}


# --- CIFAR ------------------------------------------------------------------------------------------------------


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
        (b"\x80\x02cnumpy\ndtype\n}X\x04\x00\x00\x00codeK\x01sb.", "not a dictionary"),
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


# --- real datasets ----------------------------------------------------------------------------------------------


@needs_real_data
@pytest.mark.parametrize(("labels", "classes"), [("fine", 100), ("coarse", 20)])
def test_real_cifar100_has_its_published_sizes(labels: str, classes: int) -> None:
    raw = read_real("cifar100", "cifar100", labels=labels)
    assert shapes(raw) == ((25_000, 3, 32, 32), (5_000, 3, 32, 32)) and len(raw.class_names) == classes
    assert np.bincount(raw.y).tolist() == [25_000 // classes] * classes
