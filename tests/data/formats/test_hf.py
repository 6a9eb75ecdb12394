"""hf:PATH: data sets of the library datasets, saved or in files. The hub is asked only with download."""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import fewer
from fewer.data.sources import read
from fewer.errors import DataError, SettingError

ROWS: dict[str, list[Any]] = {
    "text": ["one fish", "two fish", "red fish", "blue fish"],
    "label": [0, 1, 1, 0],
    "who": ["a", "a", "b", "b"],
}


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("FEWER_CACHE", str(tmp_path / "cache"))
    library = pytest.importorskip("datasets")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    return library


def test_a_saved_text_data_set_has_class_names_clients_and_a_test_set(tmp_path: Path, datasets: Any) -> None:
    names = datasets.ClassLabel(names=["number", "color"])
    train = datasets.Dataset.from_dict(ROWS).cast_column("label", names)
    test = datasets.Dataset.from_dict({key: values[:1] for key, values in ROWS.items()}).cast_column("label", names)
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "saved")
    raw = read(f"hf:{tmp_path}/saved", client="who")
    assert raw.x == ROWS["text"] and raw.y.tolist() == [0, 1, 1, 0] and raw.class_names == ("number", "color")
    assert raw.client_ids is not None and raw.client_ids.tolist() == ROWS["who"]
    assert raw.test is not None and raw.test[0] == ["one fish"] and raw.test[1].tolist() == [0]
    options = {"client": "who"}
    data = fewer.data.load(f"hf:{tmp_path}/saved", data_options=options, partition="natural", max_length=3)
    assert len(data) == 2 and data.size(0) == 2 and data.shape == (3,)


def test_images_are_decoded_and_resized(tmp_path: Path, datasets: Any) -> None:
    from PIL import Image

    images = []
    for value in (0, 255):
        content = BytesIO()
        Image.fromarray(np.full((4, 4, 3), value, np.uint8)).save(content, "PNG")
        images.append({"bytes": content.getvalue(), "path": None})
    features = datasets.Features({"picture": datasets.Image(), "label": datasets.Value("string")})
    datasets.Dataset.from_dict({"picture": images, "label": ["dark", "light"]}, features).save_to_disk(
        tmp_path / "saved"
    )
    raw = read(f"hf:{tmp_path}/saved", size=2)
    assert np.asarray(raw.x).shape == (2, 3, 2, 2) and np.asarray(raw.x)[:, 0, 0, 0].tolist() == [0, 255]
    assert raw.class_names == ("dark", "light") and raw.y.tolist() == [0, 1]
    assert np.asarray(read(f"hf:{tmp_path}/saved", size=2, gray=True).x).shape == (2, 2, 2)


def test_samples_without_a_client_or_an_image_are_named(tmp_path: Path, datasets: Any) -> None:
    datasets.Dataset.from_dict({**ROWS, "who": ["a", None, "b", "b"]}).save_to_disk(tmp_path / "texts")
    with pytest.raises(DataError, match="texts, sample 1 has no 'who', which names its client"):
        read(f"hf:{tmp_path}/texts", client="who")
    features = datasets.Features({"picture": datasets.Image(), "label": datasets.Value("int64")})
    datasets.Dataset.from_dict({"picture": [None], "label": [0]}, features).save_to_disk(tmp_path / "images")
    with pytest.raises(DataError, match="images, sample 0 has no image"):
        read(f"hf:{tmp_path}/images")


def test_a_test_set_without_labels_gives_way_to_the_validation_set(tmp_path: Path, datasets: Any) -> None:
    unlabeled, validation = {**ROWS, "label": [-1] * 4}, {key: values[:1] for key, values in ROWS.items()}
    splits = {"train": ROWS, "test": unlabeled, "validation": validation}
    names = datasets.ClassLabel(names=["number", "color"])
    parts = {name: datasets.Dataset.from_dict(rows).cast_column("label", names) for name, rows in splits.items()}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    raw = read(f"hf:{tmp_path}/saved")
    assert raw.test is not None and raw.test[0] == ["one fish"] and raw.test[1].tolist() == [0]


def test_a_parquet_file_is_read_by_the_names_of_its_columns(tmp_path: Path, datasets: Any) -> None:
    file = tmp_path / "rows.parquet"
    datasets.Dataset.from_dict({"words": ROWS["text"], "topic": ["n", "n", "c", "c"]}).to_parquet(file)
    raw = read(f"hf:{file}", text="words", label="topic")
    assert raw.x == ROWS["text"] and raw.y.tolist() == [1, 1, 0, 0] and raw.class_names == ("c", "n")
    with pytest.raises(DataError, match=r"no column 'text' \(it has: words, topic\); pass --data-option text=COLUMN"):
        read(f"hf:{file}", label="topic")
    with pytest.raises(SettingError, match="text = words and image = topic: choose one"):
        read(f"hf:{file}", text="words", image="topic")
    other = tmp_path / "rows.xml"
    other.touch()
    with pytest.raises(DataError, match="unknown ending"):
        read(f"hf:{other}")


def test_a_missing_library_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SettingError, match=r"needs the library datasets: pip install 'fewer\[hf\]'"):
        read(f"hf:{tmp_path}")


def test_the_hub_is_asked_only_with_download(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def load_dataset(*args: Any) -> Any:
        calls.append(args)
        raise ConnectionError("no network")

    library = ModuleType("datasets")
    vars(library).update(load_dataset=load_dataset, disable_progress_bars=lambda: None)
    monkeypatch.setitem(sys.modules, "datasets", library)
    monkeypatch.delenv("FEWER_DATA", raising=False)
    with pytest.raises(DataError, match="'org/name' does not exist.* --data-option download=true fetches hf:org/name"):
        read("hf:org/name")
    assert not calls
    with pytest.raises(DataError, match="cannot read org/name as a data set of the library datasets: no network"):
        read("hf:org/name", download=True, config="small")
    assert calls == [("org/name", "small")]
