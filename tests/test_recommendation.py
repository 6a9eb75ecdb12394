"""Recommendation data: classes per user, local learners, top-k accuracy, queries at the end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.naive_bayes import GaussianNB

import fewer
from fewer.data import ArrayData, RawDataset, federate, from_clients
from fewer.data.episodes import split_clients
from fewer.data.recommendation import build_user_tasks, generate_usage
from fewer.data.sources import read
from fewer.errors import DataError, SettingError
from fewer.experiments import recipes
from fewer.learning.evaluate import MAX_LOSS, count_correct
from fewer.methods.alone import Alone, MostUsed, NaiveBayes, recency_scores
from fewer.methods.fedavg_meta import FedAvgMeta
from fewer.models import get_weights
from fewer.models.sequences import LogisticRegression
from fewer.runs.result import open_run
from tests.test_formats import film_line, write, write_movielens

torch.set_num_threads(1)

# --- items ----------------------------------------------------------------------------------------------------


def records() -> RawDataset:
    y = np.array([7, 2, 7, 5, 2, 9, 7, 7, 1])
    client_ids = np.array([1, 1, 1, 1, 1, 2, 2, 2, 2])
    return RawDataset(
        np.arange(9.0)[:, None], y, client_ids=client_ids, class_names=tuple("abcdefghij"), time_ordered=True
    )


def test_items_are_numbered_per_user_in_order_of_first_use() -> None:
    raw = build_user_tasks(records(), own_classes=True)
    assert (
        raw.y.tolist() == [0, 1, 0, 2, 1, 0, 1, 1, 2]
        and raw.class_names == ("item 1", "item 2", "item 3")
        and raw.time_ordered
    )
    assert build_user_tasks(records()).y.tolist() == records().y.tolist()


def test_later_items_and_users_with_few_records_are_left_out() -> None:
    raw = build_user_tasks(records(), own_classes=True, max_items=2)
    assert np.asarray(raw.x)[:, 0].tolist() == [0, 1, 2, 4, 5, 6, 7] and raw.y.tolist() == [0, 1, 0, 1, 0, 1, 1]
    raw = build_user_tasks(records(), max_items=2, min_records=4)
    assert raw.client_ids is not None and raw.client_ids.tolist() == [1] * 4 and raw.y.tolist() == [7, 2, 7, 2]
    assert (
        len(raw.class_names) == 10
        and len(build_user_tasks(records(), own_classes=True, max_items=40).class_names) == 40
    )
    with pytest.raises(DataError, match="no user has 6 records"):
        build_user_tasks(records(), min_records=6)
    with pytest.raises(SettingError, match="max_items must be 0 to 100,000 and min_records >= 0, got -1 and 0"):
        build_user_tasks(records(), max_items=-1)


def test_movielens_by_genres(tmp_path: Path) -> None:
    write_movielens(tmp_path)
    films = film_line(1, "1995", {1, 5}) + film_line(2, "", {0}) + film_line(3, "1970", {5, 1})
    write(tmp_path / "u.item", films)
    raw = read(f"movielens:{tmp_path}", items="genres")
    assert raw.class_names == ("action + comedy", "unknown") and raw.y.tolist() == [0, 0, 1, 0]
    assert read(f"movielens:{tmp_path}", items="genres", own_classes=True, max_items=1).y.tolist() == [0, 0, 0]
    assert len(read(f"movielens:{tmp_path}", min_records=2).y) == 3
    with pytest.raises(SettingError, match="unknown items of movielens 'genre'"):
        read(f"movielens:{tmp_path}", items="genre")


def test_usage_is_deterministic_and_repetitive() -> None:
    first, second = generate_usage(), generate_usage()
    assert np.array_equal(np.asarray(first.x), np.asarray(second.x)) and np.array_equal(first.y, second.y)
    assert first.client_ids is not None
    items_by_user = [first.y[first.client_ids == user] for user in range(40)]
    assert all(len(user) == 60 and 1 <= len(set(user)) <= 8 for user in items_by_user)
    assert 0.4 < np.mean([np.mean(user[1:] == user[:-1]) for user in items_by_user]) < 0.8
    assert len(read("usage", own_classes=True).class_names) <= 8 < 30 == len(read("usage").class_names)


# --- top-k accuracy -------------------------------------------------------------------------------------------


def test_a_prediction_is_correct_among_the_top_k() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 0.0, 0.0, 5.0]])
    y = torch.tensor([2, 1])
    assert [count_correct(scores, y, top).correct for top in (1, 2, 3, 4, 9)] == [0, 0, 2, 2, 2]
    assert count_correct(scores, torch.tensor([1, 2]), 2).correct == 1  # ties go to the first class
    assert count_correct(torch.full((1, 2), torch.nan), torch.tensor([1])).loss == MAX_LOSS


def test_top_k_and_query_fraction_are_used() -> None:
    """Each client has labels 0 0 0 1 1 1 2 1; the support is the first half, queries are the last half or quarter."""
    x, y = np.zeros((8, 1), np.float32), np.array([0, 0, 0, 1, 1, 1, 2, 1])
    data = replace(from_clients([(x, y)] * 10, test=(x, y)), time_ordered=True)
    for learner, query_fraction, top, accuracy in (
        ("most-used", None, 1, 0.0),  # 0 of 1 1 2 1
        ("most-used", None, 2, 0.75),
        ("most-used", None, 3, 1.0),
        ("most-used", 0.25, 2, 0.5),  # 2 1
        ("last-used", None, 1, 0.5),  # 1 1 1 2 before 1 1 2 1
        ("last-used", 0.25, 1, 0.0),
        ("last-used", 0.25, 2, 0.5),
        ("last-used", 0.25, 3, 1.0),
    ):
        method = Alone(learner=learner, support_fraction=0.5, query_fraction=query_fraction, top_k=top)
        assert fewer.run(method, data, model="logistic").accuracy == accuracy, (learner, query_fraction, top)


def test_queries_are_the_last_samples_for_any_support() -> None:
    splits: list[tuple[list[int], list[int]]] = []

    class Recording(Alone):
        def support_and_query(self, client: Any, generator: Any = None) -> Any:
            support, queries = super().support_and_query(client, generator)
            splits.append((support.slice(0, 99)[0][:, 0].int().tolist(), queries.slice(0, 99)[0][:, 0].int().tolist()))
            return support, queries

    x, y = np.arange(10, dtype=np.float32)[:, None], np.arange(10) % 2
    data = replace(from_clients([(x, y)] * 10, test=(x, y)), time_ordered=True)
    for support, query_fraction, expected in (
        (0.8, 0.2, (list(range(8)), [8, 9])),
        (0.05, 0.2, ([0], [8, 9])),
        (0.8, 0.5, (list(range(8)), [8, 9])),  # never from the support
        (0.5, 0.01, (list(range(5)), [9])),  # at least one
    ):
        splits.clear()
        fewer.run(Recording(support_fraction=support, query_fraction=query_fraction), data, model="logistic")
        assert splits and all(split == expected for split in splits)


# --- learners -------------------------------------------------------------------------------------------------


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


# --- the table ------------------------------------------------------------------------------------------------


def test_rows_of_a_recipe_may_differ_in_model_and_data() -> None:
    plan = recipes.load_recipe("fedmeta/table3")
    for quick, options in ((False, {"items": "genres", "max_items": 40, "min_records": 100}), (True, {})):
        settings = dict(
            zip([row.name for row in plan.row], recipes.row_settings(plan.column[3], plan, quick), strict=True)
        )
        mixed, meta, alone = settings["MIXED: NN, tuned"], settings["META: MAML + NN, tuned"], settings["SELF: MRU"]
        assert mixed["data_options"] == options and meta["data_options"] == alone["data_options"] == {
            **options,
            "own_classes": True,
        }
        assert mixed["model"] == meta["model"] == "mlp" and alone["model"] == "logistic" and alone["rounds"] == 1
        assert all(
            row["method_options"]["top_k"] == 4 and row["method_options"]["support_fraction"] == 0.05
            for row in settings.values()
        )


def test_local_classes_beat_guessing_on_usage() -> None:
    groups = split_clients(40, seed=0)
    data: ArrayData = fewer.data.load("usage", partition="natural", data_options={"own_classes": True})
    splits: dict[str, Any] = {"support_fraction": 0.8, "query_fraction": 0.2}
    result = fewer.run(Alone(lr=0.3, **splits), data, model="logistic")
    assert result.metrics["clients"].keys() == {str(client) for client in groups.test}
    assert result.accuracy > 1.5 / len(data.class_names)
