"""Local training against a NumPy reference; nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fewer
from fewer.errors import SettingError
from fewer.methods.local import Local
from fewer.models import get_weights
from fewer.wire import decode
from tests.helpers import data_bytes, is_close
from tests.methods.linear_harness import PAIRS, SEED, WEIGHT, client_batches, federation, linear, make_harness, run_sgd


def test_local_is_plain_sgd_on_each_client(tmp_path: Path) -> None:
    method = Local(rounds=3, local_steps=2, batch_size=2, lr=0.3)
    result = fewer.run(method, federation(), model=linear(), seed=SEED, out=tmp_path / "run")
    for client in range(3):
        w = WEIGHT
        for round in (1, 2, 3):
            w = run_sgd(w, client_batches(method, client, round), 0.3)
        assert is_close(get_weights(result.personal_model(client))["weight"], w)
    with pytest.raises(SettingError, match="local has no global model"):
        _ = result.model


def test_local_clients_do_not_influence_each_other(tmp_path: Path) -> None:
    def models(pairs: Sequence[tuple[Any, Any]], name: str) -> list[Tensor]:
        harness = make_harness(Local(local_steps=3, batch_size=2, lr=0.3), linear(), tmp_path / name, pairs)
        harness.rounds(2)
        return [harness.personal_model(client)["weight"] for client in range(3)]

    before = models(PAIRS, "before")
    after = models([(PAIRS[0][0] * 3 + 1, 1 - PAIRS[0][1]), *PAIRS[1:]], "after")
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [False, True, True]


def test_local_sends_only_empty_messages(tmp_path: Path) -> None:
    harness = make_harness(Local(local_steps=1, batch_size=1), linear(), tmp_path)
    harness.rounds(2)
    traffic = harness.clients.down + harness.clients.up
    assert len(traffic) == 12
    for _, blob in traffic:
        assert decode(blob)[1] == {} and data_bytes(blob) == 0 and len(blob) < 150
    assert sum(harness.clients.ledger.total.values()) == sum(len(blob) for _, blob in traffic) < 12 * 150
