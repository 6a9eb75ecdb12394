"""The public Python API."""

from __future__ import annotations

import inspect
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fewer
from fewer import F2L, FedAvg, FedMK, FedProx, Local
from fewer.data import ArrayData
from fewer.errors import SettingError
from fewer.methods import Method, find, names
from fewer.registry import CODECS, FORMATS, METHODS, MODELS, Registry
from tools.make_stub import STUB, stub

RNG = np.random.default_rng(0)


class MyNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 10))


@pytest.fixture(scope="module")
def my_data() -> ArrayData:
    y = np.arange(240) % 10
    x = RNG.normal(0, 1, (240, 1, 8, 8)).astype(np.float32) + y[:, None, None, None]
    return fewer.data.from_arrays(x, y, clients=4, alpha=1.0)


# --- public names --------------------------------------------------------------------------------------------------


def test_every_method_can_be_imported_from_fewer() -> None:
    assert {F2L, FedAvg, FedMK, FedProx} <= {find(name) for name in names()}
    for name in names():
        method = find(name)
        assert getattr(fewer, method.__name__) is method
        assert method.name == name


def test_dir_lists_the_api_without_importing_torch() -> None:
    code = "import sys, fewer; print(*dir(fewer)); sys.exit('torch' in sys.modules)"
    listed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    expected = {"run", "resume", "compare", "tune", "open_run", "audit", "methods", "models", "data", "Client"}
    expected |= {"Clients", "Task", "Unable", "FewerError", "SettingError", "DataError", "RunError", "QuorumLost"}
    assert expected | {find(name).__name__ for name in names()} <= set(listed)
    for name in listed:
        assert getattr(fewer, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fewer.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_the_type_stub_is_current() -> None:
    assert STUB.read_text() == stub(), "run: make format"


def test_audit_is_a_function_and_a_package() -> None:
    assert callable(fewer.audit) and fewer.audit.attacks.audit  # type: ignore[attr-defined]
    with pytest.raises(fewer.RunError, match="is not a run directory"):
        fewer.audit("nowhere")


# --- the registry -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("registry", [METHODS, MODELS, FORMATS, CODECS])
def test_builtin_names_match_what_the_modules_register(registry: Registry) -> None:
    assert len(registry) > 4
    for name, builtin in registry.builtins.items():
        registered = registry[name]
        assert registered.__module__ == builtin.module and registered.__name__ == builtin.attribute
        assert registered.name == name


def test_every_public_method_class_is_registered() -> None:
    def subclasses(cls: type[Any]) -> set[type[Any]]:
        return {cls}.union(*(subclasses(child) for child in cls.__subclasses__()))

    registered = {find(name) for name in names()}
    concrete = {cls for cls in subclasses(Method) if not inspect.isabstract(cls)}
    builtin = {cls for cls in concrete if cls.__module__.startswith("fewer.methods.")}
    assert builtin == registered


def test_builtins_need_no_list_in_pyproject() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert "entry-points" not in project


# --- compare, tune, open_run --------------------------------------------------------------------------------------


def test_compare_takes_objects_data_and_models(my_data: ArrayData, tmp_path: Path) -> None:
    methods: list[Method | str] = [FedAvg(lr=0.1), FedAvg(lr=0.3), FedProx(mu=0.1), "local"]
    table = fewer.compare(methods, data=my_data, model=MyNet, rounds=2, seeds=2, out=tmp_path / "runs")
    assert table.labels == ["fedavg lr=0.1", "fedavg lr=0.3", "fedprox", "local"]
    assert [row.settings["lr"] for row in table.rows[:2]] == [0.1, 0.3] and table.rows[2].settings["mu"] == 0.1
    assert {row.rounds for row in table.rows} == {2} and len(table.runs) == 8
    single = fewer.run(FedAvg(lr=0.3, rounds=2), my_data, model=MyNet, seed=1)
    assert table.rows[1].accuracies[1] == single.accuracy
    frame = table.to_pandas()
    assert frame["method"].tolist() == table.labels
    assert table.plot().axes and "fedprox" in table._repr_html_()
    row = table.rows[2]
    line = str(table).splitlines()[2].split()
    assert line[:5] == ["fedprox", f"{100 * row.accuracy:.2f}", "±", f"{100 * (row.ci95 or 0):.2f}", "%"]
    assert line[5:7] == ["2", "rounds"] and repr(table).startswith("Comparison(labels=['fedavg lr=0.1'")
    assert table.report(tmp_path / "report").read_text().count("fedprox")
    again = fewer.compare(methods, data=my_data, model=MyNet, rounds=2, seeds=2, out=tmp_path / "runs")
    assert again.rows == table.rows  # taken from the run directories


def test_compare_tunes_objects(my_data: ArrayData, tmp_path: Path) -> None:
    table = fewer.compare([FedAvg(rounds=1), "local"], data=my_data, model=MyNet, rounds=1, tune=True, trials=4)
    assert [len(row.trials) for row in table.rows] == [4, 4]
    best = max(table.rows[0].trials, key=lambda trial: trial.accuracy or 0)
    assert table.rows[0].settings["lr"] == best.settings["lr"]
    assert table.report(tmp_path / "report").is_file()  # also without run directories


def test_compare_reports_wrong_settings(my_data: ArrayData) -> None:
    with pytest.raises(SettingError, match="option 'mu': no method has it"):
        fewer.compare([FedProx(), "fedavg"], my_data, method_options={"mu": 0.1})
    with pytest.raises(SettingError, match="clients belongs to the data"):
        fewer.compare(["fedavg"], my_data, clients=3)
    with pytest.raises(SettingError, match="fedavg: rounds must be > 0, got 0"):
        fewer.compare([FedAvg()], my_data, model=MyNet, rounds=0)


def test_tune_returns_the_best_method(my_data: ArrayData) -> None:
    tuning = fewer.tune(FedAvg(rounds=1), my_data, model=MyNet, trials=4)
    assert isinstance(tuning.method, FedAvg) and len(tuning.trials) == 4
    best = max(tuning.trials, key=lambda trial: trial.accuracy or 0)
    assert tuning.method.lr == best.settings["lr"] and tuning.method.rounds == 1
    assert tuning.to_pandas()["lr"].tolist() == [trial.settings["lr"] for trial in tuning.trials]


def test_open_run_gives_history_and_models(my_data: ArrayData, tmp_path: Path) -> None:
    result = fewer.run(Local(rounds=2), my_data, model=MyNet, out=tmp_path / "run")
    opened = fewer.open_run(tmp_path / "run", data=my_data, model=MyNet)
    assert opened.history == result.history and opened.accuracy == result.accuracy
    reloaded, original = (run.personal_model(1).state_dict() for run in (opened, result))
    assert all(torch.equal(reloaded[name], original[name]) for name in reloaded)
    assert opened.report(tmp_path / "report").is_file()
    with pytest.raises(SettingError, match="local has no global model"):
        opened.model  # noqa: B018
