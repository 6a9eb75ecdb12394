"""The command line, as a user types it."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

import fewer
from fewer.cli.app import app
from fewer.cli.printing import short_name
from fewer.runs.reader import RunReader
from tests.helpers import DIGITS, call

# --- the command ------------------------------------------------------------------------------------------------


def test_help_says_that_real_data_is_needed() -> None:
    assert "real data" in " ".join(call("audit", "--help").stdout.split())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "fedbn"
    call("run", "fedbn", *DIGITS, "--rounds", "2", "-o", "lr=0.2", "--out", path)
    return path


def test_run_prints_and_saves_its_results(tmp_path: Path) -> None:
    result = call("run", "fedavg", *DIGITS, "--rounds", "2", "--out", tmp_path / "run", "--json", tmp_path / "a.json")
    assert "fedavg: accuracy" in result.stdout and f"Run directory: {tmp_path / 'run'}" in result.stdout
    assert "round 2/2" in result.stderr and "up 0." in result.stderr
    figures = json.loads((tmp_path / "a.json").read_text())
    assert figures["method"] == "fedavg" and figures["round"] == 2 and len(figures["history"]) == 2
    assert figures["accuracy"] == figures["history"][-1]["accuracy"]


def test_a_method_table_in_a_settings_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('data = "digits"\n[method]\nlr = 0.5\n')
    errors = call("run", "fedavg", "--settings", tmp_path / "a.toml", code=2).stderr
    assert "its options belong to the table [method_options]" in errors


def test_the_name_of_a_run_has_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a/long path").mkdir(parents=True)
    rows = "".join(f"{n % 7},{n % 3},{'even' if n % 2 else 'odd'}\n" for n in range(60))
    (tmp_path / "a/long path/my.patients.csv").write_text(f"u,v,label\n{rows}")
    monkeypatch.chdir(tmp_path)
    call("run", "fedavg", "--data", "csv:a/long path/my.patients.csv", "--clients", "2", "--rounds", "1", "--no-report")
    (run,) = (tmp_path / "runs").iterdir()
    assert RunReader(run).data_summary.startswith("csv:my.patients.csv, 2 clients")
    assert re.fullmatch(r"fedavg-my\.patients-\d{8}-\d{6}", run.name)
    assert json.loads((run / "settings.json").read_text())["settings"]["model"] == "mlp"  # it fits the data
    assert (short_name("digits"), short_name("folder:x/y/"), short_name("jsonl:a.jsonl.gz")) == ("digits", "y", "a")


def test_json_on_standard_output_is_only_json(tmp_path: Path) -> None:
    result = call("run", "fedavg", *DIGITS, "--rounds", "1", "--out", tmp_path / "run", "--json", "-")
    assert json.loads(result.stdout)["round"] == 1


def test_flags_override_a_settings_file(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(
        'method = "fedprox"\ndata = "digits"\nclients = 5\nrounds = 3\nnorm = "batch"\n[method_options]\nmu = 0.5\n'
    )
    call("run", "--settings", file, "--rounds", "1", "-o", "lr=0.05", "--out", tmp_path / "run")
    saved = json.loads((tmp_path / "run/settings.json").read_text())
    assert saved["settings"]["clients"] == 5 and saved["settings"]["norm"] == "batch"
    assert (saved["method"]["rounds"], saved["method"]["mu"], saved["method"]["lr"]) == (1, 0.5, 0.05)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["run", "fedavgg"], "unknown method 'fedavgg', did you mean 'fedavg'? (allowed: "),
        (["run", "mine.py"], "method 'mine.py' is a file: add the name of an object in it, mine.py:Name"),
        (["run", "fedavg", "--data", "digit"], "unknown data 'digit', did you mean 'digits'?"),
        (["run", "fedavg", "--data", "my/x.csv"], "unknown data 'my/x.csv', did you mean 'csv:my/x.csv'?"),
        (["run", "fedavg", "--data", "x.jsonl.gz"], "unknown data 'x.jsonl.gz', did you mean 'jsonl:x.jsonl.gz'?"),
        (["run", "fedavg", "--data", "/"], "unknown data '/', did you mean 'folder:/'?"),
        (["run", "fedavg", "--data", "mnist"], "set FEWER_DATA or pass --data-dir, then run fewer data get mnist"),
        (
            ["run", "fedavg", "--data", "cifar100-coarse", "--data-dir", "/"],
            "no files of data 'cifar100-coarse' in /: run fewer data get cifar100 --data-dir /",
        ),
        (["run", "fedavg", "--data", "hapt"], "then put them at hapt/hapt.npz in that directory"),
        (["run", "fedavg", "--data", "npy:x"], "unknown data format 'npy', did you mean 'npz'?"),
        (
            ["run", "fedavg", "--data", "npz:none.npz"],
            "'none.npz' does not exist, and no data directory is set: pass --data-dir or set FEWER_DATA",
        ),
        (["run", "fedavg", *DIGITS, "--cohort", "7"], "cohort = 7, but there are only 6 clients (allowed: 1 … 6)"),
        (
            ["run", "fedavg", *DIGITS, "-o", "local_step=1"],
            "fedavg has no option 'local_step', did you mean 'local_steps'?",
        ),
        (["run", "fedavg", *DIGITS, "-o", "lr=-1"], "fedavg: lr must be > 0, got -1"),
        (["run", "fedavg", *DIGITS, "-o", "lr"], "option 'lr' is not of the form name=value"),
        (
            ["run", "fedavg", *DIGITS, "-o", "codec=int4"],
            "codec = 'int4': unknown codec 'int4', did you mean 'int8'? (allowed: bfloat16",
        ),
        (["run", "fedavg", *DIGITS, "--drop", "1.5"], "drop must be <= 1, got 1.5"),
        (
            ["run", "fedavg", *DIGITS, "--partition", "odd"],
            "partition must be 'iid', 'dirichlet', 'dirichlet-pairs'",
        ),
        (
            ["run", "fedavg", "--data", "digits", "--clients", "60", "--alpha", "0.01"],
            "dirichlet with alpha = 0.01 leaves some of 60",
        ),
        (["run", "fedavg", *DIGITS, "--partition", "natural"], "partition = natural needs client ids"),
        (["run", "fedavg", *DIGITS, "--device", "gpu"], "device = 'gpu' is not available"),
        (["run", "fedavg", *DIGITS, "--model", "vgg"], "unknown model 'vgg'"),
        (["run", "fedbn", *DIGITS, "--norm", "none"], "fedbn needs a model with normalization layers"),
        (["run", "none.py:Mine"], "no file 'none.py' (in 'none.py:Mine'; expected: FILE.py:Name)"),
        (["run", "--settings", "none.toml"], "none.toml cannot be read: No such file"),
        (["resume", "nowhere"], "nowhere is not a run directory: it does not exist"),
        (
            ["compare", "fedavg", "fedprox", *DIGITS, "-o", "nu=1"],
            "no method has an option 'nu' (methods: fedavg, fedprox)",
        ),
        (["predict", "nowhere", "--data", "digits"], "nowhere is not a run directory"),
        (["methods", "fedmax"], "unknown method 'fedmax'"),
    ],
)
def test_a_mistake_gives_a_one_line_error(
    args: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEWER_DATA", raising=False)
    result = call(*args, code=2)
    assert result.stderr.startswith("fewer: ") and result.stderr.count("\n") == 1
    assert text in result.stderr
    assert not list(tmp_path.rglob("settings.json"))


def test_a_misspelled_command_suggests_the_right_one_once() -> None:
    assert call("runn", code=2).stderr.count("Did you mean 'run'") == 1


def test_a_misspelled_name_in_a_file_is_answered_with_the_classes_of_the_file() -> None:
    file = Path(__file__).parents[2] / "docs/examples/fedmedian.py"
    assert "has no 'FedMedain' (it has: FedMedian)" in call("run", f"{file}:FedMedain", code=2).stderr


def test_a_misspelled_flag_suggests_the_right_one() -> None:
    result = call("run", "fedavg", "--round", "3", code=2)
    assert "No such option" in result.stderr and "--rounds" in result.stderr


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["run", "fedavg", "--lr", "0.1"], "write -o lr=0.1 "),
        (["compare", "fedavg", "local", "--local-steps=5"], "write -o local_steps=5 "),
        (["run", "fedavg", "--batch-size"], "write -o batch_size=VALUE "),
    ],
)
def test_an_option_of_a_method_as_a_flag_is_an_error_that_shows_how_to_write_it(args: list[str], text: str) -> None:
    stderr = " ".join(call(*args, code=2).stderr.replace("│", " ").split())
    assert f"{args[-2 if args[-1] == '0.1' else -1].partition('=')[0]} is an option of a method: {text}" in stderr
    assert "No such option" in call("predict", "x", "--lr", "0.1", code=2).stderr


@pytest.mark.parametrize(
    ("flag", "option"), [("--local-stepz", "local_steps"), ("--learning-rate", "lr"), ("--batchsize", "batch_size")]
)
def test_a_misspelled_option_of_a_method_as_a_flag_is_an_error_that_shows_how_to_write_it(
    flag: str, option: str
) -> None:
    stderr = " ".join(call("run", "fedavg", flag, "7", code=2).stderr.replace("│", " ").split())
    assert f"No such option {flag}." in stderr and f"write -o {option}=7 " in stderr


def test_a_flag_is_no_value_of_a_misspelled_option() -> None:
    stderr = " ".join(call("run", "fedavg", "--local-step", "--rounds", "5", code=2).stderr.replace("│", " ").split())
    assert "write -o local_steps=VALUE " in stderr
    assert "-o" not in call("run", "fedavg", "--headz", "2", code=2).stderr  # FedAvg has no head


def test_compare_prints_one_table_and_resumes(tmp_path: Path) -> None:
    args = ["compare", "local", "fedprox", *DIGITS, "--rounds", "2", "--seeds", "2", "-o", "fedprox.mu=0.3"]
    file = tmp_path / "table.json"
    result = call(*args, "--out", tmp_path / "out", "--json", file)
    assert "global %" in result.stdout and "±" in result.stdout
    table = json.loads(file.read_text())
    assert [row["method"] for row in table["rows"]] == ["local", "fedprox"]
    assert {"accuracy", "ci95", "rounds", "mb_up", "mb_down", "seconds"} <= table["rows"][0].keys()
    assert table["rows"][1]["settings"]["mu"] == 0.3 and table["settings"]["seeds"] == 2
    first, second = table["rows"][1]["accuracies"]
    assert table["rows"][1]["accuracy"] == pytest.approx((first + second) / 2)
    assert table["rows"][1]["ci95"] == pytest.approx(12.7062 * abs(first - second) / 2, rel=1e-4)
    again = call(*args, "--out", tmp_path / "out", "--json", file)
    assert "round" not in again.stderr.replace("resumes after round 2/2", "")
    assert json.loads(file.read_text()) == table
    other = call(*args, "--alpha", "0.7", "--out", tmp_path / "out", code=2)
    assert "holds a run with other settings" in other.stderr


def test_tune_gives_every_method_the_same_trials(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    args = ["compare", "fedavg", "fedprox", *DIGITS, "--rounds", "1", "--tune", "--trials", "6"]
    result = call(*args, "--out", tmp_path / "out", "--json", file)
    rows = json.loads(file.read_text())["rows"]
    assert [len(row["trials"]) for row in rows] == [6, 6]
    for row in rows:
        best = max(row["trials"], key=lambda trial: trial["accuracy"] or 0)
        assert all(row["settings"][name] == value for name, value in best["settings"].items())
    assert "best of 6 trials on held-out training data" in result.stdout


def test_methods_lists_methods_and_their_options() -> None:
    assert {"local", "fedavg", "fedprox", "fedbn"} <= json.loads(call("methods", "--json", "-").stdout).keys()
    text = call("methods", "fedprox").stdout
    assert "mu" in text and "proximal term" in text


def test_predict_writes_the_classes_of_a_personal_model(run: Path, tmp_path: Path) -> None:
    x, y = fewer.data.load("digits", clients=6).test.x.numpy(), fewer.data.load("digits", clients=6).test.y.numpy()
    np.savez(tmp_path / "new.npz", x=x, y=y)
    out = tmp_path / "p.csv"
    result = call("predict", run, "--data", f"npz:{tmp_path / 'new.npz'}", "--client", "1", "--out", out)
    rows = list(csv.DictReader(out.open()))
    net = fewer.open_run(run).personal_model(1)
    data = fewer.data.load("digits", clients=6).test
    expected = net(data.slice(0, 1000)[0]).argmax(1)
    assert [int(row["class"]) for row in rows] == expected.tolist()
    assert f"accuracy {float((expected == data.y).float().mean()):.2%}" in result.stderr
    assert "fedbn has no global model" in call("predict", run, "--data", "digits", code=2).stderr
    np.savez(tmp_path / "odd.npz", x=np.zeros((3, 1, 9, 9), np.uint8))
    wrong_shape = call("predict", run, "--data", f"npz:{tmp_path / 'odd.npz'}", "--client", "1", code=2)
    assert "has inputs of shape (1, 9, 9); the model takes (1, 8, 8)" in wrong_shape.stderr


def test_export_writes_weights_and_a_program(run: Path, tmp_path: Path) -> None:
    call("export", run, "--client", "2", "--out", tmp_path / "e")
    net = fewer.open_run(run).personal_model(2)
    weights = safetensors.torch.load_file(tmp_path / "e/model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in net.state_dict().items())
    program = torch.export.load(tmp_path / "e/model.pt2").module()
    x = torch.rand(7, 1, 8, 8)
    assert torch.allclose(program(x), net(x), atol=1e-5)
    metadata = json.loads((tmp_path / "e/model.json").read_text())
    assert metadata["input"] == ["batch", 1, 8, 8] and metadata["classes"] == 10
    assert metadata["class_names"] == [str(digit) for digit in range(10)]


PLUGIN = '''
import torch
from fewer import FedAvg
from fewer.models import Task
from fewer.methods import ModelState, Scores

class Zero(FedAvg):
    """Starts from zero weights."""
    def init(self, task, seed):
        return ModelState({name: torch.zeros_like(value) for name, value in task.initial_weights(seed).items()})

class Net(torch.nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(shape[1] * shape[2], classes))

class Grouped(FedAvg):
    """Is evaluated on groups and prepares nothing."""
    def evaluate(self, state, clients, data):
        return Scores({"accuracy": 0.5, "loss": 1.0}, "groups", [0.4, 0.6])

def measure(outputs, targets):
    return 1.0

number = 3
'''


def test_user_method_and_model_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine_to_try.py"
    file.write_text(PLUGIN)
    args = ["run", f"{file}:Zero", "--model", f"{file}:Net", *DIGITS, "--rounds", "2"]
    call(*args, "--runtime", "pool", "--out", tmp_path / "run")
    assert fewer.open_run(tmp_path / "run").model.state_dict()["1.weight"].shape == (10, 64)
    call("resume", tmp_path / "run")
    assert "is not a method" in call("run", f"{file}:number", code=2).stderr
    missing = call("run", f"{file}:Mine", code=2).stderr
    assert "has no 'Mine' (it has: Zero, Net, Grouped, measure)" in missing
    output = call("run", f"{file}:Grouped", *DIGITS, "--rounds", "1", "--out", tmp_path / "grouped").stdout
    assert "Mean over 2 groups: " in output and "deploy" not in output
    (tmp_path / "broken_one.py").write_text("import nothing_like_this")
    broken = call("run", f"{tmp_path / 'broken_one.py'}:Mine", code=2).stderr
    assert "cannot import" in broken and "ModuleNotFoundError" in broken
    (tmp_path / "json.py").write_text("class Mine: pass")
    assert "has the same name as another module" in call("run", f"{tmp_path / 'json.py'}:Mine", code=2).stderr


def test_help_imports_neither_torch_nor_settings() -> None:
    code = "import sys, typer, fewer.cli.app as cli; typer.main.get_command(cli.app); print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not {"torch", "numpy", "sklearn", "pydantic"} & set(process.stdout.split())
    for command in ("run", "resume", "compare", "methods", "predict", "export"):
        assert call(command, "--help").stdout


def test_predict_on_text_with_options(tmp_path: Path) -> None:
    texts = ["good fine nice", "bad poor sad"] * 40
    lines = [json.dumps({"words": text, "kind": n % 2}) for n, text in enumerate(texts)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    data = ["--data", f"jsonl:{tmp_path / 't.jsonl'}", "--data-option", "text=words", "--data-option", "label=kind"]
    training = ["--model", "text-bilstm", "--model-option", "width=8", "-o", "lr=1.0", "--rounds", "6"]
    call("run", "fedavg", *data, "--clients", "2", *training, "--no-report", "--out", tmp_path / "run")
    (tmp_path / "new.jsonl").write_text("\n".join(lines[:6]))
    result = call("predict", tmp_path / "run", "--data", f"jsonl:{tmp_path / 'new.jsonl'}")
    assert [line.split(",")[1] for line in result.stdout.splitlines()[1:]] == ["0", "1"] * 3
    call("export", tmp_path / "run", "--out", tmp_path / "e")
    assert "good" in json.loads((tmp_path / "e/model.json").read_text())["tokens"]


def test_unwritable_files_give_one_line_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for args in (
        ["compare", "fedavg", *DIGITS, "--rounds", "1"],
        ["data", "inspect", "digits"],
        ["run", "fedavg", *DIGITS, "--rounds", "1"],
    ):
        assert call(*args, "--out", tmp_path / "file/x", code=2).stderr.startswith("fewer: ")
    missing = call("run", "fedavg", *DIGITS, "--json", tmp_path / "none/x.json", "--out", tmp_path / "r", code=2)
    assert "there is no directory" in missing.stderr and not (tmp_path / "r").exists()
    (tmp_path / "a.toml").write_text("method_options = 5\n")
    wrong = call("run", "fedavg", "--settings", tmp_path / "a.toml", "-o", "lr=1", code=2).stderr
    assert "method_options = 5 in" in wrong and wrong.count("\n") == 1


def test_a_run_resumes_from_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here/mine_to_move.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path / "here")
    call("run", "mine_to_move.py:Zero", *DIGITS, "--rounds", "1", "--no-report", "--out", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    call("resume", tmp_path / "run", "--no-report")


def test_version_help_and_completion() -> None:
    assert call("--version").stdout == f"fewer {fewer.__version__}\n"
    empty = CliRunner().invoke(app, ["run"])
    assert "Train with one method" in empty.output and "fewer methods" in empty.output
    assert "A method's name, or FILE.py:Name." in call("run", "--help").stdout  # the help of an argument
    variables = {"_FEWER_COMPLETE": "complete_bash", "COMP_WORDS": "fewer run fedm", "COMP_CWORD": "2"}
    code = "import sys; from fewer.cli import main; sys.argv[0] = 'fewer'; main()"
    completed = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert completed.stdout.split() == ["fedmeta", "fedmk", "fedmk-avg", "fedmk-paper"]


def test_the_method_is_only_a_positional_argument(tmp_path: Path) -> None:
    assert "No such option" in call("run", "--method", "fedavg", code=2).stderr
    assert "METHOD is missing" in call("run", *DIGITS, "--out", tmp_path / "run", code=2).stderr


def test_an_unknown_flag_suggests_the_nearest_name() -> None:
    assert "--clients" in call("run", "fedavg", "--client", "3", code=2).stderr
    assert "--model-option" in call("run", "fedavg", "--model-set", "a=1", code=2).stderr


# --- inspecting data and runs -----------------------------------------------------------------------------------


def test_run_compare_and_report_write_a_page(tmp_path: Path) -> None:
    out = call("run", "fedavg", *DIGITS, "--rounds", "1", "--out", tmp_path / "run").stdout
    assert f"report: {tmp_path / 'run/report/report.html'}" in out
    assert "<svg" in (tmp_path / "run/report/report.html").read_text()
    call("compare", "fedavg", "local", *DIGITS, "--rounds", "1", "--out", tmp_path / "both")
    page = (tmp_path / "both/report/report.html").read_text()
    assert "fedavg" in page and "local" in page
    call("report", tmp_path / "both", tmp_path / "run", "--out", tmp_path / "page")
    assert (tmp_path / "page/report.html").exists()
    (tmp_path / "both/report/report.html").unlink()
    assert str(tmp_path / "both/report/report.html") in call("report", tmp_path / "both").stdout
    assert (tmp_path / "both/report/report.html").exists()
    call("run", "fedavg", *DIGITS, "--rounds", "1", "--out", tmp_path / "bare", "--no-report")
    assert not (tmp_path / "bare/report").exists()
    assert "is not a run directory" in call("report", tmp_path / "none", code=2).stderr
