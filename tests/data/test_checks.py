"""Checks of a user's own data: what is suspicious becomes a note."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fewer.data import ArrayData, RawDataset, from_arrays, from_clients, from_dataset, load
from fewer.data.checks import list_names, name_labels
from fewer.errors import DataError, SettingError
from tests.data.arrays import arrays

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(120, 3)).astype(np.float32), np.arange(120) % 2
IMAGES = RNG.integers(256, size=(40, 9, 8, 3), dtype=np.uint8)
LABELS = np.arange(40) % 2


def build(x: Any, y: Any, **settings: Any) -> ArrayData:
    return from_arrays(x, y, clients=2, partition="iid", **settings)


def channels_first(images: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))


# --- images -----------------------------------------------------------------------------------------------------


def test_channels_move_to_the_front() -> None:
    note = "images: 9×8×3 are read as height × width × channels (channels=first if not)"
    pairs = [(IMAGES[:20], LABELS[:20]), (IMAGES[20:], LABELS[20:])]
    for data in (
        build(IMAGES, LABELS, test=(IMAGES[:5] // 2, LABELS[:5])),
        build(torch.from_numpy(IMAGES), LABELS),
        from_dataset(list(zip(IMAGES, LABELS, strict=True)), clients=2, partition="iid"),
        from_clients(pairs),
    ):
        assert torch.equal(data.source.x, channels_first(IMAGES)) and note in data.notes
        assert data.test.x.shape[1:] == (3, 9, 8)
    assert build(IMAGES, LABELS, channels="first").shape == (9, 8, 3)
    assert build(IMAGES, LABELS, channels="last").notes == ()
    first = IMAGES.transpose(0, 3, 1, 2)
    assert build(first, LABELS).shape == (3, 9, 8) and not build(first, LABELS).notes
    assert build(first, LABELS, channels="last").shape == (8, 3, 9)


def test_ambiguous_channels_are_refused() -> None:
    with pytest.raises(DataError, match=r"inputs of 3×8×4: the first or the last .* pass channels=first or channels="):
        build(np.zeros((40, 3, 8, 4), np.uint8), LABELS)
    assert build(np.zeros((40, 1, 4, 4), np.uint8), LABELS).shape == (1, 4, 4)  # square, so the first
    with pytest.raises(SettingError, match="unknown channels 'middle'"):
        build(IMAGES, LABELS, channels="middle")
    with pytest.raises(SettingError, match="channels = last needs four dimensions"):
        build(X, Y, channels="last")
    assert "images: 9×8×2 are read as 9 channels; channels=last reads 2" in build(IMAGES[..., :2], LABELS).notes


def test_inputs_of_different_shapes_are_refused() -> None:
    with pytest.raises(DataError, match=r"the Dataset has inputs of different shapes: \(2,\), \(3,\)"):
        from_dataset([(np.zeros(2 + row % 2), row % 2) for row in range(9)], clients=2)
    with pytest.raises(DataError, match="client 0 has inputs or labels of different shapes"):
        from_clients([([[1, 2], [3]], [0, 1])])


def test_unusual_float_inputs_are_noted() -> None:
    images = IMAGES.transpose(0, 3, 1, 2).astype(np.float32)
    assert any("values up to 255 are used as they are" in note for note in build(images, LABELS).notes)
    assert build(images / 255, LABELS).notes == ()
    notes = build(images[:, 0], LABELS).notes
    assert notes[0].startswith("inputs: 9×8 floats are series of 9 channels and 8 steps (for steps × channels, swap")
    assert "images need a dimension for channels" in build(images[:, 0, :8], LABELS).notes[0]


# --- labels -----------------------------------------------------------------------------------------------------


def test_labels_with_large_gaps_become_names() -> None:
    data = build(X, np.where(Y, 3, 7))
    assert data.classes == 2 and data.class_names == ("3", "7")
    assert data.source.y.tolist() == np.where(Y, 0, 1).tolist()
    assert data.notes == ("labels: 3, 7 are the names of 2 classes, numbered from 0",)
    numbers = data.as_numbers()
    assert numbers.source.y[:, 0].tolist() == np.where(Y, 3, 7).tolist() and not numbers.notes
    assert build(X, Y + 1).class_names == ("1", "2") and build(X, 9 * Y).class_names == ("0", "9")
    tested = build(X, np.where(Y, 3, 7), test=(X[:4] + 1, np.array([5, 3, 3, 7])))
    assert tested.class_names == ("3", "5", "7") and tested.test.y.tolist() == [1, 0, 0, 2]


def test_other_labels_stay() -> None:
    complete = build(X, Y, test=(X[:3] + 1, np.array([0, 1, 1])))
    assert complete.classes == 2 and complete.class_names == () and complete.notes == ()
    filled = RawDataset(X, 2 * Y, (X[:1], np.array([1])))  # the test set fills the gap
    assert name_labels(filled) is filled
    small_gap = build(X, np.array([0, 1, 3])[np.arange(120) % 3])
    assert small_gap.classes == 4 and small_gap.notes == ("labels: no samples of class 2",)
    named = RawDataset(X, Y + 1, class_names=("a", "b", "c"))
    assert name_labels(named) is named


def test_suspicious_classes_are_noted() -> None:
    assert build(X, np.zeros(120, int)).notes == (
        "labels: all training samples are of class 0; nothing can be learned",
    )
    assert build(X, Y, test=(X[:2] + 1, np.array([2, 0]))).notes == (
        "labels: only test samples, no training samples of class 2",
    )
    assert build(X, np.where(np.arange(120) == 3, 2, Y), test=(X[:2] + 1, Y[:2])).notes == (
        "labels: a single sample of class 2",
    )
    prices = build(X, 1000 + np.arange(120) % 97)
    assert prices.notes == ("labels: 97 distinct values in 120 samples (--loss mse predicts numbers)",)
    assert prices.as_numbers().notes == () and float(prices.as_numbers().source.y.max()) == 1096


# --- splits and clients -----------------------------------------------------------------------------------------


def test_a_negative_label_among_others_is_noted() -> None:
    assert build(X, np.arange(120) % 3 - 1).notes == ("labels: -1 is a class; it may mean a missing label",)
    assert not build(X, np.arange(120) % 2 * 2 - 1).notes


def test_copies_of_training_samples_in_the_test_set_are_counted() -> None:
    note = "split: 5 of 7 test samples are copies of training samples"
    assert note in build(X, Y, test=(np.concatenate([X[:5], X[:2] + 1]).astype(np.float64), Y[:7])).notes
    texts = [f"text {number}" for number in range(120)]
    assert note in build(texts, Y, test=([*texts[:5], "a", "b"], Y[:7])).notes
    doubled = build(np.concatenate([X, X]), np.concatenate([Y, Y]))
    held_out = {row.tobytes() for row in doubled.test.all()[0].numpy()}
    trained = {doubled.client(client).train.all()[0][row].numpy().tobytes() for client in (0, 1) for row in range(90)}
    assert held_out & trained and "test samples are copies of training samples" in doubled.notes[0]


def test_clients_with_similar_names_are_noted() -> None:
    data = from_arrays(X, Y, client_ids=np.array(["a", "a ", "A", "b"])[np.arange(120) % 4])
    assert data.notes == ("clients: 'A' and 'a' and 'a ' are different clients",) and len(data) == 4
    data = from_arrays(X, Y, client_ids=np.array(["1", "1.0", "01", "10"])[np.arange(120) % 4])
    assert data.notes == ("clients: '01' and '1' and '1.0' are different clients",)


def test_clients_that_a_partition_ignores_are_noted(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=Y, client=np.arange(120) % 3)
    note = "clients: --partition iid ignores those of the data; --partition natural uses them"
    assert load(f"npz:{tmp_path}/a.npz", clients=2, partition="iid").notes == (note,)
    assert load(f"npz:{tmp_path}/a.npz", partition="natural").notes == ()


def test_labels_that_options_name_stay(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=3 * Y + 2)
    chosen = load(f"npz:{tmp_path}/a.npz", clients=2, partition="iid", data_options={"unseen_classes": 5})
    assert chosen.classes == 6 and load(f"npz:{tmp_path}/a.npz", clients=2, partition="iid").classes == 2


def test_known_data_have_no_notes(tmp_path: Path) -> None:
    assert load("looks", clients=4, partition="natural").notes == ()
    (tmp_path / "hapt").mkdir()
    np.savez(tmp_path / "hapt" / "hapt.npz", x=RNG.random((40, 6, 9)), y=LABELS, client=LABELS)
    assert load("hapt", data_dir=tmp_path, clients=2, partition="iid").notes == ()


def test_long_lists_are_shortened() -> None:
    assert list_names(["a", "", "b"]) == "a, '', b"
    assert list_names([str(number) for number in range(20)]) == "0, 1, 2, 3, 4, 5, 6, 7, … (20 in total)"
    assert build(*arrays()).notes == ()
