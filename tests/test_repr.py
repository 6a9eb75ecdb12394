"""Objects of the public API describe themselves in three lines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fewer
from fewer import FedAvg
from fewer.data import ArrayData, Data
from fewer.runs.reader import RunReader


@pytest.fixture(scope="module")
def data() -> ArrayData:
    x, y = np.arange(60, dtype=np.float32).reshape(20, 3), np.arange(20) % 2
    return fewer.data.from_arrays(x, y, client_ids=np.arange(20) // 10, name="mine")


def check(shown: object, expected: str) -> None:
    """Compares as a doctest does: `...` stands for anything within a line."""
    pattern = re.escape(expected).replace(r"\.\.\.", ".*")
    assert re.fullmatch(pattern, repr(shown)), repr(shown)


def test_data(data: ArrayData) -> None:
    check(
        data,
        "ArrayData 'mine': 2 clients\n  inputs 3, 2 classes\n  16 training samples (8 to 8 per client), 4 test samples",
    )
    check(data.client(0).train, "Samples(8 inputs of 3, float32)")
    named = fewer.data.load("fashion-mini", clients=20, partition="iid")
    check(
        named,
        "ArrayData 'fashion-mini': 20 clients\n"
        "  inputs 1×28×28, 10 classes: T-shirt, trousers, pullover, dress, coat, …\n"
        "  6,000 training samples (300 to 300 per client), 1,000 test samples",
    )
    assert "  inputs 80 tokens (vocabulary 80), 80 classes\n" in repr(
        fewer.data.load("shakespeare-mini", fraction=0.01)
    )


def test_data_of_a_user(data: Data) -> None:
    class Lazy(Data):
        name, shape, classes, test = "lazy", (1, 8, 8), 3, data.test

        def __len__(self) -> int:
            return 1_000

        def client(self, index: int) -> fewer.data.ClientData:
            pytest.fail("a client was loaded")

        def size(self, index: int) -> int:
            return 1 + index

        def fingerprint(self) -> str:
            return ""

    check(
        Lazy(),
        "Lazy 'lazy': 1,000 clients\n"
        "  inputs 1×8×8, 3 classes\n"
        "  500,500 training samples (1 to 1,000 per client), 4 test samples",
    )


def test_result_and_run_directory(data: ArrayData, tmp_path: Path) -> None:
    result = fewer.run(FedAvg(rounds=3, local_steps=1), data, model="mlp", evaluate_every=2, out=tmp_path / "run")
    expected = (
        "Result of fedavg with mlp on mine, 2 clients\n  3 of 3 rounds: accuracy ...%...\n  ... MB up, ... MB down, 0 s"
    )
    check(result, expected)
    check(fewer.open_run(tmp_path / "run", data=data), expected)
    gone = repr(fewer.open_run(tmp_path / "run").data)
    assert gone.startswith("AbsentData 'mine': 2 clients\n  inputs 3, 2 classes\n  the training data of ")
    result.history.pop()
    result.history.pop()  # the first round was not evaluated
    assert "\n  1 of 3 rounds\n" in repr(result)
    result.history.clear()
    assert repr(result).endswith("\n  0 of 3 rounds\n  0 MB up, 0 MB down, 0 s")
    reader = RunReader(tmp_path / "run")
    check(reader, f"RunReader of {tmp_path}/run\n  fedavg on mine, 2 clients\n  finished, 3 of 3 rounds")
    missing = f"RunReader of {tmp_path}\n  {tmp_path} is not a run directory: it has no settings.json"
    check(RunReader(tmp_path), f"{missing}, but its folders are runs; ...")


def test_predictions() -> None:
    x = np.random.default_rng(0).normal(size=(200, 2)).astype(np.float32)
    settings: dict[str, Any] = {"clients": 2, "partition": "iid"}
    skewed = fewer.data.from_arrays(x, np.where(np.arange(200) % 50, "common", "rare"), **settings)
    result = fewer.run(FedAvg(rounds=2), skewed, model="logistic")
    end = " see classes, probabilities, to_pandas(), to_csv()"
    check(result.predict(x[:9]), f"Predictions: 9 samples, 2 classes\n  common: 9; mean confidence ...\n {end}")
    assert re.search(r"accuracy \d+.\d+%, no better than always 'common' \(\d+.\d+%\)\n", repr(result))
    learned = fewer.run(FedAvg(rounds=2, lr=0.5), fewer.data.from_arrays(x, (x[:, 0] > 0) * 1, **settings))
    assert "no better" not in repr(learned) and learned.accuracy > 0.8
    numbers = fewer.run(FedAvg(rounds=1), fewer.data.from_arrays(x, x[:, 0], **settings), loss="mse").predict(x)
    check(numbers, "Predictions: 200 samples, 1 outputs\n  ... to ...\n  see outputs, to_pandas(), to_csv()")
    sets = fewer.run(FedAvg(rounds=1), fewer.data.from_arrays(x, (x > 0) * 1, **settings), loss="bce").predict(x)
    check(
        sets, "Predictions: 200 samples, 2 labels\n  0: ..., 1: ...\n  see names, probabilities, to_pandas(), to_csv()"
    )


def test_comparison(data: ArrayData) -> None:
    table = fewer.compare([FedAvg(local_steps=1), "local"], data, model="mlp", rounds=1, seeds=2)
    first, second = sorted(zip(table.rows, table.labels, strict=True), key=lambda pair: -pair[0].accuracy)
    check(
        table,
        "Comparison on mine: 2 clients, 2 seeds\n"
        f"  accuracy: {first[1]} ... %, {second[1]} ... %\n"
        "  print(…) shows a table; see also plot(), to_pandas() and report()",
    )
