"""Folders of images by class, domain and split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from fewer.data import load
from fewer.errors import SettingError
from tests.data.formats.files import check_refused, png, read, shapes, write


def test_folder_of_classes(tmp_path: Path) -> None:
    write(tmp_path / "cat" / "a.png", png(40, 20, color=(255, 0, 0)))
    write(tmp_path / "owl" / "b.PNG", png(color=(0, 255, 0)))
    write(tmp_path / "owl" / "notes.txt", "no image")
    Image.new("L", (9, 9), 7).save(tmp_path / "owl" / "c.jpg")
    raw = read("folder", tmp_path)
    assert shapes(raw) == ((3, 3, 32, 32), None) and raw.class_names == ("cat", "owl") and raw.y.tolist() == [0, 1, 1]
    assert isinstance(raw.x, np.ndarray) and raw.x.dtype == np.uint8 and raw.client_ids is None
    assert raw.x[0, :, 5, 5].tolist() == [255, 0, 0] and raw.x[1, :, 5, 5].tolist() == [0, 255, 0]
    assert raw.notes == ("files: ignored notes.txt (no images)",)
    assert load(f"folder:{tmp_path}", clients=1, partition="iid").notes[0] == raw.notes[0]  # also from the cache
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


def test_names_of_splits_ignore_case(tmp_path: Path) -> None:
    for part in ("train", "Test"):
        write(tmp_path / part / "dog" / "1.png", png())
    assert shapes(read("folder", tmp_path, size=4)) == ((1, 3, 4, 4), (1, 3, 4, 4))


def test_images_of_16_bits_are_scaled_and_wider_ones_are_refused(tmp_path: Path) -> None:
    values = np.array([[0, 257, 300], [32768, 51400, 65535], [0, 0, 0]], np.uint16)
    for name in ("a.png", "b.tif"):
        (tmp_path / name[0]).mkdir()
        Image.fromarray(values).save(tmp_path / name[0] / name)
    write(tmp_path / "a" / "plain.png", png(3, 3, "L"))
    raw = read("folder", tmp_path, size=3, gray=True)
    for image in (raw.x[0], raw.x[2]):
        assert np.array_equal(image, [[0, 1, 1], [128, 200, 255], [0, 0, 0]])
    assert (np.asarray(raw.x[1]) == 255).all()
    note = "images: 2 of 3 have 16 bits and are divided by 257, so their largest value 65535 becomes 255 of 255"
    assert raw.notes == (note,)
    for dtype, mode in ((np.int32, "I"), (np.float32, "F")):
        Image.fromarray(values.astype(dtype)).save(tmp_path / "b" / "b.tif")
        check_refused("folder", tmp_path, f"b.tif has pixels of mode {mode}, 32 bits")


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
