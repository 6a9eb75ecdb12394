"""FedNCM, FedCOF, Fed3R and FedPFT: heads by formula, bytes, and FedAvg that starts from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fewer
from fewer.data.episodes import Episode
from fewer.errors import SettingError
from fewer.methods.fed3r import Fed3R
from fewer.methods.fedavg_head import FedAvgHead
from fewer.methods.fedcof import FedCOF
from fewer.methods.fedncm import FedNCM
from fewer.methods.fedpft import FedPFT
from fewer.methods.fl_proto import FLProto
from fewer.methods.head_only import UNSEEN_BIAS, HeadOnly
from fewer.runtime import stream
from tests.helpers import Array
from tests.methods.class_harness import EMPTY, PAIRS, SEED, encoder_head_net, federation, make_harness

METHODS: list[type[HeadOnly]] = [FedNCM, FedCOF, Fed3R, FedPFT]


def features(client: int) -> Array:
    with torch.no_grad():
        return np.asarray(encoder_head_net().encoder(torch.as_tensor(PAIRS[client][0])), np.float64)


Z = [features(client) for client in range(3)]
Y = [y for _, y in PAIRS]
ALL_Z, ALL_Y = np.concatenate(Z), np.concatenate(Y)


def run(method: Any, **settings: Any) -> Any:
    return fewer.run(method, federation(), model=encoder_head_net(), seed=SEED, **settings)


def normalize(rows: Array) -> Array:
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def class_means() -> Array:
    return np.stack([ALL_Z[label == ALL_Y].mean(0) for label in range(3)])


def test_fedncm_is_the_normalized_mean_of_each_class() -> None:
    result = run(FedNCM())
    assert np.allclose(result.state.head["head.weight"], normalize(class_means()), atol=1e-6)
    assert result.state.head["head.bias"].tolist() == [0, 0, 0]
    assert result.state.answered == [0, 1, 2]


def test_fedncm_with_euclidean_distance_predicts_the_nearest_mean() -> None:
    result = run(FedNCM(distance="euclidean"))
    distances = np.linalg.norm(ALL_Z[:, None] - class_means(), axis=2)
    with torch.no_grad():
        scores = result.model(torch.as_tensor(np.concatenate([x for x, _ in PAIRS])))
    assert np.array_equal(scores.argmax(1).numpy(), distances.argmin(1))
    assert np.allclose(result.state.head["head.bias"], -(class_means() ** 2).sum(1), atol=1e-6)


def fedcof_head(groups: list[tuple[int, Array]], shrinkage: float) -> Array:
    """W by the formulas of the paper, from the features of each class and client."""
    scatter, b, n = np.zeros((4, 4)), [], sum(len(z) for _, z in groups)
    for label in range(3):
        parts = [z for held, z in groups if held == label]
        mu = np.concatenate(parts).mean(0)
        total = sum(map(len, parts))
        b.append(total * mu)
        if len(parts) > 1:
            deviations = [(z.mean(0) - mu) for z in parts]
            outer = [len(z) * np.outer(d, d) for z, d in zip(parts, deviations, strict=True)]
            scatter += (total - 1) * sum(outer) / (len(parts) - 1)
    mean = sum(b) / n
    g = scatter + shrinkage * np.trace(scatter) / 4 * np.eye(4) + n * np.outer(mean, mean)
    return normalize((np.linalg.inv(g) @ np.stack(b).T).T)


def test_fedcof_estimates_covariances_from_class_means() -> None:
    groups = [(label, z[y == label]) for z, y in zip(Z, Y, strict=True) for label in np.unique(y)]
    head = run(FedCOF(shrinkage=0.3)).state.head
    assert np.allclose(head["head.weight"], fedcof_head(groups, 0.3), atol=1e-4)
    assert not head["head.bias"].any()


def test_fedcof_with_subsets_sends_several_means_of_each_class(tmp_path: Path) -> None:
    method = FedCOF(subsets=2, shrinkage=0.3)
    harness = make_harness(method, encoder_head_net(), tmp_path)
    with harness.clients.training_round(1):
        state = method.round(harness.state, harness.clients)
    rows = state.statistics
    assert rows["classes"].tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 1, 1]
    assert rows["counts"].tolist() == [2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 2]
    whole = (rows["means"] * rows["counts"][:, None])[:2].sum(0) / 3  # of client 0, class 0
    assert np.allclose(whole, Z[0][Y[0] == 0].mean(0), atol=1e-6)
    mu, n = rows["means"].double().numpy(), rows["counts"].numpy()
    groups = [(int(c), np.repeat(m[None], k, 0)) for c, m, k in zip(rows["classes"], mu, n, strict=True)]
    assert np.allclose(state.head["head.weight"], fedcof_head(groups, 0.3), atol=1e-4)


def test_fed3r_is_ridge_regression_on_all_features() -> None:
    result = run(Fed3R(ridge=0.05))
    gram, one_hot = ALL_Z.T @ ALL_Z, np.eye(3)[ALL_Y]
    solution = np.linalg.inv(gram + 0.05 * np.trace(gram) / 4 * np.eye(4)) @ ALL_Z.T @ one_hot
    assert np.allclose(result.state.head["head.weight"], normalize(solution.T), atol=1e-4)


def test_fed3r_projects_features_by_a_matrix_of_the_seed() -> None:
    result = run(Fed3R(ridge=0.05, projection=2))
    matrix = torch.randn(4, 2, generator=stream(SEED, "fed3r", "projection")).double().numpy()
    z = ALL_Z @ matrix
    gram = z.T @ z
    solution = matrix @ np.linalg.inv(gram + 0.05 * np.trace(gram) / 2 * np.eye(2)) @ z.T @ np.eye(3)[ALL_Y]
    assert np.allclose(result.state.head["head.weight"], normalize(solution.T), atol=1e-4)


def test_fed3r_does_not_depend_on_the_partition() -> None:
    one_client = [(np.concatenate([x for x, _ in PAIRS]), ALL_Y)]
    together = fewer.run(Fed3R(), federation(one_client), model=encoder_head_net(), seed=SEED)
    assert torch.allclose(run(Fed3R()).state.head["head.weight"], together.state.head["head.weight"], atol=1e-4)


def test_fedpft_sends_the_moments_of_each_class(tmp_path: Path) -> None:
    method = FedPFT(server_steps=2)
    harness = make_harness(method, encoder_head_net(), tmp_path)
    with harness.clients.training_round(1):
        rows = method.round(harness.state, harness.clients).statistics
    assert rows["classes"].tolist() == [0, 1, 0, 1, 2, 1] and rows["counts"].tolist() == [3, 3, 3, 3, 3, 4]
    own = Z[1][Y[1] == 2]
    assert np.allclose(rows["means"][4], own.mean(0), atol=1e-6)
    assert np.allclose(rows["variances"][4], np.maximum(own.var(0), 1e-3 * own.var(0).mean()), atol=1e-6)


def test_fedpft_draws_features_from_the_mixtures_in_proportion_to_their_samples() -> None:
    rows = {
        "classes": torch.tensor([0, 2]),
        "means": torch.tensor([[0.0, 10.0], [5.0, -5.0]]),
        "variances": torch.tensor([[4.0], [1.0]]),
        "counts": torch.tensor([1.0, 3.0]),
    }
    z, y = next(FedPFT(batch_size=40_000, server_steps=1).draw_features(rows, stream(0)))
    assert abs((y == 2).float().mean() - 0.75) < 0.01
    assert torch.allclose(z[y == 0].mean(0), torch.tensor([0.0, 10.0]), atol=0.1)
    assert torch.allclose(z[y == 0].std(0), torch.tensor([2.0, 2.0]), atol=0.1)


def test_fedpft_trains_the_head_on_the_drawn_features() -> None:
    accuracy = run(FedPFT(server_steps=300, server_lr=0.05)).accuracy
    assert accuracy >= run(FedPFT(server_steps=1, server_lr=1e-9)).accuracy + 0.1


@pytest.mark.parametrize("method", METHODS)
def test_each_client_answers_once_and_only_the_head_travels(method: type[HeadOnly], tmp_path: Path) -> None:
    chosen = method(cohort=2, rounds=3)
    harness = make_harness(chosen, encoder_head_net(), tmp_path)
    state, answered = harness.state, []
    for round in (1, 2, 3):
        with harness.clients.training_round(round):
            state = chosen.round(state, harness.clients)
        answered.append(len(state.answered))
    assert answered == [2, 3, 3]
    assert state.shared.keys() == {"head.weight", "head.bias"}
    asked = [entry for entry in harness.clients.ledger.entries if entry.direction == "up"]
    assert [entry.round for entry in asked] == [1, 1, 2]
    if method is not FedPFT:  # whose server draws other features in each round
        at_once = run(method()).state.head["head.weight"]
        assert torch.allclose(state.head["head.weight"], at_once, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_a_class_without_samples_is_never_predicted(method: type[HeadOnly]) -> None:
    data = federation([PAIRS[0], PAIRS[2], EMPTY])
    result = fewer.run(method(), data, model=encoder_head_net(), seed=SEED)
    assert result.state.head["head.bias"][2] == UNSEEN_BIAS and not result.state.head["head.weight"][2].any()
    assert result.state.answered == [0, 1]


def test_fedavg_head_starts_from_the_head_of_another_method() -> None:
    start = run(FedAvgHead(rounds=1, head="fed3r", head_options={"ridge": 0.05}, temperature=0.5))
    assert torch.allclose(start.state.model["head.weight"], 2 * run(Fed3R(ridge=0.05)).state.head["head.weight"])
    assert torch.equal(start.state.model["encoder.0.weight"], encoder_head_net().state_dict()["encoder.0.weight"])
    trained = run(FedAvgHead(rounds=2, head="fed3r", head_options={"ridge": 0.05}, temperature=0.5, lr=0.1))
    assert not torch.equal(trained.state.model["encoder.0.weight"], start.state.model["encoder.0.weight"])


def test_fedavg_head_keeps_the_initial_weights_of_classes_without_samples() -> None:
    result = fewer.run(FedAvgHead(rounds=1), federation([PAIRS[0], PAIRS[2]]), model=encoder_head_net(), seed=SEED)
    initial = encoder_head_net().state_dict()
    assert torch.equal(result.state.model["head.weight"][2], initial["head.weight"][2])
    assert torch.equal(result.state.model["head.bias"][2], initial["head.bias"][2])


def test_a_head_from_class_means_classifies_in_tasks_of_f2l() -> None:
    support, y = torch.as_tensor(PAIRS[1][0]), torch.as_tensor(Y[1])
    task = Episode(support, y, torch.as_tensor(PAIRS[0][0]), torch.as_tensor(Y[0]), torch.arange(3))
    net, groups = encoder_head_net().eval(), [(int(label), z[None]) for label, z in zip(Y[1], Z[1], strict=True)]
    expected = {"fedncm": normalize(np.stack([Z[1][Y[1] == c].mean(0) for c in range(3)]))}
    expected["fedcof"] = fedcof_head(groups, 1.0)
    for head, weight in expected.items():
        predicted = FLProto(head=head, way=3).predict(net, task)["accuracy"]
        assert predicted.tolist() == (Z[0] @ weight.T).argmax(1).tolist()


def test_errors_name_the_setting() -> None:
    with pytest.raises(SettingError, match=r"head = 'fedavg': it computes no head \(allowed: .*fed3r, fedcof"):
        FedAvgHead(head="fedavg")
    with pytest.raises(SettingError, match="fedcof: subsets"):
        run(FedAvgHead(head_options={"subsets": 0}))
    net = encoder_head_net()
    net.head = nn.Sequential(nn.Linear(4, 3), nn.Tanh())  # type: ignore[assignment]
    with pytest.raises(SettingError, match="one nn.Linear layer, got Sequential"):
        fewer.run(FedNCM(), federation(), model=net)
