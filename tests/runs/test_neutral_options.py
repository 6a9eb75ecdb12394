"""Neutral options: at their default, hashes leave them out, and runs recorded without them resume."""

import json
from pathlib import Path

import pytest
from pydantic import Field

import fewer
from fewer.errors import SettingError
from fewer.methods.fedavg import FedAvg
from fewer.runs.settings import Settings, settings_hash

SETTINGS = Settings()


class Smoothed(FedAvg):
    """FedAvg with an option that came later."""

    smoothing: float = Field(0.0, json_schema_extra={"neutral": True})


class AlwaysSmoothed(Smoothed):
    """Overrides the default, so that it is no longer neutral."""

    smoothing: float = 0.5


def test_the_hash_leaves_out_a_neutral_option_at_its_default() -> None:
    before = settings_hash(SETTINGS, FedAvg())
    assert settings_hash(SETTINGS, Smoothed()) == before
    assert len({before, settings_hash(SETTINGS, Smoothed(smoothing=1)), settings_hash(SETTINGS, AlwaysSmoothed())}) == 3
    assert settings_hash(SETTINGS, AlwaysSmoothed(smoothing=0)) != before


def forget_option(path: Path, name: str) -> None:
    """Rewrites the settings of a run as if this option had not existed."""
    file = path / "settings.json"
    content = json.loads(file.read_text())
    for options in (content["method"], content["settings"]["method_options"]):
        del options[name]
    file.write_text(json.dumps(content))


def test_a_run_recorded_before_a_neutral_option_existed_resumes(tmp_path: Path) -> None:
    path = tmp_path / "run"
    result = fewer.run(Smoothed(rounds=1), "digits", model="logistic", clients=2, out=path)
    forget_option(path, "smoothing")
    assert fewer.resume(path, method=Smoothed(rounds=1)).history == result.history
    with pytest.raises(SettingError, match=r"smoothing cannot change .*: it was None, got 1\.0"):
        fewer.resume(path, method=Smoothed(rounds=1, smoothing=1))
    forget_option(path, "lr")
    with pytest.raises(SettingError, match=r"lr cannot change .*: it was None, got 0\.1"):
        fewer.resume(path, method=Smoothed(rounds=1))
