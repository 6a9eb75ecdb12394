"""Methods evaluated on new clients: their samples, adaptation, top-k accuracy, edge cases."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.nn import functional as F

import fewer
from fewer.data import from_clients
from fewer.data.episodes import split_clients
from fewer.errors import DataError, SettingError
from fewer.experiments.tune import tune_experiment
from fewer.learning.adapt import adapt_weights, trainable_weights
from fewer.learning.evaluate import MAX_LOSS, count_correct
from fewer.methods.alone import Alone
from fewer.methods.fedavg_meta import FedAvgMeta
from fewer.methods.fedmeta import ALPHA, FedMeta
from fewer.methods.new_clients import NewClients, fairness
from fewer.methods.per_fedavg import PerFedAvg
from fewer.methods.reptile import Reptile
from fewer.models import Weights
from fewer.models.objective import count_top_k
from fewer.runs.experiment import build_experiment, parse_settings
from fewer.runs.result import open_run
from tests.helpers import DIGITS, call
from tests.methods.fedmeta_harness import (
    FEATURES,
    GROUPS,
    PAIRS,
    SEED,
    Array,
    federation,
    linear,
    run_sgd,
    softmax_regression,
    support_and_query,
)

# --- evaluation clients and their samples -----------------------------------------------------------------------


def accuracy(
    w: Array, clients: Sequence[int], steps: int, lr: float, support_fraction: float
) -> tuple[float, dict[str, float]]:
    """Accuracy over all samples and by client, after adapting on the support set."""
    hits = {}
    for client in clients:
        support, (x, y) = support_and_query(client, support_fraction)
        adapted = run_sgd(w, [support] * steps, lr)
        hits[client] = (x @ adapted.T).argmax(axis=1) == y
    by_client = {str(client): float(client_hits.mean()) for client, client_hits in hits.items()}
    return float(np.concatenate(list(hits.values())).mean()), by_client


@pytest.mark.parametrize(("eval_clients", "steps"), [("new", 2), ("new", 0), ("validation", 2)])
def test_new_clients_are_evaluated_on_their_queries_after_adapting(eval_clients: Any, steps: int) -> None:
    pairs = [PAIRS[client % 10] for client in range(40)]
    groups = split_clients(40, seed=SEED)
    method = FedAvgMeta(rounds=1, adapt_steps=steps, adapt_lr=2.0, support_fraction=0.4, eval_clients=eval_clients)
    result = fewer.run(method, federation(pairs), model=linear(), seed=SEED)
    evaluated = groups.test if eval_clients == "new" else groups.validation
    w = result.state.model["weight"].double().numpy()
    pooled, by_client = accuracy(w, [client % 10 for client in evaluated], steps, 2.0, 0.4)
    assert result.metrics["clients"].keys() == {str(client) for client in evaluated}
    assert {str(int(client) % 10) for client in result.metrics["clients"]} == by_client.keys()
    if len(by_client) == len(evaluated):  # otherwise some clients have the same samples
        assert result.accuracy == pytest.approx(pooled)
    assert all(value == by_client[str(int(client) % 10)] for client, value in result.metrics["clients"].items())
    assert result.metrics["fairness"] == fairness(list(result.metrics["clients"].values()))


@pytest.mark.parametrize(
    ("algorithm", "adapt_steps"), [("maml", None), ("meta-sgd", None), ("meta-sgd", 3), ("maml", 0)]
)
def test_new_clients_adapt_with_the_learned_algorithm(algorithm: Any, adapt_steps: int | None) -> None:
    method = FedMeta(rounds=2, algorithm=algorithm, inner_steps=2, adapt_steps=adapt_steps, inner_lr=0.7, meta_lr=0.3)
    result = fewer.run(method, federation(), model=linear(), seed=SEED)
    phi = {name: tensor.double().numpy() for name, tensor in result.state.algorithm.items()}
    alpha = phi[ALPHA + "weight"] if algorithm == "meta-sgd" else 0.7
    total = count = 0.0
    for client in GROUPS.test:
        support, (x, y) = support_and_query(client, 0.2)
        w = phi["weight"]
        for _ in range(2 if adapt_steps is None else adapt_steps):
            w = w - alpha * softmax_regression(w, *support)[0]
        total += float(F.cross_entropy(torch.from_numpy(x @ w.T), torch.from_numpy(y), reduction="sum"))
        count += len(y)
    assert result.history[-1]["loss"] == pytest.approx(total / count, rel=1e-5)
    assert algorithm == "maml" or np.abs(alpha - 0.7).max() > 0.1


def test_only_training_clients_train_and_only_new_clients_are_evaluated(tmp_path: Path) -> None:
    fewer.run(FedMeta(rounds=3, cohort=4), federation(), model=linear(), seed=SEED, out=tmp_path / "run")
    lines = [line.split(",") for line in (tmp_path / "run/ledger.csv").read_text().splitlines()[1:]]
    trained = {int(line[1]) for line in lines if line[3] == "local_train"}
    assert trained and trained <= set(GROUPS.train)
    assert {int(line[1]) for line in lines if line[3].startswith("evaluate")} == set(GROUPS.test)


def test_trials_are_evaluated_on_validation_clients_only() -> None:
    seen: set[int] = set()

    class Watched(FedMeta):
        def eval_cohort_of(self, clients: fewer.Clients) -> list[int]:
            seen.update(cohort := super().eval_cohort_of(clients))
            return cohort

    experiment = build_experiment(
        parse_settings({"seed": SEED, "method": "fedmeta"}), Watched(rounds=1), federation(), linear()
    )
    tuned, trials = tune_experiment(experiment, 3)
    assert len(trials) == 3 and seen == set(GROUPS.validation)
    assert tuned.method.eval_clients == "new" and tuned.data is experiment.data  # type: ignore[attr-defined]


def test_adapt_lr_is_tuned_only_with_adapt_steps() -> None:
    assert FedAvgMeta(adapt_steps=0).search_space().keys() == {"lr"}
    assert FedAvgMeta(adapt_steps=1).search_space().keys() == {"lr", "adapt_lr"}


def test_support_and_queries_of_a_new_client_are_the_same_for_all_methods_and_rounds() -> None:
    drawn: dict[str, list[Any]] = {}

    def record_splits(kind: type[NewClients]) -> type[NewClients]:
        class Watched(kind):  # type: ignore[misc, valid-type]
            def support_and_query(self, client: Any, generator: Any = None) -> Any:
                parts = super().support_and_query(client, generator)
                if generator is None:
                    drawn.setdefault(f"{kind.__name__} {client.id}", []).append([part.rows.tolist() for part in parts])
                return parts

        return Watched

    data = from_clients(PAIRS, test=(PAIRS[0][0], PAIRS[0][1]))
    for kind in (FedMeta, FedAvgMeta):
        fewer.run(record_splits(kind)(rounds=2), data, model=linear(), seed=SEED)
    splits = [client_split for client_splits in drawn.values() for client_split in client_splits]
    assert len(splits) > 4 and all(client_split == splits[0] for client_split in splits)
    assert splits[0][0] != sorted(splits[0][0]) or len(splits[0][0]) == 1


def test_splits_change_in_training_and_are_fixed_for_new_clients() -> None:
    drawn: dict[tuple[int, int, bool], list[Any]] = {}

    class Watched(FedMeta):
        def support_and_query(self, client: Any, generator: Any = None) -> Any:
            parts: Any = super().support_and_query(client, generator)
            drawn.setdefault((client.seed, client.id, generator is not None), []).append(
                [part.rows.tolist() for part in parts]
            )
            return parts

    groups = {}
    for seed in (0, 1):
        x, y = np.zeros((30, FEATURES), np.float32), np.arange(30) % 2
        data = from_clients([(x, y)] * 20, test=(x, y))
        fewer.run(Watched(rounds=2, cohort=16), data, model=linear(), seed=seed)
        groups[seed] = split_clients(20, seed=seed)

    def support_rows(rows: Any, client: int) -> tuple[int, ...]:  # indices within the client
        assert sorted(rows[0] + rows[1]) == list(range(30 * client, 30 * client + 30)) and len(rows[0]) == 6
        return tuple(row - 30 * client for row in rows[0])

    for seed in (0, 1):
        for client in groups[seed].train:
            first, second = (support_rows(rows, client) for rows in drawn[seed, client, True])
            assert first != second
        for client in groups[seed].test:
            assert len({support_rows(rows, client) for rows in drawn[seed, client, False]}) == 1
    members: list[Any] = [
        SimpleNamespace(train=data.client(0).train, seed=number // 2, id=number % 2, time_ordered=False)
        for number in range(4)
    ]
    supports: list[Any] = [FedMeta().support_and_query(member)[0].rows for member in members]
    assert len({tuple(rows.tolist()) for rows in supports}) == 4  # one split per seed and client


def test_max_samples_limits_the_samples_of_a_client() -> None:
    sizes: list[int] = []

    class Watched(FedAvgMeta):
        def client_samples(self, client: Any) -> Any:
            sizes.append(len(samples := super().client_samples(client)))
            assert samples.rows is not None and samples.rows[[0, -1]].tolist() == client.train.rows[[0, -1]].tolist()
            return samples

    fewer.run(Watched(rounds=1, max_samples=6), federation(), model=linear(), seed=SEED)
    assert max(sizes) == 6 and min(sizes) == 5


EDGE_CASES = [
    *(FedMeta(rounds=2, cohort=32, algorithm=kind, inner_steps=2) for kind in ("maml", "fomaml", "meta-sgd")),
    FedMeta(rounds=2, cohort=32, local_steps=2, batch_size=3, queries=3, clip_norm=1.0),
    *(FedAvgMeta(rounds=2, cohort=32, local_steps=2, adapt_steps=steps) for steps in (0, 2)),
    FedAvgMeta(rounds=2, cohort=32, local_steps=2, optimizer="adam"),
    *(PerFedAvg(rounds=2, cohort=32, local_steps=2, first_order=flag) for flag in (False, True)),
    Reptile(rounds=2, cohort=32, local_steps=2),
    *(Alone(learner=kind) for kind in ("net", "most-used", "last-used", "naive-bayes")),
]


@pytest.mark.parametrize("eval_clients", ["new", "validation"])
@pytest.mark.parametrize("method", EDGE_CASES, ids=lambda method: method.name)
def test_runs_survive_clients_with_one_sample_one_class_or_no_data(
    method: NewClients, eval_clients: Any, tmp_path: Path
) -> None:
    pairs = [PAIRS[client % 10] for client in range(40)]
    groups = split_clients(40, seed=SEED)
    for group in groups:  # each group gets a client with one sample, an empty one and one with one class
        one_sample, empty, one_class = group[:3]
        pairs[one_sample] = (pairs[one_sample][0][:1], pairs[one_sample][1][:1])
        pairs[empty] = (np.zeros((0, FEATURES), np.float32), np.zeros(0, np.int64))
        pairs[one_class] = (pairs[one_class][0], np.zeros_like(pairs[one_class][1]))
    configured = method.model_copy(update={"eval_clients": eval_clients})
    result = fewer.run(configured, federation(pairs), model=linear(), seed=SEED, out=tmp_path)
    evaluated = groups.test if eval_clients == "new" else groups.validation
    assert result.metrics["clients"].keys() == {str(client) for client in evaluated[2:]}
    assert all(torch.isfinite(tensor).all() for tensor in result.state.shared.values())
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    reported = {(event["client"], event["detail"]) for event in events if event.get("reason") == "unable"}
    one_sample_error, empty_error = "support and query set need at least 2 samples, got 1", "no training data"
    expected = {(evaluated[0], one_sample_error), (evaluated[1], empty_error)}
    if not isinstance(method, Alone):
        expected.add((groups.train[1], empty_error))
    if isinstance(method, FedMeta):  # the other methods also train on one sample
        expected.add((groups.train[0], one_sample_error))
    assert reported == expected and not any(event.get("reason") in ("failed", "refused") for event in events)


def test_a_client_with_impossible_counts_is_ignored() -> None:
    class Liar(FedAvgMeta):
        @fewer.on_client
        def answer_queries(self, client: Any, model: Weights) -> dict[str, float]:
            counts = super().answer_queries(client, model)
            return counts | ({"correct": counts["total"] + 1} if client.id == first else {})

    pairs = [PAIRS[client % 10] for client in range(40)]
    first, *others = split_clients(40, seed=SEED).test
    result = fewer.run(Liar(rounds=1), federation(pairs), model=linear(), seed=SEED)
    assert result.metrics["clients"].keys() == {str(client) for client in others} and result.accuracy <= 1


def test_evaluation_clients_without_queries_are_an_error() -> None:
    pairs = list(PAIRS)
    for client in GROUPS.test:
        pairs[client] = (PAIRS[client][0][:1], PAIRS[client][1][:1])
    with pytest.raises(SettingError, match="no test samples to evaluate on"):
        fewer.run(FedMeta(rounds=1), federation(pairs), model=linear(), seed=SEED)


def test_too_few_clients_are_an_error() -> None:
    with pytest.raises(SettingError, match="cannot split 4 clients by fractions"):
        fewer.run(FedMeta(rounds=1), federation(PAIRS[:4]), model=linear())
    with pytest.raises(SettingError, match=r"cohort = 9, but there are only 8 clients \(allowed: 1 … 8\)"):
        fewer.run(FedMeta(rounds=1, cohort=9), federation(), model=linear())


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"algorithm": "mmaml"}, "'maml', 'fomaml' or 'meta-sgd'"),
        ({"support_fraction": 1.0}, "support_fraction must be < 1, got 1.0"),
        ({"weighting": "sizes"}, "'size' or 'uniform'"),
        ({"eval_clients": "old"}, "'new', 'validation' or 'training'"),
    ],
)
def test_wrong_settings_report_the_allowed_values(setting: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError, match=text):
        fewer.run("fedmeta", "digits", method_options=setting)


def test_fairness_metrics_by_arithmetic() -> None:
    metrics = fairness([0.5, 1.0, 0.0, 0.5])
    assert metrics == {"mean": 0.5, "variance": 0.125, "worst": 0.0}
    assert fairness([i / 20 for i in range(20)])["worst"] == pytest.approx(0.025)
    assert fairness([i / 20 for i in range(11)])["worst"] == pytest.approx(0.025)  # a tenth of 11, rounded up, is 2


# --- personal models of new clients -----------------------------------------------------------------------------


def test_adapt_writes_a_personal_model_that_predicts(tmp_path: Path) -> None:
    run, adapted = tmp_path / "run", tmp_path / "adapted"
    args: list[str | Path] = ["fedmeta", *DIGITS, "--clients", "12", "--rounds", "2", "-o", "inner_lr=0.5"]
    assert "worst tenth" in call("run", *args, "--out", run, "--no-report").stdout
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 255, (30, 1, 8, 8), np.uint8), np.full(30, 3)
    np.savez(tmp_path / "samples.npz", x=x, y=y)
    result = call("adapt", run, "--data", f"npz:{tmp_path / 'samples.npz'}", "--out", adapted)
    assert "adapted to 30 samples" in result.stderr and str(adapted / "model.safetensors") in result.stdout
    opened = open_run(run)
    start = opened.model
    samples = opened.data.test
    batch = (torch.from_numpy(x).float() - samples.shift) * samples.scale, torch.from_numpy(y)
    start.train()
    expected = adapt_weights(start, trainable_weights(start), [batch], 0.5)
    written = safetensors.torch.load_file(adapted / "model.safetensors")
    assert all(torch.allclose(written[name], expected[name], atol=1e-6) for name in expected)
    from_python = opened.adapt(x, y).state_dict()
    assert all(torch.equal(written[name], from_python[name]) for name in written)
    hits = {}
    options: tuple[list[str | Path], ...] = ([], ["--weights", adapted / "model.safetensors"])
    for weights in options:
        lines = call("predict", run, "--data", f"npz:{tmp_path / 'samples.npz'}", *weights).stdout.splitlines()[1:]
        hits[len(weights)] = sum(line.split(",")[1] == "3" for line in lines)
    assert hits[2] == 30 > hits[0]


def test_invalid_adaptations_are_reported(tmp_path: Path) -> None:
    call("run", "fedavg", *DIGITS, "--rounds", "1", "--out", tmp_path / "run", "--no-report")
    np.savez(tmp_path / "samples.npz", x=np.zeros((3, 1, 8, 8), np.uint8), y=np.zeros(3, int))
    args: list[str | Path] = ["adapt", tmp_path / "run", "--out", tmp_path / "adapted", "--data"]
    assert (
        "(allowed: alone, fedavg-meta, fedbabu-meta, fedmeta, knn-per-meta, per-fedavg, reptile)"
        in call(*args, f"npz:{tmp_path}/samples.npz", code=2).stderr
    )
    call("run", "fedmeta", *DIGITS, "--clients", "12", "--rounds", "1", "--out", tmp_path / "meta", "--no-report")
    args[1] = tmp_path / "meta"
    np.savez(tmp_path / "bare.npz", x=np.zeros((3, 1, 8, 8), np.uint8))
    assert "has no labels to adapt to" in call(*args, f"npz:{tmp_path}/bare.npz", code=2).stderr
    np.savez(tmp_path / "label10.npz", x=np.zeros((3, 1, 8, 8), np.uint8), y=np.array([0, 1, 10]))
    assert "has the class '10', which" in call(*args, f"npz:{tmp_path}/label10.npz", code=2).stderr
    result = fewer.run(FedMeta(rounds=1, cohort=2), federation(), model=linear(), seed=SEED)
    with pytest.raises(DataError, match=re.escape(f"inputs of shape ({FEATURES + 1},)")):
        result.adapt(np.zeros((3, FEATURES + 1), np.float32), [0, 1, 1])
    assert result.adapt(np.zeros((3, FEATURES), int), [0, 1, 1])(torch.zeros(1, FEATURES)).shape[0] == 1


# --- top-k accuracy ---------------------------------------------------------------------------------------------


def test_a_prediction_is_correct_among_the_top_k() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 0.0, 0.0, 5.0]])
    y = torch.tensor([2, 1])
    assert [count_top_k(scores, y, top) for top in (1, 2, 3, 4, 9)] == [0, 0, 2, 2, 2]
    assert count_top_k(scores, torch.tensor([1, 2]), 2) == 1  # ties go to the first class
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
