"""Few-shot methods: tasks of novel classes, the choice of the best model, wrong data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fewer
from fewer.data import ArrayData, RawDataset, federate
from fewer.data.episodes import Episode
from fewer.errors import SettingError
from fewer.learning.logistic import logistic_regression
from fewer.methods import fewshot
from fewer.methods.f2l import F2L
from fewer.methods.fedfsl import FedFSL
from fewer.methods.fewshot import CURRENT, FewShot
from fewer.methods.fine_tuned import resize_head
from fewer.methods.fl_maml import FLMAML, LocalMAML
from fewer.methods.fl_proto import FLProto, LocalProto
from fewer.models import Weights
from fewer.runs.experiment import warn_once
from fewer.runtime import Clients
from tests.helpers import call
from tests.methods.f2l_harness import (
    BASE,
    FAST,
    FEATURES,
    NOVEL,
    QUERIES,
    SHOT,
    VALIDATION,
    WAY,
    make_client,
    make_clusters,
    make_data,
    net,
    random_tensor,
    run,
)

# --- behavior ---------------------------------------------------------------------------------------------------


BASELINES: list[type[FewShot]] = [FLMAML, FLProto, FedFSL, LocalMAML, LocalProto]


@pytest.mark.parametrize("kind", [F2L, *BASELINES])
def test_every_method_learns_to_classify_novel_classes(kind: type[FewShot], data: ArrayData) -> None:
    settings = {**FAST, "rounds": 6, "tasks": 8, "lr": 0.01, "test_tasks": 40}
    if "fine_tune_lr" in kind.model_fields:
        settings["fine_tune_lr"] = 0.3
    result = run(kind(**settings), data)
    assert result.accuracy > 0.55, result.accuracy  # chance is a third
    assert result.metrics["tasks"] == 40 and result.metrics["absent"] == 0
    groups = result.metrics["groups"]
    assert len(groups) == 40 and sum(groups) / 40 == pytest.approx(result.accuracy)
    assert result.metrics["tasks_ci95"] == pytest.approx(2.022691 * np.std(groups, ddof=1) / 40**0.5)  # t(39)
    assert result.metrics["best_round"] in (2, 4, 6) and set(result.metrics["clients"]) == {"0", "1", "2", "3"}


@pytest.mark.parametrize("kind", [F2L, FLMAML, LocalProto])
def test_pool_and_resume_give_the_same_result(kind: type[FewShot], data: ArrayData, tmp_path: Path) -> None:
    method = kind(**FAST | {"rounds": 4, "validate_every": 1})
    uninterrupted = run(method, data, out=tmp_path / "uninterrupted")
    pool = run(method, data, runtime="pool", workers=2)

    class Stop(Exception):
        pass

    class Interrupt(fewer.Callback):
        def on_answer(self, run: fewer.Run, answered: int, asked: int) -> None:
            if run.round == 3 and answered == 3:
                raise Stop

    with pytest.raises(Stop):
        run(method, data, out=tmp_path / "interrupted", callbacks=[Interrupt()])
    resumed = fewer.resume(tmp_path / "interrupted", method=method, data=data, model=net)
    for other in (pool, resumed):
        assert other.metrics["accuracy"] == uninterrupted.metrics["accuracy"]
        assert other.metrics["best_round"] == uninterrupted.metrics["best_round"]
        assert other.state.best_model.keys() == uninterrupted.state.best_model.keys()
        assert all(
            torch.equal(tensor, uninterrupted.state.best_model[name]) for name, tensor in other.state.best_model.items()
        )


def test_the_best_server_model_is_evaluated_with_the_client_models_of_its_round(
    data: ArrayData, tmp_path: Path
) -> None:
    class Worse(F2L):
        """Ruins all models after round 2, so the evaluated model must come from round 2."""

        def fit(self, client: Any, model: Weights) -> Weights:
            sent = super().fit(client, model)
            if client.round <= 2:
                return sent
            client.store.put(
                CURRENT, {**client.store.get(CURRENT), "weights": self._noise(client.store.get(CURRENT)["weights"])}
            )
            return self._noise(sent)

        def _noise(self, weights: Weights) -> Weights:
            return {name: torch.randn_like(tensor) * 3 for name, tensor in weights.items()}

    settings = FAST | {"tasks": 8, "lr": 0.01, "fine_tune_lr": 0.3, "test_tasks": 40}
    ruined = run(Worse(**settings, rounds=4), data, out=tmp_path / "ruined")
    two_rounds = run(F2L(**settings, rounds=2), data)
    # With one candidate there is no validation.
    assert two_rounds.metrics["best_round"] == 0 and two_rounds.metrics["validation_accuracy"] is None
    assert ruined.metrics["best_round"] == 2
    assert ruined.metrics["accuracy"] == two_rounds.metrics["accuracy"]
    assert (
        ruined.metrics["client"] == two_rounds.metrics["client"]
        and ruined.metrics["server"] == two_rounds.metrics["server"]
    )


def test_the_chosen_predictor_gives_the_accuracy(data: ArrayData) -> None:
    client_model, server_model = (
        run(F2L(**FAST, rounds=2, predictor=predictor), data).metrics for predictor in ("client", "server")
    )
    assert client_model["accuracy"] == client_model["client"] and server_model["accuracy"] == server_model["server"]
    assert client_model["server"] == server_model["server"]  # the same tasks, the same models


def test_tasks_are_the_same_for_all_methods_and_of_the_right_classes(data: ArrayData) -> None:
    seen: dict[str, list[tuple[Any, ...]]] = {}

    class RecordingF2L(F2L):
        def predict(self, solver: Any, task: Episode) -> dict[str, Tensor]:
            seen.setdefault(self.name, []).append((*task.classes.tolist(), float(task.query_x.sum())))
            return super().predict(solver, task)

    class RecordingProto(FLProto):
        def predict(self, solver: Any, task: Episode) -> dict[str, Tensor]:
            seen.setdefault(self.name, []).append((*task.classes.tolist(), float(task.query_x.sum())))
            return super().predict(solver, task)

    for kind in (RecordingF2L, RecordingProto):
        run(kind(**FAST | {"validate_every": 1}, rounds=2), data)
    first, second = seen.values()
    assert first == second and first[:8] == first[8:16] and len(first) == 24
    classes = [{c for *classes, _ in part for c in classes} for part in (first[:16], first[16:])]
    assert classes[0] <= set(range(BASE, BASE + VALIDATION))
    assert classes[1] <= set(range(BASE + VALIDATION, BASE + VALIDATION + NOVEL))


@pytest.mark.parametrize("kind", [F2L, *BASELINES])
@pytest.mark.parametrize("zero_head", [True, False])
def test_training_tasks_have_their_own_size(
    kind: type[FewShot], zero_head: bool, data: ArrayData, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[tuple[int, ...]] = []
    sample = fewshot.sample_episode  # type: ignore[attr-defined]

    def spy(samples: Any, *size: Any) -> Episode:
        sizes.append(size[:3])
        return sample(samples, *size)

    monkeypatch.setattr(fewshot, "sample_episode", spy)
    head = {"zero_head": zero_head} if "zero_head" in kind.model_fields else {}
    own_size = {"train_way": 5, "train_shot": 1, "train_queries": 3}
    result = run(kind(**FAST, **own_size, **head, rounds=2), data)
    assert (
        set(sizes) == {(5, 1, 3), (WAY, SHOT, QUERIES)} and sizes[0] == (5, 1, 3) and sizes[-1] == (WAY, SHOT, QUERIES)
    )
    assert 0 < result.accuracy <= 1


def test_a_learned_head_needs_as_many_training_classes_as_a_novel_task() -> None:
    with pytest.raises(SettingError, match="a learned head has train_way = 2 classes, and a novel task way = 3; raise"):
        FLMAML(way=3, train_way=2)
    assert FLMAML(way=3, train_way=2, zero_head=True).train_way == 2
    weights = {
        "encoder.w": torch.ones(4),
        "head.weight": torch.arange(8.0).reshape(4, 2),
        "head.bias": torch.arange(4.0),
    }
    smaller, larger = resize_head(weights, 3), resize_head(weights, 5)
    assert smaller["head.weight"].tolist() == [[0, 1], [2, 3], [4, 5]] and smaller["head.bias"].tolist() == [0, 1, 2]
    assert larger["head.weight"].tolist()[3:] == [[6, 7], [0, 0]] and larger["head.bias"].tolist() == [0, 1, 2, 3, 0]
    assert smaller["encoder.w"] is weights["encoder.w"]


def test_a_tuning_trial_uses_only_validation_classes(data: ArrayData) -> None:
    method, same = F2L(**FAST | {"rounds": 2, "validate_every": 1}).tuning_split(data, 0.2, 0)
    assert same is data
    scores = run(method, data).metrics
    assert scores["accuracy"] == scores["validation_accuracy"]


def test_with_one_candidate_validation_is_skipped(data: ArrayData, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[str] = []
    original = FewShot.ask_task_counts

    def spy(*args: Any, **kwargs: Any) -> Any:
        parts.append(args[3])
        return original(*args, **kwargs)

    monkeypatch.setattr(FewShot, "ask_task_counts", spy)
    for interval, expected in ((2, ["test"]), (1, ["validation", "validation", "test"])):
        parts.clear()
        run(FLProto(**FAST | {"validate_every": interval}, rounds=2), data)
        assert parts == expected


def test_a_client_without_state_in_the_best_round_has_no_best_state(data: ArrayData, tmp_path: Path) -> None:
    method, client = F2L(**FAST), make_client(data, tmp_path)
    method.mark_best(client)
    client.store.put(CURRENT, {"later": torch.ones(1)})
    assert method.load_private(client, best=True) is None and method.load_private(client, best=False) is not None


def test_dropped_clients_do_not_count_as_clients_without_validation_classes(
    data: ArrayData, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Clients._draw_fault
    monkeypatch.setattr(
        Clients,
        "_draw_fault",
        lambda self, client, name: "drop" if name == "answer_tasks" else original(self, client, name),
    )
    with pytest.raises(fewer.errors.QuorumLost, match="0 of 4 clients answered.*4 dropped"):
        run(FLProto(**FAST, rounds=4), data)


def test_rows_of_a_comparison_are_measured_in_tasks(tmp_path: Path) -> None:
    data_settings: dict[str, Any] = {
        "data": "digits",
        "data_options": {"split": "4/3/3"},
        "clients": 3,
        "partition": "iid",
        "rounds": 1,
    }
    settings = {**data_settings, "method_options": {"way": 3, "queries": 2, "tasks": 1, "test_tasks": 6}}
    comparison = fewer.compare(["fl-proto", "local-proto"], seeds=2, out=tmp_path, **settings)
    for row in comparison.rows:
        assert (row.groups, row.units) == (12, "tasks") and [len(accuracies) for accuracies in row.unit_accuracies] == [
            6,
            6,
        ]


def test_a_client_with_too_few_classes_is_skipped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    raw = make_clusters()
    client_ids = np.arange(len(raw.y)) % 3
    client_ids[(raw.y < BASE) & (raw.y >= WAY - 1) & (client_ids == 2)] = 0  # client 2 has two base classes
    uneven = federate(
        RawDataset(raw.x, raw.y, client_ids=client_ids, split=raw.split), partition="natural", name="uneven"
    )
    warn_once.cache_clear()
    result = run(F2L(**FAST, rounds=2), uneven)
    assert result.metrics["absent"] == 1 and result.metrics["tasks"] == 9
    assert caplog.messages == [
        "f2l: skipped client 2: base: 3-way 2-shot needs 3 classes with 2 + 2 samples each, got 2"
    ]
    with pytest.raises(fewer.errors.QuorumLost, match="needs 3 classes"):
        run(F2L(**FAST | {"shot": 40}, rounds=1), uneven)


def test_without_validation_classes_the_last_model_is_used_and_novel_classes_are_required() -> None:
    raw = make_clusters()
    few_validation = federate(
        RawDataset(raw.x, raw.y, split=(BASE, 2, VALIDATION - 2 + NOVEL)), clients=2, partition="iid"
    )
    assert run(FLProto(**FAST, rounds=4), few_validation).metrics["best_round"] == 4
    few_novel = federate(RawDataset(raw.x, raw.y, split=(BASE, VALIDATION + NOVEL - 2, 2)), clients=2, partition="iid")
    with pytest.raises(SettingError, match="no client has 3 novel classes with 2 \\+ 2 samples"):
        run(FLProto(**FAST, rounds=1), few_novel)


def test_clients_send_the_encoder_or_encoder_and_head(data: ArrayData) -> None:
    """The encoder has 8 × 8 + 8 weights, the head none, 8 × N + N or 8 × |C_b| + |C_b|."""
    encoder = 8 * FEATURES + FEATURES
    for kind, head in ((FLProto, 0), (FLMAML, FEATURES * WAY + WAY), (F2L, FEATURES * BASE + BASE)):
        state = kind(**FAST).init(make_client(data, Path("/nowhere")).task, 0)
        assert sum(tensor.numel() for tensor in state.model.values()) == encoder + head
    local = run(LocalProto(**FAST, rounds=1), data)
    assert not local.state.model and local.metrics["up"] < 4 * 4 * 2000


def test_logistic_regression_separates_clusters() -> None:
    y = torch.arange(3).repeat(4)
    features = F.one_hot(y, 3) * 3.0 + 0.1 * random_tensor(12, 3).float()
    assert torch.equal(logistic_regression(features[:6], y[:6], features[6:]), y[6:])


def test_logistic_regression_matches_scikit_learn() -> None:
    from sklearn.linear_model import LogisticRegression

    draw = torch.Generator().manual_seed(0)
    support, queries, y = (
        torch.randn(12, 6, generator=draw),
        torch.randn(60, 6, generator=draw),
        torch.arange(3).repeat(4),
    )
    expected = LogisticRegression(tol=1e-8).fit(F.normalize(support, dim=1), y).predict(F.normalize(queries, dim=1))
    assert (logistic_regression(support, y, queries).numpy() == expected).mean() > 0.97


# --- data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [F2L, FLMAML, FedFSL, LocalMAML, FLProto])
def test_text_methods_solve_tasks_of_novel_classes(kind: type[FewShot]) -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(BASE + VALIDATION + NOVEL), 16)
    texts = [" ".join([f"word{label}", *(f"w{n}" for n in rng.integers(20, size=4))]) for label in labels]
    text = federate(
        RawDataset(texts, labels, split=(BASE, VALIDATION, NOVEL)), clients=2, partition="iid", max_length=5
    )
    result = fewer.run(kind(**FAST, rounds=1), text, model="text-bilstm", model_options={"width": 8})
    assert result.metrics["tasks"] == 8


def test_methods_and_data_that_do_not_match_are_rejected(data: ArrayData) -> None:
    with pytest.raises(SettingError, match="split=BASE/VALIDATION/NOVEL"):
        fewer.run("f2l", "digits", rounds=1)
    with pytest.raises(SettingError, match="novel classes, which fedavg cannot predict"):
        fewer.run("fedavg", data, model=net, rounds=1)
    with pytest.raises(SettingError, match="split by classes"):
        make_data(validation=0.1)
    with pytest.raises(SettingError, match="split and unseen"):
        fewer.data.load("digits", data_options={"split": "4/3/3", "unseen_classes": "1"})


def test_the_command_line_runs_f2l_and_warns_about_shot_1(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    args = (
        "--data",
        "digits",
        "--data-option",
        "split=4/3/3",
        "--clients",
        "3",
        "--partition",
        "iid",
        "--rounds",
        "1",
    )
    options = ("-o", "way=3", "-o", "tasks=1", "-o", "test_tasks=3", "--out", str(tmp_path / "run"))
    output = call("run", "f2l", *args, *options).stdout  # writes the report, too
    assert "Mean over 3 tasks" in output and "deploy" not in output
    inspected = call("data", "inspect", *args[1:8], "--out", tmp_path / "pictures")
    assert "classes                 4" in inspected.stdout and (tmp_path / "pictures/digits-examples.png").exists()
    assert len(caplog.messages) == 1 and "mutual information within a class is 0" in caplog.text
    # The server model has the base classes.
    assert fewer.open_run(tmp_path / "run").model(torch.zeros(1, 1, 8, 8)).shape == (1, 4)
