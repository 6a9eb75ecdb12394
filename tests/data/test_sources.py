"""Named datasets, from the package and from a data directory."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits

from fewer.data import load
from fewer.errors import DataError, SettingError

# --- embedded datasets ------------------------------------------------------------------------------------------


def test_digits_are_those_of_scikit_learn() -> None:
    data = load("digits", clients=10)
    assert (len(data.source), len(data.test)) == (1438, 359)
    assert data.shape == (1, 8, 8) and data.classes == 10 and data.source.x.dtype == torch.uint8
    assert len(data) == 10 and sum(data.size(client) for client in range(10)) == 1438
    x, y = load_digits(return_X_y=True)
    assert data.test.y.tolist() == y[4::5].tolist()
    assert (data.test.x[0].reshape(-1) / (255 / 16)).round().tolist() == x[4].tolist()
    assert int(data.source.x.max()) == 255 and int(data.source.x.min()) == 0
    train, test = ({tuple(row.tolist()) for row in part.x.reshape(len(part), -1)} for part in (data.source, data.test))
    assert not train & test


def test_fashion_mini_has_its_published_size() -> None:
    data = load("fashion-mini", clients=20)
    assert (len(data.source), len(data.test)) == (6000, 1000)
    assert torch.bincount(data.source.y).tolist() == [600] * 10
    assert torch.bincount(data.test.y).tolist() == [100] * 10
    assert data.shape == (1, 28, 28) and data.classes == 10
    inputs = data.source.slice(0, 6000)[0]
    assert abs(float(inputs.mean())) < 0.05 and abs(float(inputs.std()) - 1) < 0.05
    assert data.origin is not None and data.origin["name"] == "fashion-mini"


def test_the_embedded_file_is_small_and_comes_with_its_license() -> None:
    folder = files("fewer.data").joinpath("embedded")
    with folder.joinpath("fashion-mini.npz").open("rb") as file:
        assert len(file.read()) < 5_000_000
    license = folder.joinpath("LICENSE.fashion-mnist").read_text()
    assert "MIT" in license and "Zalando" in license


def test_load_is_deterministic_and_depends_on_the_seed() -> None:
    assert load("digits").fingerprint() == load("digits").fingerprint() != load("digits", seed=1).fingerprint()


def test_the_first_samples_of_each_class_can_be_kept() -> None:
    full = load("digits", clients=3)
    data = load("digits", clients=3, data_options={"max_per_class": 7})
    assert torch.bincount(data.source.y).tolist() == [7] * 10
    for label in range(10):
        rows = torch.nonzero(full.source.y == label)[:7, 0]
        assert torch.equal(data.source.x[data.source.y == label], full.source.x[rows])
    assert torch.equal(data.test.x, full.test.x)


def test_pixels_can_have_another_normalization() -> None:
    x, _ = load("digits", clients=3, data_options={"normalization": [0.5, 0.5]}).test.all()
    assert (x.min().item(), x.max().item()) == (-1, 1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digits", {"max_per_class": 0}, r"max_per_class of data 'digits' must be an integer >= 1, got 0"),
        ("digits", {"max_per_class": "some"}, "must be an integer >= 1"),
        ("digits", {"normalization": [0.5, 0]}, r"must be \[mean, deviation > 0\], got \[0.5, 0\]"),
        ("digits", {"normalization": "unit"}, r"must be \[mean, deviation > 0\]"),
        ("shakespeare-mini", {"normalization": [0.5, 0.5]}, "has no pixels"),
        ("digits", {"max_per_clas": 3}, "did you mean max_per_class|max_per_class"),
    ],
)
def test_wrong_options_of_all_data_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        load(name, clients=3, data_options=options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("digitz", "unknown data 'digitz', did you mean 'digits'"),
        ("fashion-mni", "unknown data 'fashion-mni', did you mean 'fashion-mini'"),
        ("xyzzy", r"unknown data 'xyzzy' \(allowed: 20newsgroups, .*csv:PATH, digits, "),
        ("npx:file", "unknown data format 'npx', did you mean 'npz'"),
        (Path("a.csv"), "unknown data 'a.csv', did you mean 'csv:a.csv'"),
    ],
)
def test_unknown_data_is_refused_with_a_hint(name: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        load(name)


def test_wrong_settings_are_reported_before_anything_is_read() -> None:
    with pytest.raises(SettingError, match="unknown partition 'even'"):
        load("npz:nowhere", partition="even")
    with pytest.raises(SettingError, match="alpha must be > 0, got -1"):
        load("npz:nowhere", alpha=-1)


# --- files ------------------------------------------------------------------------------------------------------


def test_named_data_is_read_from_the_data_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "mnist")
    monkeypatch.delenv("FEWER_DATA", raising=False)
    with pytest.raises(DataError, match="'mnist' needs files: .* then run fewer data get mnist"):
        load("mnist")
    loaded = load("mnist", data_dir=folder, clients=3, min_samples_per_client=1)
    assert (loaded.source.shift, loaded.source.scale) == (255 * 0.1307, 1 / (255 * 0.3081))
    monkeypatch.setenv("FEWER_DATA", str(folder))
    assert load("mnist", clients=3, min_samples_per_client=1).fingerprint() == loaded.fingerprint()
    with pytest.raises(DataError, match=f"no files of data 'fashion-mnist' in {folder}: run fewer data get"):
        load("fashion-mnist")
