"""The tables by class and client, and the verdict on the majority baseline: on data with classes 98 : 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fewer
from fewer import FedAvg
from fewer.cli.printing import Output, print_result
from fewer.data import Data
from fewer.errors import SettingError
from fewer.runs.figures import describe_baseline
from fewer.runs.metric import ACCURACY, PrimaryMetric
from tests.helpers import Interrupt, run_contents

pytest.importorskip("pandas")


class Fixed(nn.Module):
    """Predicts class 1 if the second input is 1. A learning rate near 0 keeps it so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def rare_label(outputs: Tensor, targets: Tensor) -> Tensor:
    return (targets == 1).float()


@pytest.fixture
def imbalanced() -> Data:
    """200 test samples, 4 of class 1. The net takes one of class 0 for class 1, and all of class 1 for class 0."""
    labels = np.array([0] * 196 + [1] * 4)
    inputs = np.eye(2, dtype=np.float32)[[0] * 195 + [1] + [0] * 4]
    return fewer.data.from_arrays(inputs, labels, test=(inputs, labels), clients=2, partition="iid")


def run_fixed(data: Data, **settings: Any) -> fewer.Result:
    return fewer.run(FedAvg(rounds=2, lr=1e-9), data, model=Fixed, metrics=[rare_label], **settings)


def test_tables_by_class_and_client_by_hand(imbalanced: Data) -> None:
    result = run_fixed(imbalanced)
    assert result.accuracy == 195 / 200 and result.metrics["majority_baseline"] == 196 / 200
    f1 = 2 * 195 / (196 + 199), 0.0
    assert result.metrics["macro_f1"] == pytest.approx(sum(f1) / 2)
    confidence = float(torch.tensor([1.0, 0.0]).softmax(0)[0])  # of every sample
    assert result.metrics["ece"] == pytest.approx(195 / 200 - confidence, abs=1e-6)
    by_class = result.per_class()
    assert by_class.columns.tolist() == ["class", "support", "recall", "precision", "f1"]
    assert by_class["support"].tolist() == [196, 4] and by_class["recall"].tolist() == [195 / 196, 0.0]
    assert by_class["precision"].tolist() == [195 / 199, 0.0] and by_class["f1"].tolist() == pytest.approx(f1)
    confusion = result.confusion()
    assert confusion.loc["0"].tolist() == [195, 1] and confusion.loc["1"].tolist() == [4, 0]
    assert (confusion.index.name, confusion.columns.name) == ("label", "predicted")
    clients = result.per_client()
    assert clients["client"].tolist() == [0, 1] and clients["samples"].sum() == 200
    pooled = (clients["samples"] * clients["rare_label"]).sum() / 200
    assert pooled == pytest.approx(result.metrics["rare_label"]) and pooled == pytest.approx(4 / 200)


def test_counts_are_integers_in_pandas(imbalanced: Data) -> None:
    result = run_fixed(imbalanced, evaluate_every=2)
    frame = result.to_pandas()
    assert {name: str(frame[name].dtype) for name in ("round", "absent", "up", "down")} == dict.fromkeys(
        ("round", "absent", "up", "down"), "int64"
    )
    assert str(frame["accuracy"].dtype) == "float64" and frame["accuracy"].isna().tolist() == [True, False]
    result.history[1]["unmeasured"] = 3
    assert str(result.to_pandas()["unmeasured"].dtype) == "Int64" and result.to_pandas()["unmeasured"].tolist()[1] == 3
    assert [str(kind) for kind in result.per_client()[["client", "samples"]].dtypes] == ["int64", "int64"]
    assert str(result.per_class()["support"].dtype) == "int64"
    assert {str(kind) for kind in result.confusion().dtypes} == {"int64"}


def test_a_result_below_the_majority_baseline_says_so(
    imbalanced: Data, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_fixed(imbalanced, out=tmp_path / "run")
    sentence = "97.5 % is below the majority baseline: always predicting '0' scores 98.0 %."
    print_result(result, tmp_path / "run", Output(report=False))
    assert sentence in capsys.readouterr().out.splitlines()
    page = result.report(tmp_path / "report").read_text()
    assert f"<p>{sentence.replace(chr(39), '&#39;')}</p>" in page


def test_a_resumed_run_has_the_same_figures(imbalanced: Data, tmp_path: Path) -> None:
    run_fixed(imbalanced, out=tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        run_fixed(imbalanced, out=tmp_path / "run", callbacks=[Interrupt(1)])
    with pytest.raises(SettingError, match="this run has not finished"):
        fewer.open_run(tmp_path / "run", data=imbalanced, model=Fixed, metrics=[rare_label]).per_class()
    fewer.resume(tmp_path / "run", data=imbalanced, model=Fixed, metrics=[rare_label])
    assert run_contents(tmp_path / "run") == run_contents(tmp_path / "straight")
    opened = fewer.open_run(tmp_path / "run", data=imbalanced, model=Fixed, metrics=[rare_label])
    assert opened.confusion().to_numpy().tolist() == [[195, 1], [4, 0]]


def test_other_tasks_have_no_figures_by_class() -> None:
    x = np.linspace(0, 1, 60, dtype=np.float32)[:, None]
    data = fewer.data.from_arrays(x, 2 * x[:, 0], clients=2, partition="iid")
    result = fewer.run(FedAvg(rounds=1), data, model=lambda: nn.Linear(1, 1), loss="mse")
    assert not {"macro_f1", "ece", "majority_baseline", "classes"} & result.metrics.keys()
    assert result.per_client().columns.tolist() == ["client", "samples", "mae", "loss"]
    with pytest.raises(SettingError, match="has no 'classes': it needs a task with at most 100 classes"):
        result.per_class()


def line(accuracy: float, baseline: float, support: list[int] | None = None) -> dict[str, Any]:
    classes = {"classes": {"names": ["healthy", "ill"], "support": support}} if support else {}
    return {"accuracy": accuracy, "majority_baseline": baseline, **classes}


BELOW = "is below the majority baseline: always predicting"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([line(0.975, 0.98, [98, 2])], f"97.5 % {BELOW} 'healthy' scores 98.0 %."),
        ([line(0.9796, 0.98, [98, 2])], f"97.96 % {BELOW} 'healthy' scores 98.00 %."),
        ([line(0.5, 0.6, [50, 50])], f"50.0 % {BELOW} each client's most frequent class scores 60.0 %."),
        ([line(0.1, 0.2), line(0.3, 0.4)], f"20.0 % {BELOW} the most frequent class scores 30.0 %."),
        (
            [line(0.98, 0.98, [98, 2])],
            "98.0 % is no better than the majority baseline: always predicting 'healthy' scores the same.",
        ),
        ([line(0.99, 0.98, [98, 2])], ""),
        ([{"accuracy": 0.1}], ""),
        ([{"majority_baseline": 0.1}], ""),
    ],
)
def test_the_sentence_on_the_baseline(lines: list[dict[str, Any]], expected: str) -> None:
    assert describe_baseline(lines, ACCURACY) == expected
    assert describe_baseline(lines, PrimaryMetric("mae", False, False)) == ""
