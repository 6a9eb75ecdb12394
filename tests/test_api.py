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
from torch.utils.data import TensorDataset

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


def test_import_star_gives_the_api_alone() -> None:
    names_by_star: dict[str, Any] = {}
    exec("from fewer import *", names_by_star)
    assert {*dir(fewer)} == names_by_star.keys() - {"__builtins__"}


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


def test_a_user_can_register_a_method(my_data: ArrayData, tmp_path: Path) -> None:
    class Mine(FedAvg):
        """FedAvg under another name."""

    try:
        assert METHODS.register("mine")(Mine) is Mine and find("mine") is Mine and "mine" in names()
        assert fewer.run("mine", my_data, model=MyNet, rounds=1).method.name == "mine"
        fewer.run(Mine(rounds=1), my_data, model=MyNet, out=tmp_path / "run")
        assert '"method": "' + __file__ in (tmp_path / "run/settings.json").read_text()  # another process finds it
        with pytest.raises(SettingError, match="method 'fedavg' exists already"):
            METHODS.register("fedavg")(Mine)
    finally:
        METHODS._registered.clear()


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
    assert line[5:7] == ["2", "rounds"]
    assert table.report(tmp_path / "report").read_text().count("fedprox")
    again = fewer.compare(methods, data=my_data, model=MyNet, rounds=2, seeds=2, out=tmp_path / "runs")
    assert again.rows == table.rows  # taken from the run directories


def test_compare_tunes_objects(my_data: ArrayData, tmp_path: Path) -> None:
    table = fewer.compare([FedAvg(rounds=1), "local"], data=my_data, model=MyNet, rounds=1, tune=True, trials=4)
    assert [len(row.trials) for row in table.rows] == [4, 4]
    best = max(table.rows[0].trials, key=lambda trial: trial.accuracy or 0)
    assert table.rows[0].settings["lr"] == best.settings["lr"]
    assert table.report(tmp_path / "report").is_file()  # also without run directories


def test_compare_trains_a_plain_net_with_fedmk_too(my_data: ArrayData) -> None:
    quick = {"min_samples": 1, "per_class": 2, "matching_steps": 2, "outer_steps": 1, "server_steps": 5}
    methods: list[Method | str] = [FedAvg(lr=0.1), FedProx(mu=0.1), "fedmk"]
    table = fewer.compare(
        methods, data=my_data, model=MyNet, rounds=1, seeds=2, tune=True, trials=2, method_options=quick
    )
    assert [len(row.trials) for row in table.rows] == [2, 2, 2] and len(table.to_pandas()) == 3


def test_compare_finds_a_method_that_cannot_start_before_the_first_run(my_data: ArrayData) -> None:
    class Started(fewer.Callback):
        def on_run_start(self, run: fewer.Run) -> None:
            pytest.fail("a run has started")

    class NoLinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(64, 10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1) @ self.weight

    with pytest.raises(SettingError, match="model NoLinear has no encoder and no head"):
        fewer.compare(["fedavg", "fedmk"], my_data, model=NoLinear, callbacks=[Started()])


def test_wrong_arguments_get_one_clear_line(my_data: ArrayData) -> None:
    x, y = np.zeros((20, 1, 8, 8), np.float32), np.arange(20) % 10
    run, compare, data = fewer.run, fewer.compare, fewer.data
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: FedAvg(rate=0.1), SettingError, "fedavg has no option 'rate'"),  # type: ignore[call-arg]
        (lambda: FedAvg(learning_rate=0.1), SettingError, "has no option 'learning_rate', did you mean 'lr'?"),  # type: ignore[call-arg]
        (lambda: FedAvg(lr=-1), SettingError, "fedavg: lr must be > 0, got -1"),
        (lambda: run(FedAvg, my_data), SettingError, "method is the class FedAvg: pass an instance"),  # type: ignore[arg-type]
        (lambda: run(3, my_data), SettingError, "method must be a name or a fewer.Method, got int"),  # type: ignore[arg-type]
        (lambda: run("fedavg", (x, y)), fewer.DataError, "data must be a name, or made by .*got tuple"),  # type: ignore[arg-type]
        (lambda: run("fedavg", my_data, model=3), SettingError, "model must be a name, .*got int"),  # type: ignore[arg-type]
        (lambda: run("fedavg", my_data, lr=0.1), SettingError, "lr is an option of a method"),
        (lambda: run("fedavg", my_data, learning_rate=0.1), SettingError, "lr is an option of a method"),
        (lambda: run("fedavg", my_data, local_step=3), SettingError, "local_steps is an option of a method"),
        (lambda: run("fedavg", my_data, rouns=2), SettingError, "unknown setting 'rouns', did you mean 'rounds'"),
        (lambda: compare(FedAvg, my_data), SettingError, "methods must be a list"),  # type: ignore[arg-type]
        (lambda: compare([FedAvg], my_data), SettingError, "method is the class FedAvg"),  # type: ignore[list-item]
        (lambda: compare("fedavg", my_data), SettingError, "methods must be a list"),
        (lambda: compare(["fedavg"], my_data, seeds=[0]), SettingError, "seeds must be the number"),  # type: ignore[arg-type]
        (lambda: data.load("digits", parties=3), SettingError, "unknown setting of the data 'parties'"),
        (lambda: data.from_arrays(x, y, n_clients=2), SettingError, "did you mean 'clients'"),
        (lambda: data.from_clients([x, x]), fewer.DataError, "client 0 must be a pair"),
    ]
    for call, error, text in cases:
        with pytest.raises(error, match=text):
            call()


def test_clients_may_be_torch_datasets() -> None:
    x, y = torch.rand(40, 1, 8, 8), torch.arange(40) % 10
    by_dataset = fewer.data.from_clients([TensorDataset(x[:25], y[:25]), TensorDataset(x[25:], y[25:])])
    by_pair = fewer.data.from_clients([(x[:25], y[:25]), (x[25:], y[25:])])
    assert by_dataset.fingerprint() == by_pair.fingerprint() and len(by_dataset) == 2


def test_audit_takes_a_result_or_the_data_and_model_again(my_data: ArrayData, tmp_path: Path) -> None:
    result = fewer.run(FedAvg(rounds=1), my_data, model=MyNet, out=tmp_path / "run")
    quick: dict[str, Any] = {"clients": 2, "steps": 2, "starts": 1}
    by_path = fewer.audit(tmp_path / "run", data=my_data, model=MyNet, **quick)
    assert fewer.audit(result, **quick).metrics == by_path.metrics
    with pytest.raises(fewer.RunError, match="was run with your own data: pass data="):
        fewer.audit(tmp_path / "run")
    with pytest.raises(fewer.RunError, match="run with out=DIR"):
        fewer.audit(fewer.run(FedAvg(rounds=1), my_data, model=MyNet))


def test_compare_reports_wrong_settings(my_data: ArrayData) -> None:
    with pytest.raises(SettingError, match="no method has an option 'mu'"):
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
