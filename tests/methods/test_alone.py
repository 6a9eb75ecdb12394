"""Local learners without a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.naive_bayes import GaussianNB

import fewer
from fewer.data import ArrayData, federate, from_clients
from fewer.data.episodes import split_clients
from fewer.data.recommendation import build_user_tasks, generate_usage
from fewer.errors import SettingError
from fewer.methods.alone import Alone, MostUsed, NaiveBayes, recency_scores
from fewer.methods.fedavg_meta import FedAvgMeta
from fewer.models import get_weights
from fewer.models.sequences import LogisticRegression
from fewer.runs.result import open_run

# --- learners ---------------------------------------------------------------------------------------------------


def test_naive_bayes_against_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 4)), rng.choice([0, 1, 3], size=60)
    x[:, 1] *= 3
    x[y == 3] += 1
    queries = rng.normal(size=(20, 4))
    expected = GaussianNB(var_smoothing=0.05).fit(x, y).predict_log_proba(queries)
    scores = NaiveBayes(torch.from_numpy(x), torch.from_numpy(y), 5, 0.05)(torch.from_numpy(queries))
    log_probabilities = scores[:, [0, 1, 3]].log_softmax(1).numpy()
    assert np.allclose(log_probabilities, expected, atol=1e-8)
    assert torch.isfinite(scores).all() and (scores[:, [2, 4]].amax(1) < scores[:, [0, 1, 3]].amin(1)).all()


def test_naive_bayes_with_one_sample_predicts_its_class() -> None:
    net = NaiveBayes(torch.ones(1, 3), torch.tensor([2]), 4, 0.1)
    assert net(torch.randn(5, 3)).argmax(1).tolist() == [2] * 5


def test_most_and_last_used_by_arithmetic() -> None:
    labels = torch.tensor([1, 0, 0, 2, 1])
    assert MostUsed(labels, 4)(torch.zeros(2, 1)).exp().round().tolist() == [[3, 3, 2, 1]] * 2
    assert recency_scores(labels, 2, 4).tolist() == [[2, 1, 0, 0], [3, 1, 0, 0], [3, 1, 4, 0]]


def test_a_local_net_is_gradient_descent_from_the_initial_weights() -> None:
    raw = build_user_tasks(generate_usage(users=12, records=20), own_classes=True)
    data = federate(raw, partition="natural")
    common: dict[str, Any] = {"support_fraction": 0.8, "query_fraction": 0.2}
    local = fewer.run(Alone(local_steps=7, lr=0.3, **common), data, model="logistic", seed=1).history[-1]
    # FedAvg with a tiny lr keeps the initial model; fine-tuned, it equals a local net
    federated = FedAvgMeta(rounds=1, lr=1e-12, adapt_steps=7, adapt_lr=0.3, **common)
    assert local["loss"] == pytest.approx(
        fewer.run(federated, data, model="logistic", seed=1).history[-1]["loss"], abs=1e-6
    )
    assert local["up"] == local["down"] == 0
    fewer_steps = fewer.run(Alone(local_steps=6, lr=0.3, **common), data, model="logistic", seed=1).history[-1]
    assert abs(local["loss"] - fewer_steps["loss"]) > 1e-4


def test_the_search_space_depends_on_the_learner() -> None:
    assert Alone().search_space().keys() == {"lr"} and Alone(learner="naive-bayes").search_space().keys() == {
        "smoothing"
    }
    assert not Alone(learner="most-used").search_space() and not Alone(learner="last-used").search_space()


def test_unsupported_uses_of_a_learner_are_errors(tmp_path: Path) -> None:
    x, y = np.zeros((6, 1), np.float32), np.array([0, 1] * 3)
    data = from_clients([(x, y)] * 10, test=(x, y))
    with pytest.raises(SettingError, match="needs samples in time order"):
        fewer.run(Alone(learner="last-used"), data, model="logistic")
    result = fewer.run(Alone(learner="most-used"), data, model="logistic")
    with pytest.raises(SettingError, match="learner = most-used trains no net"):
        result.adapt(x, y)
    with pytest.raises(SettingError, match="alone has no global model"):
        _ = result.model
    run = tmp_path / "run"
    fewer.run("alone", "usage", partition="natural", model="logistic", method_options={"learner": "last-used"}, out=run)
    with pytest.raises(SettingError, match="learner = last-used trains no net"):
        open_run(run).personal_model(0)


def test_a_local_net_adapts_to_new_data() -> None:
    x, y = np.eye(6, 2, dtype=np.float32), np.array([0, 1] * 3)
    result = fewer.run(Alone(local_steps=3), from_clients([(x, y)] * 10, test=(x, y)), model="logistic")
    initial = LogisticRegression((2,), 2)
    initial.load_state_dict(result.task.initial_weights(0))
    assert not torch.equal(get_weights(result.adapt(x, y))["head.weight"], get_weights(initial)["head.weight"])


# --- the table --------------------------------------------------------------------------------------------------


def test_local_classes_beat_guessing_on_usage() -> None:
    groups = split_clients(40, seed=0)
    data: ArrayData = fewer.data.load("usage", partition="natural", data_options={"own_classes": True})
    splits: dict[str, Any] = {"support_fraction": 0.8, "query_fraction": 0.2}
    result = fewer.run(Alone(lr=0.3, **splits), data, model="logistic")
    assert result.metrics["clients"].keys() == {str(client) for client in groups.test}
    assert result.accuracy > 1.5 / len(data.class_names)
