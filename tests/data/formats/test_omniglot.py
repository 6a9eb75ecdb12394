"""Omniglot archives."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from fewer.errors import SettingError
from tests.data.formats.files import check_refused, count, needs_real_data, png, read, read_real, shapes, write_zip

# --- files of every format --------------------------------------------------------------------------------------


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


# --- Omniglot ---------------------------------------------------------------------------------------------------


def test_omniglot_is_read_by_character_and_drawer(tmp_path: Path) -> None:
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


# --- real datasets ----------------------------------------------------------------------------------------------


@needs_real_data
def test_real_omniglot_has_its_published_sizes() -> None:
    raw = read_real("omniglot", "omniglot")
    assert shapes(raw) == ((964 * 20, 28, 28), (659 * 20, 28, 28)) and len(raw.class_names) == 964 + 659
    assert np.bincount(raw.y).tolist() == [20] * 964 and count(raw.client_ids) == 20
    assert len({name.partition("/")[0] for name in raw.class_names}) == 50
    assert raw.test is not None and np.bincount(raw.test[1])[964:].tolist() == [20] * 659
