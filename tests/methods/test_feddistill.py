"""FedDistill against a slow, literal implementation of its equations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fewer
from fewer import FedAvg, FedDistill
from fewer.errors import SettingError
from fewer.methods.fedavg import LocalTraining
from fewer.methods.feddistill import FedDistillLogits, FedDistillState
from fewer.models import get_weights
from fewer.wire import decode
from tests.helpers import Array, data_bytes, is_close
from tests.methods.class_harness import (
    CLASSES,
    FEATURES,
    PAIRS,
    SEED,
    SIZES,
    federation,
    linear,
    make_harness,
    sample_indices,
    softmax,
)

ClassLogits = dict[int, Array]
"""Mean logits by class."""


def distill_client(
    weight: Array, method: FedDistill, client: int, round: int, teacher: ClassLogits
) -> tuple[Array, ClassLogits]:
    """Trains sample by sample: cross-entropy has the derivative softmax − one-hot, the KL loss softmax − teacher."""
    seen: dict[int, list[Array]] = {}
    x, y = PAIRS[client]
    for row in sample_indices(method, client, round).tolist():
        gradient = np.zeros_like(weight)
        for index in row:
            inputs, label = x[index].astype(np.float64), int(y[index])
            scores = weight @ inputs
            d_scores = softmax(scores) - np.eye(len(weight))[label]
            if label in teacher:
                d_scores[:CLASSES] += method.distill_weight * (softmax(scores[:CLASSES]) - softmax(teacher[label]))
            gradient += np.outer(d_scores, inputs) / len(row)
            seen.setdefault(label, []).append(scores[:CLASSES])
        weight = weight - method.lr * gradient
    return weight, {label: np.asarray(np.mean(logits, axis=0)) for label, logits in seen.items()}


def mean_logits_of_others(all_logits: Mapping[int, ClassLogits], client: int) -> ClassLogits:
    """The mean logits by class over the other clients that hold the class, with equal weights."""
    mean: ClassLogits = {}
    for label in range(CLASSES):
        logits = [
            own_logits[label] for other, own_logits in all_logits.items() if other != client and label in own_logits
        ]
        if logits:
            mean[label] = sum(logits[1:], logits[0]) / len(logits)
    return mean


def check_class_logits(state: FedDistillState, all_logits: Mapping[int, ClassLogits]) -> None:
    assert sorted(state.clients) == sorted(all_logits)
    for row, client in enumerate(state.clients):
        assert set(state.held[row].nonzero()[:, 0].tolist()) == all_logits[client].keys()
        for label, logits in all_logits[client].items():
            assert is_close(state.logits[row, label], logits, 1e-5)


@pytest.mark.parametrize("outputs", [CLASSES, 5])
def test_feddistill_matches_numpy(outputs: int, tmp_path: Path) -> None:
    method = FedDistill(local_steps=3, batch_size=4, lr=0.5, distill_weight=2.0)
    harness = make_harness(method, linear(outputs), tmp_path)
    weight = get_weights(linear(outputs))["weight"].double().numpy()
    all_logits: dict[int, ClassLogits] = {}
    for round in (1, 2, 3):
        results = {
            client: distill_client(weight, method, client, round, mean_logits_of_others(all_logits, client))
            for client in range(3)
        }
        weight = np.asarray(sum(size * results[client][0] for client, size in enumerate(SIZES)) / sum(SIZES))
        all_logits = {client: result[1] for client, result in results.items()}
        state = harness.rounds(1)
        assert is_close(state.model["weight"], weight, 1e-5)
        check_class_logits(state, all_logits)
    assert any(1 in logits and 2 not in logits for logits in all_logits.values())  # some clients lack a class


def test_feddistill_teacher_is_the_mean_of_the_other_clients() -> None:
    logits = torch.tensor([[[1.0, 2], [3, 4]], [[5, 6], [99, 99]], [[0, 1], [7, 8]]])
    state = FedDistillState({}, [4, 9, 2], logits, torch.tensor([[True, True], [True, False], [False, True]]))
    for client, teacher, known in (
        (4, [[5, 6], [7, 8]], [True, True]),
        (9, [[1, 2], [5, 6]], [True, True]),
        (2, [[3, 4], [3, 4]], [True, True]),
        (7, [[3, 4], [5, 6]], [True, True]),  # not in the cohort: the mean over all clients
    ):
        mean, is_known = state.teacher(client)
        assert mean.tolist() == teacher and is_known.tolist() == known
    single = FedDistillState({}, [4], logits[:1], torch.tensor([[True, False]]))
    assert single.teacher(4)[1].tolist() == [False, False] and single.teacher(5)[1].tolist() == [True, False]


def test_feddistill_with_zero_weight_or_in_round_1_is_fedavg() -> None:
    def trained_weight(method: LocalTraining) -> Tensor:
        weight = fewer.run(method, federation(), model=linear(), seed=SEED).state.model["weight"]
        assert isinstance(weight, Tensor)
        return weight

    settings: dict[str, Any] = {"local_steps": 3, "batch_size": 4, "lr": 0.3}
    assert torch.equal(
        trained_weight(FedDistill(rounds=2, distill_weight=0, **settings)), trained_weight(FedAvg(rounds=2, **settings))
    )
    assert torch.equal(
        trained_weight(FedDistill(rounds=1, distill_weight=3, **settings)), trained_weight(FedAvg(rounds=1, **settings))
    )
    assert not torch.equal(
        trained_weight(FedDistill(rounds=2, distill_weight=3, **settings)), trained_weight(FedAvg(rounds=2, **settings))
    )


def test_feddistill_sends_the_model_and_class_logits_only(tmp_path: Path) -> None:
    """The model, nine logits of four bytes, and three truth values of one."""
    harness = make_harness(FedDistill(local_steps=2, batch_size=8), linear(), tmp_path)
    harness.rounds(2)
    traffic = harness.clients.down + harness.clients.up
    assert len(traffic) == 12
    for _, blob in traffic:
        assert data_bytes(blob) == 4 * FEATURES * CLASSES + 4 * CLASSES * CLASSES + CLASSES
    assert sum(harness.clients.ledger.total.values()) == sum(len(blob) for _, blob in traffic)
    sent = {call.client: decode(blob)[1] for call, blob in harness.clients.up}
    assert sent[2]["held"].tolist() == [False, True, False]
    assert sent[2]["logits"][[0, 2]].eq(0).all() and sent[2]["size"] == SIZES[2]
    half = make_harness(FedDistill(local_steps=2, batch_size=8, codec="float16"), linear(), tmp_path)
    half.rounds(1)
    assert data_bytes(half.clients.up[0][1]) == 2 * FEATURES * CLASSES + 2 * CLASSES * CLASSES + CLASSES


def test_feddistill_logits_matches_numpy(tmp_path: Path) -> None:
    method = FedDistillLogits(local_steps=3, batch_size=4, lr=0.5, distill_weight=2.0)
    harness = make_harness(method, linear(), tmp_path)
    models = {client: get_weights(linear())["weight"].double().numpy() for client in range(3)}
    all_logits: dict[int, ClassLogits] = {}
    for round in (1, 2, 3):
        results = {
            client: distill_client(models[client], method, client, round, mean_logits_of_others(all_logits, client))
            for client in range(3)
        }
        models, all_logits = (
            {client: result[0] for client, result in results.items()},
            {client: result[1] for client, result in results.items()},
        )
        state = harness.rounds(1)
        check_class_logits(state, all_logits)
        for client in range(3):
            assert is_close(harness.personal_model(client)["weight"], models[client], 1e-5)


def test_feddistill_logits_sends_no_model(tmp_path: Path) -> None:
    harness = make_harness(FedDistillLogits(local_steps=2, batch_size=4), linear(), tmp_path)
    harness.rounds(2)
    for _, blob in harness.clients.down + harness.clients.up:
        assert decode(blob)[1]["model"] == {} and data_bytes(blob) == 4 * CLASSES * CLASSES + CLASSES
    assert harness.state.model == {}
    result = fewer.run(FedDistillLogits(rounds=1), federation(), model=linear(), seed=SEED)
    assert {"personal_accuracy", "global_accuracy"} <= result.metrics.keys()
    with pytest.raises(SettingError, match="feddistill-logits has no global model"):
        _ = result.model
