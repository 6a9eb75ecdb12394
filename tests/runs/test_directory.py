"""Foreign, damaged and locked run directories."""

import json
from pathlib import Path

import pytest
import torch

import fewer
from fewer import FedAvg
from fewer.data import Data
from fewer.errors import RunError, SettingError
from fewer.runs.directory import RunDirectory


def test_foreign_and_damaged_directories_are_refused(digits: Data, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="does not exist"):
        fewer.resume(tmp_path / "nowhere")
    (tmp_path / "foreign").mkdir()
    with pytest.raises(RunError, match="is not a run directory: it has no settings.json"):
        fewer.resume(tmp_path / "foreign")
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="exists already"):
        fewer.run(FedAvg(rounds=1), digits, out=tmp_path / "foreign")
    run = tmp_path / "run"
    fewer.run(FedAvg(rounds=2, cohort=2), digits, out=run)
    for name, part in (
        ("checkpoint.safetensors", "checkpoint"),
        ("settings.json", "settings.json"),
        ("ledger.csv", "ledger"),
    ):
        content = (run / name).read_bytes()
        (run / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(RunError, match=f"damaged.*{part}"):
            fewer.resume(run)
        (run / name).write_bytes(content)
    settings = json.loads((run / "settings.json").read_text())
    (run / "settings.json").write_text(json.dumps({**settings, "format": 99}))
    with pytest.raises(RunError, match="format 99"):
        fewer.resume(run)


def test_changed_data_is_detected(digits: Data, tmp_path: Path) -> None:
    data = fewer.data.from_arrays(torch.rand(90, 1, 8, 8), torch.arange(90) % 3, clients=3, partition="iid")
    fewer.run(FedAvg(rounds=1), data, out=tmp_path / "run")
    with pytest.raises(RunError, match="with your own data"):
        fewer.resume(tmp_path / "run")
    other = fewer.data.from_arrays(torch.rand(90, 1, 8, 8), torch.arange(90) % 3, clients=3, partition="iid")
    with pytest.raises(RunError, match="was run on other data"):
        fewer.resume(tmp_path / "run", data=other)
    fewer.resume(tmp_path / "run", data=data)


def test_only_one_process_at_a_time_writes_a_run(digits: Data, tmp_path: Path) -> None:
    fewer.run(FedAvg(rounds=1, cohort=2), digits, out=tmp_path / "run")
    with RunDirectory(tmp_path / "run"), pytest.raises(RunError, match="in use by another process"):
        fewer.resume(tmp_path / "run")


def test_the_seed_cannot_change_on_resume(digits: Data, tmp_path: Path) -> None:
    fewer.run(FedAvg(rounds=1, cohort=2), digits, out=tmp_path / "run")
    with pytest.raises(SettingError, match="seed cannot change when a run resumes"):
        fewer.resume(tmp_path / "run", seed=4)
