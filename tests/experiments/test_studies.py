"""Studies of a recipe: embeddings, leakage, distances, unused samples."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fewer
from fewer.data import Samples
from fewer.errors import SettingError
from fewer.experiments.studies import _embed_member, _measure_distance, _score_unused
from fewer.learning.group_model import compute_features, use_batch_statistics
from fewer.methods.context import ContextFactory
from fewer.methods.frl import FRL
from fewer.runs.experiment import load_data
from fewer.runs.result import open_run
from fewer.runtime import stream
from fewer.statistics import half_width
from tests.helpers import call
from tests.methods.frl_harness import GROUPS, load_digits

# --- recipes and unseen classes ---------------------------------------------------------------------------------


def test_a_recipe_plots_a_members_embedding_and_has_intervals_over_groups(tmp_path: Path) -> None:
    text = """
title = "Small"
paper = "Example"
seeds = 2
[settings]
fraction = 0.3
data = "digits"
data_options = { unseen_classes = "5-9" }
partition = "shards"
clients = 12
rounds = 4
evaluate_every = 4
method_options = { eval_groups = 2, group_size = 4, samples_per_class = 12 }
[study]
name = "embedding"
max_samples = 40
[[column]]
name = "digits"
[[row]]
name = "distance"
method = "frl"
method_options = { head = "distance" }
[[row]]
name = "GPAL"
method = "frl"
"""
    file = tmp_path / "small.toml"
    file.write_text(text)
    output = call("reproduce", file, "--results", tmp_path, "--out", tmp_path / "runs").stdout
    results = json.loads((tmp_path / "small.json").read_text())
    assert "95 % CI over 4 groups" in output and "![Embedding of one member of a group](small-embedding.png)" in output
    assert (tmp_path / "small-embedding.png").read_bytes().startswith(b"\x89PNG")
    for row, cell in zip(("distance", "GPAL"), results["cells"], strict=True):
        groups = [
            value
            for seed in (0, 1)
            for value in json.loads(
                (tmp_path / f"runs/digits/{row.lower()}-seed{seed}/metrics.jsonl").read_text().splitlines()[-1]
            )["groups"]
        ]
        assert cell["ours"]["groups"] == 4 and cell["ours"]["ci95"] == half_width(groups)
        assert 0 <= results["study"][f"{row}, digits"]["others"] <= 1


def test_a_members_embedding_is_computed_after_its_training() -> None:
    method = FRL(rounds=4, head="distance", lr=1.0, unseen_classes=1, **{**GROUPS, "samples_per_class": 30})
    result = fewer.run(method, load_digits())
    embedding, accuracy, _ = _embed_member(result, 1, 2, 40)
    server: Any = ContextFactory(result.data, result.task, 0, Path()).server(0, 0)
    group = method.draw_group(server.global_test, [6, 7, 8, 9], 1, 0, 1)
    assert set(embedding.labels.tolist()) == set(group.queries.labels.tolist())
    assert len({6, 7, 8, 9} & set(embedding.labels.tolist())) == 1
    group_state = method.simulate_group(server, result.state.initial, group.supports, 1, 3)[1]
    net = method.simulate_group(server, result.state.initial, group.supports, 1, 2)[0]
    accuracies = []
    for trained in (False, True):
        if trained:
            method.fit_support(net, group.supports[2], None, False, stream(0, "embedding"))
        use_batch_statistics(net)
        x, y = group.queries.slice(0, len(group.queries))
        nearest = torch.cdist(compute_features(net, x).detach(), group_state.means).argmin(1)
        accuracies.append(float((group_state.classes[nearest] == y).double().mean()))
    assert accuracy == accuracies[1] != accuracies[0]


# --- studies of recipes -----------------------------------------------------------------------------------------


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


def test_a_recipe_can_study_canaries(tmp_path: Path) -> None:
    """FedAvg memorizes wrong labels. With noise it states an ε, and the attack proves less."""
    text = RECIPE[: RECIPE.index("[quick]")].replace(
        "matching_steps = 2, outer_steps = 1, server_steps = 2", "lr = 0.5"
    )
    text += '[study]\nname = "canaries"\nclients = 3\nshadows = 8\n[[column]]\nname = "digits"\nmodel = "mlp"\n'
    text += '[[row]]\nname = "FedAvg"\nmethod = "fedavg"\nmethod_options = { local_steps = 150 }\n'
    text += '[[row]]\nname = "DP"\nmethod = "fedavg"\nmethod_options = { local_steps = 2 }\n'
    text += 'settings = { dp = "record:epsilon=2" }\n'
    file = tmp_path / "small.toml"
    file.write_text(text)
    call("reproduce", file, "--results", tmp_path, "--out", tmp_path / "runs")
    (data,) = tmp_path.rglob("small.json")
    study = json.loads(data.read_text())["study"]
    memorized, private = study["FedAvg, digits"], study["DP, digits"]
    assert memorized["low"] > 0.6 and memorized["epsilon_bound"] > 0 and memorized["claimed"] is None
    assert private["epsilon_bound"] < private["claimed"] <= 2 and private["delta"] == 1e-5
    page = data.with_suffix(".md").read_text()
    assert f"| {memorized['epsilon_bound']:.2f} | none |\n" in page and f"| {private['claimed']:.2f} |\n" in page
    assert f"8 runs of each row have {memorized['members']:,} members" in page


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
    assert {path.name for path in tmp_path.glob("small-fedmk-*.png")} == {
        f"small-fedmk-s-{size}-{kind}.png" for size in (2, 3) for kind in ("copies", "leakage")
    }
    file.write_text(file.read_text().replace('"leakage"\nsteps = 2\nstarts = 1', '"emd"\npaper = [0.0, 0.25]'))
    second_row = '[[row]]\nname = "Paper"\nmethod = "fedmk-paper"\n'
    file.write_text(file.read_text().replace("study = { steps = 1 }", "") + second_row)
    text = call(*args).stdout
    study = json.loads((tmp_path / "small.json").read_text())["study"]
    (same,), (other,), (paper_same,), (paper_other,) = study.values()
    assert same == paper_same == 0 and 0 < other < 1 and 0 < paper_other < 1  # each row to its own first column
    assert list(study) == ["FedMK, S = 2", "FedMK, S = 3", "Paper, S = 2", "Paper, S = 3"]
    rows = f"| FedMK | 0.000 | {other:.3f} |\n| Paper | 0.000 | {paper_other:.3f} |"
    assert f"{rows}\n| the paper's values | 0.000 | 0.250 |" in text


def test_a_recipe_can_study_near_copies_in_one_column(tmp_path: Path) -> None:
    """Condensed images are compared with real ones. A row whose clients send no images is left out."""
    file, runs = tmp_path / "small.toml", tmp_path / "runs"
    text = RECIPE.replace('"leakage"\nsteps = 2\nstarts = 1', '"copies"\nclients = 3')
    text = text.replace("study = { steps = 1 }", "")
    file.write_text(text + '[[row]]\nname = "FedAvg"\nmethod = "fedavg"\n')
    output = call("reproduce", file, "--results", tmp_path, "--out", runs, "--column", "S = 2").stdout
    (page,) = tmp_path.glob("small*.json")
    study = json.loads(page.read_text())["study"]
    assert list(study) == ["FedMK, S = 2"]
    (found,) = study["FedMK, S = 2"]
    expected = fewer.audit(runs / "s-2/fedmk-seed0", clients=3, steps=1, starts=1).metrics["copies"]
    assert found == json.loads(json.dumps(expected))
    line = f"{100 * found['near_copies']:.2f} % | {found['images']:,} | {found['min']:.2f} | {found['median']:.2f} |"
    assert f"| FedMK, S = 2 | {line}" in output


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
        (("starts = 1", "start = 1"), "study leakage has no option 'start', did you mean 'starts'?"),
        (("starts = 1", 'starts = "1"'), "starts must be an integer or a list of numbers, got '1'"),
    ],
)
def test_a_wrong_study_is_an_error_before_anything_runs(change: tuple[str, str], text: str, tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(RECIPE.replace(*change))
    assert text in call("reproduce", file, "--results", tmp_path, "--out", tmp_path / "runs", code=2).stderr
    assert not (tmp_path / "runs").exists()
