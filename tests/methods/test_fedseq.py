"""FedSeq: the model passes through the clients; compared with NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fewer import FedSeq
from fewer.errors import QuorumLost
from tests.helpers import is_close
from tests.methods.linear_harness import (
    FEATURES,
    PAIRS,
    SIZES,
    WEIGHT,
    client_batches,
    linear,
    make_harness,
    run_sgd,
)

EMPTY = np.zeros((0, FEATURES), np.float32), np.zeros(0, np.int64)


def test_each_client_continues_from_the_model_of_the_one_before(tmp_path: Path) -> None:
    method = FedSeq(rounds=2, local_steps=2, batch_size=2, lr=0.3)
    harness = make_harness(method, linear(), tmp_path)
    state = harness.rounds(2)
    order = [call.client for call, _ in harness.clients.down]
    assert sorted(order[:3]) == sorted(order[3:]) == [0, 1, 2]  # each pass visits everyone
    w = WEIGHT
    for number, client in enumerate(order):
        w = run_sgd(w, client_batches(method, client, 1 + number // 3), 0.3)
    assert is_close(state.model["weight"], w)
    assert FedSeq().rounds == 1 and SIZES == (3, 5, 2)  # sizes differ, and play no role


def test_the_order_is_drawn_anew_in_each_round(tmp_path: Path) -> None:
    harness = make_harness(FedSeq(rounds=9, local_steps=1), linear(), tmp_path)
    harness.rounds(9)
    order = [call.client for call, _ in harness.clients.down]
    assert len({tuple(order[start : start + 3]) for start in range(0, 27, 3)}) > 2


def test_the_pass_skips_a_client_that_cannot_train(tmp_path: Path) -> None:
    method = FedSeq(local_steps=2, batch_size=2, lr=0.5)
    harness = make_harness(method, linear(), tmp_path, [PAIRS[0], EMPTY, PAIRS[2]])
    state = harness.rounds(1)
    order = [call.client for call, _ in harness.clients.down if call.client != 1]
    w = WEIGHT
    for client in order:
        w = run_sgd(w, client_batches(method, client, 1), 0.5)
    assert len(order) == 2 and is_close(state.model["weight"], w)


def test_a_pass_needs_its_quorum(tmp_path: Path) -> None:
    harness = make_harness(FedSeq(), linear(), tmp_path, [PAIRS[0], EMPTY, EMPTY])
    harness.clients.rules = type(harness.clients.rules)(quorum=0.5)
    with pytest.raises(QuorumLost, match=r"round 1: 1 of 3 clients trained the model, 2 needed \(quorum 0.5\)"):
        harness.rounds(1)
