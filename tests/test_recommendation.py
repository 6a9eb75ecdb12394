"""Users and their items: classes of their own, learners alone with their support, top-k, the last queries."""

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
from fewer.data.recommendation import generate_usage, per_user
from fewer.data.sources import read
from fewer.errors import DataError, SettingError
from fewer.experiments import recipes
from fewer.learning.evaluate import MAX_LOSS, count_correct
from fewer.methods.alone import Alone, MostUsed, NaiveBayes, recency_scores
from fewer.methods.fedavg_meta import FedAvgMeta
from fewer.models import get_weights
from fewer.models.sequences import LogisticRegression
from fewer.runs.result import open_run
from tests.test_formats import film, movielens, write

torch.set_num_threads(1)

# --- items ----------------------------------------------------------------------------------------------------


def records() -> RawDataset:
    y = np.array([7, 2, 7, 5, 2, 9, 7, 7, 1])
    client_ids = np.array([1, 1, 1, 1, 1, 2, 2, 2, 2])
    return RawDataset(
        np.arange(9.0)[:, None], y, client_ids=client_ids, class_names=tuple("abcdefghij"), time_ordered=True
    )


def test_items_are_numbered_by_user_from_the_first_to_come() -> None:
    raw = per_user(records(), own_classes=True)
    assert (
        raw.y.tolist() == [0, 1, 0, 2, 1, 0, 1, 1, 2]
        and raw.class_names == ("item 1", "item 2", "item 3")
        and raw.time_ordered
    )
    assert per_user(records()).y.tolist() == records().y.tolist()


def test_later_items_and_then_users_with_few_records_are_left_out() -> None:
    raw = per_user(records(), own_classes=True, max_items=2)
    assert np.asarray(raw.x)[:, 0].tolist() == [0, 1, 2, 4, 5, 6, 7] and raw.y.tolist() == [0, 1, 0, 1, 0, 1, 1]
    raw = per_user(records(), max_items=2, min_records=4)
    assert raw.client_ids is not None and raw.client_ids.tolist() == [1] * 4 and raw.y.tolist() == [7, 2, 7, 2]
    assert len(raw.class_names) == 10 and len(per_user(records(), own_classes=True, max_items=40).class_names) == 40
    with pytest.raises(DataError, match="no user has 6 records"):
        per_user(records(), min_records=6)
    with pytest.raises(SettingError, match="max_items must be 0 to 100,000 and min_records >= 0, got -1 and 0"):
        per_user(records(), max_items=-1)


def test_movielens_by_genres(tmp_path: Path) -> None:
    movielens(tmp_path)
    films = film(1, "1995", {1, 5}) + film(2, "", {0}) + film(3, "1970", {5, 1})
    write(tmp_path / "u.item", films)
    raw = read(f"movielens:{tmp_path}", items="genres")
    assert raw.class_names == ("action + comedy", "unknown") and raw.y.tolist() == [0, 0, 1, 0]
    assert read(f"movielens:{tmp_path}", items="genres", own_classes=True, max_items=1).y.tolist() == [0, 0, 0]
    assert len(read(f"movielens:{tmp_path}", min_records=2).y) == 3
    with pytest.raises(SettingError, match="unknown items of movielens 'genre'"):
        read(f"movielens:{tmp_path}", items="genre")


def test_usage_is_always_the_same_and_has_habits() -> None:
    one, two = generate_usage(), generate_usage()
    assert np.array_equal(np.asarray(one.x), np.asarray(two.x)) and np.array_equal(one.y, two.y)
    assert one.client_ids is not None
    of = [one.y[one.client_ids == user] for user in range(40)]
    assert all(len(user) == 60 and 1 <= len(set(user)) <= 8 for user in of)
    assert 0.4 < np.mean([np.mean(user[1:] == user[:-1]) for user in of]) < 0.8
    assert len(read("usage", own_classes=True).class_names) <= 8 < 30 == len(read("usage").class_names)


# --- right among the best -------------------------------------------------------------------------------------


def test_an_answer_is_right_among_the_best() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 0.0, 0.0, 5.0]])
    y = torch.tensor([2, 1])
    assert [count_correct(scores, y, top).correct for top in (1, 2, 3, 4, 9)] == [0, 0, 2, 2, 2]
    assert count_correct(scores, torch.tensor([1, 2]), 2).correct == 1  # of equal ones the first is the best
    assert count_correct(torch.full((1, 2), torch.nan), torch.tensor([1])).loss == MAX_LOSS


def test_top_and_query_share_are_used() -> None:
    """Each client has classes 0 0 1 2 in a row; the support is the first half, the query the last quarter."""
    x, y = np.zeros((8, 1), np.float32), np.array([0, 0, 0, 1, 1, 1, 2, 1])
    data = replace(from_clients([(x, y)] * 10, test=(x, y)), time_ordered=True)
    for learner, share, top, right in (
        ("most-used", None, 1, 0.0),  # 0 of 1 1 2 1
        ("most-used", None, 2, 0.75),
        ("most-used", None, 3, 1.0),
        ("most-used", 0.25, 2, 0.5),  # 2 1
        ("last-used", None, 1, 0.5),  # 1 1 1 2 before 1 1 2 1
        ("last-used", 0.25, 1, 0.0),
        ("last-used", 0.25, 2, 0.5),
        ("last-used", 0.25, 3, 1.0),
    ):
        method = Alone(learner=learner, support_fraction=0.5, query_fraction=share, top_k=top)
        assert fewer.run(method, data, model="logistic").accuracy == right, (learner, share, top)


def test_queries_are_the_last_whatever_the_support() -> None:
    seen: list[tuple[list[int], list[int]]] = []

    class Watched(Alone):
        def support_and_query(self, client: Any, generator: Any = None) -> Any:
            support, queries = super().support_and_query(client, generator)
            seen.append((support.slice(0, 99)[0][:, 0].int().tolist(), queries.slice(0, 99)[0][:, 0].int().tolist()))
            return support, queries

    x, y = np.arange(10, dtype=np.float32)[:, None], np.arange(10) % 2
    data = replace(from_clients([(x, y)] * 10, test=(x, y)), time_ordered=True)
    for support, share, expected in (
        (0.8, 0.2, (list(range(8)), [8, 9])),
        (0.05, 0.2, ([0], [8, 9])),
        (0.8, 0.5, (list(range(8)), [8, 9])),  # never what the support has
        (0.5, 0.01, (list(range(5)), [9])),  # never nothing
    ):
        seen.clear()
        fewer.run(Watched(support_fraction=support, query_fraction=share), data, model="logistic")
        assert seen and all(each == expected for each in seen)


# --- learners -------------------------------------------------------------------------------------------------


def test_naive_bayes_against_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(60, 4)), draw.choice([0, 1, 3], size=60)
    x[:, 1] *= 3
    x[y == 3] += 1
    queries = draw.normal(size=(20, 4))
    theirs = GaussianNB(var_smoothing=0.05).fit(x, y).predict_log_proba(queries)
    scores = NaiveBayes(torch.from_numpy(x), torch.from_numpy(y), 5, 0.05)(torch.from_numpy(queries))
    mine = scores[:, [0, 1, 3]].log_softmax(1).numpy()
    assert np.allclose(mine, theirs, atol=1e-8)
    assert torch.isfinite(scores).all() and (scores[:, [2, 4]].amax(1) < scores[:, [0, 1, 3]].amin(1)).all()


def test_naive_bayes_of_one_sample_knows_one_class() -> None:
    net = NaiveBayes(torch.ones(1, 3), torch.tensor([2]), 4, 0.1)
    assert net(torch.randn(5, 3)).argmax(1).tolist() == [2] * 5


def test_most_and_last_used_by_hand() -> None:
    labels = torch.tensor([1, 0, 0, 2, 1])
    assert MostUsed(labels, 4)(torch.zeros(2, 1)).exp().round().tolist() == [[3, 3, 2, 1]] * 2
    assert recency_scores(labels, 2, 4).tolist() == [[2, 1, 0, 0], [3, 1, 0, 0], [3, 1, 4, 0]]


def test_a_net_alone_is_descent_from_the_initial_one() -> None:
    raw = per_user(generate_usage(users=12, records=20), own_classes=True)
    data = federate(raw, partition="natural")
    common: dict[str, Any] = {"support_fraction": 0.8, "query_fraction": 0.2}
    own_classes = fewer.run(Alone(local_steps=7, lr=0.3, **common), data, model="logistic", seed=1).history[-1]
    # FedAvg of no rate to speak of leaves the initial model as it is; fine-tuned, it is a net alone
    still = FedAvgMeta(rounds=1, lr=1e-12, adapt_steps=7, adapt_lr=0.3, **common)
    assert own_classes["loss"] == pytest.approx(
        fewer.run(still, data, model="logistic", seed=1).history[-1]["loss"], abs=1e-6
    )
    assert own_classes["up"] == own_classes["down"] == 0
    few = fewer.run(Alone(local_steps=6, lr=0.3, **common), data, model="logistic", seed=1).history[-1]
    assert abs(own_classes["loss"] - few["loss"]) > 1e-4


def test_what_each_learner_chooses() -> None:
    assert Alone().search_space().keys() == {"lr"} and Alone(learner="naive-bayes").search_space().keys() == {
        "smoothing"
    }
    assert not Alone(learner="most-used").search_space() and not Alone(learner="last-used").search_space()


def test_a_learner_without_a_net_and_without_time_says_so(tmp_path: Path) -> None:
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


def test_a_net_alone_is_written_for_new_data() -> None:
    x, y = np.eye(6, 2, dtype=np.float32), np.array([0, 1] * 3)
    result = fewer.run(Alone(local_steps=3), from_clients([(x, y)] * 10, test=(x, y)), model="logistic")
    first = LogisticRegression((2,), 2)
    first.load_state_dict(result.task.initial_weights(0))
    assert not torch.equal(get_weights(result.adapt(x, y))["head.weight"], get_weights(first)["head.weight"])


# --- the table ------------------------------------------------------------------------------------------------


def test_rows_of_a_recipe_may_differ_in_net_and_data() -> None:
    plan = recipes.load_recipe("fedmeta/table3")
    for quick, options in ((False, {"items": "genres", "max_items": 40, "min_records": 100}), (True, {})):
        found = dict(zip([r.name for r in plan.row], recipes.row_settings(plan.column[3], plan, quick), strict=True))
        mixed, meta, alone = found["MIXED: NN, tuned"], found["META: MAML + NN, tuned"], found["SELF: MRU"]
        assert mixed["data_options"] == options and meta["data_options"] == alone["data_options"] == {
            **options,
            "own_classes": True,
        }
        assert mixed["model"] == meta["model"] == "mlp" and alone["model"] == "logistic" and alone["rounds"] == 1
        assert all(
            each["method_options"]["top_k"] == 4 and each["method_options"]["support_fraction"] == 0.05
            for each in found.values()
        )


def test_local_classes_beat_guessing_on_usage() -> None:
    groups = split_clients(40, seed=0)
    data: ArrayData = fewer.data.load("usage", partition="natural", data_options={"own_classes": True})
    set_: dict[str, Any] = {"support_fraction": 0.8, "query_fraction": 0.2}
    result = fewer.run(Alone(lr=0.3, **set_), data, model="logistic")
    assert result.metrics["clients"].keys() == {str(client) for client in groups.test}
    assert result.accuracy > 1.5 / len(data.class_names)
