"""Runs beyond classification: losses and metrics from Python and the command line, in all runtimes, and on resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from torch import Tensor, nn

import fewer
from fewer import FedAvg
from fewer.audit import audit
from fewer.data import ArrayData, from_arrays, from_clients, from_dataset
from fewer.errors import DataError, RunError, SettingError
from fewer.methods import find, names
from fewer.models.split import EncoderHead
from fewer.runs.callbacks import EarlyStopping
from fewer.runs.reader import RunFollower, RunReader
from fewer.runs.settings import Settings, settings_hash
from tests.helpers import Interrupt, call, run_contents

RNG = np.random.default_rng(0)
X = RNG.normal(size=(400, 3)).astype(np.float32)
Y = (X @ RNG.normal(size=(3, 2)) + 0.3 * RNG.normal(size=(400, 2)) + 1).astype(np.float32)
SETS = (X @ RNG.normal(size=(3, 4)) + 0.3 * RNG.normal(size=(400, 4)) > 0).astype(np.int64)


class Linear(nn.Module):
    """One linear layer for any number of outputs."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(shape[0], classes)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x)
        return outputs


def numbers(clients: int = 4) -> ArrayData:
    return from_arrays(X, Y, clients=clients, partition="iid")


def pseudo_huber(outputs: Tensor, targets: Tensor) -> Tensor:
    return (1 + (outputs - targets).square()).sqrt().mean()


def largest_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().amax(1)


def pooled_test(data: ArrayData) -> tuple[Tensor, Any]:
    x, y = data.test.all()
    return x, y.numpy()


# --- training ---------------------------------------------------------------------------------------------------


def test_fedavg_reaches_the_least_squares_solution() -> None:
    data = numbers()
    result = fewer.run(FedAvg(rounds=30, lr=0.05, local_steps=40), data, model=Linear, loss="mse", metrics=["mse"])
    rows = data.train.rows
    features = np.c_[X[rows], np.ones(len(rows))]
    solution = np.linalg.lstsq(features, Y[rows], rcond=None)[0]
    x, y = pooled_test(data)
    expected = float(((np.c_[x.numpy(), np.ones(len(x))] @ solution - y) ** 2).mean())
    assert result.metrics["mse"] == pytest.approx(expected, rel=0.02)
    assert result.metrics["loss"] == pytest.approx(result.metrics["mse"], rel=1e-5)


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedensemble", "local"])
def test_pooled_metrics_are_those_of_the_pooled_predictions(method: str, tmp_path: Path) -> None:
    data = numbers()
    options: dict[str, Any] = {"loss": "huber", "metrics": ["r2", "mae"], "rounds": 2, "out": tmp_path / "run"}
    result = fewer.run(method, data, model=Linear, **options)
    predictions, targets = [], []
    for client in range(len(data)):
        x, y = data.client(client).test.all()
        net = result.personal_model(client) if method == "local" else result.model
        predictions.append(net(x).detach().numpy())
        targets.append(y.numpy())
    expected, predicted = np.concatenate(targets), np.concatenate(predictions)
    assert result.metrics["r2"] == pytest.approx(sklearn.metrics.r2_score(expected, predicted), rel=1e-5)
    assert result.metrics["mae"] == pytest.approx(sklearn.metrics.mean_absolute_error(expected, predicted), rel=1e-5)
    own = sklearn.metrics.r2_score(targets[2], predictions[2])
    assert result.metrics["clients"]["2"] == pytest.approx(own, rel=1e-4)
    assert result.metrics["personal_r2"] == pytest.approx(result.metrics["r2"], rel=1e-5)


def test_multi_label_f1_is_that_of_scikit_learn() -> None:
    data = from_arrays(X, SETS, clients=3, partition="quantity")
    result = fewer.run(FedAvg(rounds=3), data, model=Linear, loss="bce", metrics=["f1", "exact-match"])
    x, y = pooled_test(data)
    predicted = result.model(x).detach().numpy() > 0
    assert data.classes == 4 and y.dtype == np.float32
    assert result.metrics["f1"] == pytest.approx(sklearn.metrics.f1_score(y, predicted, average="micro"))
    assert result.metrics["f1"] > 0.8
    assert result.metrics["exact-match"] == pytest.approx(sklearn.metrics.accuracy_score(y, predicted))


def without_seconds(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "seconds"} for line in history]


@pytest.mark.parametrize("method", [name for name in names() if not find(name).needs and name != "fedavg-augmented"])
def test_every_method_without_classes_trains_a_regression_in_both_runtimes(method: str) -> None:
    data = from_arrays(X, Y, clients=10, partition="iid")

    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        return EncoderHead(nn.Sequential(nn.Linear(shape[0], 4), nn.GroupNorm(1, 4)), 4, classes)

    settings: dict[str, Any] = {"model": build, "loss": pseudo_huber, "metrics": ["mae", largest_error], "rounds": 2}
    inline = fewer.run(method, data, **settings)
    pool = fewer.run(method, data, runtime="pool", **settings)
    assert without_seconds(inline.history) == without_seconds(pool.history)
    assert inline.metrics["largest_error"] > inline.metrics["mae"] > 0


def test_a_run_with_own_functions_resumes_bit_equal(tmp_path: Path) -> None:
    data = numbers()
    own: dict[str, Any] = {"data": data, "model": Linear, "loss": pseudo_huber, "metrics": [largest_error, "mae"]}
    fewer.run(FedAvg(rounds=3), out=tmp_path / "straight", **own)
    with pytest.raises(KeyboardInterrupt):
        fewer.run(FedAvg(rounds=3), out=tmp_path / "run", callbacks=[Interrupt(1)], **own)
    fewer.resume(tmp_path / "run", **own)
    assert run_contents(tmp_path / "run") == run_contents(tmp_path / "straight")
    recorded = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert recorded["objects"] == ["data", "model", "loss", "metrics"]
    assert recorded["settings"]["loss"] == "(pseudo_huber)"
    assert recorded["settings"]["metrics"] == ["(largest_error)", "mae"]
    with pytest.raises(RunError, match="was run with your own loss: pass loss="):
        fewer.resume(tmp_path / "run", **{**own, "loss": None})
    with pytest.raises(RunError, match="was run with your own metrics"):
        fewer.open_run(tmp_path / "run", **{**own, "metrics": None})
    assert fewer.open_run(tmp_path / "run", **own).task.loss is pseudo_huber


# --- the command line -------------------------------------------------------------------------------------------


def write_csv(path: Path, y: Any = None) -> None:
    rows = np.c_[X[:120], Y[:120, 0] if y is None else y]
    lines = ["a,b,c,label", *(",".join(f"{value:.4f}" for value in row) for row in rows)]
    path.write_text("\n".join(lines) + "\n")


def test_the_command_line_takes_losses_and_metrics(tmp_path: Path) -> None:
    write_csv(tmp_path / "table.csv")
    (tmp_path / "own_code.py").write_text(
        "def pseudo_huber(outputs, targets):\n    return (1 + (outputs - targets).square()).sqrt().mean()\n\n\n"
        "def bias(outputs, targets):\n    return (outputs - targets)[:, 0]\n"
    )
    data = ["--data", f"csv:{tmp_path}/table.csv", "--clients", "3", "--partition", "iid", "--model", "mlp"]
    args = ["run", "fedavg", *data, "--rounds", "2"]
    call(*args, "--loss", "mse", "--metrics", "mae,r2", "--out", str(tmp_path / "named"))
    line = json.loads((tmp_path / "named" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"mae", "r2", "loss"} <= line.keys() and "accuracy" not in line
    own = [f"--loss={tmp_path}/own_code.py:pseudo_huber", f"--metrics=mae,{tmp_path}/own_code.py:bias"]
    call(*args, *own, "--data-option", "regression=true", "--out", str(tmp_path / "own"))
    call("resume", str(tmp_path / "own"))
    line = json.loads((tmp_path / "own" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"mae", "bias"} <= line.keys()
    write_csv(tmp_path / "others.csv")
    predicted = call("predict", str(tmp_path / "named"), "--data", f"csv:{tmp_path}/others.csv")
    lines = predicted.stdout.splitlines()
    assert lines[0] == "sample,value_0" and len(lines) == 121
    result = fewer.open_run(tmp_path / "named")
    value = float(result.model(torch.from_numpy(np.round(X[:1], 4))).detach()[0, 0])
    assert float(lines[1].split(",")[1]) == pytest.approx(value, rel=1e-4)
    call("export", tmp_path / "named", "--out", tmp_path / "exported")
    assert json.loads((tmp_path / "exported" / "model.json").read_text())["predicts"] == "regression"


def test_predictions_of_sets_are_labels(tmp_path: Path) -> None:
    np.savez(tmp_path / "sets.npz", x=X, y=SETS)
    fewer.run(
        FedAvg(rounds=2), f"npz:{tmp_path}/sets.npz", model="mlp", loss="bce", clients=3, partition="iid",
        out=tmp_path / "run",
    )  # fmt: skip
    np.savez(tmp_path / "others.npz", x=X, y=SETS)  # for the data of the run, only test samples are predicted
    output = call("predict", str(tmp_path / "run"), "--data", f"npz:{tmp_path}/others.npz")
    net = fewer.open_run(tmp_path / "run").model
    labels = [" ".join(str(label) for label in row.nonzero()[:, 0].tolist()) for row in net(torch.from_numpy(X)) > 0]
    lines = output.stdout.splitlines()
    assert lines[0] == "sample,labels" and lines[1:] == [f"{row},{cells}" for row, cells in enumerate(labels)]


# --- the primary metric -----------------------------------------------------------------------------------------


def test_a_result_shows_its_primary_metric(tmp_path: Path) -> None:
    result = fewer.run(
        FedAvg(rounds=1), numbers(), model=Linear, loss="mse", metrics=["rmse", "r2"], out=tmp_path / "run"
    )
    assert f"1 of 1 rounds: rmse {result.metrics['rmse']:.4g}\n" in repr(result)
    assert result.value == result.metrics["rmse"] and result.records()[0]["r2"] == result.metrics["r2"]
    with pytest.raises(SettingError, match=r"this regression task has no accuracy: use metrics\['rmse'\]"):
        _ = result.accuracy
    recorded = json.loads((tmp_path / "run" / "settings.json").read_text())["metric"]
    assert recorded == {"name": "rmse", "higher_is_better": False, "percent": False}
    run = RunReader(tmp_path / "run")
    assert run.value == run.progress()["value"] == result.value
    assert RunFollower(tmp_path / "run").curve()[-1]["value"] == result.value


def test_tuning_prefers_the_lower_error() -> None:
    tuning = fewer.tune(FedAvg(rounds=2), numbers(), model=Linear, loss="mse", trials=4)
    errors = {trial.settings["lr"]: trial.accuracy for trial in tuning.trials}
    assert (
        tuning.method.model_dump()["lr"] == min(errors, key=lambda lr: errors[lr] or np.inf)
        and len(set(errors.values())) == 4
    )
    assert "mae" in tuning.to_pandas()


def test_a_comparison_ranks_the_lower_error_first(tmp_path: Path) -> None:
    methods = [FedAvg(rounds=2, lr=0.0001), FedAvg(rounds=2, lr=0.1)]
    own: dict[str, Any] = {"data": numbers(), "model": Linear, "loss": pseudo_huber, "metrics": ["mae", largest_error]}
    table = fewer.compare(methods, **own, seeds=2, out=tmp_path)
    assert fewer.compare(methods, **own, seeds=2, out=tmp_path).rows == table.rows  # from the kept runs
    slow, fast = table.rows
    assert slow.accuracy > fast.accuracy and {"mae", "global_mae"} <= table.records()[0].keys()
    assert f"{fast.accuracy:.4g}" in str(table) and "%" not in str(table)
    page = table.report(tmp_path / "page").read_text()
    assert f"{table.labels[1]} wins: {fast.accuracy:.4g}" in page and "mae by round" in page and "ccuracy" not in page
    assert table.plot("round").axes[0].get_ylabel() == "mae" == table.plot("client").axes[0].get_ylabel()
    assert f"{fast.accuracy:.4g}" in table._repr_html_()


@pytest.mark.parametrize(("metric", "higher_is_better"), [("mae", False), ("r2", True)])
def test_early_stopping_follows_the_direction_of_the_metric(metric: str, higher_is_better: bool) -> None:
    method, stopping = FedAvg(rounds=30, lr=0.05), EarlyStopping(patience=2)
    result = fewer.run(method, numbers(), model=Linear, loss="mse", metrics=[metric], callbacks=[stopping])
    values = [line[metric] if higher_is_better else -line[metric] for line in result.history]
    assert len(values) < 30 and max(values) == values[-3] and f"{metric} has not improved" in result.stopped


# --- mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("fedmk", {}, r"fedmk needs classes, but this is a regression task \(allowed: .*fedavg"),
        ("metafed", {}, "metafed needs classes"),
        ("frl", {}, "frl needs classes"),
        ("f2l", {}, "f2l needs classes"),
        ("alone", {"method_options": {"learner": "most-used"}}, "learner = most-used needs classes"),
        ("fedavg", {"loss": None}, "loss = cross-entropy is for classification, but data 'arrays' has numbers"),
        ("fedavg", {"loss": "bce"}, "loss = bce is for multi-label"),
        ("fedavg", {"model": "cnn"}, "takes images"),
        ("fedavg", {"model": lambda: nn.Linear(3, 1)}, r"returns \(1, 1\) for one sample, expected 2 outputs"),
        ("fedavg", {"model": lambda: nn.Linear(3, 3)}, r"returns \(1, 3\) for one sample, expected 2 outputs"),
        ("fedavg", {"loss": lambda outputs, targets: outputs - targets}, "the loss must be a tensor with one number"),
        ("fedavg", {"loss": lambda outputs: outputs}, "the loss cannot be computed: TypeError"),
        ("fedavg", {"metrics": [lambda outputs: outputs]}, "a metric cannot be computed: TypeError"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        fewer.run(method, numbers(10), **{"model": Linear, "loss": "mse", **options})


def test_a_method_with_its_own_loss_takes_no_other() -> None:
    def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)

    with pytest.raises(SettingError, match=r"fedmk has its own loss; loss = \(smoothed\) does not apply"):
        fewer.run("fedmk", "digits", clients=3, loss=smoothed)
    assert "accuracy" in fewer.run(FedAvg(rounds=1), "digits", clients=3, loss=smoothed).metrics


@pytest.mark.parametrize("partition", ["dirichlet", "dirichlet-pairs", "pathological", "shards"])
def test_partitions_by_class_are_refused_for_numbers(partition: Any) -> None:
    with pytest.raises(SettingError, match=rf"partition = {partition} needs classes.*allowed: iid, quantity, natural"):
        from_arrays(X, Y, partition=partition)


def test_named_classes_are_not_numbers() -> None:
    with pytest.raises(DataError, match="data 'fashion-mini' has named classes, and a regression needs numbers"):
        fewer.run(FedAvg(rounds=1), "fashion-mini", loss="mse")


def test_a_run_without_classes_is_not_audited(tmp_path: Path) -> None:
    result = fewer.run(FedAvg(rounds=1), numbers(), model=Linear, loss="mse", out=tmp_path / "run")
    with pytest.raises(SettingError, match="is a regression run; the attacks need classes"):
        audit(result)


# --- data -------------------------------------------------------------------------------------------------------


def test_float_targets_come_from_arrays_clients_and_datasets() -> None:
    pairs = [(X[:50], Y[:50, 0]), (X[50:80], np.ones(30)), (X[:0], Y[:0, 0])]
    clients = from_clients(pairs)
    assert clients.classes == 1 and not clients.has_classes and clients.client(1).train.labels.tolist()[0] == [1.0]
    dataset = from_dataset(list(zip(X, Y, strict=True)), clients=3, partition="iid")
    assert torch.equal(dataset.source.y, torch.from_numpy(Y)) and dataset.classes == 2
    assert from_arrays(X, Y[:, 0], clients=2, partition="iid").source.y.shape == (400, 1)
    assert from_arrays(X, np.arange(400) % 3.0, clients=2).has_classes  # whole floats are class labels, as before


def test_integer_labels_become_numbers_for_a_regression_loss() -> None:
    data = from_arrays(X, np.arange(400) % 5, clients=2, partition="iid")
    result = fewer.run(FedAvg(rounds=1), data, model=Linear, loss="mae")
    assert result.data.classes == 1 and result.data.test.y.shape == (400, 1) and result.metrics["mae"] > 0


def test_csv_targets_are_numbers_only_for_a_regression(tmp_path: Path) -> None:
    write_csv(tmp_path / "table.csv", -1 - np.arange(120) % 3)
    settings: dict[str, Any] = {"model": "mlp", "clients": 2, "partition": "iid"}
    result = fewer.run(FedAvg(rounds=1), f"csv:{tmp_path}/table.csv", loss="mse", **settings)
    assert result.data.classes == 1 and set(result.data.test.labels[:, 0].tolist()) == {-1, -2, -3}
    classes = fewer.run(FedAvg(rounds=1), f"csv:{tmp_path}/table.csv", **settings)
    assert classes.data.classes == 3
    write_csv(tmp_path / "table.csv", np.abs(Y[:120, 0]))
    with pytest.raises(DataError, match="column 'label' has 120 distinct values in 120 rows: pass --loss mse"):
        fewer.run(FedAvg(rounds=1), f"csv:{tmp_path}/table.csv", **settings)


def test_loss_and_metrics_are_part_of_the_hash_only_if_given() -> None:
    plain = settings_hash(Settings(), FedAvg())
    assert settings_hash(Settings(loss=None, metrics=()), FedAvg(optimizer="sgd", momentum=0)) == plain
    others = [Settings(loss="mse"), Settings(metrics="mae"), Settings(loss="/a/l.py:f"), Settings(loss="/b/m.py:f")]
    assert len({plain, *(settings_hash(settings, FedAvg()) for settings in others)}) == 5
    assert settings_hash(Settings(loss="/a/l.py:f"), FedAvg()) == settings_hash(Settings(loss="/b/l.py:f"), FedAvg())
    assert settings_hash(Settings(), FedAvg(lr_schedule="cosine")) != plain


def test_hashes_from_before_these_options_stay() -> None:
    methods = FedAvg(), fewer.FedAvgMeta(), fewer.PerFedAvg(), fewer.MetaFed()
    hashes = [settings_hash(Settings(model="cnn"), method) for method in methods]
    assert hashes == ["930301adf5b4", "36fa56e9a50a", "30ae3bbdf06e", "811bbc371c7c"]
