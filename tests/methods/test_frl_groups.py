"""FRL on groups of new classes, edge cases, and the same numbers in every runtime."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fewer
from fewer.data import from_clients
from fewer.errors import DataError, FewerError, SettingError
from fewer.experiments.tune import tune_experiment
from fewer.learning import Counts
from fewer.learning.evaluate import MAX_LOSS, count_correct
from fewer.learning.group_model import GroupModel, use_batch_statistics
from fewer.methods import Method, Scores
from fewer.methods.few_rounds import valid_answers
from fewer.methods.frl import FRL, PreparingMethod
from fewer.methods.frl_baselines import FRLMetaHead, FRLPerFedAvg, FRLScratch, FRLWarmStart
from fewer.methods.groups import TUNING_GROUPS
from fewer.models import EncoderHead
from fewer.runs.experiment import build_experiment, parse_settings
from fewer.runs.inference import deploy
from fewer.runtime import Absent, Answer, Clients
from tests.helpers import Stop, Stopping
from tests.methods.frl_harness import GROUPS, PAIRS, SMALL, UNSEEN, Small, federation, initial_net, load_digits

# --- groups -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", ["iid", "shards"])
def test_groups_have_the_right_classes_and_partitions(partition: Any) -> None:
    data = load_digits()
    method = FRL(**{**GROUPS, "samples_per_class": 16, "group_size": 6}, partition=partition)
    assert data.unseen_classes == {6, 7, 8, 9}
    groups = [method.draw_group(data.test, [6, 7, 8, 9], 2, 3, number) for number in range(8)]
    for group in groups:
        labels = {int(label) for support in group.supports for label in support.labels}
        assert len(labels) == 3 and len(labels & {6, 7, 8, 9}) == 2
        rows = [row for support in group.supports for row in support.rows.tolist()]  # type: ignore[union-attr]
        queries = group.queries.rows.tolist()  # type: ignore[union-attr]
        assert len(set(rows)) + len(set(queries)) == 3 * 16 and not set(rows) & set(queries)
        assert queries != sorted(queries)
        class_counts = [len(set(support.labels.tolist())) for support in group.supports]
        assert max(class_counts) <= 2 if partition == "shards" else max(class_counts) == 3
        assert len(group.supports) == 6
    assert len({tuple(sorted(set(group.queries.labels.tolist()))) for group in groups}) > 1
    other_method = FRLScratch(**{**GROUPS, "samples_per_class": 16, "group_size": 6}, partition=partition)
    other_rows = other_method.draw_group(data.test, [6, 7, 8, 9], 2, 3, 5).queries.rows
    assert torch.equal(other_rows, groups[5].queries.rows)  # type: ignore[arg-type]


def test_by_default_groups_use_all_unseen_classes() -> None:
    class Watched(FRLScratch):
        def draw_group(self, samples: Any, unseen: Any, num_unseen: int, seed: int, number: int) -> Any:
            assert (sorted(unseen), num_unseen) == ([6, 7, 8, 9], 4)
            return super().draw_group(samples, unseen, num_unseen, seed, number)

    scores = fewer.run(Watched(**{**GROUPS, "way": 5}), load_digits()).metrics
    assert len(scores["groups"]) == 3 and scores["accuracy"] == pytest.approx(np.mean(scores["groups"]))
    for wrong in ({"way": 11}, {"unseen_classes": 5, "way": 5}):
        with pytest.raises(SettingError, match="the test data has 4 and 6"):
            fewer.run(FRLScratch(**{**GROUPS, **wrong}), load_digits())


def test_support_fraction_sets_the_share_of_each_class() -> None:
    data = load_digits()
    options = {**GROUPS, "samples_per_class": 16, "group_size": 1, "partition": "iid", "support_fraction": 0.25}
    for number in range(3):
        group = FRL(**options).draw_group(data.test, [6, 7, 8, 9], 3, 0, number)
        assert sorted(torch.bincount(group.supports[0].labels).tolist())[-3:] == [4, 4, 4]
    client: Any = SimpleNamespace(train=federation().client(2).train, time_ordered=False, seed=0, id=2, round=1)
    support, queries = FRL(support_fraction=0.25).support_and_query(client)
    assert (len(support), len(queries)) == (2, 6)


def test_accuracy_is_the_mean_over_groups() -> None:
    class Watched(FRLScratch):
        def evaluate_groups(self, *_: Any) -> Any:
            return [Counts(1, 2, 3.0), Counts(3, 3, 1.0)]

    scores = Watched().evaluate(None, None, None)  # type: ignore[arg-type]
    assert scores == Scores({"accuracy": 0.75, "loss": 0.8}, "groups", [0.5, 1.0])
    assert scores.as_dict() == {"accuracy": 0.75, "loss": 0.8, "unit": "groups", "groups": [0.5, 1.0]}


def test_deploy_rounds_sets_the_number_of_rounds_in_a_group(tmp_path: Any) -> None:
    seeds, rounds = [], []

    class Watched(FRLScratch):
        def fit_support(self, net: Any, support: Any, prototypes: Any, upload: bool, generator: Any) -> Any:
            seeds.append(generator.initial_seed())
            return super().fit_support(net, support, prototypes, upload, generator)

        def aggregate(self, group: Any, updates: Any, *aggregation: Any) -> Any:
            rounds.append(group.rounds_done)
            return super().aggregate(group, updates, *aggregation)

    fewer.run(
        Watched(deploy_rounds=2, **{**SMALL, "eval_groups": 2}), federation(), model=initial_net(), out=tmp_path / "run"
    )
    assert rounds == [0, 1, 0, 1] and len(set(seeds)) == 8
    fewer.run(FRLScratch(deploy_rounds=2, **SMALL), federation(), model=initial_net(), out=tmp_path / "other")
    assert deploy(tmp_path / "other", federation(), model=Small).method.rounds == 2


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"way": 2, "unseen_classes": 3}, "unseen_classes must be at most way = 2, got 3"),
        (
            {"samples_per_class": 1, "partition": "iid"},
            "4 members and 3 classes has no queries: no member has two samples",
        ),
        ({"samples_per_class": 1}, "8 shards need at least 8 samples, got 3"),
        ({"group_size": 300}, "600 shards need at least 600 samples, got 24"),
    ],
    ids=str,
)
def test_impossible_groups_are_reported_before_the_first_round(wrong: dict[str, Any], text: str) -> None:
    class Never(FRLScratch):
        def round(self, state: Any, clients: Clients) -> Any:
            raise AssertionError

    with pytest.raises(SettingError, match=text):
        fewer.run(Never(**{**GROUPS, **wrong}), load_digits())


def test_a_trial_with_impossible_groups_is_reported() -> None:
    experiment = build_experiment(
        parse_settings({"method": "frl-scratch"}), FRLScratch(**{**GROUPS, "unseen_classes": 3}), load_digits()
    )
    with pytest.raises(SettingError, match="a group needs 3 unseen and 0 seen classes, but the test data has 1 and 5"):
        tune_experiment(experiment, 1)


def test_diverged_groups_are_logged_and_count_as_wrong(caplog: pytest.LogCaptureFixture) -> None:
    scores = fewer.run(FRLScratch(lr=1e30, head="linear", **GROUPS), load_digits()).metrics
    assert scores["groups"] == [0, 0, 0]
    assert "frl-scratch: the models of 3 of 3 groups diverged" in caplog.text


def test_a_class_with_probability_0_adds_no_loss() -> None:
    scores = torch.tensor([[1.0, -torch.inf, 2.0], [3.0, -torch.inf, 1.0]])
    second = count_correct(scores[1:], torch.tensor([0]))
    assert count_correct(scores, torch.tensor([1, 0])) == (1, 2, second.loss) and 0 < second.loss < 1
    assert count_correct(scores, torch.tensor([1, 1])) == (0, 2, 0.0)
    assert count_correct(scores * torch.nan, torch.tensor([1, 0])).loss == MAX_LOSS


def test_a_trial_never_sees_the_test_samples() -> None:
    data = load_digits()
    method, trial_data = FRL(**{**GROUPS, "eval_groups": 100}).tuning_split(data, 0.2, 3)
    assert (
        trial_data.unseen_classes
        and not trial_data.unseen_classes & data.unseen_classes
        and not set(trial_data.test.labels.tolist()) & data.unseen_classes
    )
    assert trial_data.test.x is data.source.x and trial_data.test.rows is not None
    assert set(trial_data.test.rows.tolist()) <= set(data.train.rows.tolist())
    assert isinstance(method, FRL) and method.eval_groups == TUNING_GROUPS < 100


def test_trials_are_evaluated_on_held_out_training_classes() -> None:
    data = load_digits()
    trial_data = data.hold_out_classes(0.2, 3)
    assert len(trial_data.unseen_classes) == 1 and trial_data.unseen_classes < set(range(6))
    trained = {int(label) for client in range(12) for label in trial_data.client(client).train.labels}
    assert trained == set(range(6)) - trial_data.unseen_classes and set(trial_data.test.labels.tolist()) == set(
        range(6)
    )
    before, after = (sum(source.size(client) for client in range(12)) for source in (data, trial_data))
    assert after + len(trial_data.test) == before
    assert len(trial_data.client(0).test) == len(data.hold_out(0.2, 3).client(0).test)
    assert list(FRLScratch(head="linear").search_space()["lr"]) == pytest.approx([0.01, 0.03, 0.1])
    assert FRL(head="distance").search_space() == {"meta_lr": (0.003, 0.01, 0.03), "lr": (0.001, 0.003, 0.01)}
    assert FRLScratch(temperature=30).search_space()["lr"] == pytest.approx((0.03, 0.09, 0.3))
    assert FRL().search_space()["gamma"] == (0.5, 5 / 6) and FRL(optimizer="sgd").search_space()["meta_lr"] == (
        0.1,
        0.3,
        1.0,
    )
    experiment = build_experiment(
        parse_settings({"method": "frl-scratch", "method_options": GROUPS}), FRLScratch(**GROUPS), data
    )
    tuned, trials = tune_experiment(experiment, 2)
    assert len(trials) == 2 and tuned.method.eval_groups == 3 and tuned.data is experiment.data  # type: ignore[attr-defined]


# --- edge cases -------------------------------------------------------------------------------------------------


EMPTY = np.zeros((0, 2), np.float32), np.zeros(0, np.int64)
EDGE_CASES = {
    "fewer clients than K": PAIRS[:3],
    "one class each": [(x[y == y[0]], y[y == y[0]]) for x, y in PAIRS],
    "all the same class": [(x, np.zeros_like(y)) for x, y in PAIRS],
    "one sample, and nothing": [*PAIRS, (PAIRS[0][0][:1], PAIRS[0][1][:1]), EMPTY],
    "one client": PAIRS[:1],
}


@pytest.mark.parametrize("case", EDGE_CASES)
@pytest.mark.parametrize("head", ["linear", "distance", "gpal", "fedncm", "fedcof"])
def test_a_round_survives_unusual_groups(head: Any, case: str, tmp_path: Path) -> None:
    pairs, options = EDGE_CASES[case], {"way": 2, "group_size": 2, "eval_groups": 1}
    methods: list[Method] = [FRL(rounds=4, head=head, **options), FRLPerFedAvg(rounds=1, head=head, **options)]
    for number, method in enumerate(methods if head == "gpal" else methods[:1]):
        run = tmp_path / str(number)
        result = fewer.run(method, from_clients(pairs, test=UNSEEN), model=initial_net(), out=run)
        assert all(torch.isfinite(tensor).all() for tensor in result.state.shared.values())
        events = (run / "events.jsonl").read_text()
        assert '"failed"' not in events
        if "nothing" in case:
            assert "no training data" in events and "no class with two samples" in events
        group = deploy(
            run, from_clients(pairs, test=UNSEEN), model=Small, method_options={"keep_best": 1} if number else {}
        )
        classes = sorted({int(label) for _, y in pairs for label in y}) if not number else group.state.classes.tolist()
        assert group.state.classes.tolist() == classes
        scores = group.model(torch.zeros(1, 2))
        assert scores.shape == (1, 6) and torch.isfinite(scores[0, classes]).all()
        assert (scores[0, [label for label in range(6) if label not in classes]] == -torch.inf).all()


def test_invalid_answers_are_refused() -> None:
    class NoClients(Clients):
        def _deliver_calls(self, calls: Any) -> Any:
            return iter(())

    refused: list[Absent] = []
    kinds: set[str] = set()

    def record(absent: Absent, kind: str) -> None:
        refused.append(absent)
        kinds.add(kind)

    clients = NoClients(3, 0, on_absent=record)
    good = {"classes": torch.tensor([1, 4]), "means": torch.zeros(2, 3), "counts": torch.tensor([1, 2])}
    bad = [
        {**good, "classes": torch.tensor([4, 1])},
        {**good, "classes": torch.tensor([1, 1])},
        {**good, "classes": torch.tensor([-1, 1])},
        {**good, "classes": torch.tensor([1, 5])},
        {**good, "counts": torch.tensor([0, 1])},
        {**good, "means": torch.zeros(1, 3)},
    ]
    answers = [Answer(number, fields) for number, fields in enumerate([*bad, good])]
    assert [answer.client for answer in valid_answers(answers, clients, 5, "hold_out_classes")] == [6]
    assert (
        [absence.client for absence in refused] == [0, 1, 2, 3, 4, 5]
        and refused[0].reason == "refused"
        and kinds == {"hold_out_classes"}
    )
    with pytest.raises(FewerError, match="no client sent valid classes and prototypes"):
        valid_answers(answers[:2], clients, 5, "hold_out_classes")


# --- reproducibility --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        FRL(rounds=8, cohort=4, **GROUPS),
        FRL(rounds=8, cohort=4, head="linear", codec="float16", **GROUPS),
        FRL(rounds=8, cohort=4, head="distance", query_prototypes="support", queries=3, **GROUPS),
        FRLMetaHead(rounds=8, cohort=4, **GROUPS),
        FRLWarmStart(rounds=8, cohort=4, warmup_rounds=4, head="linear", **GROUPS),
        FRLPerFedAvg(rounds=4, cohort=4, keep_best=2, **GROUPS),
    ],
    ids=lambda method: f"{method.name} {method.head}",
)
def test_pool_and_resume_within_an_episode_give_the_same_numbers(method: PreparingMethod, tmp_path: Path) -> None:
    data = load_digits()
    expected = fewer.run(method, data, seed=2)
    with pytest.raises(Stop):
        fewer.run(method, data, seed=2, out=tmp_path / "run", callbacks=[Stopping()])
    for other in (fewer.run(method, data, seed=2, runtime="pool"), fewer.resume(tmp_path / "run")):
        assert [{**h, "seconds": 0} for h in other.history] == [{**h, "seconds": 0} for h in expected.history]
        weights, expected_weights = other.state.shared, expected.state.shared
        assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)
    evaluated = [line["round"] for line in expected.history if "accuracy" in line]
    warmup = range(1, getattr(method, "warmup_rounds", 0) + 1)
    assert evaluated == ([*warmup, *range(len(warmup) + 4, 9, 4)] if isinstance(method, FRL) else [1, 2, 3, 4])


def test_batch_norm_predicts_with_batch_statistics() -> None:
    class Normed(EncoderHead):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)), 3, 6)

    torch.manual_seed(0)
    net = Normed()
    group_model = GroupModel(net, torch.tensor([0, 4]), torch.randn(2, 3), 6).eval()
    x = torch.randn(16, 2)
    assert torch.allclose(group_model(x), group_model(3 * x + 5), atol=1e-2)  # running statistics are not used
    assert net.encoder[1].training and not net.encoder[2].training  # type: ignore[index]
    with pytest.raises(DataError, match="batch norm needs at least two samples to predict; prepare with --norm group"):
        group_model(x[:1])
    use_batch_statistics(net.train())
    assert net.encoder[1].training and not net.training  # type: ignore[index]
    state = fewer.run(FRL(rounds=4, cohort=5, way=2, group_size=2, eval_groups=1), federation(), model=Normed).state
    assert int(state.initial["encoder.1.num_batches_tracked"]) > 0  # running statistics are averaged, but not used
