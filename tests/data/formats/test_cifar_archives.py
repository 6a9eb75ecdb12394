"""CIFAR's binary and pickled archives give the same samples."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fewer.data.download import DOWNLOADS
from fewer.data.raw_dataset import RawDataset
from fewer.data.sources import FILES, read
from fewer.errors import DataError
from tests.data.formats.files import write_tar

CLASSES = {"label": 10, "coarse_label": 20, "fine_label": 100}


def make_files(
    parts: Mapping[str, int], kinds: Mapping[str, str], meta: str
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The files of a binary and of a pickled archive with the same samples: so many in each part."""
    rng = np.random.default_rng(0)
    binary: dict[str, bytes] = {}
    pickled: dict[str, bytes] = {}
    for part, count in parts.items():
        images = rng.integers(256, size=(count, 3072), dtype=np.uint8)
        fine = rng.permutation(count) % 100
        labels = {kind: fine // 5 if kind == "coarse_label" else fine % CLASSES[kind] for kind in kinds}
        columns = [labels[kind].astype(np.uint8)[:, None] for kind in kinds]
        binary[f"{part}.bin"] = np.hstack([*columns, images]).tobytes()
        table = {f"{kind}s".encode(): values.tolist() for kind, values in labels.items()}
        pickled[part] = pickle.dumps({b"data": images, **table}, 2)
    names = {kind: [f"{kind}_{number}" for number in range(CLASSES[kind])] for kind in kinds}
    for kind, file in kinds.items():
        binary[file] = ("\n".join(names[kind]) + "\n\n").encode()
    pickled[meta] = pickle.dumps({f"{kind}_names".encode(): names[kind] for kind in kinds}, 2)
    return binary, pickled


BATCHES = {**{f"data_batch_{number}": number for number in range(1, 6)}, "test_batch": 7}
CIFAR10 = make_files(BATCHES, {"label": "batches.meta.txt"}, "batches.meta")
KINDS = {"coarse_label": "coarse_label_names.txt", "fine_label": "fine_label_names.txt"}
CIFAR100 = make_files({"train": 200, "test": 100}, KINDS, "meta")


def check_equal(first: RawDataset, second: RawDataset) -> None:
    assert first.class_names == second.class_names and first.test is not None and second.test is not None
    for one, other in ((first.x, second.x), (first.y, second.y), *zip(first.test, second.test, strict=True)):
        assert isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
        assert one.dtype == other.dtype and np.array_equal(one, other)
        assert one.flags.writeable and other.flags.writeable


def test_both_archives_of_cifar10_give_the_same_samples(tmp_path: Path) -> None:
    binary = write_tar(tmp_path / "a.tar.gz", {f"cifar-10-batches-bin/{k}": v for k, v in CIFAR10[0].items()})
    pickled = write_tar(tmp_path / "b.tar.gz", {f"cifar-10-batches-py/{k}": v for k, v in CIFAR10[1].items()})
    raw = read(f"cifar10:{binary}")
    check_equal(raw, read(f"cifar10:{pickled}"))
    first = np.frombuffer(CIFAR10[0]["data_batch_1.bin"], np.uint8)
    assert raw.y.shape == (15,) and raw.y[0] == first[0] and len(set(raw.y.tolist())) > 1
    assert isinstance(raw.x, np.ndarray) and np.array_equal(raw.x[0].ravel(), first[1:])
    assert raw.test is not None and len(raw.test[1]) == 7 and raw.class_names[9] == "label_9"


@pytest.mark.parametrize("labels", ["fine", "coarse", "fc100"])
def test_both_archives_of_cifar100_give_the_same_samples(tmp_path: Path, labels: str) -> None:
    binary, pickled = (write_tar(tmp_path / f"{i}.tar.gz", files) for i, files in enumerate(CIFAR100))
    raw = read(f"cifar100:{binary}", labels=labels)
    check_equal(raw, read(f"cifar100:{pickled}", labels=labels))
    records = np.frombuffer(CIFAR100[0]["train.bin"], np.uint8).reshape(200, 3074)
    kind, column = ("coarse_label", 0) if labels == "coarse" else ("fine_label", 1)
    assert [raw.class_names[label] for label in raw.y] == [f"{kind}_{label}" for label in records[:, column]]
    assert isinstance(raw.x, np.ndarray) and np.array_equal(raw.x.reshape(200, -1), records[:, 2:])


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_the_archive_that_is_downloaded_is_the_one_that_is_read(tmp_path: Path, name: str) -> None:
    (remote,) = DOWNLOADS[name]
    assert remote.url.endswith(remote.name) and FILES[name].path == remote.folder
    files = (CIFAR10 if name == "cifar10" else CIFAR100)[0]
    write_tar(tmp_path / remote.folder / remote.name, files)
    expected = read(f"{name}:{write_tar(tmp_path / 'any.tar.gz', files)}")
    check_equal(read(name, tmp_path), expected)


@pytest.mark.parametrize("folder", ["cifar-10-batches-bin", "cifar-10-batches-py", ""])
def test_extracted_files_are_found(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    for name, content in CIFAR10[folder.endswith("-py")].items():
        (tmp_path / folder / name).write_bytes(content)
    assert len(read(f"cifar10:{tmp_path}").y) == 15


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_batch_2.bin": b"\0" * 3074}, r"data_batch_2.bin has 3074 bytes \(allowed: a multiple of 3073\)"),
        ({"test_batch.bin": b"\x0a" + b"\0" * 3072}, r"label 10 in sample 0 \(allowed: 0 to 9\)"),
        ({"batches.meta.txt": b"\xff"}, "batches.meta.txt is not UTF-8"),
        ({"test_batch.bin": None, "data_batch_5.bin": None}, "has no data_batch_5.bin, test_batch.bin$"),
        (dict.fromkeys(CIFAR10[0]), "neither cifar-10-binary.tar.gz nor cifar-10-python.tar.gz"),
    ],
)
def test_a_bad_archive_gets_one_clear_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    files = {name: content for name, content in {**CIFAR10[0], **changes}.items() if content is not None}
    path = write_tar(tmp_path / "c.tar.gz", {**files, "readme.html": b""})
    with pytest.raises(DataError, match=message) as caught:
        read(f"cifar10:{path}")
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
