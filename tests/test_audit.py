"""Privacy audit: distances, ranks and gradients checked by arithmetic, and the command."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fewer.audit.attacks import _AttackedRun, find_participants
from fewer.audit.distance import earth_mover, earth_mover_1d, nearest_neighbors, typical_distance
from fewer.audit.leakage import LR, compute_gradients, psnr, replace_relu, restore_images, total_variation
from fewer.audit.membership import estimate_proportion, loss_gaps, losses, membership
from fewer.data import Samples
from fewer.errors import SettingError
from fewer.experiments.studies import _measure_distance, _score_unused
from fewer.methods.fedmk import FedMK
from fewer.runs.experiment import load_data
from fewer.runs.result import open_run
from fewer.runtime import stream
from tests.test_cli import DIGITS, call

# --- membership ---------------------------------------------------------------------------------------------------


def test_auc_by_arithmetic() -> None:
    # pairs: 3 > {1, 2, 3: half}, 2 > {1, 2: half}, 5 > all three: (2.5 + 1.5 + 3) / 9
    result = membership(torch.tensor([3.0, 2.0, 5.0]), torch.tensor([1.0, 2.0, 3.0]))
    assert result.auc == pytest.approx(7 / 9)
    # DeLong: shares of others beaten 2.5/3, 1.5/3, 1; shares of members that beat each other sample: the same three
    shares = [2.5 / 3, 0.5, 1.0]
    mean = sum(shares) / 3
    variance = sum((share - mean) ** 2 for share in shares) / 2
    half = 1.959964 * math.sqrt(2 * variance / 3)
    assert result.low == pytest.approx(7 / 9 - half, abs=1e-5) and result.high == 1.0
    assert (result.members, result.nonmembers) == (3, 3)


def test_auc_of_useless_and_perfect_scores() -> None:
    useless = membership(torch.zeros(5), torch.zeros(7))
    assert useless.auc == 0.5 and useless.true_positive_rate == 0
    perfect = membership(torch.arange(5) + 10.0, torch.arange(7.0))
    assert (perfect.auc, perfect.low, perfect.high, perfect.true_positive_rate) == (1, 1, 1, 1)
    assert membership(torch.arange(7.0), torch.arange(5) + 10.0).auc == 0
    assert membership(torch.tensor([math.nan, 1.0]), torch.tensor([2.0, 3.0])).auc == 0


def test_the_interval_has_about_its_nominal_coverage() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = 0.5 * (1 + math.erf(0.5))  # normal scores, shifted by 1: Φ(1/√2)
    results = [
        membership(torch.randn(60, generator=generator) + 1, torch.randn(40, generator=generator)) for _ in range(300)
    ]
    assert 0.9 < sum(result.low <= truth <= result.high for result in results) / 300 < 0.985


def test_hits_at_one_false_alarm_in_a_hundred() -> None:
    others = torch.arange(200.0)  # two may count as members: 199 and 198
    assert membership(torch.tensor([197.0, 197.5, 198.5, 300.0]), others).true_positive_rate == 0.75


class Steep(nn.Module):
    """Two logits: 0 and the sum of the image."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.flatten(1).sum(1)
        return torch.stack([torch.zeros_like(total), total], 1)


def test_scores_of_samples() -> None:
    x = torch.zeros(2, 1, 4, 4)
    x[1, 0, 1:3, 1:3] = 1.0
    y = torch.tensor([1, 1])
    expected = [math.log(2), math.log(1 + math.exp(-4))]
    assert losses(Steep(), x, y).tolist() == pytest.approx(expected, rel=1e-4)
    gap = loss_gaps(Steep(), torch.ones(1, 1, 4, 4), y[:1], torch.Generator().manual_seed(0))
    assert gap.item() == pytest.approx(0, abs=1e-6)  # shifts do not change a constant image


# --- distances ------------------------------------------------------------------------------------------------------


def test_nearest_by_arithmetic() -> None:
    real = torch.tensor([[0.0, 0.0], [3.0, 4.0], [10.0, 0.0]])
    distances, indices = nearest_neighbors(torch.tensor([[3.0, 3.0], [8.0, 0.0], [0.0, 0.0]]), real)
    assert distances.tolist() == [1, 2, 0] and indices.tolist() == [1, 2, 0]
    self_distances, self_indices = nearest_neighbors(real, real, same=True)
    assert self_distances.tolist() == pytest.approx([5, 5, math.sqrt(65)]) and self_indices.tolist() == [1, 0, 1]
    assert typical_distance(real) == 5 and typical_distance(real[:1]) is None and typical_distance(real[[0, 0]]) is None


def test_a_sample_is_not_its_own_neighbor_beyond_the_first_block() -> None:
    real = 10.0 * torch.arange(1001.0)[:, None]
    assert nearest_neighbors(real, real, same=True)[0].tolist() == [10.0] * 1001


def test_earth_mover_by_arithmetic() -> None:
    # {0, 2} against {1, 1, 4, 4}: halves of {0 0 2 2} go to {1 1 4 4}: (1 + 1 + 2 + 2) / 4
    first, second = torch.tensor([[2.0], [0.0]]), torch.tensor([[4.0], [1.0], [1.0], [4.0]])
    assert earth_mover_1d(first, second).tolist() == [1.5]
    assert earth_mover_1d(torch.tensor([[0.0], [6.0]]), torch.tensor([[0.0], [3.0], [6.0]])).item() == pytest.approx(1)
    assert earth_mover_1d(torch.tensor([[0.0, 5.0]]), torch.tensor([[1.0, 1.0]])).tolist() == [1, 4]


def test_earth_mover_of_shifted_sets() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(7, 1, 2, 2, generator=generator)
    assert earth_mover(images, images[torch.randperm(7)], generator) == pytest.approx(0, abs=1e-12)
    # projected on a random line in 4 dimensions, a shift of length 2 has length 2·E|u₁| = 2 · 4/(3π)
    shift = torch.tensor([2.0, 0, 0, 0]).view(1, 2, 2)
    assert earth_mover(images, images + shift, generator, 20_000) == pytest.approx(8 / (3 * math.pi), rel=0.02)


# --- leakage ------------------------------------------------------------------------------------------------------


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def test_gradients_are_computed_per_batch() -> None:
    net = small_net()
    x, y = torch.randn(2, 3, 1, 4, 4), torch.tensor([[0, 1, 2], [2, 2, 1]])
    gradients = compute_gradients(net, x, y)
    nn.functional.cross_entropy(net(x[1]), y[1]).backward()  # type: ignore[no-untyped-call]
    expected = torch.cat([parameter.grad.flatten() for parameter in net.parameters() if parameter.grad is not None])
    assert torch.allclose(gradients[1], expected, atol=1e-6) and gradients.shape == (2, 51)


def test_gradient_matching_restores_an_image() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))
    x = torch.rand(2, 1, 1, 4, 4)
    y = torch.tensor([[1], [2]])
    observed = compute_gradients(net, x, y).detach()
    generator = torch.Generator().manual_seed(1)
    images, mismatch = restore_images(net, observed, y, x.flatten(0, 1), generator, steps=300, starts=6, smooth=0.0)
    assert images.shape == x.shape and (mismatch < 1e-3).all()
    assert (images - x).abs().mean() < 0.05
    unrelated, _ = restore_images(
        net, observed.flip(0), y.flip(0), x.flatten(0, 1), generator, steps=300, starts=6, smooth=0.0
    )
    assert (unrelated - x).abs().mean() > 0.15  # the gradient of another sample reveals nothing


def test_sign_descent_returns_the_best_of_several_starts() -> None:
    net, data, y = small_net(), torch.rand(5, 1, 4, 4), torch.tensor([[0], [1]])
    observed = compute_gradients(net, data[:2, None], y).detach()

    def restore(starts: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        return restore_images(net, observed, y, data, generator, steps=2, starts=starts, smooth=0.0)

    images, mismatch = restore(4)
    similarity = nn.functional.cosine_similarity(compute_gradients(net, images, y), observed)
    assert torch.allclose(1 - similarity, mismatch, atol=1e-6)
    fewer = [restore(starts)[1] for starts in (1, 2, 3)]
    assert (mismatch <= torch.stack(fewer).min(0).values + 1e-7).all() and (mismatch < fewer[0] - 1e-3).any()
    images, _ = restore(1)
    initial = torch.randn(2, 1, 1, 4, 4, generator=torch.Generator().manual_seed(0)).clamp_(data.min(), data.max())
    moved = (images - initial).abs()[
        (images > data.min()) & (images < data.max()) & (initial > data.min()) & (initial < data.max())
    ]
    # Adam on signs, with lr factors 1 and 1/2: a constant sign moves 1.5 steps, a flipped one 1 − 0.01 / 0.19 / 2
    assert len(moved) > 5
    assert all(any(abs(step - LR * size) < 1e-4 for size in (1.5, 1 - 0.005 / 0.19)) for step in moved.tolist())


def test_replace_relu_returns_a_copy_with_softplus() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    soft = replace_relu(net)
    assert not any(isinstance(module, nn.ReLU) for module in soft.modules())
    assert any(isinstance(module, nn.ReLU) for module in net.modules())
    x = torch.tensor([[1.0, -2.0]])
    assert torch.allclose(soft(x), net(x), atol=0.1)


def test_total_variation_and_psnr_by_arithmetic() -> None:
    image = torch.tensor([[0.0, 1.0], [3.0, 3.0]]).view(1, 1, 1, 2, 2)
    assert total_variation(image).item() == (3 + 2) / 2 + (1 + 0) / 2
    assert psnr(torch.full((1, 4), 0.1), torch.zeros(1, 4), 1.0).item() == pytest.approx(20)
    assert psnr(torch.full((1, 4), 0.1), torch.zeros(1, 4), 10.0).item() == pytest.approx(40)


# --- the command --------------------------------------------------------------------------------------------------

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
    lines = ["1,3,up,train", "1,4,down,train", "1,5,up,evaluate/score", "2,6,up,train"]
    (tmp_path / "ledger.csv").write_text("\n".join(["round,client,direction,kind", *lines]))
    assert find_participants(tmp_path, 1) == [3] and find_participants(tmp_path, 2) == [3, 6]


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


def test_help_says_that_real_data_is_needed() -> None:
    assert "real data" in " ".join(call("audit", "--help").stdout.split())


def test_a_low_loss_under_the_trained_model_indicates_a_member(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attacked = _AttackedRun(open_run(runs / "fedavg"), [0, 1, 2], 3)
    real = torch.cat([attacked.training_samples(client)[0] for client in attacked.clients])

    def fake_losses(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        assert net is attacked.nets["trained"]
        return nearest_neighbors(x, real)[0].gt(0).float()

    monkeypatch.setattr("fewer.audit.attacks.losses", fake_losses)
    name, scores = next(attacked.membership_scores())
    assert name == "loss" and membership(*scores).auc > 0.99


def test_a_sample_whose_variants_have_a_higher_loss_scores_high() -> None:
    x = torch.rand(3, 1, 6, 6)

    class DistanceNet(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            distance = (inputs - x).abs().flatten(1).sum(1)
            return torch.stack([distance, torch.zeros_like(distance)], 1)

    assert (loss_gaps(DistanceNet(), x, torch.ones(3, dtype=torch.long), stream("v")) > 0.1).all()


def test_distance_is_within_a_class_and_relative_to_its_typical_distance() -> None:
    attacked = object.__new__(_AttackedRun)
    attacked.has_images, attacked.low, attacked.high = False, 0.0, 9.0
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
    assert attacked.synthetic[0][0].max() == attacked.high < 99


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


def test_proportion_by_arithmetic() -> None:
    # Wilson: (0.75 + z²/80 ± z √(0.75 · 0.25 / 40 + z² / 6400)) / (1 + z²/40)
    estimate = estimate_proportion(30, 40)
    assert (estimate.fraction, estimate.total) == (0.75, 40)
    assert (estimate.low, estimate.high) == pytest.approx((0.5981, 0.8581), abs=1e-4)


def test_nearness_is_scored_within_condensed_classes() -> None:
    attacked = object.__new__(_AttackedRun)
    attacked.synthetic = {0: (torch.tensor([[0.0], [5.0]]), torch.tensor([0, 1]))}
    sides = tuple((torch.tensor([[1.0], [4.0], [9.0]]) + side, torch.tensor([0, 0, 2])) for side in (0, 1))
    inside, outside = attacked.nearness_scores(0, sides)  # type: ignore[arg-type]
    # only D̂ of the same class counts; class 2 has none
    assert inside.tolist() == [-1, -4] and outside.tolist() == [-2, -5]


# --- studies of recipes -------------------------------------------------------------------------------------------

RECIPE = """
title = "Small"
paper = "Nobody: Nothing, 2026"
seeds = 1
[settings]
data = "digits"
clients = 3
rounds = 1
method_options = { matching_steps = 2, outer_steps = 1, server_steps = 2 }
[quick]
study = { steps = 1 }
[study]
name = "leakage"
steps = 2
starts = 1
[[column]]
name = "S = 2"
method_options = { per_class = 2 }
[[column]]
name = "S = 3"
method_options = { per_class = 3 }
[[row]]
name = "FedMK"
method = "fedmk"
"""


def test_a_recipe_can_study_leakage_or_earth_mover_distance(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(RECIPE.replace('name = "S = 3"', 'name = "S = 3"\nseed = 1\ndata_seed = 0'))
    args: list[str | Path] = ["reproduce", file, "--results", tmp_path, "--out", tmp_path / "runs"]
    text = call(*args).stdout
    saved = json.loads((tmp_path / "small.json").read_text())
    assert [cell["ours"]["settings"]["per_class"] for cell in saved["cells"]] == [2, 3]
    assert f"| {saved['study']['FedMK, S = 2']['metrics']['copies']['median']:.2f} |" in text
    assert saved["study"].keys() == {"FedMK, S = 2", "FedMK, S = 3"}
    assert text.count("![FedMK: deep leakage from gradients](small-fedmk-s-2-leakage.png)") == 1
    assert {path.name for path in tmp_path.glob("*.png")} == {
        f"small-fedmk-s-{size}-{kind}.png" for size in (2, 3) for kind in ("copies", "leakage")
    }
    file.write_text(file.read_text().replace('"leakage"\nsteps = 2\nstarts = 1', '"emd"\npaper = [0.0, 0.25]'))
    file.write_text(file.read_text().replace("study = { steps = 1 }", ""))
    text = call(*args).stdout
    (same,), (other,) = json.loads((tmp_path / "small.json").read_text())["study"].values()
    assert same == 0 and 0 < other < 1
    assert f"| ours | 0.000 | {other:.3f} |\n| paper | 0.000 | 0.250 |" in text


def test_distance_of_synthetic_data_by_arithmetic() -> None:
    def result(images: list[float], labels: list[int], client: int = 0) -> Any:
        sent = {client: (torch.tensor(images).view(-1, 1, 1, 1), torch.tensor(labels))}
        test = Samples(torch.tensor([[[-1.0]], [[3.0]]]), torch.zeros(2))
        return SimpleNamespace(
            method=SimpleNamespace(synthetic_data=lambda _: sent), state=None, data=SimpleNamespace(test=test)
        )

    # black to white is 4; class 0: {0, 2} to {2, 2}: 1 / 4; class 1: {0} to {3}: 3 / 4; class 2 is in only one
    first, second = result([0, 2, 0, 9], [0, 0, 1, 2]), result([2, 2, 3], [0, 0, 1])
    assert _measure_distance(first, second) == pytest.approx(0.5)
    with pytest.raises(SettingError, match="no client"):
        _measure_distance(first, result([2.0], [0], client=1))


@pytest.mark.parametrize("data", ["digits", "fashion-mini"])  # test rows split off from all rows, or separate
def test_accuracy_on_samples_that_no_client_holds(data: str, tmp_path: Path) -> None:
    args = ["--clients=2", "--cohort=1", "--rounds=1", "--fraction=0.4", "--no-report"]
    call("run", "fedavg", "--data", data, *args, "--out", tmp_path / "a")
    result = open_run(tmp_path / "a")
    all_data = load_data(result.settings.model_copy(update={"fraction": 1.0}))
    score = _score_unused(result)
    used, total = (sum(map(dataset.size, range(2))) for dataset in (result.data, all_data))
    assert 0.9 * (total - used) < score.total <= total - used  # some images are duplicates
    assert 0 < score.correct < score.total
    with pytest.raises(SettingError, match="set fraction < 1"):
        _score_unused(replace(result, settings=result.settings.model_copy(update={"fraction": 1.0})))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (('"leakage"', '"leakag"'), "unknown study 'leakag', did you mean 'leakage'?"),
        (("starts = 1", "start = 1"), "unknown option of study leakage 'start', did you mean 'starts'?"),
        (("starts = 1", 'starts = "1"'), "starts must be an integer or a list of numbers, got '1'"),
    ],
)
def test_a_wrong_study_is_an_error_before_anything_runs(change: tuple[str, str], text: str, tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(RECIPE.replace(*change))
    assert text in call("reproduce", file, "--results", tmp_path, "--out", tmp_path / "runs", code=2).stderr
    assert not (tmp_path / "runs").exists()
