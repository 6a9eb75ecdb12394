"""A finished run gives its models."""

from pathlib import Path

import pytest

import fewer
from fewer import Local
from fewer.data import Data
from fewer.errors import SettingError


def test_open_run_gives_the_trained_models(digits: Data, tmp_path: Path) -> None:
    result = fewer.run(Local(rounds=2, cohort=6), digits, out=tmp_path / "local")
    with pytest.raises(SettingError, match="local has no global model"):
        _ = fewer.open_run(tmp_path / "local").model
    with pytest.raises(SettingError, match=r"client = 6 \(allowed: 0 … 5\)"):
        fewer.open_run(tmp_path / "local").personal_model(6)
    x, y = digits.client(2).test.slice(0, 1000)
    accuracy = (fewer.open_run(tmp_path / "local").personal_model(2)(x).argmax(1) == y).float().mean()
    assert float(accuracy) == pytest.approx(result.metrics["clients"]["2"])
