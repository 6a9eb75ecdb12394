"""A run is used on new files, and without its training data."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fewer
from fewer import FedAvg
from fewer.data.absent import AbsentData
from fewer.errors import DataError, RunError, SettingError
from tests.helpers import call

CLASSES = ("cold", "flu", "healthy")


def write_table(path: Path, seed: int, classes: Sequence[str] = CLASSES, columns: Sequence[str] = "abc") -> Path:
    """Writes a table in which the class is the column with the largest value."""
    x = np.random.default_rng(seed).normal(size=(300, 3))
    rows = [dict(zip("abc", map(str, row), strict=True)) | {"label": CLASSES[row.argmax()]} for row in x]
    lines = [columns, *([row[name] for name in columns] for row in rows if row["label"] in classes)]
    path.write_text("\n".join(map(",".join, lines)))
    return path


def accuracy(output: Any) -> float:
    return float(output.stderr.split("accuracy ")[1].split(" %")[0].split("%")[0])


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(StringIO(text)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run on a table, which is gone afterwards."""
    table = write_table(tmp_path / "train.csv", 0, columns=["a", "b", "c", "label"])
    args = ["--data", f"csv:{table}", "--clients", "3", "--partition", "iid", "--model", "logistic"]
    call("run", "fedavg", *args, "--rounds", "5", "-o", "lr=0.5", "--no-report", "--out", tmp_path / "run")
    table.unlink()
    return tmp_path / "run"


def test_the_run_directory_keeps_the_schema(run: Path) -> None:
    schema = json.loads((run / "schema.json").read_text())
    assert schema["class_names"] == list(CLASSES) and [column["name"] for column in schema["columns"]] == list("abc")
    assert schema["kind"] == "features" and schema["shape"] == [3] and schema["dtype"] == "float32"


@pytest.mark.parametrize("columns", [["a", "b", "c", "label"], ["label", "c", "a", "b"]])
@pytest.mark.parametrize("classes", [CLASSES, ("flu", "healthy"), ("healthy",)])
def test_predict_maps_columns_and_classes_by_name(
    columns: list[str], classes: Sequence[str], run: Path, tmp_path: Path
) -> None:
    """A file with a subset of the classes scored 0 %, one with other column orders 50 %."""
    file = write_table(tmp_path / "new.csv", 1, classes, columns)
    output = call("predict", run, "--data", f"csv:{file}")
    assert accuracy(output) > 85
    rows = rows_of(output.stdout)
    assert list(rows[0]) == ["sample", "class", "confidence", "p_cold", "p_flu", "p_healthy"]
    assert {row["class"] for row in rows} <= set(CLASSES)
    for row in rows[:20]:
        assert max(float(row[f"p_{name}"]) for name in CLASSES) == float(row["confidence"])
        assert float(row[f"p_{row['class']}"]) == float(row["confidence"])


def test_predictions_keep_the_row_numbers_of_the_file(run: Path, tmp_path: Path) -> None:
    """Dropped and sorted rows once shifted the numbers, so that predictions belonged to other patients."""
    file = tmp_path / "new.csv"
    file.write_text("a,b,c,when,label\n9,0,0,3,cold\n,9,0,2,flu\n0,9,0,1,\n0,0,9,0,healthy\n")
    output = call("predict", run, "--data", f"csv:{file}", "--data-option", "missing=drop")
    rows = rows_of(output.stdout)
    assert [(row["sample"], row["class"]) for row in rows] == [("0", "cold"), ("2", "flu"), ("3", "healthy")]
    assert "labels: 1 of 4 are missing, so none are used" in output.stderr and "accuracy" not in output.stderr
    options = ["--data-option", "missing=drop", "--data-option", "time=when"]
    output = call("predict", run, "--data", f"csv:{file}", *options)
    assert [row["sample"] for row in rows_of(output.stdout)] == ["3", "2", "0"]
    file.write_text("a,b,c,label\n9,0,0,\n0,9,0,\n")
    assert len(rows_of(call("predict", run, "--data", f"csv:{file}").stdout)) == 2


def test_predict_says_that_it_uses_only_the_test_samples_of_the_runs_own_data(run: Path, tmp_path: Path) -> None:
    file = write_table(tmp_path / "train.csv", 0, columns=["a", "b", "c", "label"])
    output = call("predict", run, "--data", f"csv:{file}")
    assert len(rows_of(output.stdout)) == 60 and "only its test samples are predicted" in output.stderr
    other = file.rename(tmp_path / "new.csv")
    output = call("predict", run, "--data", f"csv:{other}")
    assert len(rows_of(output.stdout)) == 300 and "test samples" not in output.stderr


def test_predict_needs_no_labels(run: Path, tmp_path: Path) -> None:
    labeled = write_table(tmp_path / "new.csv", 1, columns=["a", "b", "c", "label"])
    unlabeled = write_table(tmp_path / "bare.csv", 1, columns=["c", "b", "a"])
    output = call("predict", run, "--data", f"csv:{unlabeled}")
    assert output.stdout == call("predict", run, "--data", f"csv:{labeled}").stdout
    assert "accuracy" not in output.stderr


def test_predict_measures_only_known_labels(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "new.csv"
    file.write_text("a,b,c,label\n" + "1,0,0,cold\n0,1,0,malaria\n0,0,1,plague\n")
    output = call("predict", run, "--data", f"csv:{file}")
    assert len(rows_of(output.stdout)) == 3
    assert output.stderr == "labels 'malaria', 'plague' are unknown to the model: no accuracy\n"
    file.write_text("a,b,c,label\n1,0,0,1\n0,1,0,0\n")
    output = call("predict", run, "--data", f"csv:{file}")
    assert output.stderr == "labels '0', '1' are unknown to the model: no accuracy\n"
    file.write_text("a,b,label\n1,0,cold\n")
    assert "lacks the column 'c'" in call("predict", run, "--data", f"csv:{file}", code=2).stderr


def test_a_run_without_its_data_says_what_needs_it(run: Path, tmp_path: Path) -> None:
    result = fewer.open_run(run)
    assert isinstance(result.data, AbsentData) and len(result.data) == 3 and result.accuracy > 0.85
    assert result.model(torch.tensor([[0.0, 9.0, 0.0]])).argmax() == 1
    with pytest.raises(DataError, match=r"^the training data of .*run is not there \('.*train.csv' does not exist"):
        result.data.client(0)
    assert "train.csv' does not exist" in call("audit", run, code=2).stderr
    assert "train.csv' does not exist" in call("resume", run, code=2).stderr
    assert call("report", run, "--out", tmp_path / "report").stdout
    assert result.report(tmp_path / "again").exists() and "fedavg" in result._repr_html_()


def test_changed_training_data_does_not_change_what_a_model_means(run: Path, tmp_path: Path) -> None:
    write_table(tmp_path / "train.csv", 3, ("flu", "healthy"), ["label", "c", "b", "a"])
    result = fewer.open_run(run)
    with pytest.raises(DataError, match="the training data of .*run has changed"):
        result.data.client(0)
    assert result.schema.class_names == CLASSES
    assert accuracy(call("predict", run, "--data", f"csv:{tmp_path / 'train.csv'}")) > 85


def test_an_old_run_without_a_schema_needs_its_data(run: Path, tmp_path: Path) -> None:
    (run / "schema.json").unlink()
    with pytest.raises(DataError, match=r"train.csv' does not exist"):
        fewer.open_run(run)
    write_table(tmp_path / "train.csv", 0, columns=["a", "b", "c", "label"])
    assert fewer.open_run(run).schema.class_names == CLASSES
    (run / "schema.json").write_text("{")
    with pytest.raises(RunError, match=r"damaged: schema.json"):
        fewer.open_run(run)


def test_an_exported_model_describes_its_inputs(run: Path, tmp_path: Path) -> None:
    call("export", run, "--out", tmp_path / "e")
    described = json.loads((tmp_path / "e/model.json").read_text())
    assert described == {
        "method": "fedavg",
        "rounds": 5,
        "predicts": "classification",
        "input": ["batch", 3],
        **json.loads((run / "schema.json").read_text()),
    }
    program = torch.export.load(tmp_path / "e/model.pt2").module()
    x = torch.rand(5, 3)
    assert torch.allclose(program(x), fewer.open_run(run).model(x), atol=1e-6)


def test_arrays_and_frames_are_predicted_from_python(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    x = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32)
    frame = pandas.DataFrame(x, columns=["u", "v", "w"])
    settings: dict[str, Any] = {"class_names": CLASSES, "clients": 3, "partition": "iid"}
    data = fewer.data.from_arrays(frame, x.argmax(1), test=(frame[["w", "u", "v"]], x.argmax(1)), **settings)
    result = fewer.run(FedAvg(rounds=5, lr=0.5), data, model="logistic", out=tmp_path / "run")
    assert result.accuracy > 0.9
    opened = fewer.open_run(tmp_path / "run")  # the arrays were never on disk
    predictions = opened.predict(x[:50])
    assert predictions.classes == opened.predict(frame[["w", "v", "u"]][:50]).classes
    assert np.mean(np.array(predictions.classes) == np.array(CLASSES)[x[:50].argmax(1)]) > 0.85
    assert torch.allclose(predictions.probabilities.sum(1), torch.ones(50))
    table = predictions.to_pandas()
    assert list(table) == ["class", "confidence", "p_cold", "p_flu", "p_healthy"] and len(table) == 50
    with pytest.raises(DataError, match="data 'x' lacks the columns 'u', 'v'"):
        opened.predict(frame[["w"]])
    assert opened.predict([[2, -1, 0]]).classes == ["cold"]  # integers
    with pytest.raises(DataError, match="column 'v' has no numbers, but values such as '"):
        opened.predict(frame.astype({"v": str}))
    with pytest.raises(DataError, match="has label 2, but only 2 class names"):
        fewer.data.from_arrays(x, x.argmax(1), class_names=("cold", "flu"))


def test_frames_are_encoded_as_the_schema_says(tmp_path: Path) -> None:
    """Categories and replacements of missing values are those of the file."""
    pandas = pytest.importorskip("pandas")
    rows = [f"{'f' if i % 2 else 'm'},{i % 5 or ''},{'ill' if i % 2 else 'well'}" for i in range(100)]
    (tmp_path / "a.csv").write_text("\n".join(["sex,a,label", *rows]))
    options = {"categorical": "sex", "missing": "mean"}
    data = fewer.data.load(f"csv:{tmp_path}/a.csv", data_options=options, clients=2, partition="iid")
    result = fewer.run(FedAvg(rounds=3, lr=0.5), data, model="logistic")
    frame = pandas.DataFrame({"a": [2.0, None, 1], "sex": ["f", "m ", None]})
    samples = result.to_samples(frame, "x").all()[0]
    fill = data.columns[1].fill
    assert fill is not None and samples.tolist() == [[1, 0, 2], [0, 1, pytest.approx(fill)], [0, 0, 1]]
    assert result.predict(frame).classes[:2] == ["ill", "well"]
    with pytest.raises(DataError, match=r"data 'x', column 'sex' has the unknown category 'F' \(known: f, m\)"):
        result.predict(frame.assign(sex="F"))


def test_images_without_class_folders_are_predicted(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(60):
        name, low = (("dark", 0), ("light", 200), ("gray", 100))[number % 3]
        pixels = rng.integers(low, low + 50, (9, 9), np.uint8)
        (tmp_path / "train" / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "train" / name / f"{number}.png")
        for folder in ("bare", *(["subset/light"] if name == "light" else [])):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / folder / f"{number:02d}.png")
    args = ["--data", f"folder:{tmp_path / 'train'}", "--data-option", "size=8", "--data-option", "gray=true"]
    training = ["--model", "logistic", "--clients", "2", "--partition", "iid", "--rounds", "5", "--no-report"]
    call("run", "fedavg", *args, *training, "--out", tmp_path / "run")
    (tmp_path / "train").rename(tmp_path / "gone")
    subset = call("predict", tmp_path / "run", "--data", f"folder:{tmp_path / 'subset'}")
    assert accuracy(subset) == 100
    bare = call("predict", tmp_path / "run", "--data", f"folder:{tmp_path / 'bare'}")
    names = [row["class"] for row in rows_of(bare.stdout)]
    assert names == ["dark", "light", "gray"] * 20 and "accuracy" not in bare.stderr
    with pytest.raises(DataError, match="0 folders deep"):
        fewer.data.load(f"folder:{tmp_path / 'bare'}")


def test_images_are_predicted_with_channels_first_or_last(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (60, 3, 8, 9), np.uint8)
    data = fewer.data.from_arrays(images, np.arange(60) % 2, clients=2, partition="iid")
    result = fewer.run(FedAvg(rounds=1), data, model="logistic")
    first, last = (result.predict(x).outputs for x in (images[:5], images[:5].transpose(0, 2, 3, 1)))
    assert torch.equal(first, last)
    with pytest.raises(DataError, match=r"data 'x' has inputs of shape \(9, 8, 3\); the model takes \(3, 8, 9\)"):
        result.predict(images[:5].transpose(0, 3, 2, 1))


def test_models_that_need_a_clients_data_say_so(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    data = fewer.data.from_arrays(x, x.argmax(1), clients=8, partition="iid")
    fewer.run("fedmeta", data, model="logistic", rounds=1, out=tmp_path / "run")
    result = fewer.open_run(tmp_path / "run")
    assert len(result.predict(x[:5])) == 5  # the model before adaptation
    assert result.adapt(x[:30], x[:30].argmax(1)) is not None
    with pytest.raises(RunError, match="was run with your own data"):
        fewer.resume(tmp_path / "run")
    with pytest.raises(DataError, match="the training data of .* is not there .*was run with your own data"):
        result.personal_model(0)


def test_adapt_takes_labels_by_name(tmp_path: Path) -> None:
    table = write_table(tmp_path / "train.csv", 0, columns=["a", "b", "c", "label"])
    args = ["--data", f"csv:{table}", "--clients", "8", "--partition", "iid", "--model", "logistic", "--rounds", "1"]
    call("run", "reptile", *args, "--no-report", "--out", tmp_path / "run")
    table.unlink()
    write_table(tmp_path / "mine.csv", 1, ("flu", "healthy"), ["label", "c", "b", "a"])
    call("adapt", tmp_path / "run", "--data", f"csv:{tmp_path / 'mine.csv'}", "--out", tmp_path / "mine")
    result = fewer.open_run(tmp_path / "run")
    names = ["cold", "healthy", "flu"]
    assert result.to_targets(names, "y").tolist() == [0, 2, 1]
    with pytest.raises(DataError, match=r"data 'y' has the class 'lost', which the run does not know \(it knows: cold"):
        result.to_targets(["lost", "cold"], "y")
    (tmp_path / "mine.csv").write_text("a,b,c\n1,2,3\n")
    bare = call("adapt", tmp_path / "run", "--data", f"csv:{tmp_path / 'mine.csv'}", code=2)
    assert "has no labels to adapt to" in bare.stderr


def test_text_is_predicted_without_labels(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text, "label": label}) for text, label in [("good fine", "+"), ("bad sad", "-")] * 40]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    args = ["--data", f"jsonl:{tmp_path / 't.jsonl'}", "--clients", "2", "--partition", "iid", "--max-length", "4"]
    training = ["--model", "text-bilstm", "--model-option", "width=8", "-o", "lr=1.0", "--rounds", "6", "--no-report"]
    call("run", "fedavg", *args, *training, "--out", tmp_path / "run")
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("sad bad", "fine good")))
    output = call("predict", tmp_path / "run", "--data", f"jsonl:{tmp_path / 't.jsonl'}")
    assert [row["class"] for row in rows_of(output.stdout)] == ["-", "+"]
    assert fewer.open_run(tmp_path / "run").predict(["bad sad"]).classes == ["-"]
    with pytest.raises(SettingError, match="client = 9"):
        fewer.open_run(tmp_path / "run").predict(["bad sad"], client=9)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedbn", {"norm": "batch"}),
        ("fedensemble", {}),
        ("metafed", {"validation": 0.2, "method_options": {"federations": 2, "nets": "cnn,mlp"}}),
        ("f2l", {"data_options": {"split": "4/3/3"}, "method_options": {"way": 2, "tasks": 1, "test_tasks": 1}}),
    ],
)
def test_models_are_the_same_without_the_data(
    method: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer.run(method, "digits", rounds=1, clients=4, partition="iid", out=tmp_path / "run", **settings)

    def weights() -> dict[str, torch.Tensor]:
        result = fewer.open_run(tmp_path / "run")
        return (result.personal_model(1) if method in ("fedbn", "metafed") else result.model).state_dict()

    def lose(settings: Any) -> None:
        raise DataError("gone")

    expected = weights()
    monkeypatch.setattr("fewer.runs.result.load_data", lose)
    actual = weights()
    assert actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in actual)
