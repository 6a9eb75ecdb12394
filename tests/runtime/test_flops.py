"""FLOPs by arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fewer
from fewer.learning.adapt import meta_gradient, trainable_weights
from fewer.methods.fedavg_meta import FedAvgMeta
from fewer.methods.fedmeta import FedMeta
from fewer.models.sequences import CharLSTM
from fewer.runtime.flops import count_flops
from tests.methods.fedmeta_harness import CLASSES, FEATURES, GROUPS, SEED, federation, linear, support_and_query


def test_flops_of_a_linear_net() -> None:
    net = nn.Linear(5, 4, bias=False)
    theta, batch = trainable_weights(net), (torch.randn(6, 5), torch.randint(4, (6,)))
    forward = 2 * 6 * 5 * 4  # scores of 6 samples; a gradient with respect to the weights costs the same
    with count_flops() as counter:
        meta_gradient(net, theta, [batch], batch, 0.1, first_order=True)
    assert counter.flops == 4 * forward
    with count_flops() as counter:
        meta_gradient(net, theta, [batch], batch, 0.1, first_order=False)
    assert counter.flops == 6 * forward  # ∇_θ⟨g, v⟩ adds two: from g to the scores, from the scores to the weights
    with count_flops(False) as counter:
        meta_gradient(net, theta, [batch], batch, 0.1, first_order=False)
    assert counter.flops == 0


def test_flops_are_cached_per_net_and_not_across_nets() -> None:
    class Repeated(nn.Module):
        """Uses its layer several times; the layer alone does not show how often."""

        def __init__(self, times: int) -> None:
            super().__init__()
            self.layer, self.times = nn.Linear(FEATURES, CLASSES), times

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = torch.stack([self.layer(x) for _ in range(self.times)]).sum(0)
            return scores

    def flops(times: int) -> Any:
        method = FedMeta(rounds=1, cohort=8, count_flops=True)
        return fewer.run(method, federation(), model=partial(Repeated, times), seed=SEED).history[0]["flops"]

    assert (once := flops(1)) and flops(2) == 2 * once and flops(1) == once


def test_flops_of_a_fused_lstm_are_counted() -> None:
    net = CharLSTM((6,), 4, vocabulary=9, hidden=16)
    x = torch.randint(9, (3, 6))
    with count_flops() as counter:
        scores = net(x)
    forward = 2 * 3 * 6 * 4 * 16 * ((8 + 16) + (16 + 16)) + 2 * 3 * 16 * 4
    assert counter.flops == forward
    with count_flops() as counter:
        scores.sum().backward()
    assert 1.5 * forward < counter.flops <= 2 * forward


def test_clip_norm_limits_the_gradient_norm() -> None:
    """The norm is over all weights together."""
    torch.manual_seed(0)
    net = nn.Linear(FEATURES, CLASSES)
    changes = []
    for clip in (None, 1e-3, 1e3):
        method = FedMeta(rounds=1, cohort=1, local_steps=1, local_lr=1.0, clip_norm=clip)
        updated = fewer.run(method, federation(), model=net, seed=SEED).state.algorithm
        changes.append(torch.cat([(net.state_dict()[name] - updated[name]).flatten() for name in ("weight", "bias")]))
    assert float(changes[1].norm()) == pytest.approx(1e-3, rel=1e-3) and torch.equal(changes[0], changes[2])
    assert torch.allclose(changes[1] / changes[1].norm(), changes[0] / changes[0].norm(), atol=1e-3)


def test_flops_add_up_over_rounds_and_clients() -> None:
    method = FedMeta(rounds=2, cohort=8, count_flops=True, support_fraction=0.4)
    result = fewer.run(method, federation(), model=linear(), seed=SEED)
    per_round = sum(
        2
        * FEATURES
        * CLASSES
        * (4 * len(support_and_query(client, 0.4)[0][1]) + 2 * len(support_and_query(client, 0.4)[1][1]))
        for client in GROUPS.train
    )
    assert [line["flops"] for line in result.history] == [per_round, 2 * per_round]
    result = fewer.run(
        FedAvgMeta(rounds=2, cohort=8, count_flops=True, local_steps=3, batch_size=2),
        federation(),
        model=linear(),
        seed=SEED,
    )
    per_round = 8 * 3 * 2 * (2 * 2 * FEATURES * CLASSES)  # clients × steps × (forward and backward)
    assert [line["flops"] for line in result.history] == [per_round, 2 * per_round]


class StopAfter(fewer.Callback):
    def on_round_end(self, run: fewer.runs.callbacks.Run, metrics: Mapping[str, Any]) -> None:
        if len(run.history) == 1:
            raise KeyboardInterrupt


def count_run(**settings: Any) -> fewer.Result:
    method = fewer.FedAvg(rounds=2, cohort=8, local_steps=3, batch_size=2)
    return fewer.run(method, federation(), model=linear(), seed=SEED, count_flops=True, **settings)


def test_a_run_counts_the_training_of_its_clients_and_changes_nothing(tmp_path: Path) -> None:
    counted, plain = (
        count_run(),
        fewer.run(
            fewer.FedAvg(rounds=2, cohort=8, local_steps=3, batch_size=2), federation(), model=linear(), seed=SEED
        ),
    )
    per_round = 8 * 3 * 2 * (2 * 2 * FEATURES * CLASSES)  # clients × steps × (forward and backward); no evaluation
    flops = [per_round, 2 * per_round]
    assert [line["flops"] for line in counted.history] == flops
    assert all(torch.equal(counted.state.model[name], plain.state.model[name]) for name in plain.state.model)
    assert [line["flops"] for line in count_run(runtime="pool").history] == flops
    with pytest.raises(KeyboardInterrupt):
        count_run(out=tmp_path / "run", callbacks=[StopAfter()])
    resumed = fewer.resume(tmp_path / "run", data=federation(), model=linear())
    assert [line["flops"] for line in resumed.history] == flops
