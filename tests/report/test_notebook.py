"""Results in a notebook: HTML, plots and data frames."""

import sys
from typing import Any

import pytest

import fewer
from fewer import FedAvg
from fewer.errors import SettingError


def test_a_result_has_html_plots_and_a_data_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    data = fewer.data.load("digits", clients=4, alpha=1.0)
    result = fewer.run(FedAvg(rounds=2, cohort=2, local_steps=1), data)
    page = result._repr_html_()
    assert "fedavg on digits, round 2 of 2" in page and f"{100 * result.accuracy:.2f}" in page
    assert 'src="data:image/svg+xml;base64,' in page and "script" not in page and 'alt="Line chart' in page
    axes = result.plot().axes[0]
    assert axes.get_xlabel() == "round"
    assert list(axes.lines[0].get_ydata()) == pytest.approx(  # type: ignore[arg-type]
        [100 * line["accuracy"] for line in result.history]
    )
    assert result.plot("megabytes").axes[0].get_xlabel().startswith("MB")
    assert result.plot("client").axes[0].get_xlabel().startswith("clients")
    with pytest.raises(SettingError, match="by must be one of round, megabytes, gflop, seconds, client, got 'week'"):
        result.plot("week")  # type: ignore[arg-type]
    frame = pytest.importorskip("pandas") and result.to_pandas()
    assert frame["accuracy"].tolist() == [line["accuracy"] for line in result.history]
    assert frame["round"].tolist() == [1, 2] and "clients" not in frame
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(SettingError, match=r"to_pandas needs pandas: pip install 'fewer\[notebook\]'"):
        result.to_pandas()
    result.history.clear()
    assert "no round has been evaluated yet" in result._repr_html_()


def test_a_comparison_has_html_plots_and_a_data_frame() -> None:
    settings: dict[str, Any] = {
        "data": "digits",
        "clients": 4,
        "rounds": 1,
        "cohort": 2,
        "method_options": {"local_steps": 1},
    }
    table = fewer.compare(["fedavg", "local"], seeds=2, **settings)
    page = table._repr_html_()
    assert "digits, 4 clients" in page and "fedavg" in page and "local" in page and "±" in page
    assert len(table.plot("seconds").legends[0].get_texts()) == 2
    assert len(table.plot("client").legends[0].get_texts()) == 2
    frame = pytest.importorskip("pandas") and table.to_pandas()
    assert frame["method"].tolist() == ["fedavg", "local"] and frame["seeds"].tolist() == [2, 2]
    assert frame["accuracy"].tolist() == [row.accuracy for row in table.rows]
    with pytest.raises(SettingError, match="no methods to compare"):
        fewer.compare([], data="digits")
