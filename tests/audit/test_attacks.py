"""The audit of a run: members, copies, and errors in one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fewer.audit.attacks import _AttackedRun
from fewer.audit.distance import nearest_neighbors
from fewer.audit.membership import membership
from fewer.methods.fedmk import FedMK
from fewer.runs.reader import RunReader
from fewer.runs.result import open_run
from tests.helpers import DIGITS, call

FAST = ["--steps", "2", "--starts", "1"]
SMALL = [
    f"--method-option={setting}" for setting in ("matching_steps=3", "outer_steps=1", "server_steps=5", "per_class=4")
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    call("run", "fedmk", *DIGITS, "--cohort", "3", "--rounds", "1", *SMALL, "--no-report", "--out", path / "fedmk")
    call("run", "fedavg", *DIGITS, "--cohort", "3", "--rounds", "1", "--no-report", "--out", path / "fedavg")
    call("run", "local", *DIGITS, "--rounds", "1", "--no-report", "--out", path / "local")
    return path


def test_audit_of_synthetic_data(runs: Path, tmp_path: Path) -> None:
    result = call("audit", runs / "fedmk", *FAST, "--clients", "2", "--out", tmp_path)
    findings = json.loads((tmp_path / "audit.json").read_text())
    assert findings["method"] == "fedmk" and len(findings["clients"]) == 2
    assert findings["metrics"]["membership"].keys() == {"loss", "variants", "distance"}
    copies, leakage = findings["metrics"]["copies"], findings["metrics"]["leakage"]
    assert 0 < copies["min"] < copies["median"] and copies["by_client"].keys() == set(map(str, findings["clients"]))
    assert copies["min"] == copies["by_client"][str(copies["closest"]["client"])]["min"]
    assert leakage["gradients_of"] == "synthetic" and len(leakage["attacks"]) == 2
    page = (tmp_path / "audit.html").read_text()
    assert page.count("<img") == 2 and "does not prove privacy" in page
    assert f"{findings['metrics']['membership']['loss']['auc']:.3f}" in result.stdout and "D̂" in result.stdout
    again = call("audit", runs / "fedmk", *FAST, "--clients", "2", "--out", tmp_path / "again", "--json", "-")
    assert json.loads(again.stdout) == findings


def test_audit_of_a_run_without_synthetic_data(runs: Path) -> None:
    result = call("audit", runs / "fedavg", *FAST)
    findings = json.loads((runs / "fedavg/audit/audit.json").read_text())
    lines = (runs / "fedavg/ledger.csv").read_text().splitlines()
    senders = {int(line.split(",")[1]) for line in lines if line.startswith("1,") and ",up,local_train" in line}
    assert findings["clients"] == sorted(senders) and len(senders) == 3  # clients that did not train have no members
    assert (
        findings["metrics"].keys() == {"leakage", "membership"}
        and findings["metrics"]["leakage"]["gradients_of"] == "real"
    )
    assert [attack["batch_size"] > 1 for attack in findings["metrics"]["leakage"]["attacks"]] == [False, True, False]
    assert "fedavg send no synthetic data" in result.stdout and "20 steps on 32 samples" in result.stdout


def test_a_copy_is_found(runs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = open_run(runs / "fedmk").data
    sent = {client: data.client(client).train.pick(torch.arange(10)) for client in range(6)}
    monkeypatch.setattr(FedMK, "synthetic_data", lambda self, state: sent)
    call("audit", runs / "fedmk", *FAST, "--out", tmp_path)
    findings = json.loads((tmp_path / "audit.json").read_text())["metrics"]
    assert findings["copies"]["median"] == 0 and findings["copies"]["near_copies"] == 1
    assert findings["leakage"]["psnr_of_synthetic"] > 100 > findings["leakage"]["psnr_of_lookalike"]
    assert findings["membership"]["distance"]["auc"] > 0.5
    assert findings["copies"]["nearest_is_member"]["low"] > 0.5


def test_members_and_others_have_the_same_classes(runs: Path) -> None:
    pair = _AttackedRun(open_run(runs / "fedavg"), [0, 1, 2], 3).matched_samples(1)
    assert pair
    (x, y), (other_x, other_y) = pair
    assert y.bincount().tolist() == other_y.bincount().tolist() and len(x) == len(other_x) > 10
    train, _, test = open_run(runs / "fedavg").data.client(1)
    counts = [torch.bincount(part.labels, minlength=10) for part in (train, test)]
    assert y.bincount(minlength=10).tolist() == torch.minimum(*counts).tolist()  # as many as possible


def test_an_unfinished_round_has_no_members(tmp_path: Path) -> None:
    lines = ["1,3,up,train,9", "1,4,down,train,9", "1,5,up,evaluate/score,9", "2,6,up,train,9"]
    (tmp_path / "ledger.csv").write_text("".join(f"{line}\n" for line in ["round,client,direction,kind,bytes", *lines]))
    for rounds, senders in ((1, [3]), (2, [3, 6])):
        run = RunReader(tmp_path)
        vars(run).update(history=[{}] * rounds)
        assert run.participants == senders


def test_errors_are_one_line(runs: Path, tmp_path: Path) -> None:
    assert "local has no global model" in call("audit", runs / "local", code=2).stderr
    assert "is not a run directory" in call("audit", tmp_path / "none", code=2).stderr
    shutil.copytree(runs / "fedavg", tmp_path / "moved")
    file = tmp_path / "moved/settings.json"
    metadata = json.loads(file.read_text())
    file.write_text(json.dumps(metadata | {"data": metadata["data"] | {"fingerprint": "0"}}))
    assert "has changed since" in call("audit", tmp_path / "moved", code=2).stderr
    file.write_text(json.dumps(metadata | {"objects": ["data"]}))
    assert "your own data" in call("audit", tmp_path / "moved", code=2).stderr
    file.write_text(json.dumps(metadata | {"settings": metadata["settings"] | {"data": "npz:gone.npz"}}))
    error = call("audit", tmp_path / "moved", "--data-dir", tmp_path, code=2).stderr
    assert "gone.npz" in error and error.count("\n") == 1


def test_a_low_loss_under_the_trained_model_indicates_a_member(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attacked = _AttackedRun(open_run(runs / "fedavg"), [0, 1, 2], 3)
    real = torch.cat([attacked.training_samples(client)[0] for client in attacked.clients])

    def fake_losses(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        assert net is attacked.nets["trained"]
        return nearest_neighbors(x, real)[0].gt(0).float()

    monkeypatch.setattr("fewer.audit.attacks.losses", fake_losses)
    name, scores = next(attacked.membership_scores())
    assert name == "loss" and membership(*scores).auc > 0.99


def test_distance_is_within_a_class_and_relative_to_its_typical_distance() -> None:
    attacked = object.__new__(_AttackedRun)
    attacked.has_images, attacked.limits = False, (0.0, 9.0)
    attacked.unseen_samples = lambda client, label: torch.zeros(0, 1)  # type: ignore[method-assign]
    real = torch.tensor([0.0, 2.0, 9.0, 5.0, 5.5]).view(5, 1), torch.tensor([0, 0, 0, 1, 1])
    attacked.training_samples = lambda client: real  # type: ignore[method-assign]
    attacked.synthetic = {4: (torch.tensor([[5.0], [4.0]]), torch.tensor([0, 1]))}
    # class 0: distance 3, typical 2; class 1: distance 1, typical 0.5
    assert attacked.compare_to_real()[0]["by_client"] == {"4": {"min": 1.5, "median": 1.75}}


def test_synthetic_images_are_clipped_to_pixel_values(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        FedMK, "synthetic_data", lambda *_: {0: (torch.full((1, 1, 8, 8), 99.0), torch.zeros(1).long())}
    )
    attacked = _AttackedRun(open_run(runs / "fedmk"), [0], 1)
    assert attacked.synthetic[0][0].max() == attacked.limits[1] < 99


def test_nearest_among_equally_many_members_and_others(monkeypatch: pytest.MonkeyPatch) -> None:
    attacked = object.__new__(_AttackedRun)
    attacked.stream = lambda purpose: torch.Generator().manual_seed(0)  # type: ignore[method-assign]
    synthetic, real, unseen = (
        torch.tensor(list(values)).view(-1, 1) for values in ([1.0, 6.1, 9.0], [1.1, 9.2], [6.0, 8.9])
    )
    assert attacked.nearest_is_member(synthetic, real, unseen) == [True, False, False]
    # compares with two of the hundred members, not all
    assert sum(attacked.nearest_is_member(synthetic, torch.cat([real] * 50), unseen)) < 3
    assert attacked.nearest_is_member(synthetic, real, unseen[:0]) == []


def test_nearness_is_scored_within_condensed_classes() -> None:
    attacked = object.__new__(_AttackedRun)
    attacked.synthetic = {0: (torch.tensor([[0.0], [5.0]]), torch.tensor([0, 1]))}
    sides = tuple((torch.tensor([[1.0], [4.0], [9.0]]) + side, torch.tensor([0, 0, 2])) for side in (0, 1))
    inside, outside = attacked.nearness_scores(0, sides)  # type: ignore[arg-type]
    # only D̂ of the same class counts; class 2 has none
    assert inside.tolist() == [-1, -4] and outside.tolist() == [-2, -5]


@pytest.mark.parametrize(
    ("method", "name", "sent"), [("fedncm", "prototypes", "means"), ("feddistill", "logits", "logits")]
)
def test_what_clients_send_by_class_is_inverted(tmp_path: Path, method: str, name: str, sent: str) -> None:
    call("run", method, *DIGITS, "--model", "mlp", "--rounds", "1", "--no-report", "--out", tmp_path / "run")
    result = call("audit", tmp_path / "run", "--steps", "40", "--starts", "1", "--clients", "2")
    findings = json.loads((tmp_path / "run/audit/audit.json").read_text())
    attack = findings["metrics"][name]
    assert attack["client"] == findings["clients"][0] and attack["mismatch"] < 0.3 and attack["means"] > 1
    assert f"restored from class {sent}" in result.stdout and f"Class {sent} give" in result.stdout
    assert (tmp_path / f"run/audit/{name}.png").exists()
