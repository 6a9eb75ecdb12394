"""Arrays in npz files: our own, MedMNIST, and invalid ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fewer.data import load
from fewer.data.schema import Schema
from fewer.data.sources import read_inputs
from fewer.errors import DataError
from tests.data.arrays import arrays
from tests.data.formats.files import RNG, check_refused, read, shapes, write

# --- arrays -----------------------------------------------------------------------------------------------------


def test_npz_arrays_keep_types_and_clients(tmp_path: Path) -> None:
    x, y = RNG.random((6, 3)), np.arange(6) % 2
    np.savez(tmp_path / "a.npz", x=x, y=y.astype(float), client=np.array(list("aabbcc")), unused=np.zeros(3))
    raw = read("npz", tmp_path / "a.npz")
    assert np.array_equal(np.asarray(raw.x), x) and raw.y.dtype == np.int64 and raw.test is None
    assert raw.client_ids is not None and raw.client_ids.tolist() == list("aabbcc")
    assert raw.notes == ("arrays: ignored unused",)
    np.savez(tmp_path / "b.npz", x=x, y=y, x_test=x[:2], y_test=y[:2, None], client_test=np.arange(2))
    raw = read("npz", tmp_path / "b.npz")
    assert shapes(raw) == ((6, 3), (2, 3)) and raw.test_client_ids is not None


@pytest.mark.parametrize(("first", "second"), [("ill", "well"), (-1, 1)])
def test_npz_labels_may_be_names(tmp_path: Path, first: Any, second: Any) -> None:
    np.savez(
        tmp_path / "a.npz", x=np.zeros((4, 2), int), y=[second, first] * 2, x_test=np.zeros((1, 2)), y_test=[first]
    )
    raw = read("npz", tmp_path / "a.npz")
    assert raw.y.tolist() == [1, 0, 1, 0] and raw.class_names == (str(first), str(second))
    assert raw.test is not None and raw.test[1].tolist() == [0]
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 2)), y=["a", "", "b", "b"])
    check_refused("npz", tmp_path / "a.npz", r"missing labels \(1; the first is empty, in sample 1\)")


def test_images_with_channels_last_are_transposed(tmp_path: Path) -> None:
    x = RNG.integers(256, size=(6, 9, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(6) % 2, x_test=x[:2], y_test=np.arange(2))
    raw = read("npz", tmp_path / "a.npz")
    assert np.array_equal(np.asarray(raw.x), x.transpose(0, 3, 1, 2)) and shapes(raw)[1] == (2, 3, 9, 8)
    assert raw.notes == ("images: 9×8×3 are read as height × width × channels (channels=first if not)",)
    assert shapes(read("npz", tmp_path / "a.npz", channels="first"))[0] == (6, 9, 8, 3)
    np.savez(tmp_path / "new.npz", x=x)
    schema = Schema(
        "images", (3, 9, 8), "uint8", 2, options={"channels": "first"}
    )  # of the run's file, not of this one
    assert read_inputs(f"npz:{tmp_path}/new.npz", None, schema).x.shape == (6, 3, 9, 8)  # type: ignore[union-attr]


@pytest.mark.parametrize("color", [False, True])
def test_medmnist_is_read_with_its_splits(tmp_path: Path, color: bool) -> None:
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
        ({"x": x, "y": y[:, None] * [2, 3]}, "one integer per sample"),
        ({"x": x, "y": y, "x_test": x}, "only one of"),
        ({"x": x, "y": y, "x_test": x[:, :1], "y_test": y}, r"shape \(2,\), but test inputs of shape \(1,\)"),
        ({"x": x[:0], "y": y[:0]}, "no samples"),
        ({"x": np.array([{}] * 4, object), "y": y}, "cannot read .* as an npz"),
    ]
    for content, message in wrong:
        np.savez(tmp_path / "a.npz", **content)
        check_refused("npz", tmp_path / "a.npz", message)
    np.savez(tmp_path / "a.npz", x=x, y=y)
    check_refused("npz", write(tmp_path / "cut.npz", (tmp_path / "a.npz").read_bytes()[:-30]), "truncated")


# --- files ------------------------------------------------------------------------------------------------------


def test_npz_arrays_are_split_among_clients(tmp_path: Path) -> None:
    x, y = arrays(60)
    path = tmp_path / "own.npz"
    np.savez(path, x=x, y=y)
    data = load(f"npz:{path}", clients=2)
    assert len(data.test) + data.size(0) + data.size(1) == 60
    np.savez_compressed(path, x=x, y=y, x_test=x[:7], y_test=y[:7], client=np.arange(60) % 5)
    data = load("npz:own.npz", data_dir=tmp_path, partition="natural")
    assert len(data) == 5 and len(data.test) == 7 and [data.size(client) for client in range(5)] == [12] * 5
    assert len(load(f"npz:{path}", clients=3)) == 3


def test_a_damaged_npz_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    x, y = arrays(60)
    np.savez_compressed(path, x=x, y=y)
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        damaged = np.frombuffer(good, np.uint8).copy()
        damaged[rng.integers(len(good), size=3)] ^= rng.integers(1, 256, size=3, dtype=np.uint8)
        path.write_bytes(damaged.tobytes())
        try:
            load(f"npz:{path}", clients=2, min_samples_per_client=1)
        except DataError:
            refused += 1
    assert refused > 200


def test_code_in_an_archive_is_never_executed(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return Path.touch, (tmp_path / "sprung",)  # type: ignore[return-value]

    np.savez(tmp_path / "trap.npz", x=np.array([Trap()], dtype=object), y=np.zeros(1))
    with pytest.raises(DataError):
        load("npz:trap.npz", data_dir=tmp_path)
    assert not (tmp_path / "sprung").exists()
